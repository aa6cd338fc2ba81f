"""An ONNX file as a function of intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from ..errors import InputError, UnsupportedModelError
from .arithmetic import Interval
from .dual import Dual
from .node import FLOATS, Node, element_type
from .shapes import literal
from .table import MAX_OPSET, MIN_OPSET, OPERATORS

MAX_BYTES = 4_000_000  # of a model; larger ones are not small networks


class Port:
    """An input or output of a graph: name, element type, shape with None for what is not fixed, or None."""

    def __init__(self, info: Any) -> None:
        tensor = info.type.tensor_type
        self.name: str = info.name
        self.type = element_type(tensor.elem_type)
        self.shape: tuple[int | None, ...] | None = None
        if tensor.HasField("shape"):
            self.shape = tuple(
                d.dim_value if d.HasField("dim_value") and d.dim_value > 0 else None for d in tensor.shape.dim
            )


class Network:
    """One network.

    Attributes:
        path, model: the file. inputs, outputs: its ports, without initializers.
        floats: element types that its floating point values may have; () once it stands for real numbers.
        widest: entries of its largest value, once it was called.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            size = path.stat().st_size
            if size > MAX_BYTES:
                raise UnsupportedModelError(
                    f"{path}: {size} bytes; intervals are for models up to {MAX_BYTES}"
                )
            self.model = onnx.load(str(path))
        except UnsupportedModelError:
            raise
        except OSError as error:
            raise InputError(f"{path}: cannot be read ({error.strerror or error})") from error
        except Exception as error:
            raise InputError(f"{path}: is not an ONNX file ({type(error).__name__})") from error
        graph = self.model.graph
        self.opset = max(
            (o.version for o in self.model.opset_import if o.domain in ("", "ai.onnx")), default=1
        )
        stored = {t.name for t in graph.initializer}
        self.inputs = [Port(i) for i in graph.input if i.name not in stored]
        self.outputs = [Port(o) for o in graph.output]
        self.floats: tuple[str, ...] = self._floats()
        self.widest = 1
        self._constants: dict[str, Dual] = {}
        self._nodes: list[tuple[Any, Node]] = []

    def _floats(self) -> tuple[str, ...]:
        graph = self.model.graph
        found = {p.type for p in (*self.inputs, *self.outputs)}
        found |= {element_type(t.data_type) for t in graph.initializer}
        for node in graph.node:
            for a in node.attribute:
                if a.type == onnx.AttributeProto.TENSOR:
                    found.add(element_type(a.t.data_type))
                elif node.op_type == "Cast" and a.name == "to":
                    found.add(element_type(a.i))
        return tuple(sorted(found & set(FLOATS)))

    def prepare(self, floats: Sequence[str]) -> None:
        """Fix the element types, and check operators and attributes; raises UnsupportedModelError."""
        self.floats = tuple(floats)
        graph = self.model.graph
        if not MIN_OPSET <= self.opset <= MAX_OPSET:
            raise UnsupportedModelError(
                f"{self.path}: opset {self.opset}; {MIN_OPSET} to {MAX_OPSET} can be read"
            )
        unknown = sorted(
            {n.op_type for n in graph.node if n.domain not in ("", "ai.onnx") or n.op_type not in OPERATORS}
        )
        if unknown:
            raise UnsupportedModelError(f"{self.path}: no intervals for the operator {', '.join(unknown)}")
        self._nodes = []
        used = {name for n in graph.node for name in n.input} | {o.name for o in graph.output}
        for n in graph.node:
            attributes = {a.name: onnx.helper.get_attribute_value(a) for a in n.attribute}
            count = max((i + 1 for i, name in enumerate(n.output) if name and name in used), default=1)
            if n.op_type == "Split":
                count = len(n.output)
            self._nodes.append((n, Node(n.op_type, n.name, self.opset, count, self.floats, attributes)))
        loader = Node("initializer", "", self.opset, 1, self.floats)
        self._constants = {t.name: literal(loader, t) for t in graph.initializer}

    def __call__(self, inputs: Sequence[Dual]) -> dict[str, Dual]:
        """All values of the graph by name; inputs: one per port, (boxes, *shape)."""
        values = dict(self._constants)
        values.update((port.name, value) for port, value in zip(self.inputs, inputs, strict=True))
        for proto, node in self._nodes:
            if proto.input and not proto.input[0]:
                raise InputError(f"{self.path}: node {proto.name or '?'} ({node.op}) has no first input")
            missing = [name for name in proto.input if name and name not in values]
            if missing:
                raise InputError(
                    f"{self.path}: node {proto.name or proto.output[0]} ({node.op}) reads {missing[0]!r}, "
                    "which no node before it gives"
                )
            given = [values[name] if name else None for name in proto.input]
            try:
                result = OPERATORS[node.op](node, *given)
            except UnsupportedModelError as error:
                raise UnsupportedModelError(f"{self.path}: {error}") from None
            except (TypeError, ValueError, IndexError, AttributeError, ArithmeticError) as error:
                where = f"{self.path}: node {proto.name or proto.output[0]} ({node.op})"
                raise UnsupportedModelError(f"{where}: cannot be read ({error})") from error
            for name, value in zip(
                proto.output, result if isinstance(result, list) else [result], strict=False
            ):
                if name:
                    values[name] = value
                    self.widest = max(self.widest, math.prod(value.shape))
        for port in self.outputs:
            if port.name not in values:
                raise InputError(f"{self.path}: no node gives the output {port.name!r}")
        return values

    def shape_of(self, port: Port, declared: tuple[int, ...]) -> tuple[int, ...]:
        """The declared shape of a port if it agrees with the file's; raises InputError."""
        if port.shape is None:
            return declared
        fits = len(declared) == len(port.shape) and all(
            n is None or n == m for n, m in zip(port.shape, declared, strict=True)
        )
        if not fits:
            shape = [n if n is not None else "?" for n in port.shape]
            raise InputError(
                f"{self.path}: {port.name} has shape {shape}, the query declares {list(declared)}"
            )
        return declared


def seeds(
    lower: np.ndarray, upper: np.ndarray, moving: np.ndarray | None
) -> tuple[Interval, Interval | None]:
    """Values (boxes, n) of inputs, and derivatives (1, moving, n) by those that move; None: without."""
    if moving is None or not len(moving):
        return Interval(lower, upper), None
    d = np.zeros((1, len(moving), lower.shape[1]))
    d[0, np.arange(len(moving)), moving] = 1.0
    return Interval(lower, upper), Interval.of(d)
