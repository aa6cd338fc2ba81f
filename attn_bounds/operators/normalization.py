"""Bound operators of LayerNorm and RMSNorm, and of their mean square; gain and bias are nodes of their own.

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
    mean_square,
    normalize,
    product_planes,
    value_range,
)
from .base import BoundOperator, forward_bounds, node_box


class _OverAxes(BoundOperator):
    """What the operators over the last `axes` dimensions share."""

    centred: bool

    def __init__(self, attr: Any, inputs: Any, output_index: int, options: Any) -> None:
        super().__init__(attr, inputs, output_index, options)
        self.axes, self.eps = int(attr["axes"]), float(attr["eps"])

    def _rows(self, x: Tensor) -> Tensor:
        """The last dimensions as one."""
        return x.flatten(x.ndim - self.axes)

    def is_linear(self) -> bool:
        return not self.inputs[0].perturbed


class BoundMeanSquare(_OverAxes):
    """`mean(z²) + eps`, z the input or what is left of it without its mean.

    Between the tangent at the centre and a parallel plane: `‖z + Cδ‖² = ‖z‖² + 2 z·δ + ‖Cδ‖²`.
    """

    def __init__(self, attr: Any, inputs: Any, output_index: int, options: Any) -> None:
        super().__init__(attr, inputs, output_index, options)
        self.requires_input_bounds = [0]
        self.centred = bool(int(attr["centred"]))

    def forward(self, x: Tensor) -> Tensor:
        dims = tuple(range(-self.axes, 0))
        z = x - x.mean(dims, keepdim=True) if self.centred else x
        return z.square().mean(dims, keepdim=True) + self.eps

    def is_linear(self) -> bool:
        return True  # as far as α goes

    def alpha_shape(self) -> tuple[int, ...]:
        return ()

    def interval_propagate(self, *v: Any) -> tuple[Tensor, Tensor]:
        low, high = (self._rows(t) for t in v[0][:2])
        found = mean_square(low, high, self.eps, self.centred)
        room = 2 * torch.finfo(low.dtype).eps
        lower, upper = found.low * (1.0 - room), found.high * (1.0 + room)
        shape = (*v[0][0].shape[: v[0][0].ndim - self.axes], *[1] * self.axes)
        return lower.to(low).reshape(shape), upper.to(low).reshape(shape)

    def lower_plane(
        self, a: Tensor, alpha: Tensor | None, mix: Tensor | None
    ) -> tuple[list[Tensor | None], Tensor]:
        shape = self.inputs[0].output_shape[1:]
        low, high = (self._rows(t) for t in node_box(self.inputs[0]))
        slope, at, most = self._plane(low, high)
        rows = a.reshape(*a.shape[: a.ndim - self.axes], 1)
        coefficients = rows * slope.to(a)
        bias = (rows * at.to(a) + rows.clamp(max=0.0) * most.to(a)).squeeze(-1)
        rounding = 8 * torch.finfo(a.dtype).eps * (rows.abs() * at.to(a).abs()).squeeze(-1)
        bias = (bias - rounding).reshape(*a.shape[:2], -1).sum(-1)
        return [coefficients.reshape(*a.shape[:2], *shape)], bias

    def _plane(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Slope (…, d), value at x = 0 of the tangent (…, 1), and how far the function is above it."""
        low, high = low.double(), high.double()
        found = mean_square(low, high, self.eps, self.centred)
        centre = (low + high) / 2
        z = centre - centre.mean(-1, keepdim=True) if self.centred else centre
        slope = 2.0 * z / z.shape[-1]
        return slope, found.own - (slope * centre).sum(-1, keepdim=True), found.most

    def bound_forward(self, dim_in: int, *x: Any) -> Any:
        given = forward_bounds(self.inputs[0], x[0], len(self.inputs[0].output_shape))
        lw, uw, lb, ub = (None if t is None else self._rows(t) for t in given)
        assert lb is not None and ub is not None
        low, high = (self._rows(t) for t in node_box(self.inputs[0]))
        slope, at, most = (t.to(lb) for t in self._plane(low, high))
        up, down = slope.clamp(min=0.0), slope.clamp(max=0.0)

        def image(a: Any, b: Any, turn: int) -> Any:
            if a is None or b is None:
                return None
            one, other = (up, down) if not turn else (up.unsqueeze(1), down.unsqueeze(1))
            found = (one * a + other * b).sum(-1)
            return found.reshape(*found.shape, *[1] * self.axes)

        def wide(t: Tensor) -> Tensor:
            return t.squeeze(-1).reshape(*t.shape[:-1], *[1] * self.axes)

        return LinearBound(
            image(lw, uw, 1),
            image(lb, ub, 0) + wide(at),
            image(uw, lw, 1),
            image(ub, lb, 0) + wide(at + most),
        )


class BoundNormalization(_OverAxes):
    """`z / √(‖z‖²/d + eps)`; inputs x, and the mean square whose bounds are used too."""

    def __init__(self, attr: Any, inputs: Any, output_index: int, options: Any) -> None:
        super().__init__(attr, inputs, output_index, options)
        self.requires_input_bounds = [0, 1]
        self._kept: tuple[tuple[Tensor, ...], Box] | None = None

    def forward(self, x: Tensor, square: Tensor) -> Tensor:
        return normalize(self._rows(x), self.eps, self.centred).reshape(x.shape)

    def alpha_shape(self) -> tuple[int, ...]:
        shape = tuple(self.output_shape[1:])
        return (*shape[: len(shape) - self.axes], 2)  # McCormick's λ, and the part of the interval

    def interval_propagate(self, *v: Any) -> tuple[Tensor, Tensor]:
        low, high = v[0][:2]
        found = value_range(self._rows(low), self._rows(high), self.eps, self.centred)
        return found[0].reshape(low.shape), found[1].reshape(low.shape)

    def _box(self) -> Box:
        x, square = (node_box(i) for i in self.inputs)
        given = tuple(t.detach() for t in (*x, *square))
        kept = self._kept
        if kept is None or not all(map(torch.equal, kept[0], given)):
            low, high = (self._rows(t) for t in given[:2])
            known = self._rows(given[2]), self._rows(given[3])
            kept = self._kept = given, box(low, high, self.eps, self.centred, known)
        return kept[1]

    def lower_plane(
        self, a: Tensor, alpha: Tensor | None, mix: Tensor | None
    ) -> tuple[list[Tensor | None], Tensor]:
        slope, value = self._planes(self._rows(a), self._box(), alpha)
        centre = self._box().centre.to(a)
        at = (slope * centre).sum(-1)
        rounding = 4 * torch.finfo(a.dtype).eps * (slope.abs() * centre.abs()).sum(-1)
        bias = value - at - rounding
        return [slope.reshape(a.shape), None], bias.reshape(*bias.shape[:2], -1).sum(-1)

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
