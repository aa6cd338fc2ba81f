"""The batch becomes the first axis of every value, whatever axis the file keeps it in.

A file may move the batch to the second axis (sequence-first attention), merge it with the heads
(`nn.MultiheadAttention`) or put another axis in front of it (`qkv` unbound from the first axis). Shapes are
those of batch 1, and at batch 1 all this is a function of one sample; applied to every sample by itself, it
is the model. So a value whose first axis is not of size 1 is held with one more axis in front, and the nodes
that make and use it act on axes shifted by one. The comparison with onnxruntime at a larger batch is what
tells whether the file itself treats its samples one by one.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from .graph import Builder, constant, opset, permutation, reduced_axes, replace, sizes

# fmt: off
ELEMENTWISE = frozenset((
    "Add", "Sub", "Mul", "Div", "Pow", "Max", "Min", "Where", "Sum", "Neg", "Abs", "Relu",
    "LeakyRelu", "PRelu", "Elu", "Selu", "Celu", "ThresholdedRelu", "Tanh", "Sigmoid",
    "HardSigmoid", "HardSwish", "Softplus", "Softsign", "Mish", "Erf", "Sqrt", "Reciprocal", "Exp",
    "Log", "Gelu", "Clip", "Identity", "Cast", "Dropout", "Silu", "QuickGelu", "LayerNorm",
    "RMSNorm", "Swish", "Floor", "Ceil", "Round", "Sign", "Sin", "Cos",
))
# fmt: on
RESHAPES = ("Reshape", "Flatten", "Squeeze", "Unsqueeze")
REDUCTIONS = frozenset(
    f"Reduce{kind}" for kind in ("Mean", "Sum", "Max", "Min", "L1", "L2", "SumSquare", "Prod")
)
ALONG = ("Softmax", "LogSoftmax", "LayerNormalization", "RMSNormalization")

Handler = Callable[["_Lifting", ir.Node, Builder], "ir.Value | list[ir.Value] | None"]


class _Lifting:
    """The walk over a graph; `lifted` holds the values that got one more axis."""

    def __init__(self, model: ir.Model) -> None:
        self.graph, self.opset = model.graph, opset(model)
        self.data: set[ir.Value] = {v for v in model.graph.inputs if v.name not in model.graph.initializers}
        self.lifted: dict[ir.Value, ir.Value] = {}

    def shape(self, value: ir.Value | None) -> tuple[int, ...]:
        """Shape in the file, at batch 1."""
        if value is None:
            return ()
        if value not in self.data and (c := constant(value)) is not None:
            return tuple(c.shape)
        found = sizes(value)
        assert found is not None
        return found

    def natural(self, value: ir.Value) -> bool:
        return value not in self.lifted and self.shape(value)[:1] == (1,)

    def padded(self, builder: Builder, value: ir.Value, rank: int) -> ir.Value:
        """The value with axes of size 1 in front; constants as they are."""
        if value not in self.data:
            return value
        shape = self.shape(value)
        return builder.reshape(self.lifted.get(value, value), (1,) * (rank - len(shape)) + shape)

    def up(self, builder: Builder, value: ir.Value) -> ir.Value:
        """The value with one more axis in front; constants too."""
        if value not in self.data:
            c = constant(value)
            assert c is not None
            return builder.constant(c[None], "constant")
        return self.padded(builder, value, len(self.shape(value)) + 1)

    def run(self) -> None:
        for node in list(self.graph):
            used = [v for v in node.inputs if v is not None and v in self.data]
            if not used:
                continue
            self.data.update(node.outputs)
            if any(sizes(v) is None for v in (*used, *self._outputs(node))):
                continue
            if self._is_natural(node, used):
                continue
            handler = _handler(node)
            if handler is None:
                continue
            label = f"{node.name or node.outputs[0].name}/batched"
            builder = Builder(self.graph, label, node.outputs[0].dtype)
            made = handler(self, node, builder)
            if made is None:
                continue
            for out, new in zip(self._outputs(node), made if isinstance(made, list) else [made], strict=True):
                self._settle(builder, out, new)
            builder.insert_before(node)
        for i, out in enumerate(self.graph.outputs):
            if out in self.lifted:
                self.graph.outputs[i] = self.lifted[out]

    def _outputs(self, node: ir.Node) -> list[ir.Value]:
        return [o for o in node.outputs if o.uses() or o.is_graph_output()]

    def _is_natural(self, node: ir.Node, used: list[ir.Value]) -> bool:
        """Whether the node keeps the batch first as it is."""
        outputs = self._outputs(node)
        if not all(self.natural(v) for v in used) or any(self.shape(v)[:1] != (1,) for v in outputs):
            return False
        op, rank = node.op_type, len(self.shape(used[0]))
        if op in ELEMENTWISE or op in ("MatMul", "Expand"):
            out_rank = len(self.shape(outputs[0])) if outputs else rank
            both = op == "MatMul" and len(used) > 1
            return all(len(self.shape(v)) == out_rank for v in used) and (not both or out_rank > 2)
        if op == "Transpose":
            return permutation(node, rank)[0] == 0
        if op in ("Concat", "Split", "Gather"):
            return node.attributes.get_int("axis", 0) % rank != 0
        if op == "Gemm":
            return used == [node.inputs[0]] and not node.attributes.get_int("transA", 0)
        return True

    def _settle(self, builder: Builder, out: ir.Value, new: ir.Value) -> None:
        """Let `new`, which has one more axis or not, stand for an output."""
        shape = self.shape(out)
        self.data.update(o for made in builder.nodes for o in made.outputs)
        if shape[:1] == (1,):
            new = builder.reshape(new, shape)
            self.data.add(new)
            replace(out, new)
        else:
            self.lifted[out] = builder.reshape(new, (1, *shape))
            self.data.add(self.lifted[out])


def _handler(node: ir.Node) -> Handler | None:
    op = node.op_type
    if op in ELEMENTWISE:
        return _elementwise
    if op in RESHAPES:
        return _reshape
    if op in REDUCTIONS:
        return _reduction
    if op in ALONG:
        return _along
    return _HANDLERS.get(op) if node.domain in ("", "ai.onnx") else None


def _copied(
    lifting: _Lifting,
    node: ir.Node,
    builder: Builder,
    inputs: list[ir.Value | None],
    shape: tuple[int, ...],
    **changed: int,
) -> ir.Value:
    """The node on other inputs, with some attributes changed."""
    out = builder.node(node.op_type, inputs, shape, domain=node.domain)
    made = builder.nodes[-1]
    for name, attribute in node.attributes.items():
        made.attributes[name] = attribute
    for attr in ir.convenience.convert_attributes(changed):
        made.attributes[attr.name] = attr
    return out


def _elementwise(lifting: _Lifting, node: ir.Node, builder: Builder) -> ir.Value:
    shape = lifting.shape(node.outputs[0])
    full = shape if shape[:1] == (1,) else (1, *shape)
    inputs = [None if v is None else lifting.padded(builder, v, len(full)) for v in node.inputs]
    return _copied(lifting, node, builder, inputs, full)


def _reshape(lifting: _Lifting, node: ir.Node, builder: Builder) -> ir.Value | None:
    source = node.inputs[0]
    assert source is not None
    shape = lifting.shape(node.outputs[0])
    return builder.reshape(lifting.lifted.get(source, source), shape if shape[:1] == (1,) else (1, *shape))


def _transpose(lifting: _Lifting, node: ir.Node, builder: Builder) -> ir.Value:
    source = node.inputs[0]
    assert source is not None
    before, after = lifting.shape(source), lifting.shape(node.outputs[0])
    perm = permutation(node, len(before))
    kept = [i for i in perm if before[i] != 1]
    if kept == sorted(kept):  # only axes of size 1 move
        return builder.reshape(lifting.lifted.get(source, source), (1, *after))
    return builder.transpose(lifting.up(builder, source), [0, *(i + 1 for i in perm)])


def _matmul(lifting: _Lifting, node: ir.Node, builder: Builder) -> ir.Value | None:
    a, b = node.inputs
    assert a is not None and b is not None
    shapes = lifting.shape(a), lifting.shape(b)
    if min(len(s) for s in shapes) < 2:
        return None
    shape = lifting.shape(node.outputs[0])
    natural = shape[0] == 1 and len(shape) > 2
    full = shape if natural else (1, *shape)
    inputs: list[ir.Value | None] = [lifting.padded(builder, v, len(full)) for v in (a, b)]
    return builder.node("MatMul", inputs, full)


def _gemm(lifting: _Lifting, node: ir.Node, builder: Builder) -> ir.Value | None:
    shape = (1, *lifting.shape(node.outputs[0]))
    alpha, beta = (node.attributes.get_float(n, 1.0) for n in ("alpha", "beta"))
    operands: list[ir.Value] = []
    for i, flag in ((0, "transA"), (1, "transB")):
        value = node.inputs[i]
        assert value is not None
        turned = bool(node.attributes.get_int(flag, 0))
        if value in lifting.data:
            value = lifting.up(builder, value)
            operands.append(builder.swapped(value) if turned else value)
            continue
        c = constant(value)
        if c is None:
            return None
        c = (c.T if turned else c) * c.dtype.type(alpha)
        alpha = 1.0
        operands.append(builder.constant(c, "weight"))
    out = builder.node("MatMul", list(operands), shape)
    if alpha != 1.0:
        out = builder.node("Mul", [out, builder.constant(np.array(alpha), "alpha")], shape)
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    if bias is None:
        return out
    if bias in lifting.data:
        bias = lifting.padded(builder, bias, 3)
        if beta != 1.0:
            bias = builder.node("Mul", [bias, builder.constant(np.array(beta), "beta")], sizes(bias))
    else:
        c = constant(bias)
        if c is None:
            return None
        bias = builder.constant(c * c.dtype.type(beta), "bias")
    return builder.node("Add", [out, bias], shape)


def _concat(lifting: _Lifting, node: ir.Node, builder: Builder) -> ir.Value:
    shape = lifting.shape(node.outputs[0])
    axis = node.attributes.get_int("axis", 0) % len(shape)
    inputs: list[ir.Value | None] = [lifting.up(builder, v) for v in node.inputs if v is not None]
    return builder.node("Concat", inputs, (1, *shape), {"axis": axis + 1})


def _cut(
    lifting: _Lifting,
    builder: Builder,
    source: ir.Value,
    shape: tuple[int, ...],
    **where: list[int],
) -> ir.Value:
    """A Slice; `where` has starts, ends, axes and steps, the axes those of the file."""
    where["axes"] = [a + 1 for a in where["axes"]]
    inputs: list[ir.Value | None] = [lifting.up(builder, source)]
    for name in ("starts", "ends", "axes", "steps"):
        inputs.append(builder.constant(np.array(where[name], dtype=np.int64), name))
    return builder.node("Slice", inputs, (1, *shape))


def _split(lifting: _Lifting, node: ir.Node, builder: Builder) -> list[ir.Value]:
    source = node.inputs[0]
    assert source is not None
    axis = node.attributes.get_int("axis", 0) % len(lifting.shape(source))
    found, start = [], 0
    for out in node.outputs:
        shape = lifting.shape(out) if sizes(out) is not None else ()
        if out.uses() or out.is_graph_output():
            found.append(
                _cut(
                    lifting,
                    builder,
                    source,
                    shape,
                    starts=[start],
                    ends=[start + shape[axis]],
                    axes=[axis],
                    steps=[1],
                )
            )
        start += shape[axis]
    return found


def _slice(lifting: _Lifting, node: ir.Node, builder: Builder) -> ir.Value | None:
    source = node.inputs[0]
    assert source is not None
    where: dict[str, list[int]] = {}
    for i, name in enumerate(("starts", "ends", "axes", "steps"), start=1):
        given = node.attributes.get_ints(name, None)
        if given is None and i < len(node.inputs) and node.inputs[i] is not None:
            c = constant(node.inputs[i])
            if c is None:
                return None
            given = c.reshape(-1).tolist()
        if given is not None:
            where[name] = [int(v) for v in given]
    count, rank = len(where["starts"]), len(lifting.shape(source))
    where["axes"] = [a % rank for a in where.get("axes", list(range(count)))]
    where.setdefault("steps", [1] * count)
    return _cut(lifting, builder, source, lifting.shape(node.outputs[0]), **where)


def _gather(lifting: _Lifting, node: ir.Node, builder: Builder) -> ir.Value | None:
    source, index = node.inputs
    assert source is not None
    if source not in lifting.data or index in lifting.data:
        return None
    axis = node.attributes.get_int("axis", 0) % len(lifting.shape(source))
    inputs = [lifting.up(builder, source), index]
    return builder.node("Gather", inputs, (1, *lifting.shape(node.outputs[0])), {"axis": axis + 1})


def _reduction(lifting: _Lifting, node: ir.Node, builder: Builder) -> ir.Value | None:
    source = node.inputs[0]
    axes = reduced_axes(node)
    assert source is not None
    if axes is None or (0 in axes and lifting.natural(source)):
        return None
    kept = node.attributes.get_int("keepdims", 1)
    full = [1, *(1 if i in axes else d for i, d in enumerate(lifting.shape(source)))]
    if not kept:
        full = [d for i, d in enumerate(full) if i - 1 not in axes]
    return builder.node(
        node.op_type, [lifting.up(builder, source)], full, {"axes": [a + 1 for a in axes], "keepdims": kept}
    )


def _along(lifting: _Lifting, node: ir.Node, builder: Builder) -> ir.Value | None:
    source = node.inputs[0]
    assert source is not None
    shape = lifting.shape(source)
    old = lifting.opset < 13 and "oftmax" in node.op_type
    axis = node.attributes.get_int("axis", 1 if old else -1) % len(shape)
    if axis == 0 and lifting.natural(source):
        return None
    inputs = [lifting.up(builder, source), *node.inputs[1:]]
    return _copied(lifting, node, builder, inputs, (1, *shape), axis=axis + 1)


def _expand(lifting: _Lifting, node: ir.Node, builder: Builder) -> ir.Value:
    source = node.inputs[0]
    assert source is not None
    shape = lifting.shape(node.outputs[0])
    full = shape if shape[0] == 1 else (1, *shape)
    return builder.expand(lifting.padded(builder, source, len(full)), full)


def _tile(lifting: _Lifting, node: ir.Node, builder: Builder) -> ir.Value | None:
    source, repeats = node.inputs[0], constant(node.inputs[1])
    if source is None or repeats is None:
        return None
    shifted = builder.constant(np.array([1, *repeats.tolist()], dtype=np.int64), "repeats")
    return builder.node("Tile", [lifting.up(builder, source), shifted], (1, *lifting.shape(node.outputs[0])))


_HANDLERS: dict[str, Handler] = {
    "Transpose": _transpose,
    "MatMul": _matmul,
    "Gemm": _gemm,
    "Concat": _concat,
    "Split": _split,
    "Slice": _slice,
    "Gather": _gather,
    "Expand": _expand,
    "Tile": _tile,
}


def batch_first(model: ir.Model) -> None:
    """Rewrite a graph with static shapes at batch 1 so that the batch is the first axis of every value.

    What cannot be rewritten is left as it is, for the importers to name.
    """
    _Lifting(model).run()
    ir.passes.common.RemoveUnusedNodesPass()(model)
