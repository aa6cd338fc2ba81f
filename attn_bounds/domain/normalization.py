"""Rule of LayerNorm and RMSNorm as one operation: the Jacobian, and a remainder as an error set."""

from __future__ import annotations

import torch
from torch import Tensor

from ..norms import gram_norm_upper
from ..sensitivity.normalization import (
    Scalars,
    difference_norm,
    linear_part,
    remainder_norm,
    remainder_range,
    scalars,
    scale,
    square_range,
)
from .attention import gram_factor
from .forms import AffineForm, Groups, Rest
from .rules import append_identity
from .sets import ErrorSet, Range


class NormalizationRemainder(ErrorSet):
    """`h (1/s' − 1/s) + z q` per token (theory.md, (10)); symbols are (tokens, d) flattened.

    Arguments:
        z: (batch, tokens, d) at the centre, float64. s: (batch, tokens).
        values: `Scalars`, (batch, tokens).
        moves: per group of symbols that h depends on, a bound of each |h_j|, (batch, tokens, d), and L with
            `ρ² G Gᵀ ≤ L Lᵀ`, (batch, tokens, d, d), where the group lies in a ball of radius ρ, else None.
        reach: (batch, tokens) bound of each token's remainder in l2.
        flat: (batch, tokens), tokens without a linear part, whose error is `f(z') − f(z)`.
        centred: whether f' has mean 0.
    """

    def __init__(
        self,
        label: str,
        z: Tensor,
        s: Tensor,
        values: Scalars,
        moves: list[tuple[Tensor, Tensor | None]],
        reach: Tensor,
        flat: Tensor,
        centred: bool,
    ) -> None:
        self.label, self.size = label, z[0].numel()
        self.radius = torch.linalg.vector_norm(reach, dim=1)
        self.z, self.s, self.values, self.moves = z, s, values, moves
        self.reach, self.flat, self.centred = reach, flat, centred

    def _support(self, a: Tensor) -> Tensor:
        """Bound of |a·h|: (batch, tokens, F, d) → (batch, tokens, F)."""
        total = torch.zeros_like(a[..., 0])
        for entries, factor in self.moves:
            best = (a.abs() @ entries.unsqueeze(-1)).squeeze(-1)
            if factor is not None:
                best = torch.minimum(best, torch.linalg.vector_norm(a @ factor, dim=-1))
            total = total + best
        return total

    def range(self, w: Tensor) -> Range:
        batch, tokens, d = self.z.shape
        a = w.double().reshape(batch, tokens, d, -1).mT  # (batch, tokens, F, d)
        az = (a @ self.z.unsqueeze(-1)).squeeze(-1)
        low, high = remainder_range(az, self._support(a), self.values)
        # f' lies in a ball of radius √d, whatever h is
        free = a - a.mean(-1, keepdim=True) if self.centred else a
        size = torch.linalg.vector_norm(free, dim=-1) * d**0.5
        s = self.s.unsqueeze(-1)
        jacobian = self._support(linear_part(a, self.z.unsqueeze(-2), s.expand(az.shape)))
        flat = self.flat.unsqueeze(-1)
        jacobian = torch.where(flat, torch.zeros_like(jacobian), jacobian)
        low = torch.where(flat | low.isnan(), -torch.inf, low)
        high = torch.where(flat | high.isnan(), torch.inf, high)
        reach = self.reach.unsqueeze(-1) * torch.linalg.vector_norm(a, dim=-1)
        low = torch.maximum(torch.maximum(low, -size - az / s - jacobian), -reach)
        high = torch.minimum(torch.minimum(high, size - az / s + jacobian), reach)
        slack = 64 * d * torch.finfo(a.dtype).eps * torch.linalg.vector_norm(a, dim=-1)
        low, high = (low - slack).clamp(max=0.0).sum(1), (high + slack).clamp(min=0.0).sum(1)
        assert self.radius is not None
        ball = self.radius.unsqueeze(1) * torch.linalg.vector_norm(w.double(), dim=1)
        grow = 1.0 + 4 * torch.finfo(w.dtype).eps
        low, high = torch.maximum(low, -ball), torch.minimum(high, ball)
        return (low * grow).to(w.dtype), (high * grow).to(w.dtype)


def layer_norm(
    x: AffineForm, groups: Groups, label: str, eps: float, center: bool = True
) -> tuple[AffineForm, tuple[Tensor, Tensor]]:
    """`z / √(‖z‖²/d + ϵ)` over the last axis, z centred (LayerNorm) or not (RMSNorm); no gain, no bias.

    A token that moves so far that its remainder is larger than its difference gets no linear part.

    Arguments:
        x: (batch, …, d).

    Returns:
        the output, and bounds of `‖z‖²/d + ϵ`, (batch, …).
    """
    dtype, shape = x.centre.dtype, x.centre.shape
    d = shape[-1]
    x = x.linear(lambda t: t.reshape(len(t), -1, d))
    z, g = x.centre.double(), x.generators
    if center:
        z, g = z - z.mean(-1, keepdim=True), g - g.mean(-1, keepdim=True)
    s = scale(z, eps)
    z_size = torch.linalg.vector_norm(z, dim=-1)
    moves: list[tuple[Tensor, Tensor | None]] = []
    rho = torch.zeros_like(s)
    supports = groups.supports(g)
    for gram, support in zip(groups.grams(g), supports, strict=True):
        support = support.double()
        best, factor = torch.linalg.vector_norm(support, dim=-1), None
        if gram is not None:
            factor = gram_factor(gram)
            best = torch.minimum(best, gram_norm_upper(gram).sqrt())
        rho = rho + best
        moves.append((support, factor))
    along = (g * z.unsqueeze(1).to(dtype)).sum(-1)
    t_low, t_high = (t.double() for t in groups.total(groups.ranges(along), z[..., 0].to(dtype)))
    rounding = (groups.growth - 1) * z_size * rho  # of sums that cancel
    t_low, t_high = (t_low - rounding).clamp(max=0.0), t_high + rounding
    values = scalars(z_size, s, d, eps, t_low, t_high, rho)
    ends = square_range(z_size, s, d, eps, t_low, t_high, rho)
    squares = ends[0].reshape(shape[:-1]), ends[1].reshape(shape[:-1])
    reach, far = remainder_norm(z_size, rho, values), difference_norm(s, d, rho)
    flat = ~(reach <= far)  # there the Jacobian is worth less than nothing
    reach = torch.where(flat, far, reach) * groups.growth
    reach = torch.where(
        torch.isfinite(rho) & torch.isfinite(s), reach, torch.nan
    )  # the unknown stays unknown

    output = (z / s.unsqueeze(-1)).to(dtype)
    own = linear_part(g.double(), z.unsqueeze(1), s.unsqueeze(1)).to(dtype)
    own = torch.where(flat[:, None, :, None], torch.zeros_like(own), own)
    if groups.room(output[0].numel()) < output[0].numel():
        groups.folded.append((label, output[0].numel()))
        length = reach.to(dtype) * groups.growth
        rest = Rest(length.unsqueeze(-1).expand(output.shape), length)
        return AffineForm(output, own, rest).linear(lambda t: t.reshape(len(t), *shape[1:])), squares
    start = groups.add(NormalizationRemainder(label, z, s, values, moves, reach, flat, center))
    index = torch.arange(output[0].numel())
    form = AffineForm(output, append_identity(own, start, index))
    return form.linear(lambda t: t.reshape(len(t), *shape[1:])), squares
