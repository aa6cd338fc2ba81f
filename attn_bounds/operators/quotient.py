"""Bound operator of `x / y`: McCormick planes of x and 1/y, and lines of the reciprocal.

auto_LiRPA 0.7.1 raises where y may be 0 or negative; 0.3 takes quotients of negative numbers for those of
positive ones, and every `a / √b` for a layer normalisation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..domain.activations import RECIPROCAL
from ..domain.lines import lines_above, lines_below, value_range
from ..lirpa import LinearBound
from .base import BoundOperator, batched, fit, forward_bounds, signed_product


def quotient_range(x: tuple[Tensor, Tensor], y: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Range of x/y over boxes; NaN where y may be 0."""
    inverse = value_range(RECIPROCAL, *y)
    ends = torch.stack(torch.broadcast_tensors(*(a * b for a in x for b in inverse)))
    room = 2.0 * torch.finfo(ends.dtype).eps * ends.abs().amax(0)
    return ends.amin(0) - room, ends.amax(0) + room


class BoundDiv(BoundOperator):
    """`x / y`, entry by entry with broadcasting; where y may be 0 the bounds are NaN, that is, unknown."""

    def __init__(self, attr: Any, inputs: Any, output_index: int, options: Any) -> None:
        super().__init__(attr, inputs, output_index, options)
        self.requires_input_bounds = [0, 1]

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x / y

    def is_linear(self) -> bool:
        return not self.inputs[1].perturbed

    def alpha_shape(self) -> tuple[int, ...]:
        return tuple(self.output_shape[1:])

    def interval_propagate(self, *v: Any) -> tuple[Tensor, Tensor]:
        x, y = (interval[:2] for interval in v)
        if not self.inputs[1].perturbed:
            ends = x[0] / y[0], x[1] / y[0]
            return torch.minimum(*ends), torch.maximum(*ends)
        return quotient_range((x[0], x[1]), (y[0], y[1]))

    def _divisor(self) -> Tensor:
        """The constant y."""
        return batched(self.inputs[1], len(self.output_shape))[0]

    def _boxes(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        rank = len(self.output_shape)
        return batched(self.inputs[0], rank), batched(self.inputs[1], rank)

    def _plane(self, a: Tensor, part: Tensor | float) -> tuple[Tensor, Tensor, Tensor]:
        """Coefficients on x and y of a plane below `a x / y`, and its constant; a: the output's shape."""
        (x_l, x_u), (y_l, y_u) = self._boxes()
        w_l, w_u = value_range(RECIPROCAL, y_l, y_u)
        below, above = lines_below(RECIPROCAL, y_l, y_u), lines_above(RECIPROCAL, y_l, y_u)
        up, down = a.clamp(min=0.0), a.clamp(max=0.0)
        rest = 1.0 - part
        on_x = a * (part * w_l + rest * w_u)
        on_w = up * (part * x_l + rest * x_u) + down * (part * x_u + rest * x_l)
        constant = -up * (part * x_l * w_l + rest * x_u * w_u) - down * (part * x_u * w_l + rest * x_l * w_u)
        on_w_up, on_w_down = on_w.clamp(min=0.0), on_w.clamp(max=0.0)
        constant = constant + on_w_up * below.offset + on_w_down * above.offset
        size = a.abs() * torch.maximum(x_l.abs(), x_u.abs()) * torch.maximum(w_l.abs(), w_u.abs())
        rounding = 16 * torch.finfo(a.dtype).eps * size
        return on_x, on_w_up * below.slope + on_w_down * above.slope, constant - rounding

    def lower_plane(
        self, a: Tensor, alpha: Tensor | None, mix: Tensor | None
    ) -> tuple[list[Tensor | None], Tensor]:
        x, y = self.inputs
        if not y.perturbed:
            bias = torch.zeros(a.shape[:2], dtype=a.dtype, device=a.device)
            return [fit(a / self._divisor(), x), None], bias
        on_x, on_y, constant = self._plane(a, 0.5 if alpha is None else alpha)
        if not x.perturbed:
            constant = constant + on_x * batched(x, len(self.output_shape))[0]
        return [fit(on_x, x), fit(on_y, y)], constant.flatten(2).sum(-1)

    def bound_forward(self, dim_in: int, *x: Any) -> Any:
        rank = len(self.output_shape)
        given = [forward_bounds(node, bound, rank) for node, bound in zip(self.inputs, x, strict=True)]
        like = torch.ones_like(given[0][2] + given[1][2])

        def side(sign: float) -> tuple[Any, Tensor]:
            if not self.inputs[1].perturbed:
                slopes: tuple[Tensor, ...] = (sign / self._divisor(),)
                total, w = torch.zeros_like(like), None
            else:
                *slopes_xy, total = self._plane(sign * like, 0.5)
                slopes, w = tuple(slopes_xy), None
            for slope, (lw, uw, lb, ub) in zip(slopes, given, strict=False):
                total = total + signed_product(slope, lb, ub, torch.mul)
                if lw is not None:
                    moved = signed_product(slope.unsqueeze(1), lw, uw, torch.mul)
                    w = moved if w is None else w + moved
            return None if w is None else sign * w, sign * total

        new_lw, new_lb = side(1.0)
        new_uw, new_ub = side(-1.0)
        return LinearBound(new_lw, new_lb, new_uw, new_ub)
