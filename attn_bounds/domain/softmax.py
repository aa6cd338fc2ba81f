"""Rule of a softmax by itself; inside an attention unit `attention.py` bounds all of it at once."""

from __future__ import annotations

import torch
from torch import Tensor

from ..sensitivity.remainder import RowData, chi, curvature_bound, psi, slope_bound, weighted_deviation
from ..sensitivity.softmax import probability_box
from .forms import AffineForm, Groups, Rest
from .rules import append_identity
from .sets import AttentionRemainder, BoxInBall, ErrorSet, Range, intersection


class SoftmaxRemainder(ErrorSet):
    """Errors in a box and a ball; an attention with the values I bounds their functionals as a whole."""

    def __init__(self, label: str, box: BoxInBall, whole: AttentionRemainder) -> None:
        self.label, self.size, self.radius = label, box.size, box.radius
        self.box, self.whole = box, whole

    def range(self, w: Tensor) -> Range:
        return intersection(self.box.range(w), self.whole.range(w))

    def tight_range(self, w: Tensor) -> Range:
        return intersection(self.box.tight_range(w), self.whole.tight_range(w))

    def entry_range(self, w: Tensor) -> Range:
        return self.box.range(w)


def row_data(linear: Tensor, log_p: Tensor, groups: Groups) -> tuple[RowData, Range]:
    """`RowData` of scores without a bilinear part, and the range of their moves.

    Arguments:
        linear: (batch, K, heads, n, m) generators of the scores, centred: `Σ_c p_c D_c = 0`.
        log_p: (batch, heads, n, m) logarithms of the probabilities at the centre, float64.
    """
    p = log_p.exp()
    ranges = [(a.double(), b.double()) for a, b in groups.ranges(linear)]
    supports = torch.stack([torch.maximum(-low, high) for low, high in ranges])
    grams = groups.grams(linear)
    r = supports.sum(0)

    def deviation(factor: Tensor, growth: float) -> Tensor:
        # a probability that underflows is not 0, and the factor, at most e^(growth · r), may make up for it
        weight = torch.where(p > 0, p * factor, (log_p + growth * r).exp())
        whole = weighted_deviation(grams, supports, weight).sum(0)
        return torch.minimum(whole, (weight * r.square()).sum(-1).sqrt())

    norms = deviation(torch.ones_like(r), 0.0), deviation(psi(r), 1.0), deviation(chi(r).square(), 2.0)
    charge = p * psi(r) * r.square()
    return RowData(p, r, torch.zeros_like(r), *norms, charge), groups.total(ranges, p)


def _without_slope(rows: RowData, flat: Tensor) -> RowData:
    """Rows that keep no linear part: `curvature_bound` then is the range of y, `[min y, max y]`."""
    zero, inf = torch.zeros_like(rows.sd), torch.full_like(rows.sd, torch.inf)
    r = torch.where(flat.unsqueeze(-1), torch.full_like(rows.r, 1e15), rows.r)  # ψ(r) is infinite
    charge = torch.where(flat.unsqueeze(-1), torch.inf, rows.charge)
    sd, sd_psi = torch.where(flat, zero, rows.sd), torch.where(flat, inf, rows.sd_psi)
    return rows._replace(r=r, sd=sd, sd_psi=sd_psi, charge=charge)


def softmax(x: AffineForm, groups: Groups, label: str) -> tuple[AffineForm, tuple[Tensor, Tensor]]:
    """Softmax over the last axis: the Jacobian at the centre, and what is left of each probability.

    Per entry the error is bounded by the second-order bound of its functional (`curvature_bound` with the
    unit vectors as values), and by the exact range of the probability minus that of the linear part. With
    `e = (1/Z) [p∘φ − (Σ p φ)(p + p∘Δ')]` and `s = sd_ψ² ≥ Σ p φ`, a row's l2 norm is at most
    `s / (1 + s) · (1 + ‖p∘(1 + r)‖₂)`. A row whose scores move so far that its probabilities have a narrower
    range than their errors gets no linear part.

    Arguments:
        x: scores, (batch, …, m).

    Returns:
        the output, and the bounds of the probabilities.
    """
    dtype, shape = x.centre.dtype, x.centre.shape
    m = shape[-1]
    x = x.linear(lambda t: t.reshape(len(t), 1, -1, m))
    centre = x.centre.double()
    log_p = torch.log_softmax(centre, -1)
    p = log_p.exp()
    p_g = p.to(dtype).unsqueeze(1)
    d = x.generators - (x.generators * p_g).sum(-1, keepdim=True)  # a constant per row moves no probability
    rows, (d_low, d_high) = row_data(d, log_p, groups)
    p_low, p_high = probability_box(centre + d_low, centre + d_high)

    eye = torch.eye(m, dtype=torch.float64)
    y = eye - p.unsqueeze(-1)  # (…, n, functional, key)
    error = torch.full_like(p, 4 * torch.finfo(torch.float64).eps)
    slope = slope_bound(y, rows, error)
    down, up = curvature_bound(-y, slope, rows), curvature_bound(y, slope, rows)
    rounding = 8 * torch.finfo(torch.float64).eps + (p - p_g.squeeze(1).double()).abs()
    low = torch.maximum(-down, p_low - p - p * d_high) - rounding
    high = torch.minimum(up, p_high - p - p * d_low) + rounding
    low, high = low.clamp(max=0.0), high.clamp(min=0.0)
    # where the scores move far the Jacobian is worth less than nothing: such a row stays at its centre
    flat = (high - low).sum(-1) > (p_high - p_low).sum(-1)
    rows = _without_slope(rows, flat)
    low = torch.where(flat.unsqueeze(-1), (p_low - p).clamp(max=0.0) - rounding, low)
    high = torch.where(flat.unsqueeze(-1), (p_high - p).clamp(min=0.0) + rounding, high)
    weight = torch.where(flat.unsqueeze(-1), torch.zeros_like(p), p).to(dtype).unsqueeze(1)
    s = rows.sd_psi.square()
    ratio = (s / (1.0 + s)).nan_to_num(nan=1.0)
    curved = ratio * (1.0 + torch.linalg.vector_norm(p * (1.0 + rows.r), dim=-1))
    curved = torch.where(flat, torch.full_like(s, 2**0.5), curved)  # the diameter of the simplex
    boxed = torch.linalg.vector_norm(torch.maximum(-low, high), dim=-1)
    row_radius = torch.minimum(boxed, curved + torch.linalg.vector_norm(rounding, dim=-1))

    grow = groups.growth
    box = BoxInBall(
        label,
        (low.flatten(1) * grow).to(dtype),
        (high.flatten(1) * grow).to(dtype),
        (torch.linalg.vector_norm(row_radius.flatten(1), dim=1) * grow).to(dtype),
    )
    weighted = d * weight
    if groups.room(box.size) < box.size:
        groups.folded.append((label, box.size))
        sides = torch.maximum(-box.lower, box.upper).reshape(p.shape)
        output = AffineForm(p.to(dtype), weighted, Rest(sides, (row_radius * grow).to(dtype)))
        output = output.linear(lambda t: t.reshape(len(t), *shape[1:]))
        return output, (p_low.reshape(shape).to(dtype), p_high.reshape(shape).to(dtype))
    values = eye.expand(*p.shape[:2], m, m)
    start = groups.add(SoftmaxRemainder(label, box, AttentionRemainder(label, values, p, rows, [])))
    index = torch.arange(p[0].numel())
    output = AffineForm(p.to(dtype), append_identity(weighted, start, index))
    output = output.linear(lambda t: t.reshape(len(t), *shape[1:]))
    return output, (p_low.reshape(shape).to(dtype), p_high.reshape(shape).to(dtype))
