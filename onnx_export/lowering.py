"""Fused operators as the small ones they stand for, so that one recognition serves every exporter.

onnxruntime's optimiser and the newer standard opsets put attention, normalisation and activations into nodes
of their own. Each is replaced by its definition; `attention` and `patterns` then name what it is. No shapes
are needed: what depends on them is left to constant folding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import onnx_ir as ir

from .fused_attention import ATTENTION_RULES
from .graph import constant, opset, replace, sizes
from .importers import Unsupported
from .importers.einsum import parse
from .primitives import MICROSOFT, Lowering, Refused, Results, Rule

STANDARD = ("", "ai.onnx")
REFUSED = "attn_bounds.refused"  # metadata of a node that cannot be lowered: the reason


def _norm(b: Lowering) -> Results:
    centred, x = "Simplified" not in b.source.op_type, b.wanted(0)
    axes, axis = [-1], b.integer("axis", -1)
    if axis != -1:
        if (shape := sizes(x)) is None:
            raise Refused("the axes are those of a value of unknown rank")
        axes = [i - len(shape) for i in range(axis % len(shape), len(shape))]
    return {0: b.norm(x, b.given(1), b.given(2), b.real("epsilon", 1e-5), centred, axes)}


def _skip_norm(b: Lowering) -> Results:
    centred = b.source.op_type == "SkipLayerNormalization"
    total = b.op("Add", b.wanted(0), b.wanted(1))
    bias = b.given(4 if centred else 3)
    total = total if bias is None else b.op("Add", total, bias)
    beta = b.given(3) if centred else None
    return {0: b.norm(total, b.given(2), beta, b.real("epsilon", 1e-12), centred), 3: total}


def _gelu(b: Lowering) -> Results:
    x, bias = b.wanted(0), b.given(1)
    x = x if bias is None else b.op("Add", x, bias)
    return {0: b.gelu(x, b.source.op_type == "FastGelu")}


def _quick_gelu(b: Lowering) -> Results:
    x = b.wanted(0)
    return {0: b.op("Mul", x, b.op("Sigmoid", b.op("Mul", x, b.real("alpha", 1.702))))}


def _fused_matmul(b: Lowering) -> Results:
    if b.integer("transBatchA", 0) or b.integer("transBatchB", 0):
        raise Refused("transBatchA or transBatchB")
    operands = []
    for i, flag in ((0, "transA"), (1, "transB")):
        value = b.wanted(i)
        if b.integer(flag, 0):
            c = constant(value)
            shape = sizes(value) if c is None else c.shape
            if shape is None:
                raise Refused(f"{flag} of a value of unknown rank")
            rank = len(shape)
            value = b.op("Transpose", value, perm=[*range(rank - 2), rank - 1, rank - 2])
        operands.append(value)
    product = b.op("MatMul", *operands)
    alpha = b.real("alpha", 1.0)
    return {0: product if alpha == 1.0 else b.op("Mul", product, alpha)}


def _einsum(b: Lowering) -> Results:
    """Of two tensors that both depend on the input: transposed, with axes merged, one MatMul."""
    inputs = [b.wanted(i) for i in range(len(b.source.inputs))]
    shapes = [sizes(v) for v in inputs]
    if len(inputs) != 2 or any(s is None for s in shapes) or any(constant(v) is not None for v in inputs):
        raise Refused("")
    try:
        (left, right), out = parse(
            b.source.attributes.get_string("equation", ""), [len(s) for s in shapes if s is not None]
        )
    except Unsupported:
        raise Refused("") from None
    size = {c: d for t, s in zip((left, right), shapes, strict=True) if s for c, d in zip(t, s, strict=True)}
    shared = [c for c in left if c in right]
    lead, summed = [c for c in shared if c in out], [c for c in shared if c not in out]
    free = [[c for c in term if c not in shared] for term in (left, right)]
    if any(c not in out for c in (*free[0], *free[1])):
        raise Refused("")

    def total(labels: Sequence[str]) -> int:
        return math.prod(size[c] for c in labels)

    operands = []
    for i, (term, order) in enumerate(((left, (lead, free[0], summed)), (right, (lead, summed, free[1])))):
        flat = [c for part in order for c in part]
        value = b.transpose(inputs[i], [term.index(c) for c in flat])
        operands.append(b.reshape(value, [*(size[c] for c in lead), *(total(part) for part in order[1:])]))
    rows, columns = free
    y = b.node("MatMul", operands, [*(size[c] for c in lead), total(rows), total(columns)])
    have = [*lead, *rows, *columns]
    y = b.reshape(y, [size[c] for c in have])
    return {0: b.transpose(y, [have.index(c) for c in out])}


def _fused_gemm(b: Lowering) -> Results:
    """Gemm with an activation behind it."""
    name = b.source.attributes.get_string("activation", "")
    if name not in ("Relu", "LeakyRelu", "Tanh", "Sigmoid"):
        raise Refused(f"activation {name}")
    attributes = {k: b.real(k, 1.0) for k in ("alpha", "beta")}
    flags = {k: b.integer(k, 0) for k in ("transA", "transB")}
    y = b.op("Gemm", *b.source.inputs, **attributes, **flags)
    slope = {"alpha": b.real("activation_alpha", 0.01)} if name == "LeakyRelu" else {}
    return {0: b.op(name, y, **slope)}


def _fused_conv(b: Lowering) -> Results:
    """Conv, a sum with another value if there is one, and an activation."""
    name = b.source.attributes.get_string("activation", "")
    if name not in ("", "Relu", "Tanh", "Sigmoid"):
        raise Refused(f"activation {name}")
    y = b.op("Conv", *b.source.inputs[:3])
    for key, attribute in b.source.attributes.items():
        if not key.startswith("activation"):
            b.nodes[-1].attributes[key] = attribute
    if (other := b.given(3)) is not None:
        y = b.op("Add", y, other)
    return {0: b.op(name, y) if name else y}


def _of_one_machine(b: Lowering) -> Results:
    raise Refused("a layout for one machine; let onnxruntime save the model at level ORT_ENABLE_EXTENDED")


RULES: dict[tuple[str, str], Rule] = {
    (MICROSOFT, "LayerNormalization"): _norm,
    (MICROSOFT, "SimplifiedLayerNormalization"): _norm,
    ("", "SimplifiedLayerNormalization"): _norm,
    (MICROSOFT, "SkipLayerNormalization"): _skip_norm,
    (MICROSOFT, "SkipSimplifiedLayerNormalization"): _skip_norm,
    (MICROSOFT, "Gelu"): _gelu,
    (MICROSOFT, "BiasGelu"): _gelu,
    (MICROSOFT, "FastGelu"): _gelu,
    (MICROSOFT, "QuickGelu"): _quick_gelu,
    (MICROSOFT, "FusedMatMul"): _fused_matmul,
    (MICROSOFT, "FusedGemm"): _fused_gemm,
    (MICROSOFT, "FusedConv"): _fused_conv,
    **{
        (f"{MICROSOFT}.nchwc", op): _of_one_machine
        for op in ("Conv", "ReorderInput", "ReorderOutput", "MaxPool", "AveragePool")
    },
    ("", "Einsum"): _einsum,
}


def lower(model: ir.Model) -> bool:
    """Replace fused operators by what they stand for, in place; returns whether there were any.

    Where that cannot be, the node keeps the reason as metadata.
    """
    version, graph = opset(model), model.graph
    rules = {**RULES, **ATTENTION_RULES}
    if version < 17:  # onnxruntime has it in files of older opsets too, where its shape cannot be inferred
        rules["", "LayerNormalization"] = _norm
    changed = False
    for node in list(graph):
        rule = rules.get(("" if node.domain in STANDARD else node.domain, node.op_type))
        if rule is None:
            continue
        builder = Lowering(graph, node, version)
        try:
            made = rule(builder)
            extra = [
                i for i, o in enumerate(node.outputs) if i not in made and (o.uses() or o.is_graph_output())
            ]
            if extra:
                raise Refused(f"its output {extra[0]} is used")
        except Refused as e:
            if str(e):
                node.metadata_props[REFUSED] = str(e)
            continue
        builder.insert_before(node)
        for i, value in made.items():
            if i < len(node.outputs):
                replace(node.outputs[i], value)
        changed = True
    if changed:
        ir.passes.common.RemoveUnusedNodesPass()(model)
    return changed
