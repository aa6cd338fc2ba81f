"""Softmax and softmax averages when the scores lie in a box: probability boxes, exact ranges, planes.

Plain tensors; the last axis is always the one that the softmax runs over (the m keys). No formula here
subtracts nearly equal numbers: sums "of all but one" are built from prefix and suffix sums, and ratios go
through log-sum-exp. Every result is moved outwards by a rounding slack for its dtype.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import InputError

# With every key of a query masked so far float32 forgets the scores, and the result depends on the dtype.
FULLY_MASKED = -1e4
# What −inf in a mask becomes: e to this power is 0 in every precision, whatever score it is added to, and 0
# times it is not NaN.
MASKED = -1e30
ROUNDING = 16.0  # units in the last place granted to one short chain of operations


def _ulp(x: Tensor, factor: float = ROUNDING) -> float:
    return factor * torch.finfo(x.dtype).eps


def finite_mask(mask: Tensor) -> Tensor:
    """An additive mask that excludes the same keys and holds no −inf.

    Raises:
        InputError: +inf or NaN, which no mask can mean.
    """
    if bool((mask.isnan() | (mask == torch.inf)).any()):
        raise InputError("an attention mask holds +inf or NaN; 0 keeps a key and -inf excludes it")
    return mask.clamp(min=MASKED)


def log_sum_exp_of_others(x: Tensor) -> Tensor:
    """`log Σ_{k≠c} exp(x_k)` for every c.

    Shape: (…, m) → (…, m); −inf where m = 1.
    """
    none = torch.full_like(x[..., :1], -torch.inf)
    before = torch.cat([none, torch.logcumsumexp(x, -1)[..., :-1]], -1)
    after = torch.cat([none, torch.logcumsumexp(x.flip(-1), -1)[..., :-1]], -1).flip(-1)
    return torch.logaddexp(before, after)


class LogProbabilities(NamedTuple):
    """Logarithms of the smallest and largest probabilities, (…, m) each."""

    lower: Tensor
    upper: Tensor


def log_probability_box(lower: Tensor, upper: Tensor) -> LogProbabilities:
    """Range of `log softmax(s)_c` for scores in the box [lower, upper], each entry by itself exact.

    The largest probability of key c has its own score at the upper end and all others at the lower
    end (theory.md, section 1): `p̄_c = e^{u_c} / (e^{u_c} + Σ_{k≠c} e^{l_k})`, and the mirror image.

    Shape: (…, m), (…, m) → two of (…, m).
    """
    others_up, others_low = log_sum_exp_of_others(upper), log_sum_exp_of_others(lower)
    # m = 1: there are no others, and the probability is 1 exactly
    low_slack = _ulp(lower) * (1.0 + lower.abs() + others_up.abs()).nan_to_num(posinf=0.0)
    high_slack = _ulp(lower) * (1.0 + upper.abs() + others_low.abs()).nan_to_num(posinf=0.0)
    low = torch.nn.functional.logsigmoid(lower - others_up - low_slack)
    high = torch.nn.functional.logsigmoid(upper - others_low + high_slack)
    return LogProbabilities(low - _ulp(lower), (high + _ulp(lower)).clamp(max=0.0))


def probability_box(lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
    """Range of `softmax(s)_c` for scores in a box; see `log_probability_box`. (…, m) → two of (…, m)."""
    low, high = log_probability_box(lower, upper)
    return low.exp(), high.exp()


def centred_probability_box(p: Tensor, low: Tensor, high: Tensor, square: Tensor) -> tuple[Tensor, Tensor]:
    """Range of `softmax(s + Δ)_c` where the moves are centred, `Σ p_c Δ_c = 0`: first order in Δ is exact.

    The others' part of the sum, `R = Σ_{k≠c} p_k e^{Δ_k}`, lies by Jensen's inequality above
    `(1 − p_c) e^{−p_c Δ_c / (1 − p_c)}`, and below `1 − p_c − p_c Δ_c + square`, as
    `e^x ≤ 1 + x + ψ x²`; and `p'_c = p_c e^{Δ_c} / (p_c e^{Δ_c} + R)` grows with Δ_c in both.

    Arguments:
        p: (…, m) softmax(s). low, high: (…, m) ranges of Δ_c.
        square: (…) bound of `Σ p_k ψ(|Δ_k|) Δ_k²`, ψ(x) = (e^x − 1 − x) / x².

    Returns:
        two of (…, m).
    """
    log_p = p.log()
    log_rest = log_sum_exp_of_others(log_p)
    ulp = _ulp(p) * p.shape[-1]
    up = log_p - log_rest + high * (1.0 + (log_p - log_rest).exp())
    most = log_rest.exp() - p * low + square.unsqueeze(-1)
    down = log_p + low - most.log()

    def moved(logit: Tensor, sign: float) -> Tensor:
        size = 1.0 + logit.abs() + log_p.abs() + log_rest.abs()
        return torch.sigmoid(logit + sign * ulp * size)

    # a key that is alone, or has probability 0, is left to the box of the scores
    return moved(down, -1.0).nan_to_num(nan=0.0), moved(up, 1.0).nan_to_num(nan=1.0)


class SoftmaxPlanes(NamedTuple):
    """Affine lower and upper bounds of the probabilities around the scores `centre`.

    `p_k ≥ low_k + L_k (s−c)_k − V_k Σ_j κ_j (s−c)_j` and
    `p_k ≤ high_k + C_k [(s−c)_k − Σ_j P_j (s−c)_j]`; all tensors (…, m).
    """

    centre: Tensor
    low: Tensor
    low_own: Tensor
    low_others: Tensor
    chord: Tensor
    high: Tensor
    high_own: Tensor
    weights: Tensor


def softmax_planes(
    lower: Tensor,
    upper: Tensor,
    centre: Tensor | None = None,
    log_box: LogProbabilities | None = None,
) -> SoftmaxPlanes:
    """Log-sum-exp bounds of the softmax over a box (Wei et al., AISTATS 2023, eqs. 39–47), as planes.

    The lower bound is the tangent at `centre` of `e^{s_k} / Σ_j chord_j(s_j)`, which is convex; the upper
    one is the tangent of the chord of exp over the range of `log p_k`, which is concave.

    Arguments:
        lower, upper: (…, m) box of the scores.
        centre: (…, m) where the tangents touch, inside the box; default its midpoint.
        log_box: a range of `log p`; default that of the box. A tighter one gives tighter upper planes.
    """
    centre = (lower + upper) / 2 if centre is None else centre
    log_box = log_probability_box(lower, upper) if log_box is None else log_box
    shift = upper.amax(-1, keepdim=True)
    width = upper - lower
    tiny = torch.finfo(lower.dtype).eps
    # slope of the chord of exp on [l, u], (e^u − e^l)/(u − l), without cancellation
    safe = width.clamp(min=tiny)
    ratio = torch.where(width > tiny, -torch.expm1(-safe) / safe, 1.0 - width / 2)
    chord = torch.exp(upper - shift) * ratio
    on_chord = torch.exp(lower - shift) + chord * (centre - lower)
    total = on_chord.sum(-1, keepdim=True)
    # total may only err upwards: a larger denominator keeps the lower bound valid
    total = total * (1.0 + _ulp(lower) * lower.shape[-1])
    low = torch.exp(centre - shift) / total
    low_others = low / total

    weights = torch.softmax(centre, -1)
    log_p = torch.log_softmax(centre, -1)
    span = (log_box.upper - log_box.lower).clamp(min=0.0)
    safe_span = span.clamp(min=tiny)
    ratio = torch.where(span > tiny, -torch.expm1(-safe_span) / safe_span, 1.0 - span / 2)
    top = log_box.upper.exp()
    high_own = top * ratio
    high = top + high_own * (log_p - log_box.upper)
    # rounding of the values at the centre, and of the slopes over the width of the box
    ulp = _ulp(lower)
    low_slack = ulp * (low * (1.0 + width) + low_others * (chord * width).sum(-1, keepdim=True))
    high_slack = ulp * (
        top + high_own * (1.0 + log_p.abs() + width + (weights * width).sum(-1, keepdim=True))
    )
    return SoftmaxPlanes(
        centre, low - low_slack, low, low_others, chord, high + high_slack, high_own, weights
    )


def largest_average(lower: Tensor, upper: Tensor, values: Tensor) -> Tensor:
    """Exact maximum of `Σ_c softmax(s)_c v_c` over scores in a box (theory.md, section 5, "interval").

    The maximum has `e^{u}` on the largest values and `e^{l}` on the rest: sort the values, scan the cut.

    Arguments:
        lower, upper: (…, m) box of the scores.
        values: (…, m), broadcast against the scores' leading dimensions.

    Returns:
        (…): not below the maximum, whatever the rounding.
    """
    lower, upper, values = torch.broadcast_tensors(lower, upper, values)
    sorted_values, order = values.sort(-1, descending=True)
    shift = upper.amax(-1, keepdim=True)
    big = torch.exp(upper - shift).gather(-1, order)
    small = torch.exp(lower - shift).gather(-1, order)

    def from_left(x: Tensor) -> Tensor:
        return x.cumsum(-1)

    def after(x: Tensor) -> Tensor:  # sum of the entries to the right of each
        reverse = x.flip(-1).cumsum(-1).flip(-1)
        return torch.cat([reverse[..., 1:], torch.zeros_like(x[..., :1])], -1)

    total = from_left(big) + after(small)
    average = (from_left(big * sorted_values) + after(small * sorted_values)) / total
    largest = sorted_values[..., :1]
    # where the weights underflow nothing better than the largest value is known
    average = torch.where(total > 1e-30, average, largest)
    size = values.abs().amax(-1)
    best = average.amax(-1) + _ulp(values) * values.shape[-1] * size
    return torch.minimum(best, values.amax(-1))


def largest_simplex_average(p_lower: Tensor, p_upper: Tensor, values: Tensor) -> Tensor:
    """Maximum of `Σ_c p_c v_c` over `p_lower ≤ p ≤ p_upper, Σ p = 1` (fractional knapsack).

    Shape: (…, m), (…, m), (…, m) → (…).
    """
    p_lower, p_upper, values = torch.broadcast_tensors(p_lower, p_upper, values)
    sorted_values, order = values.sort(-1, descending=True)
    base = p_lower.gather(-1, order)
    room = (p_upper - p_lower).clamp(min=0.0).gather(-1, order)
    left = (1.0 - base.sum(-1, keepdim=True)).clamp(min=0.0)
    filled = torch.minimum(room.cumsum(-1), left)
    given = torch.diff(filled, dim=-1, prepend=torch.zeros_like(left))
    # what no key has room for (rounding of the box) goes to the largest value
    rest = left.squeeze(-1) - filled[..., -1]
    size = values.abs().amax(-1)
    best = ((base + given) * sorted_values).sum(-1) + rest * sorted_values[..., 0].clamp(min=0.0)
    return torch.minimum(best + _ulp(values) * values.shape[-1] * size, values.amax(-1))


def average_range(
    s_lower: Tensor,
    s_upper: Tensor,
    v_lower: Tensor,
    v_upper: Tensor,
    p_box: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Range of `softmax(s) V` for scores and values in boxes.

    Arguments:
        s_lower, s_upper: (…, n, m).
        v_lower, v_upper: (…, m, dv).
        p_box: optional (…, n, m) lower and upper probabilities from elsewhere, used as well.

    Returns:
        two of (…, n, dv).
    """
    s_l, s_u = s_lower.unsqueeze(-2), s_upper.unsqueeze(-2)  # (…, n, 1, m)
    v_l, v_u = v_lower.mT.unsqueeze(-3), v_upper.mT.unsqueeze(-3)  # (…, 1, dv, m)
    upper = largest_average(s_l, s_u, v_u)
    lower = -largest_average(s_l, s_u, -v_l)
    if p_box is not None:
        p_l, p_u = p_box[0].unsqueeze(-2), p_box[1].unsqueeze(-2)
        upper = torch.minimum(upper, largest_simplex_average(p_l, p_u, v_u))
        lower = torch.maximum(lower, -largest_simplex_average(p_l, p_u, -v_l))
    return lower, upper


def jacobian_norm_upper(p_lower: Tensor, p_upper: Tensor) -> Tensor:
    """Upper bound of `‖diag(p) − p pᵀ‖₂` for every p in a box of probabilities (theory.md, section 1, 2.).

    `min(½, max p̄, max_i sup_{t ∈ [p̲_i, p̄_i]} t (1 − t + min(t, 1 − t, max_{j≠i} p̄_j)))`. For the
    key with the largest p̄ the supremum is over a concave piecewise function of t: its ends, its kinks and its
    inner maxima are tried; for all others it is at most `min(½, p̄)`.

    Shape: (…, m), (…, m) → (…).
    """
    if p_upper.shape[-1] == 1:
        return torch.zeros_like(p_upper[..., 0])
    top = p_upper.topk(2, -1)
    return _jacobian_norm(p_lower.gather(-1, top.indices[..., :1]).squeeze(-1), *top.values.unbind(-1))


def _jacobian_norm(lower: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """From the two largest p̄ and the range of the key with the first: all others' t are at most the second,
    and for these `t (1 − t + min(t, 1 − t, first)) ≤ min(t, ½)`."""
    candidates = [lower, first, second, 1.0 - second, (1.0 + second) / 2, torch.full_like(first, 0.5)]

    def g(t: Tensor) -> Tensor:
        return t * (1.0 - t + torch.minimum(torch.minimum(t, 1.0 - t), second))

    lower = torch.minimum(lower, first)
    worst = torch.stack([g(t.clamp(min=lower, max=first)) for t in candidates]).amax(0)
    bound = torch.minimum(torch.maximum(worst, second), first).clamp(max=0.5)
    return (bound * (1.0 + _ulp(first))).clamp(max=0.5)


def jacobian_norm_on_box(lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
    """`jacobian_norm_upper` for scores in a box, and the largest probabilities p̄.

    A third of the work of `probability_box`: of the least probabilities that of one key of a row is needed,
    and for p̄ sums of all but one may be differences: what rounding takes from `Σ_k e^{l_k} − e^{l_c}` is
    small against `e^{u_c}`, to which it is added.

    Shape: (…, m), (…, m) → (…), (…, m).
    """
    m = upper.shape[-1]
    if m == 1:
        return torch.zeros_like(upper[..., 0]), torch.ones_like(upper)
    shift = upper.detach().amax(-1, keepdim=True)
    apart = shift - lower.detach().amax(-1, keepdim=True)
    if bool((apart > 600.0).any()):  # one of the exponentials would vanish
        p_lower, p_upper = probability_box(lower, upper)
        return jacobian_norm_upper(p_lower, p_upper), p_upper
    room = _ulp(upper) * (1e3 + m)  # of exponents too, which are above −1000 where exp is not 0
    tiny = 1e-300
    up, low = (upper - shift).exp(), (lower - shift).exp()
    total_low = low.sum(-1, keepdim=True)
    others = (total_low - low - room * total_low).clamp(min=0.0)
    p_upper = ((up + tiny) / (up + others + tiny) * (1.0 + 4.0 * room)).clamp(max=1.0)
    top = p_upper.topk(2, -1)
    first = top.indices[..., :1]
    low_first = low.gather(-1, first)
    others = up.scatter(-1, first, 0.0).sum(-1, keepdim=True) + m * tiny
    p_lower = low_first / (low_first + others) * (1.0 - 4.0 * room)
    return _jacobian_norm(p_lower.squeeze(-1), *top.values.unbind(-1)), p_upper


class WeightsPlane(NamedTuple):
    """`⟨scores, S⟩ + bias`: a lower bound of a functional of the probabilities, per functional."""

    scores: Tensor
    bias: Tensor


def best_row_shift(a: Tensor, planes: SoftmaxPlanes) -> Tensor:
    """The t that loses least in `Σ a_c p_c = t + Σ (a_c − t) p_c` when p is replaced by its planes.

    At the centre, `(a_c − t)⁺` costs the gap of the lower plane and `(t − a_c)⁺` that of the upper one: a
    convex, piecewise linear function of t with its minimum at one of the a_c (a weighted median).

    Shape: (spec, batch, …, n, m) → (spec, batch, …, n, 1).
    """
    with torch.no_grad():  # which entry it is; its value keeps the gradient
        below = (planes.weights - planes.low).clamp(min=0.0).expand(a.shape)
        above = (planes.high - planes.weights).clamp(min=0.0).expand(a.shape)
        ordered, index = a.sort(-1, descending=True)
        below, above = below.gather(-1, index), above.gather(-1, index)
        larger = (below * ordered).cumsum(-1) - ordered * below.cumsum(-1)

        def from_right(x: Tensor) -> Tensor:
            return x.flip(-1).cumsum(-1).flip(-1)

        smaller = ordered * from_right(above) - from_right(above * ordered)
        best = index.gather(-1, (larger + smaller).argmin(-1, keepdim=True))
    return a.gather(-1, best)


def weights_lower_planes(a: Tensor, planes: SoftmaxPlanes, shift: Tensor | float = 0.0) -> WeightsPlane:
    """Lower bound of every row of `⟨a, softmax(S)⟩`, linear in S.

    Every row of probabilities sums to 1, so a constant t may be taken from a row of coefficients and given
    back as a bias; with a good t the rest is small, and so is what the planes lose on it.

    Arguments:
        a: (spec, batch, …, n, m).
        planes: of the scores' box, (batch, …, n, m) or with the spec dimension in front.
        shift: added to `best_row_shift`, in units of the spread of the row's coefficients; a number or
            (spec, batch, …, n, 1). Any value is valid.

    Returns:
        coefficients (spec, batch, …, n, m), bias (spec, batch, …, n).
    """
    t = best_row_shift(a, planes)
    if isinstance(shift, Tensor) or shift != 0.0:
        t = t + shift * (a.amax(-1, keepdim=True) - a.amin(-1, keepdim=True))
    a = a - t
    positive, negative = a.clamp(min=0.0), a.clamp(max=0.0)
    up = negative * planes.high_own
    scores = positive * planes.low_own - (positive * planes.low_others).sum(-1, keepdim=True) * planes.chord
    scores = scores + up - up.sum(-1, keepdim=True) * planes.weights
    const = positive * planes.low + negative * planes.high - scores * planes.centre
    return WeightsPlane(scores, const.sum(-1) + t.squeeze(-1))


def weights_lower_plane(a: Tensor, planes: SoftmaxPlanes, shift: Tensor | float = 0.0) -> WeightsPlane:
    """`weights_lower_planes`, the rows added up: bias (spec, batch)."""
    rows = weights_lower_planes(a, planes, shift)
    return WeightsPlane(rows.scores, rows.bias.flatten(2).sum(-1))


class KeyPlane(NamedTuple):
    """`⟨values, V⟩ + bias`: a lower bound of a functional of `softmax(S) V`, per functional."""

    values: Tensor
    bias: Tensor


def key_lower_plane(
    a: Tensor, s_lower: Tensor, s_upper: Tensor, v_lower: Tensor, v_upper: Tensor
) -> KeyPlane:
    """Lower bound of `⟨a, softmax(S) V⟩` whose only slope is the key-sensitivity term, `P dV` (theory (1)).

    With P the probabilities at the scores' midpoint and y the functional's values per key,
    `Σ_c p'_c y_c ≥ Σ_c P_c y_c + min_p' Σ (p'_c − P_c) y⁰_c − Σ max|p'_c − P_c| rad(y_c)` row by row. The
    minimum is exact over the box of scores, hence never looser than the norm form of the same term.

    Arguments:
        a: (spec, batch, …, n, dv).
        s_lower, s_upper: (batch, …, n, m).
        v_lower, v_upper: (batch, …, m, dv).

    Returns:
        coefficients (spec, batch, …, m, dv), bias (spec, batch).
    """
    p_l, p_u = probability_box(s_lower, s_upper)
    p = torch.softmax((s_lower + s_upper) / 2, -1)
    v_c, v_r = (v_lower + v_upper) / 2, (v_upper - v_lower) / 2
    y_c, y_r = a @ v_c.mT, a.abs() @ v_r.mT  # (spec, batch, …, n, m)
    moved = -largest_average(s_lower, s_upper, -y_c) - (p * y_c).sum(-1)
    spread = (torch.maximum(p_u - p, p - p_l) * y_r).sum(-1)
    slack = _ulp(a) * a.shape[-1] * (y_c.abs().amax(-1) + y_r.amax(-1))
    return KeyPlane(p.mT @ a, (moved - spread - slack).flatten(2).sum(-1))
