"""Bound operators of scalar functions, entry by entry: GELU, SiLU, erf and what else a `Function` describes.

The interval is exact. The backward and the forward pass use a line below and a line above the function that
are best at the middle of the range; during α-CROWN they are chosen from families of lines.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..domain.activations import (
    ERF,
    FUNCTIONS,
    GELU,
    QUICK_GELU,
    RECIPROCAL,
    SILU,
    TANH_GELU,
    Function,
)
from ..domain.lines import POINTS, Lines, lines_above, lines_below, member, value_range
from ..lirpa import LinearBound
from .base import BoundOperator, forward_bounds, node_box


class BoundScalar(BoundOperator):
    """`σ(x)` with the `function` σ; a subclass sets it."""

    function: Function

    def __init__(self, attr: Any, inputs: Any, output_index: int, options: Any) -> None:
        super().__init__(attr, inputs, output_index, options)
        self.requires_input_bounds = [0]
        self._lines: dict[str, Any] = {}

    def forward(self, x: Tensor) -> Tensor:
        return self.function.value(x)

    def is_linear(self) -> bool:
        return not self.inputs[0].perturbed

    def alpha_shape(self) -> tuple[int, ...]:
        return tuple(self.output_shape[1:])

    def interval_propagate(self, *v: Any) -> tuple[Tensor, Tensor]:
        return value_range(self.function, *v[0][:2])

    def lines(self, family: bool) -> tuple[Lines, Lines]:
        """Lines below and above over the input's box, kept until it changes."""
        low, high = (t.detach() for t in node_box(self.inputs[0]))
        known = self._lines.get("low"), self._lines.get("high")
        if not all(k is not None and torch.equal(k, t) for k, t in zip(known, (low, high), strict=True)):
            self._lines = {"low": low, "high": high}
        key = "family" if family else "best"
        if key not in self._lines:
            points = POINTS if family else None
            self._lines[key] = tuple(f(self.function, low, high, points) for f in (lines_below, lines_above))
        return self._lines[key]

    def lower_plane(
        self, a: Tensor, alpha: Tensor | None, mix: Tensor | None
    ) -> tuple[list[Tensor | None], Tensor]:
        below, above = self.lines(alpha is not None)
        if alpha is not None:
            below, above = member(below, alpha), member(above, alpha)
        positive, negative = a.clamp(min=0.0), a.clamp(max=0.0)
        bias = positive * below.offset + negative * above.offset
        return [positive * below.slope + negative * above.slope], bias.flatten(2).sum(-1)

    def bound_forward(self, dim_in: int, *x: Any) -> Any:
        lw, uw, lb, ub = forward_bounds(self.inputs[0], x[0], len(self.output_shape))
        below, above = self.lines(False)

        def side(line: Lines, w: Any, other: Any, b: Tensor, other_b: Tensor) -> tuple[Any, Tensor]:
            up, down = line.slope.clamp(min=0.0), line.slope.clamp(max=0.0)
            moved = None if w is None else up.unsqueeze(1) * w + down.unsqueeze(1) * other
            return moved, up * b + down * other_b + line.offset

        new_lw, new_lb = side(below, lw, uw, lb, ub)
        new_uw, new_ub = side(above, uw, lw, ub, lb)
        return LinearBound(new_lw, new_lb, new_uw, new_ub)


class BoundErf(BoundScalar):
    """erf."""

    function = ERF

    def forward(self, x: Tensor) -> Tensor:
        return torch.erf(x)


class BoundGelu(BoundScalar):
    """GELU, by the error function or by tanh."""

    def __init__(self, attr: Any, inputs: Any, output_index: int, options: Any) -> None:
        super().__init__(attr, inputs, output_index, options)
        approximate = attr.get("approximate", "none")
        self.approximate = approximate.decode() if isinstance(approximate, bytes) else str(approximate)
        self.function = TANH_GELU if self.approximate == "tanh" else GELU

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.gelu(x, approximate=self.approximate)


class BoundSilu(BoundScalar):
    """`x · sigmoid(x)`."""

    function = SILU


class BoundQuickGelu(BoundScalar):
    """`x · sigmoid(1.702 x)`."""

    function = QUICK_GELU


class BoundReciprocal(BoundScalar):
    """`1/x`; where x may be 0 the bounds are NaN: unknown. auto_LiRPA's own is for positive x only."""

    function = RECIPROCAL


class BoundSqrt(BoundScalar):
    """`√x`; where x may be negative the bounds are NaN. The upper line of 0.3 has the slope of `1/√x`."""

    function = FUNCTIONS["BoundSqrt"]


class BoundLog(BoundScalar):
    """`log x`; where x may not be positive the bounds are NaN. auto_LiRPA clamps x first."""

    function = FUNCTIONS["BoundLog"]


class BoundSoftplus(BoundScalar):
    """`log(1 + e^x)`, as torch has it. 0.3 has no lines for it."""

    function = FUNCTIONS["BoundSoftplus"]

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.softplus(x)
