"""What a fused operator is lowered with: a builder of the standard operators it stands for."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from .graph import Builder

MICROSOFT = "com.microsoft"


class Refused(Exception):
    """Why a fused operator cannot be lowered."""


class Lowering(Builder):
    """A builder of primitives for one fused node; shapes are left to inference.

    Arguments:
        node: the fused operator.
        version: of the standard operator set.
    """

    def __init__(self, graph: ir.Graph, node: ir.Node, version: int) -> None:
        first = next((v for v in node.inputs if v is not None), None)
        super().__init__(graph, node.name or str(node.outputs[0].name), first.dtype if first else None)
        self.source, self.version = node, version

    def given(self, i: int) -> ir.Value | None:
        """Input i, or None where it is left out."""
        return self.source.inputs[i] if i < len(self.source.inputs) else None

    def wanted(self, i: int) -> ir.Value:
        """Input i, which cannot be left out."""
        value = self.given(i)
        if value is None:
            raise Refused(f"input {i} is missing")
        return value

    def integer(self, name: str, default: int) -> int:
        return int(self.source.attributes.get_int(name, default))

    def real(self, name: str, default: float) -> float:
        return float(self.source.attributes.get_float(name, default))

    def op(self, kind: str, *inputs: ir.Value | float | None, **attributes: Any) -> ir.Value:
        """One node of the standard operators; numbers among the inputs become constants."""
        values = [
            self.constant(np.array(v, dtype=np.float64), "number") if isinstance(v, (int, float)) else v
            for v in inputs
        ]
        return self.node(kind, values, None, attributes)

    def ints(self, values: Sequence[int]) -> ir.Value:
        return self.constant(np.array(values, dtype=np.int64), "ints")

    def mean(self, x: ir.Value, axes: Sequence[int] = (-1,)) -> ir.Value:
        if self.version >= 18:
            return self.op("ReduceMean", x, self.ints(axes), keepdims=1)
        return self.op("ReduceMean", x, axes=list(axes), keepdims=1)

    def cut(self, x: ir.Value, start: int, end: int, axis: int) -> ir.Value:
        return self.op("Slice", x, *(self.ints([v]) for v in (start, end, axis)))

    def norm(
        self,
        x: ir.Value,
        gain: ir.Value | None,
        bias: ir.Value | None,
        eps: float,
        centred: bool,
        axes: Sequence[int] = (-1,),
    ) -> ir.Value:
        """Layer or RMS normalisation over the last axes."""
        d = self.op("Sub", x, self.mean(x, axes)) if centred else x
        y = self.op("Div", d, self.op("Sqrt", self.op("Add", self.mean(self.op("Mul", d, d), axes), eps)))
        y = y if gain is None else self.op("Mul", y, gain)
        return y if bias is None else self.op("Add", y, bias)

    def gelu(self, x: ir.Value, tanh: bool) -> ir.Value:
        if tanh:
            cube = self.op("Mul", self.op("Mul", self.op("Mul", x, x), x), 0.044715)
            inner = self.op("Tanh", self.op("Mul", self.op("Add", x, cube), math.sqrt(2.0 / math.pi)))
        else:
            inner = self.op("Erf", self.op("Mul", x, math.sqrt(0.5)))
        return self.op("Mul", self.op("Mul", x, 0.5), self.op("Add", inner, 1.0))


Results = dict[int, ir.Value]  # by number of the output
Rule = Callable[[Lowering], Results]
