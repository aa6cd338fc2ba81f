"""LayerNorm and RMSNorm over a box: the range of every entry, and planes below functionals.

`f(x) = z/s`, `s = √(‖z‖²/d + ϵ)` over the last axis, z = x for RMSNorm and `z = Cx = x − mean(x)` for
LayerNorm. Gain and bias are left out. All but what belongs to a functional is computed in float64.

**Range of RMSNorm.** `f_i` grows with x_i, and |f_i| falls with every other |x_j|: the largest value has x_i
at its upper end, the others as close to 0 as they get if that end is positive, else as far. Exact.

**Range of LayerNorm.** With y the n = d − 1 other entries, μ and W their mean and their `Σ (y_j − μ)²`,
`t = x_i − μ` and `N² = W + dϵ`,

    f_i = k √d r / √(1 + k r²),    r = t/N,  k = n/d,

which grows with r; and r grows with x_i, so `x_i = u_i`.

* If t > 0 is possible, r is largest where `N/t`, a convex function over a positive affine one, is least: at
  `y_j = clamp(c, l_j, u_j)` for some c (for a given μ that makes W least). There
  `h(c) = N² − n (μ − c)(u_i − μ)` changes sign; it is affine in c between two neighbouring ends of entries,
  so bisection over the sorted ends finds the place. What rounding leaves is made good by duality: for any
  such y* with its N*, μ* and `ρ = (u_i − μ*)/N*`, Cauchy and Schwarz give
  `N(y) ≥ (⟨y* − μ*, y⟩ + dϵ)/N*`, and what is left is linear in y and largest at y* but for a slope of
  `|h(c)|/(n N*²)`. Hence `u_i − μ(y) ≤ ρ N(y) + |h(c)|/(n N*²) Σ (u_j − l_j)`.
* If t < 0 everywhere, `N²/t²` is to be bounded from above. For any v,
  `N² = Σ (y_j − v)² − n (μ − v)² + dϵ ≤ n (D − (μ − v)²)`, `n D = Σ max((l_j − v)², (u_j − v)²) + dϵ`; with
  `τ = 1/(μ − u_i)` and `q = v − u_i` that over t² is `n ((D − q²) τ² + 2 q τ − 1)`, where τ is at most one
  over the smallest `μ − u_i`. Two v are tried; the second makes it exact to first order.

**Planes.** For a functional a, `⟨a, f⟩ = p w` with `p = ⟨Ca, x⟩` and `w = 1/s'`, a product of two numbers per
token. With p in [p_l, p_u], w in [w_l, w_u] and any λ in [0, 1], McCormick's inequality is

    p w ≥ ω p + π w − λ p_l w_l − (1−λ) p_u w_u,    ω = λ w_l + (1−λ) w_u,  π = λ p_l + (1−λ) p_u,

and w is convex in `v = s'²`, which lies between `s² + 2 z·δ/d` and that plus `Σ r²/d` (δ the move of x, r the
half widths): a tangent below, a chord above. As the box shrinks the plane tends to the Jacobian's with a loss
of second order, as that of theory.md, (10); as it grows, the range takes over.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

EPS = torch.finfo(torch.float64).eps
SQUARES = 1e150  # squares of larger numbers, and their sums, may leave float64


def normalize(x: Tensor, eps: float, centred: bool) -> Tensor:
    """LayerNorm (centred) or RMSNorm over the last axis, without gain and bias."""
    z = x - x.mean(-1, keepdim=True) if centred else x
    return z / (z.square().mean(-1, keepdim=True) + eps).sqrt()


def value_range(low: Tensor, high: Tensor, eps: float, centred: bool) -> tuple[Tensor, Tensor]:
    """Range of every entry over the box, exact but for LayerNorm's ends nearer to 0. (…, d) → two of (…, d).

    The result has the dtype of the box and is rounded outwards; NaN where an end is not finite.
    """
    dtype = low.dtype
    known = (torch.isfinite(low) & torch.isfinite(high)).all(-1, keepdim=True)
    lo, u = (torch.where(known, t.double(), 0.0) for t in (low, high))
    if centred:
        if lo.shape[-1] == 1:
            zero = torch.where(known, torch.zeros_like(low), torch.nan)
            return zero, zero.clone()
        middle = ((lo + u) / 2).mean(-1, keepdim=True)  # LayerNorm does not see it, rounding does
        lo, u = lo - middle, u - middle
        lo, u = lo - EPS * lo.abs(), u + EPS * u.abs()
    largest = _largest_centred if centred else _largest_plain
    upper, lower = largest(lo, u, eps), -largest(-u, -lo, eps)
    large = torch.maximum(lo.abs(), u.abs()).amax(-1, keepdim=True) > SQUARES  # ‖f‖₂ ≤ √d is what is known
    upper, lower = (torch.where(large, s * lo.shape[-1] ** 0.5, t) for s, t in ((1.0, upper), (-1.0, lower)))
    room = 2.0 * torch.finfo(dtype).eps
    upper, lower = upper + room * upper.abs(), lower - room * lower.abs()
    return torch.where(known, lower, torch.nan).to(dtype), torch.where(known, upper, torch.nan).to(dtype)


def _sum_of_others(x: Tensor) -> Tensor:
    """`Σ_{j≠i} x_j` of numbers ≥ 0, without subtractions."""
    none = torch.zeros_like(x[..., :1])
    before = torch.cat([none, x.cumsum(-1)[..., :-1]], -1)
    after = torch.cat([none, x.flip(-1).cumsum(-1)[..., :-1]], -1).flip(-1)
    return before + after


def _largest_plain(lo: Tensor, u: Tensor, eps: float) -> Tensor:
    d = lo.shape[-1]
    least = torch.maximum(lo, -u).clamp(min=0.0).square()
    most = torch.maximum(lo.square(), u.square())
    grow = 1.0 + 2 * (d + 8) * EPS
    others = torch.where(u >= 0, _sum_of_others(least) / grow, _sum_of_others(most) * grow)
    best = u / ((u.square() + others) / d + eps).sqrt()
    return (best + 16 * EPS * best.abs()).clamp(max=d**0.5)


class _Ends:
    """Sums of `clamp(c, l_j, u_j)` over j for many c, from sorted ends; (…, d)."""

    def __init__(self, lo: Tensor, u: Tensor) -> None:
        self.d = lo.shape[-1]
        self.low, self.high = lo.sort(-1).values, u.sort(-1).values
        self.sums = [_prefix(t) for t in (self.low, self.low.square(), self.high, self.high.square())]

    def fixed(self, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sum and sum of squares of the entries that are clamped, and the number of those that are c."""
        above = torch.searchsorted(self.low, c.contiguous(), right=True)  # l_j ≤ c
        below = torch.searchsorted(self.high, c.contiguous(), right=True)  # u_j ≤ c
        low, low_square, high, high_square = self.sums
        total = low[..., -1:] - low.gather(-1, above) + high.gather(-1, below)
        square = low_square[..., -1:] - low_square.gather(-1, above) + high_square.gather(-1, below)
        return total, square, (above - below).to(c.dtype)


def _prefix(x: Tensor) -> Tensor:
    return torch.nn.functional.pad(x.cumsum(-1), (1, 0))


def _largest_centred(lo: Tensor, u: Tensor, eps: float) -> Tensor:
    d = lo.shape[-1]
    n, k = d - 1, (d - 1) / d
    floor = d * eps
    size = torch.maximum(lo.abs(), u.abs()).amax(-1, keepdim=True)
    wrong_sum = 2 * d * d * EPS * size  # of a prefix sum of d numbers, and of two of them
    wrong = wrong_sum / n
    wrong_square = 2 * size * wrong_sum
    nearest = (lo.sum(-1, keepdim=True) - lo) / n  # smallest μ
    ahead = u - nearest + wrong > 0
    # the largest ratio by duality; where t is never positive the numbers mean nothing
    t, square, slope, arm = _worst_place(lo, u, floor)
    square = (square - 4 * wrong_square).clamp(min=floor)
    ratio = (t + wrong).clamp(min=0.0) / square.sqrt()
    width = (u - lo).sum(-1, keepdim=True) * (1.0 + d * EPS)
    slope = slope + (8 * wrong_square + 4 * n * arm * wrong) / (n * square)
    outer = ratio + slope * width / floor**0.5
    outer = torch.where(ahead, outer, 0.0).nan_to_num(nan=torch.inf, posinf=torch.inf)
    up = (k * d) ** 0.5 * torch.where(torch.isinf(outer), 1.0, outer / (1.0 / k + outer.square()).sqrt())
    inner = _smallest_ratio(lo, u, floor, (nearest - u - wrong).clamp(min=0.0), wrong_square)
    down = -((k * d) ** 0.5) * inner / (1.0 / k + inner.square()).sqrt()
    best = torch.where(ahead, up * (1.0 + 16 * EPS), down * (1.0 - 16 * EPS))
    return best.clamp(max=n**0.5 * (1.0 + 4 * EPS))


def _worst_place(lo: Tensor, u: Tensor, floor: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """t and N² at about the largest ratio with `x_i = u_i`, and there `|h|/(n N²)` and `|μ−c| + |t|`."""
    n = lo.shape[-1] - 1
    ends = _Ends(lo, u)
    sorted_ends = torch.cat([lo, u], -1).sort(-1).values

    def others(c: Tensor, inside: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Sums of the clamped entries but i, and the number of free ones; which are free as at `inside`."""
        at = c if inside is None else inside
        total, square, free = ends.fixed(at)
        own_free = (lo <= at) & (at < u)
        own = torch.where(own_free, 0.0, torch.where(at < lo, lo, u))
        return total - own, square - own.square(), free - own_free.to(free)

    def state(c: Tensor, parts: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        total, square, free = parts
        mean = (total + free * c) / n
        squares = (square + free * c.square() - n * mean.square()).clamp(min=0.0) + floor
        return mean, squares, squares - n * (mean - c) * (u - mean)

    first = torch.zeros_like(u, dtype=torch.long)  # number of ends to the left of the place
    last = torch.full_like(first, sorted_ends.shape[-1])
    while bool((first < last).any()):
        middle = ((first + last) // 2).clamp(max=sorted_ends.shape[-1] - 1)
        c = sorted_ends.gather(-1, middle)
        mean, _, h = state(c, others(c))
        right = (u > mean) & (h < 0) & (first < last)
        first, last = (
            torch.where(right, middle + 1, first),
            torch.where(right, last, torch.minimum(middle, last)),
        )
    padded = torch.cat([sorted_ends[..., :1] - 1.0, sorted_ends, sorted_ends[..., -1:] + 1.0], -1)
    inside = (padded.gather(-1, first) + padded.gather(-1, first + 1)) / 2
    total, square, free = parts = others(inside, inside)
    c = (square + floor - u * total) / (total - u * (n - free))
    left = torch.where(first == 0, -torch.inf, padded.gather(-1, first))
    right = torch.where(first == sorted_ends.shape[-1], torch.inf, padded.gather(-1, first + 1))
    c = torch.where(c.isnan(), inside, c).clamp(min=left, max=right)
    mean, squares, h = state(c, parts)
    return u - mean, squares, h.abs() / (n * squares), (mean - c).abs() + (u - mean).abs()


def _smallest_ratio(lo: Tensor, u: Tensor, floor: float, least: Tensor, wrong: Tensor) -> Tensor:
    """Lower bound of `(μ − u_i)/N` where `μ − u_i ≥ least ≥ 0`, for every i."""
    n = lo.shape[-1] - 1
    if n == 1:  # N is constant
        return least / floor**0.5 * (1.0 - 4 * EPS)
    centre = (lo + u) / 2
    order = centre.argsort(-1)
    low, high = lo.gather(-1, order), u.gather(-1, order)
    sorted_centre = centre.gather(-1, order).contiguous()
    sums = [_prefix(t) for t in (low, low.square(), high, high.square())]
    mean = (centre.sum(-1, keepdim=True) - centre) / n
    spread = centre.square().sum(-1, keepdim=True) - centre.square()  # Σ (y_j − u_i)² at the centre
    spread = spread - 2 * n * u * mean + n * u.square()
    best = torch.full_like(u, torch.inf)
    for v in (mean, u + (spread + floor) / (n * (mean - u)).clamp(min=1e-300)):
        v = torch.where(torch.isfinite(v), v, mean)
        count = torch.searchsorted(sorted_centre, v.contiguous())
        s1, s2, t1, t2 = (p.gather(-1, count) for p in sums)
        t1, t2 = sums[2][..., -1:] - t1, sums[3][..., -1:] - t2
        far = s2 - 2 * v * s1 + t2 - 2 * v * t1 + lo.shape[-1] * v.square()
        far = far - torch.maximum((lo - v).square(), (u - v).square())
        scale = 1.0 + v.abs() / u.abs().clamp(min=lo.abs()).amax(-1, keepdim=True).clamp(min=1e-300)
        density = ((far + 8 * wrong * scale.square()).clamp(min=0.0) + floor) / n
        q = v - u
        bend = density - q.square()
        top = 1.0 / least.clamp(min=1e-300)
        vertex = torch.where((bend < 0) & (q > 0), q / (-bend).clamp(min=1e-300), torch.inf)
        tau = torch.minimum(top, vertex)
        bound = n * (bend * tau.square() + 2 * q * tau - 1.0)
        bound = bound + 32 * EPS * n * (density * tau.square() + q.square() * tau.square() + 1.0)
        bound = torch.where(bound.isnan() | (least <= 0), torch.inf, bound.clamp(min=1e-300))
        best = torch.minimum(best, bound)
    return 1.0 / best.sqrt()


class Box(NamedTuple):
    """What the planes need of a box, float64; (…, d) and, per token, (…, 1).

    Attributes:
        centre, half: of the box. z: centred centre. lower, upper: range of the entries.
        w_low, w_high: range of 1/s'. below, above: planes of w, (value at the centre, slope over w_high);
            cubes of 1/s' leave the range of float32 before anything else does.
    """

    centre: Tensor
    half: Tensor
    z: Tensor
    lower: Tensor
    upper: Tensor
    w_low: Tensor
    w_high: Tensor
    below: tuple[Tensor, Tensor]
    above: tuple[Tensor, Tensor]
    centred: bool


class MeanSquare(NamedTuple):
    """`v = s'²` over a box, (…, 1) each: range, value at the centre, and what ‖Cδ‖²/d adds at most."""

    low: Tensor
    high: Tensor
    own: Tensor
    most: Tensor


def mean_square(low: Tensor, high: Tensor, eps: float, centred: bool) -> MeanSquare:
    """Range and planes of `mean(z²) + eps` over a box (…, d), float64."""
    low, high = low.double(), high.double()
    d = low.shape[-1]
    _, half, z = _middle(low, high, centred)
    reach = half * (1.0 - 1.0 / d) + (half.sum(-1, keepdim=True) - half) / d if centred else half
    square, grow = z.square().sum(-1, keepdim=True), 1.0 + 4 * (d + 8) * EPS
    along = (z.abs() * half).sum(-1, keepdim=True)
    length = half.square().sum(-1, keepdim=True) * grow
    least = (z.abs() - reach * (1.0 + 8 * EPS)).clamp(min=0.0).square().sum(-1, keepdim=True)
    ball = (square.sqrt() / grow - length.sqrt()).clamp(min=0.0).square()
    v_low = (torch.maximum(least, ball) / grow).clamp(min=0.0) / d + eps
    v_high = (square + 2 * along + length) * grow / d + eps
    return MeanSquare(v_low, v_high, square / d + eps, length / d)


def _middle(low: Tensor, high: Tensor, centred: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Centre, half widths and centred centre of a box."""
    centre, half = (low + high) / 2, (high - low) / 2
    z = centre - centre.mean(-1, keepdim=True) if centred else centre
    return centre, half + 2 * EPS * centre.abs(), z


def box(
    low: Tensor, high: Tensor, eps: float, centred: bool, known: tuple[Tensor, Tensor] | None = None
) -> Box:
    """`Box` of (…, d); known: bounds of the mean square from elsewhere, (…, 1)."""
    lower, upper = (t.double() for t in value_range(low, high, eps, centred))
    square = mean_square(low, high, eps, centred)
    v_low, v_high, own = square.low, square.high, square.own
    if known is not None:
        room = 4 * torch.finfo(known[0].dtype).eps
        v_low = torch.maximum(v_low, known[0].double() * (1.0 - room))
        v_high = torch.minimum(v_high, known[1].double() * (1.0 + room))
        v_low = torch.minimum(v_low, v_high)  # rounding
    d = low.shape[-1]
    centre, half, z = _middle(low.double(), high.double(), centred)
    w_low, w_high = v_high.rsqrt() * (1.0 - 4 * EPS), v_low.rsqrt() * (1.0 + 4 * EPS)
    far = own + square.most
    root_low, root_high = v_low.sqrt(), v_high.sqrt()
    tangent = -(far.rsqrt() / w_high) / (far * d)
    chord = -1.0 / (root_low * root_high * (root_low + root_high))
    below = far.rsqrt() * (1.0 - 4 * EPS), tangent * z
    above = w_high + chord * (own - v_low), 2.0 * chord / d / w_high * z
    return Box(centre, half, z, lower, upper, w_low, w_high, below, above, centred)


class TokenPlanes(NamedTuple):
    """Planes below functionals, per token: slope (spec, …, d) and value at the box's centre (spec, …)."""

    slope: Tensor
    value: Tensor


def _part(t: Tensor, a: Tensor) -> Tensor:
    return t.to(a.dtype).squeeze(-1)


def _product(a: Tensor, b: Box) -> tuple[Tensor, Tensor, Tensor]:
    """Ca, p at the centre and how far it moves."""
    free = a - a.mean(-1, keepdim=True) if b.centred else a
    at = (a * b.z.to(a.dtype)).sum(-1)
    return free, at, (free.abs() * b.half.to(a.dtype)).sum(-1)


def _value(b: Box, at: Tensor, reach: Tensor, part: Tensor) -> tuple[Tensor, Tensor]:
    """Value at the centre, and π."""
    low, high = _part(b.w_low, at), _part(b.w_high, at)
    pi = at + reach * (1.0 - 2.0 * part)
    w = torch.where(pi >= 0, _part(b.below[0], at), _part(b.above[0], at))
    return reach * (part * low - (1.0 - part) * high) + pi * w, pi


def best_part(a: Tensor, b: Box) -> Tensor:
    """The λ of the highest plane at the centre, (spec, …): the value is piecewise linear in λ."""
    _, at, reach = _product(a, b)
    zero = torch.zeros_like(at)
    turn = ((at / reach.clamp(min=torch.finfo(a.dtype).tiny) + 1.0) / 2).clamp(0.0, 1.0)
    candidates = torch.stack([turn, zero, zero + 1.0])
    values = torch.stack([_value(b, at, reach, part)[0] for part in candidates])
    best = values.nan_to_num(nan=-torch.inf).argmax(0, keepdim=True)
    return candidates.gather(0, best)[0]


def product_planes(a: Tensor, b: Box, part: Tensor) -> TokenPlanes:
    """McCormick planes of `p w` with λ = part (spec, …); a: (spec, …, d)."""
    free, at, reach = _product(a, b)
    value, pi = _value(b, at, reach, part)
    omega = part * _part(b.w_low, a) + (1.0 - part) * _part(b.w_high, a)
    along = torch.where(pi.unsqueeze(-1) >= 0, b.below[1].to(a.dtype), b.above[1].to(a.dtype))
    slope = omega.unsqueeze(-1) * free + (pi * _part(b.w_high, a)).unsqueeze(-1) * along
    size = (a.abs() * (b.z.abs() + b.half).to(a.dtype)).sum(-1)
    rounding = 16 * torch.finfo(a.dtype).eps * (omega * size + pi.abs() * _part(b.w_high, a))
    if b.centred:  # z is what is left of the centre
        rounding = rounding + 4 * EPS * omega * (a.abs() * b.centre.abs().to(a.dtype)).sum(-1)
    return TokenPlanes(slope, value - rounding)


def flat_planes(a: Tensor, b: Box) -> Tensor:
    """Lower bound of the functionals over the box, (spec, …): by the entries, or by `‖f‖₂ ≤ √d`."""
    free = a - a.mean(-1, keepdim=True) if b.centred else a
    sphere = -torch.linalg.vector_norm(free, dim=-1) * (a.shape[-1] ** 0.5 * (1.0 + 1e-6))
    lower, upper = b.lower.to(a.dtype), b.upper.to(a.dtype)
    entries = (a.clamp(min=0.0) * lower + a.clamp(max=0.0) * upper).sum(-1)
    return torch.maximum(entries, sphere)
