"""Small helpers on `onnx_ir` graphs: constants, static sizes, and building nodes whose shapes are known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

PASSING = ("Identity", "Cast", "Dropout")  # nodes that hand a float value on as it is
FLOATS = (ir.DataType.FLOAT, ir.DataType.DOUBLE)


def opset(model: ir.Model) -> int:
    """Version of the standard operator set that the model imports."""
    return model.opset_imports.get("", model.opset_imports.get("ai.onnx", 1))


def constant(value: ir.Value | None) -> np.ndarray | None:
    """The array of a constant input, or None."""
    tensor = ir.convenience.get_const_tensor(value) if value is not None else None
    return None if tensor is None else tensor.numpy()


def sizes(value: ir.Value | None) -> tuple[int, ...] | None:
    """The shape of a value where it is static."""
    if value is None or value.shape is None or not value.shape.is_static():
        return None
    return tuple(int(d) for d in value.shape.numpy())


def passes(node: ir.Node) -> bool:
    """Whether the node hands its first input on as it is."""
    if node.domain not in ("", "ai.onnx") or node.op_type not in PASSING:
        return False
    if node.op_type == "Dropout":
        training = constant(node.inputs[2]) if len(node.inputs) > 2 and node.inputs[2] is not None else False
        return training is not None and not np.any(training) and bool(node.attributes.get_int("is_test", 1))
    return node.op_type != "Cast" or node.attributes.get_int("to", 0) in FLOATS


def behind(value: ir.Value) -> ir.Value:
    """The value behind any nodes that only hand it on."""
    while (node := value.producer()) is not None and passes(node) and node.inputs[0] is not None:
        if node.op_type == "Cast" and node.inputs[0].dtype not in FLOATS:
            break
        value = node.inputs[0]
    return value


def permutation(node: ir.Node, rank: int) -> list[int]:
    """The axes of a Transpose."""
    return [int(i) for i in node.attributes.get_ints("perm", None) or range(rank)[::-1]]


def reduced_axes(node: ir.Node) -> list[int] | None:
    """Non-negative axes of a Reduce node whose input has a rank; None where they are not constant."""
    shape = node.inputs[0].shape if node.inputs[0] is not None else None
    if shape is None:
        return None
    axes = node.attributes.get_ints("axes", None)
    if axes is None and len(node.inputs) > 1 and node.inputs[1] is not None:
        given = constant(node.inputs[1])
        axes = None if given is None else given.reshape(-1).tolist()
        if axes is None:
            return None
    if not axes:
        return [] if node.attributes.get_int("noop_with_empty_axes", 0) else list(range(len(shape)))
    return sorted(int(a) % len(shape) for a in axes)


class Builder:
    """Nodes with known shapes, collected to be put into a graph in front of one of its nodes.

    Arguments:
        graph: where constants are registered.
        label: names begin with it.
        dtype: of the values made.
    """

    def __init__(self, graph: ir.Graph, label: str, dtype: ir.DataType | None) -> None:
        self.graph, self.label, self.dtype = graph, label, dtype or ir.DataType.FLOAT
        self.nodes: list[ir.Node] = []

    def node(
        self,
        op: str,
        inputs: Sequence[ir.Value | None],
        shape: Sequence[int] | None,
        attributes: dict[str, Any] | None = None,
        domain: str = "",
    ) -> ir.Value:
        """One node with one output of the given shape (None: unknown)."""
        label = f"{self.label}/{op}"
        if self.nodes:
            label += f"_{len(self.nodes)}"
        made = ir.node(op, list(inputs), attributes or {}, domain=domain, name=label)
        out = made.outputs[0]
        out.name = f"{label}:0"
        out.dtype = self.dtype
        out.shape = None if shape is None else ir.Shape(list(shape))
        self.nodes.append(made)
        return out

    def constant(self, array: np.ndarray, name: str) -> ir.Value:
        """An initializer of the graph; floats get the dtype of the builder."""
        if array.dtype.kind == "f":
            array = array.astype(self.dtype.numpy())
        label = f"{self.label}/{name}_{len(self.nodes)}"
        while label in self.graph.initializers:
            label += "_"
        tensor = ir.tensor(array, name=label)
        value = ir.Value(
            name=label,
            const_value=tensor,
            shape=ir.Shape(list(array.shape)),
            type=ir.TensorType(tensor.dtype),
        )
        self.graph.initializers[label] = value
        return value

    def reshape(self, value: ir.Value, shape: Sequence[int]) -> ir.Value:
        """The value itself where it has this shape already."""
        if sizes(value) == tuple(shape):
            return value
        while (node := value.producer()) is not None and node.op_type == "Reshape":
            assert node.inputs[0] is not None
            if sizes(node.inputs[0]) is None:
                break
            value = node.inputs[0]
            if sizes(value) == tuple(shape):
                return value
        target = self.constant(np.array(shape, dtype=np.int64), "shape")
        return self.node("Reshape", [value, target], shape)

    def transpose(self, value: ir.Value, perm: Sequence[int]) -> ir.Value:
        """The value with permuted axes; a Transpose that stands there is merged."""
        source, perm = value, list(perm)
        while (node := source.producer()) is not None and node.op_type == "Transpose":
            own = permutation(node, len(perm))
            perm = [own[i] for i in perm]
            assert node.inputs[0] is not None
            source = node.inputs[0]
        if perm == list(range(len(perm))):
            return source
        shape = sizes(source)
        assert shape is not None
        return self.node("Transpose", [source], [shape[i] for i in perm], {"perm": perm})

    def expand(self, value: ir.Value, shape: Sequence[int]) -> ir.Value:
        """The value broadcast to the shape."""
        if sizes(value) == tuple(shape):
            return value
        target = self.constant(np.array(shape, dtype=np.int64), "shape")
        return self.node("Expand", [value, target], shape)

    def swapped(self, value: ir.Value) -> ir.Value:
        """The value with its last two axes exchanged."""
        rank = len(sizes(value) or ())
        return self.transpose(value, [*range(rank - 2), rank - 1, rank - 2])

    def insert_before(self, node: ir.Node) -> None:
        """Put what was built into the graph."""
        self.graph.insert_before(node, self.nodes)
        self.nodes = []


def replace(old: ir.Value, new: ir.Value) -> None:
    """Let every user of a value, the graph's outputs included, read another, which takes over its name."""
    name = old.name
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
    if new.producer() is not None and new.producer() is not old.producer():
        old.name = f"{name}/replaced"
        new.name = name
