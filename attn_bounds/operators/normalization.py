"""Bound operators of LayerNorm and RMSNorm, one node each; gain and bias are nodes of their own.

The mathematics, with proofs, is in `sensitivity.normalization_box`: exact intervals, and per functional and
token the better of a plane that tends to the Jacobian and of the interval. During α-CROWN the two are mixed,
and the plane is chosen from McCormick's family.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..lirpa import LinearBound
from ..sensitivity.normalization_box import (
    Box,
    best_part,
    box,
    flat_planes,
    normalize,
    product_planes,
    value_range,
)
from .base import BoundOperator, forward_bounds, node_box


class BoundNormalization(BoundOperator):
    """`z / √(‖z‖²/d + eps)` over the last `axes` dimensions."""

    centred: bool

    def __init__(self, attr: Any, inputs: Any, output_index: int, options: Any) -> None:
        super().__init__(attr, inputs, output_index, options)
        self.requires_input_bounds = [0]
        self.axes, self.eps = int(attr["axes"]), float(attr["eps"])
        self._kept: tuple[Tensor, Tensor, Box] | None = None

    def _rows(self, x: Tensor) -> Tensor:
        """The normalised dimensions as one."""
        return x.flatten(x.ndim - self.axes)

    def forward(self, x: Tensor) -> Tensor:
        return normalize(self._rows(x), self.eps, self.centred).reshape(x.shape)

    def is_linear(self) -> bool:
        return not self.inputs[0].perturbed

    def alpha_shape(self) -> tuple[int, ...]:
        shape = tuple(self.output_shape[1:])
        return (*shape[: len(shape) - self.axes], 2)  # McCormick's λ, and the part of the interval

    def interval_propagate(self, *v: Any) -> tuple[Tensor, Tensor]:
        low, high = v[0][:2]
        found = value_range(self._rows(low), self._rows(high), self.eps, self.centred)
        return found[0].reshape(low.shape), found[1].reshape(low.shape)

    def _box(self) -> Box:
        low, high = (t.detach() for t in node_box(self.inputs[0]))
        kept = self._kept
        if kept is None or not (torch.equal(kept[0], low) and torch.equal(kept[1], high)):
            kept = self._kept = low, high, box(self._rows(low), self._rows(high), self.eps, self.centred)
        return kept[2]

    def lower_plane(
        self, a: Tensor, alpha: Tensor | None, mix: Tensor | None
    ) -> tuple[list[Tensor | None], Tensor]:
        slope, value = self._planes(self._rows(a), self._box(), alpha)
        centre = self._box().centre.to(a)
        at = (slope * centre).sum(-1)
        rounding = 4 * torch.finfo(a.dtype).eps * (slope.abs() * centre.abs()).sum(-1)
        bias = value - at - rounding
        return [slope.reshape(a.shape)], bias.reshape(*bias.shape[:2], -1).sum(-1)

    def _planes(self, a: Tensor, own: Box, alpha: Tensor | None) -> tuple[Tensor, Tensor]:
        """Slopes and values at the centre of the planes below functionals (spec, batch, …, d), by token."""
        part = best_part(a, own)
        if alpha is not None:
            part = (part + 2.0 * alpha[..., 0] - 1.0).clamp(0.0, 1.0)
        plane, flat = product_planes(a, own, part), flat_planes(a, own)
        known = torch.isfinite(plane.value) & torch.isfinite(plane.slope).all(-1)
        weight = (known & (plane.value >= flat)).to(a)  # of the plane
        if alpha is not None:
            weight = (weight + 2.0 * alpha[..., 1] - 1.0).clamp(0.0, 1.0) * known
        slope = torch.where(known.unsqueeze(-1), plane.slope, 0.0) * weight.unsqueeze(-1)
        value = torch.where(known, plane.value, 0.0) * weight + flat * (1.0 - weight)
        return slope, value

    def bound_forward(self, dim_in: int, *x: Any) -> Any:
        lw, uw, lb, ub = (
            None if t is None else self._rows(t)
            for t in forward_bounds(self.inputs[0], x[0], len(self.output_shape))
        )
        assert lb is not None and ub is not None
        own, d = self._box(), lb.shape[-1]
        unit = torch.eye(d, dtype=lb.dtype, device=lb.device)
        unit = unit.reshape(d, *[1] * (lb.ndim - 1), d).expand(d, *lb.shape)

        def side(sign: float, w: Any, other: Any, b: Tensor, other_b: Tensor) -> tuple[Any, Tensor]:
            slope, value = self._planes(sign * unit, own, None)
            offset = value - (slope * own.centre.to(slope)).sum(-1)
            slope, offset = sign * slope.movedim(0, -2), sign * offset.movedim(0, -1)  # (batch, …, d, d)
            up, down = slope.clamp(min=0.0), slope.clamp(max=0.0)

            def image(slope: Tensor, v: Tensor) -> Tensor:
                return (slope @ v.unsqueeze(-1)).squeeze(-1)

            moved = None if w is None else image(up.unsqueeze(1), w) + image(down.unsqueeze(1), other)
            return moved, image(up, b) + image(down, other_b) + offset

        new_lw, new_lb = side(1.0, lw, uw, lb, ub)
        new_uw, new_ub = side(-1.0, uw, lw, ub, lb)
        shape = self.output_shape[1:]
        new_lw, new_uw = (None if t is None else t.reshape(*t.shape[:2], *shape) for t in (new_lw, new_uw))
        return LinearBound(new_lw, new_lb.reshape(-1, *shape), new_uw, new_ub.reshape(-1, *shape))


class BoundLayerNorm(BoundNormalization):
    """z is x minus its mean."""

    centred = True


class BoundRMSNorm(BoundNormalization):
    """z is x."""

    centred = False
