"""auto_LiRPA's own operators with what is unsound in them put right, and nothing else.

`stock-*` methods use these, so that the comparison is with auto_LiRPA's relaxations and not with its bugs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import lirpa
from ..lirpa import BoundDiv as StockDiv
from ..lirpa import BoundLinear, BoundMatMul, BoundReduceMax, BoundSoftmax
from ..sensitivity.softmax import probability_box, softmax_planes
from .activation import BoundSqrt
from .quotient import quotient_range


class RepairedReduceMax(BoundReduceMax):
    """0.3 scatters the coefficients of the first functional only.

    The maximum is a shift in front of a softmax, any fixed entry serves: backward and interval bounds both
    use the entry that is largest at the centre.
    """

    def forward(self, x: Tensor) -> Tensor:
        # the maximum of a BoundedTensor, an input itself, comes without its index
        return super().forward(x.as_subclass(Tensor))

    def bound_backward(self, last_lA: Any, last_uA: Any, *x: Any, **kwargs: Any) -> Any:
        def one(a: Tensor | None) -> Tensor | None:
            if a is None:
                return None
            index = self.indices
            if not self.keepdim:
                a, index = a.unsqueeze(self.axis + 1), index.unsqueeze(self.axis)
            shape = list(a.shape)
            shape[self.axis + 1] = self.input_shape[self.axis]
            index = index.unsqueeze(0).expand(a.shape)
            return torch.zeros(shape, dtype=a.dtype, device=a.device).scatter(self.axis + 1, index, a)

        return [(one(last_lA), one(last_uA))], 0, 0

    def interval_propagate(self, *v: Any) -> Any:
        index = self.indices if self.keepdim else self.indices.unsqueeze(self.axis)
        low, high = (b.gather(self.axis, index) for b in v[0][:2])
        return (low, high) if self.keepdim else (low.squeeze(self.axis), high.squeeze(self.axis))


class RepairedSoftmax(BoundSoftmax):
    """0.7.1 subtracts nearly equal numbers in the interval and adds 1e-8 inside logarithms."""

    def interval_propagate(self, *v: Any) -> Any:
        low, high = (b.transpose(self.axis, -1) for b in v[0][:2])
        lower, upper = probability_box(low, high)
        return lower.transpose(self.axis, -1), upper.transpose(self.axis, -1)

    def _softmax_lse_upper(
        self, lb_p: Tensor, ub_p: Tensor, x0_p: Tensor, sm_x0: Tensor, *rest: Any
    ) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
        planes = softmax_planes(lb_p, ub_p, x0_p)
        own = planes.high_own
        bias = planes.high - own * x0_p + own * (planes.weights * x0_p).sum(-1, keepdim=True)
        return (own, own, planes.weights), bias


def _constant(node: Any) -> Any:
    """Value of a node that does not move."""
    for name in ("forward_value", "value"):
        if (known := getattr(node, name, None)) is not None:
            return known
    return node.forward(*map(_constant, node.inputs))


class RepairedMatMul(BoundMatMul):
    """0.3 hands functionals of a final product to `interval_propagate`, which does not take them, and cannot
    start a backward pass at a product of rank 3."""

    def bound_backward(self, last_lA: Any, last_uA: Any, *x: Any, **kwargs: Any) -> Any:
        def dense(a: Any) -> Any:
            if a is None or isinstance(a, Tensor):
                return a
            spec, batch, *shape = a.shape  # an identity that 0.3 keeps abstract
            return torch.eye(spec, device=a.device).reshape(spec, 1, *shape).expand(spec, batch, *shape)

        for node in x:  # it reads a weight as bounds, which a transposed one has only if somebody asked
            if not node.perturbed and getattr(node, "lower", None) is None:
                node.lower = node.upper = _constant(node)
        return super().bound_backward(dense(last_lA), dense(last_uA), *x, **kwargs)

    def interval_propagate(self, *v: Any, C: Tensor | None = None, **kwargs: Any) -> Any:
        interval = super().interval_propagate(*v, **kwargs)
        return interval if C is None else BoundLinear.interval_propagate(None, interval, C=C)


class BoundDiv(StockDiv):
    """0.3 takes every `a / √b` for a layer normalisation, and in intervals every numerator for positive.

    It keeps the name of what it repairs, by which rules know it.
    """

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x / y

    def interval_propagate(self, *v: Any) -> Any:
        x, y = (interval[:2] for interval in v)
        return quotient_range((x[0], x[1]), (y[0], y[1]))

    def bound_backward(self, last_lA: Any, last_uA: Any, x: Any, y: Any) -> Any:
        coefficients, lower, upper = super().bound_backward(last_lA, last_uA, x, y)
        if y.perturbed:  # its planes of 1/y are for positive y
            unknown = torch.where((y.lower <= 0).flatten(1).any(1), torch.nan, 0.0)
            lower, upper = lower + unknown, upper + unknown
        return coefficients, lower, upper


def repairs() -> tuple[dict[str, Any], str]:
    """Replacements by node kind for the installed version, and the words that say so in results."""
    if lirpa.is_old():
        replaced = {
            "onnx::Div": BoundDiv,
            "onnx::MatMul": RepairedMatMul,
            "onnx::ReduceMax": RepairedReduceMax,
            "onnx::Sqrt": BoundSqrt,  # the upper line of 0.3 has the slope of 1/√x
        }
        return replaced, f"stock {lirpa.version()}, ReduceMax, Div and Sqrt repaired"
    return {"onnx::Softmax": RepairedSoftmax}, f"stock {lirpa.version()}, Softmax intervals repaired"
