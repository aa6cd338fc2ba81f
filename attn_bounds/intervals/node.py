"""What an operator's function sees of its node."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NoReturn

import onnx

from ..errors import UnsupportedModelError
from .dual import FLOAT, Dual

NAMES = {"float": "float32", "double": "float64"}  # where VNN-LIB has other names than ONNX' enumeration
FLOATS = ("float16", "bfloat16", "float32", "float64")


def element_type(number: int) -> str:
    """The name that VNN-LIB has for an ONNX element type."""
    try:
        name = onnx.TensorProto.DataType.Name(number).lower()
    except ValueError:
        return f"unknown type {number}"
    return NAMES.get(name, name)


@dataclass(frozen=True)
class Node:
    """One node of an ONNX graph.

    Attributes:
        op: its operator. name: the node's, for messages. opset: of the model.
        outputs: how many values it gives.
        floats: element types that the network's floating point values may have; () if they stand for reals.
    """

    op: str
    name: str
    opset: int
    outputs: int
    floats: tuple[str, ...]
    attributes: dict[str, Any] = field(default_factory=dict)

    def fail(self, reason: str) -> NoReturn:
        raise UnsupportedModelError(f"node {self.name or '?'} ({self.op}): {reason}")

    def get(self, name: str, default: Any = None) -> Any:
        """An attribute."""
        value = self.attributes.get(name, default)
        return value.decode() if isinstance(value, bytes) else value

    def ints(self, value: Dual | None, what: str) -> list[int] | None:
        """A constant input as integers, flat; None if it is absent."""
        if value is None:
            return None
        constant = value.constant
        if constant is None:
            self.fail(f"{what} must be constant")
        return [int(v) for v in constant.ravel()]

    def given(self, value: Dual | None, name: str) -> list[int] | None:
        """Integers from an input (new opsets) or the attribute (old ones)."""
        found = self.ints(value, name)
        if found is None and name in self.attributes:
            found = list(self.attributes[name])
        return found

    def needed(self, value: Dual | None, name: str) -> list[int]:
        """The same, where they must be there."""
        found = self.given(value, name)
        if found is None:
            self.fail(f"has no {name}")
        return found

    def axes(self, value: Dual | None, rank: int) -> list[int] | None:
        """Axes, not negative."""
        axes = self.given(value, "axes")
        return None if axes is None else [self.axis(a, rank) for a in axes]

    def axis(self, axis: int, rank: int) -> int:
        if not -rank <= axis < rank:
            self.fail(f"axis {axis} of a value with {rank} axes")
        return axis % rank

    def float_only(self, *values: Dual | None) -> None:
        for value in values:
            if value is not None and value.kind != FLOAT:
                self.fail(f"on {value.kind} values; floating point values can be read")
