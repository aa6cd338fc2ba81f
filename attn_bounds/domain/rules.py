"""One rule per kind of nonlinear node: forms of the inputs → form of the output, with a new error set.

Linear nodes need no rule of their own: `AffineForm.linear` maps the centre and all generators at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..norms import spectral_norm_upper
from ..sensitivity.remainder import RowData, bilinear_range_of_ball, chi, psi, weighted_deviation
from ..sensitivity.softmax import probability_box
from .forms import AffineForm, Groups
from .joint import AttentionStep, ReluStep
from .sets import AttentionRemainder, Ball, BoxInBall


def _append_identity(form: Tensor, start: int, index: Tensor, size: Tensor | float = 1.0) -> Tensor:
    """Generators (batch, K, *shape) with a new symbol per flat position in `index`, numbered from `start`.

    size: (batch, len(index)), 0 where a sample does not use the symbol.
    """
    batch, symbols = form.shape[:2]
    new = form.new_zeros((batch, start - symbols + len(index), form[0, 0].numel()))
    new[:, torch.arange(start - symbols, start - symbols + len(index)), index] = size
    return torch.cat([form, new.reshape(batch, -1, *form.shape[2:])], 1)


def relu(x: AffineForm, groups: Groups, label: str) -> tuple[AffineForm, tuple[Tensor, Tensor]]:
    """ReLU (theory.md, section 6): slope of the chord, error in a box and in a ball.

    With d the move of a neuron, `e = relu(x+d) − relu(x) − λd` is convex in d with e(0) = 0: it is largest at
    an end of the range and smallest at the kink, and `|e| ≤ κ|d|` with κ the largest difference between λ and
    the slopes to the ends and at 0.

    Returns:
        the output, and the bounds (lower, upper) of the input.
    """
    ranges = groups.ranges(x.generators)
    low_d, high_d = groups.total(ranges, x.centre)
    low, high = x.centre + low_d, x.centre + high_d
    at = x.centre.clamp(min=0.0)
    # a range that is not finite must not pass for a stable neuron: NaN then reaches the final bound
    known = torch.isfinite(low) & torch.isfinite(high)
    unstable = (low < 0) & (high > 0)
    width = (high - low).clamp(min=torch.finfo(low.dtype).tiny)
    slope = torch.where(unstable, high / width, (low >= 0).to(low.dtype))
    e_low_end = -at - slope * low_d  # relu is 0 at the lower end
    e_high_end = high - at - slope * high_d
    e_kink = -at + slope * x.centre
    e_up = torch.maximum(e_low_end, e_high_end).clamp(min=0.0)
    e_down = e_kink.clamp(max=0.0)
    own = (x.centre > 0).to(low.dtype)  # slope at the centre
    to_low = (-at / low_d.clamp(max=-1e-30) - slope).abs()
    to_high = ((high - at) / high_d.clamp(min=1e-30) - slope).abs()
    kappa = torch.maximum(torch.maximum(to_low, to_high), (own - slope).abs())
    slope = torch.where(known, slope, torch.nan)
    output = AffineForm(at, x.generators * slope.unsqueeze(1))
    index = unstable.flatten(1).any(0).nonzero().squeeze(1)
    if len(index) == 0:
        return output, (low, high)

    def pick(t: Tensor) -> Tensor:
        return torch.where(unstable, t, torch.zeros_like(t)).flatten(1)[:, index]

    def of(t: Tensor) -> Tensor:
        return t.flatten(1)[:, index]

    supports = [of(torch.maximum(-down, up)) for down, up in ranges]
    generators = x.generators.flatten(2)[:, :, index]
    radius = groups.joint_norm(generators, pick(kappa), supports)
    live = of(unstable).to(low.dtype)
    errors = BoxInBall(label, pick(e_down) * groups.growth, pick(e_up) * groups.growth, radius)
    errors.step = ReluStep(
        errors, generators, of(x.centre), of(low), of(high), of(slope), live, supports, groups
    )
    start = groups.add(errors)
    return AffineForm(at, _append_identity(output.generators, start, index, live)), (low, high)


def _scores_remainder(q: AffineForm, k: AffineForm, scale: float, groups: Groups) -> tuple[Tensor, Tensor]:
    """Range of `scale · dq · dk`, (batch, heads, n, m).

    Both moves driven by group 0, an l2 ball: exactly. All other pairs: the sum over the features of products
    of supports, or the norm of the product of two ellipsoids, whichever is smaller.
    """
    first = groups.sets[0]
    q_supports = [s.double() for s in groups.supports(q.generators)]
    k_supports = [s.double() for s in groups.supports(k.generators)]
    zero_q, zero_k = q_supports[0], k_supports[0]
    rest_q, rest_k = (sum(s[1:], torch.zeros_like(s[0])) for s in (q_supports, k_supports))
    size = abs(scale)
    q_grams, k_grams = _ellipsoids(q, q_supports, groups), _ellipsoids(k, k_supports, groups)
    half_q, half_k = [_factor(g) for g in q_grams], [_factor(g) for g in k_grams]

    def pair(x: int, y: int) -> Tensor:
        """Σ_i |dq_i| |dk_i| for the first group (0) or the others (1), on either side."""
        by_entries = (zero_q, rest_q)[x] @ (zero_k, rest_k)[y].mT
        if x + y == 0 or not bool(by_entries.any()):
            return by_entries
        product = half_q[x].mT.unsqueeze(3) @ half_k[y].unsqueeze(2)  # (batch, heads, n, m, dk, dk)
        return torch.minimum(by_entries, spectral_norm_upper(product))

    entry = pair(0, 1) + pair(1, 0) + pair(1, 1)
    if isinstance(first, Ball) and first.norm == 2.0:
        gq = groups.parts(q.generators)[0][1].reshape(q.centre.shape[0], -1, *q.centre.shape[1:]).double()
        gk = groups.parts(k.generators)[0][1].reshape(k.centre.shape[0], -1, *k.centre.shape[1:]).double()
        cross = torch.einsum("bzhnd,bzhme->bhnmde", gq, gk)
        shape = cross.shape
        gram_q, gram_k = q_grams[0].unsqueeze(3).expand(shape), k_grams[0].unsqueeze(2).expand(shape)
        # the Gram matrices hold the growth for rounding already
        low, high = bilinear_range_of_ball(gram_q, gram_k, cross * groups.growth**2)
        low, high = (scale * low, scale * high) if scale >= 0 else (scale * high, scale * low)
    else:
        high = size * pair(0, 0)
        low = -high
    return low - size * entry, high + size * entry


def _ellipsoids(x: AffineForm, supports: list[Tensor], groups: Groups) -> list[Tensor]:
    """Ellipsoids `{y : yᵀΓ⁻¹y ≤ 1}` around what each token moves by group 0 and by all the others: their Γ.

    A ball's image has Γ = ρ² G Gᵀ; a box with half widths s lies in the one with Γ = diag(s_i Σ_j s_j); a sum
    of sets with Γ_g lies in the one with `Γ = Σ_g Γ_g / t_g`, Σ t_g = 1, here t_g ∝ √trace Γ_g.

    Shape: x (batch, heads, n, d) → two of (batch, heads, n, d, d), float64.
    """
    grams: list[Tensor] = []
    for (s, w), support in zip(groups.parts(x.generators), supports, strict=True):
        box = torch.diag_embed(support * support.sum(-1, keepdim=True))
        if s.radius is not None:
            rows = w.reshape(w.shape[0], -1, *x.centre.shape[1:]).double()
            gram = torch.einsum("bzhnd,bzhne->bhnde", rows, rows)
            gram = gram * (groups.growth * s.radius.double().reshape(-1, 1, 1, 1, 1)).square()
            smaller = _trace(gram) <= 1.01 * _trace(box)  # one feature: the same up to rounding
            box = torch.where(smaller[..., None, None], gram, box)
        grams.append(box)
    rest = torch.zeros_like(grams[0])
    sizes = [_trace(g).sqrt() for g in grams[1:]]
    total = sum(sizes, torch.zeros_like(_trace(rest)))
    for gram, size in zip(grams[1:], sizes, strict=True):
        part = torch.where(size > 0, total / size.clamp(min=1e-300), torch.zeros_like(size))
        rest = rest + gram * part[..., None, None]
    return [grams[0], rest]


def _trace(gram: Tensor) -> Tensor:
    return gram.diagonal(dim1=-2, dim2=-1).sum(-1)


def _factor(gram: Tensor) -> Tensor:
    """L with L Lᵀ ≥ gram for positive semidefinite matrices, (…, d, d): no cancellation in ‖aL‖."""
    finite = torch.isfinite(gram).all(-1).all(-1)[..., None, None]
    values, vectors = torch.linalg.eigh(torch.where(finite, gram, torch.zeros_like(gram)))
    error = 16 * gram.shape[-1] * torch.finfo(gram.dtype).eps * values[..., -1:].clamp(min=0.0)
    factor = vectors * (values.clamp(min=0.0) + error).sqrt().unsqueeze(-2)
    return torch.where(finite, factor, torch.inf)


def attention(
    q: AffineForm, k: AffineForm, v: AffineForm, scale: float, mask: Tensor | None, groups: Groups, label: str
) -> tuple[AffineForm, tuple[Tensor, Tensor]]:
    """Attention exactly to first order, with the second-order remainder as a new error set.

    Arguments:
        q, k, v: (batch, heads, n, dk), (batch, heads, m, dk), (batch, heads, m, dv).
        mask: additive constant or None.

    Returns:
        form of the output (batch, heads, n, dv), and (lower, upper) probabilities, (batch, heads, n, m).
    """
    dtype = q.centre.dtype
    symbols = max(q.symbols, k.symbols)
    # scores: linear part, and the bilinear remainder with its midpoint moved into the centre
    keys = k.centre - k.centre.mean(-2, keepdim=True)  # what all keys share moves no probability
    linear = scale * (q.padded(symbols) @ keys.unsqueeze(1).mT + q.centre.unsqueeze(1) @ k.padded(symbols).mT)
    b_low, b_high = _scores_remainder(q, k, scale, groups)
    centre = scale * (q.centre.double() @ k.centre.double().mT) + (b_low + b_high) / 2
    if mask is not None:
        centre = centre + mask.double()
    b = (b_high - b_low) / 2
    p = torch.softmax(centre, -1)
    # a constant per row does not change the softmax: centre D at its average
    linear = linear - (linear * p.to(dtype).unsqueeze(1)).sum(-1, keepdim=True)
    ranges = groups.ranges(linear)
    supports = [torch.maximum(-down, up).double() for down, up in ranges]
    d_low, d_high = groups.total(ranges, linear[:, 0])
    weights_box = probability_box(centre + d_low.double() - b, centre + d_high.double() + b)
    grams = []
    for s, w in groups.parts(linear):
        if s.radius is None:
            grams.append(w.new_zeros(0))
            continue
        rows = w.reshape(w.shape[0], -1, *linear.shape[2:]).double()
        gram = torch.einsum("bzhnc,bzhnd->bhncd", rows, rows)
        grams.append(gram * (groups.growth * s.radius.double().reshape(-1, 1, 1, 1, 1)).square())
    # b is centred too: b_c (1 − p_c) + Σ_{k≠c} p_k b_k at most
    r = torch.stack(supports).sum(0) + (b * (1.0 - 2.0 * p) + (p * b).sum(-1, keepdim=True)).clamp(min=0.0)
    # Var_p(b) ≤ Σ p b², and ≤ 2 Σ p (1 − p) b² since it is a sum over pairs
    b_norm = ((p * b.square()).sum(-1)).minimum(2.0 * (p * (1.0 - p) * b.square()).sum(-1)).sqrt()

    stacked = torch.stack(supports)
    first_r = supports[0]
    rest_r = r - first_r

    def deviation(factor: Tensor) -> tuple[Tensor, Tensor]:
        """Bounds of `√(Σ p factor Δ'²)`: of all of Δ', and without the part of group 0."""
        weight = torch.where(p > 0, p * factor, torch.zeros_like(p))
        by_group = weighted_deviation(grams, stacked, weight)
        rest = by_group[1:].sum(0) + factor.amax(-1).sqrt() * b_norm
        rest = torch.minimum(rest, (weight * rest_r.square()).sum(-1).sqrt())
        return torch.minimum(by_group[0] + rest, (weight * r.square()).sum(-1).sqrt()), rest

    sd, other_sd = deviation(torch.ones_like(r))
    sd_psi, other_sd_psi = deviation(psi(r))
    row_data = RowData(p, r, b, sd, sd_psi, deviation(chi(r).square())[0])

    # output: P dV + Cov_P(D, v)
    v_c = v.centre.double()
    average = p @ v_c
    p_g, v_g = p.to(dtype).unsqueeze(1), v.centre.unsqueeze(1)
    symbols = max(symbols, v.symbols)
    own = p_g @ v.padded(symbols)
    weighted = linear * p_g
    moved = weighted @ v_g - weighted.sum(-1, keepdim=True) * average.to(dtype).unsqueeze(1)
    own[:, : moved.shape[1]] += moved

    value_groups: list[tuple[Tensor, Tensor | None]] = []
    v_supports = groups.supports(v.generators)
    for (s, w), support in zip(groups.parts(v.generators), v_supports, strict=True):
        form = None
        if s.radius is not None:
            rows = w.reshape(w.shape[0], -1, *v.centre.shape[1:]).double()
            gram = torch.einsum("bzhcd,bzhce->bhcde", rows, rows)
            gram = gram * (groups.growth * s.radius.double().reshape(-1, 1, 1, 1, 1)).square()
            form = _factor(torch.einsum("bhnc,bhcde->bhnde", p, gram))
        value_groups.append((support.double(), form))
    remainder = AttentionRemainder(label, v_c, average, row_data, value_groups)
    first = groups.sets[0].size
    moves = bool(v.generators.any())
    remainder.step = AttentionStep(
        remainder,
        linear[:, :first],
        v.generators[:, :first] if moves else None,
        other_sd,
        other_sd_psi,
        rest_r,
        groups.growth,
    )
    start = groups.add(remainder)
    index = torch.arange(average[0].numel())
    output = AffineForm(average.to(dtype), _append_identity(own, start, index))
    return output, weights_box
