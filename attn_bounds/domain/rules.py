"""One rule per kind of nonlinear node: forms of the inputs → form of the output, with a new error set.

Linear nodes need no rule of their own: `AffineForm.linear` maps the centre and all generators at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..sensitivity.remainder import RowData, bilinear_range_of_ball, chi, psi, weighted_deviation
from ..sensitivity.softmax import probability_box
from .forms import AffineForm, Groups
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

    supports = [torch.maximum(-down, up).flatten(1)[:, index] for down, up in ranges]
    radius = groups.joint_norm(x.generators.flatten(2)[:, :, index], pick(kappa), supports)
    grow = groups.growth
    start = groups.add(BoxInBall(label, pick(e_down) * grow, pick(e_up) * grow, radius))
    live = unstable.flatten(1)[:, index].to(low.dtype)
    return AffineForm(at, _append_identity(output.generators, start, index, live)), (low, high)


def _scores_remainder(q: AffineForm, k: AffineForm, scale: float, groups: Groups) -> tuple[Tensor, Tensor]:
    """Range of `scale · dq · dk`, (batch, heads, n, m): group 0 exactly where it is an l2 ball."""
    first = groups.sets[0]
    q_parts, k_parts = groups.parts(q.generators), groups.parts(k.generators)
    q_supports = [s.double() for s in groups.supports(q.generators)]
    k_supports = [s.double() for s in groups.supports(k.generators)]

    def total(parts: list[Tensor], like: Tensor) -> Tensor:
        return torch.stack(parts).sum(0) if parts else torch.zeros_like(like)

    zero_q, zero_k = q_supports[0], k_supports[0]
    rest_q, rest_k = total(q_supports[1:], zero_q), total(k_supports[1:], zero_k)
    # |Σ_i dq_i dk_i| ≤ Σ_i sup|dq_i| sup|dk_i|, for every pair of groups but (0, 0)
    entry = zero_q @ rest_k.mT + rest_q @ (zero_k + rest_k).mT
    size = abs(scale)
    if isinstance(first, Ball) and first.norm == 2.0:
        gq = q_parts[0][1].reshape(q.centre.shape[0], -1, *q.centre.shape[1:]).double()
        gk = k_parts[0][1].reshape(k.centre.shape[0], -1, *k.centre.shape[1:]).double()
        gram_q = torch.einsum("bzhnd,bzhne->bhnde", gq, gq).unsqueeze(3)
        gram_k = torch.einsum("bzhmd,bzhme->bhmde", gk, gk).unsqueeze(2)
        cross = torch.einsum("bzhnd,bzhme->bhnmde", gq, gk)
        shape = cross.shape
        low, high = bilinear_range_of_ball(gram_q.expand(shape), gram_k.expand(shape), cross)
        low, high = low * groups.growth**2, high * groups.growth**2
        low, high = (scale * low, scale * high) if scale >= 0 else (scale * high, scale * low)
    else:
        high = size * (zero_q @ zero_k.mT)
        low = -high
    return low - size * entry, high + size * entry


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

    def deviation(factor: Tensor) -> Tensor:
        weight = torch.where(p > 0, p * factor, torch.zeros_like(p))
        whole = weighted_deviation(grams, torch.stack(supports), weight) + factor.amax(-1).sqrt() * b_norm
        return torch.minimum(whole, (weight * r.square()).sum(-1).sqrt())

    row_data = RowData(p, r, b, deviation(torch.ones_like(r)), deviation(psi(r)), deviation(chi(r).square()))

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
    start = groups.add(AttentionRemainder(label, v_c, average, row_data, value_groups))
    index = torch.arange(average[0].numel())
    output = AffineForm(average.to(dtype), _append_identity(own, start, index))
    return output, weights_box
