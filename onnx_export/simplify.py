"""ONNX file → small static graph: shapes fixed and constants folded.

Folding, shape inference and rewriting are `onnx_ir`'s and `onnxscript`'s.
"""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx_ir as ir
from onnx_ir.passes import common
from onnxscript import optimizer
from onnxscript.rewriter import rewrite
from onnxscript.rewriter.rules.common import (
    dropout_inference_rule,
    no_op_cast_rule,
    no_op_expand_rule,
    no_op_transpose_rule,
    reshape_reshape_rule,
    transpose_transpose_rule,
    unsqueeze_unsqueeze_rule,
)

from attn_bounds.errors import InputError, first_line

from .entry import Entry
from .graph import constant, opset
from .importers import Unsupported, fold_node
from .rebatch import rebatch

FOLD_LIMIT = 50_000_000  # elements; folding must never stop short of a shape or a class token
KEEP_SHAPE = {"GroupNormalization", "InstanceNormalization"}  # results have the shape of the input
ROUNDS = 4  # of folding and rewriting
# rules that change no value at all: onnxscript's own set takes x + 1e-8 and x · 1.00001 for x
EXACT_RULES = [
    dropout_inference_rule,
    no_op_cast_rule,
    no_op_expand_rule,
    no_op_transpose_rule,
    reshape_reshape_rule,
    transpose_transpose_rule,
    unsqueeze_unsqueeze_rule,
]


def read(path: str | Path) -> onnx.ModelProto:
    """Read an ONNX file, with the weights that lie beside it.

    Raises:
        InputError: not a file, not ONNX, truncated, or its external data is missing.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    try:
        proto = onnx.load(path, load_external_data=False)
    except Exception as e:
        raise InputError(f"{path}: not a readable ONNX file, or truncated ({first_line(e)})") from None
    if not proto.graph.node or not proto.graph.output:
        raise InputError(f"{path}: the ONNX file holds no graph with nodes and outputs")
    try:
        onnx.load_external_data_for_model(proto, str(path.parent))
    except Exception as e:
        raise InputError(
            f"{path}: external data cannot be read ({first_line(e)}); keep the model's .data file beside it"
        ) from None
    return proto


def specialise(entry: Entry, path: str | Path) -> ir.Model:
    """The entered model at batch 1, every input but one a constant.

    Raises:
        InputError: the model is invalid.
    """
    try:
        model = ir.serde.deserialize_model(entry.proto)
    except Exception as e:
        raise InputError(f"{path}: invalid ONNX model ({first_line(e)})") from None
    graph = model.graph
    for value in list(graph.inputs):
        if value.name == entry.name:
            value.shape = ir.Shape(list(entry.shape))
        elif (array := entry.feeds.get(str(value.name))) is not None:
            graph.inputs.remove(value)
            value.const_value = ir.tensor(array, name=value.name)
            value.shape = ir.Shape(list(array.shape))
            graph.initializers[str(value.name)] = value
    if entry.batch != 1:
        rebatch(model, entry.batch, entry.guess)
    for node in graph.all_nodes():  # shapes recorded for another batch would contradict ours
        for out in node.outputs:
            out.shape = None
    for out in graph.outputs:
        out.shape = None
    return model


def fold(model: ir.Model, path: str | Path) -> None:
    """Fold constants and shape arithmetic and infer shapes, in place.

    Raises:
        InputError: the graph contradicts itself.
    """
    try:
        model.graph.sort()  # fails on a cycle
        common.InlinePass()(model)
        for _ in range(ROUNDS):
            folded = optimizer.fold_constants(
                model,
                onnx_shape_inference=True,
                input_size_limit=FOLD_LIMIT,
                output_size_limit=FOLD_LIMIT,
                # by default kept to save space, and with it the shape of a class token expanded to the batch
                should_fold=lambda node: True if node.op_type == "ConstantOfShape" else None,
            )
            rewrite(model, EXACT_RULES)
            if not _fill_gaps(model) and not folded.modified:
                break
        ir.passes.Sequential(
            common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
            common.LiftSubgraphInitializersToMainGraphPass(),
            common.CommonSubexpressionEliminationPass(),
            common.RemoveUnusedNodesPass(),
            common.OutputFixPass(),
            common.NameFixPass(),
        )(model)
    except Exception as e:
        raise InputError(
            f"{path}: the graph cannot be simplified ({type(e).__name__}: {first_line(e)})"
        ) from None


def _fill_gaps(model: ir.Model) -> bool:
    """What onnxscript leaves open: integers that depend on values (NonZero), shapes of some operators."""
    changed, version = False, opset(model)
    for node in list(model.graph):
        if node.op_type in KEEP_SHAPE and node.outputs[0].shape is None and node.inputs[0] is not None:
            node.outputs[0].shape = node.inputs[0].shape
            changed |= node.inputs[0].shape is not None
        arrays = [constant(v) for v in node.inputs]
        if not arrays or any(a is None for a, v in zip(arrays, node.inputs, strict=True) if v is not None):
            continue
        try:
            found = fold_node(node, arrays, version)
        except Unsupported:
            continue
        if len(found) != 1 or found[0].dtype.kind not in "biu" or node.outputs[0].is_graph_output():
            continue
        tensor = ir.tensor(found[0])
        value = ir.Value(
            name=f"{node.outputs[0].name}/folded",
            const_value=tensor,
            shape=ir.Shape(list(found[0].shape)),
            type=ir.TensorType(tensor.dtype),
        )
        model.graph.initializers[str(value.name)] = value
        ir.convenience.replace_all_uses_with(node.outputs[0], value)
        model.graph.remove(node, safe=True)
        changed = True
    for value in model.graph.initializers.values():
        if value.const_value is not None:
            value.shape = ir.Shape(value.const_value.shape.numpy())
    for node in model.graph:  # a shape that was inferred before its constants were folded is never mended
        for out in node.outputs:
            if out.shape is not None and not out.shape.is_static():
                out.shape, changed = None, True
    return changed


def strip_head(model: ir.Model) -> str:
    """Take a final Softmax, LogSoftmax, ArgMax or single Sigmoid off, so that the output is the logits.

    Returns:
        Its operator, or "" where the model ends in something else.
    """
    output = model.graph.outputs[0]
    node = output.producer()
    if node is None or node.op_type not in ("Softmax", "LogSoftmax", "ArgMax", "Sigmoid"):
        return ""
    source = node.inputs[0]
    if source is None or source.shape is None or not source.shape.is_static() or len(source.shape) != 2:
        return ""
    default = 0 if node.op_type == "ArgMax" else 1 if opset(model) < 13 else -1
    if node.op_type == "Sigmoid":
        if source.shape[1] != 1:
            return ""
    elif node.attributes.get_int("axis", default) not in (1, -1):
        return ""
    head = node.op_type
    model.graph.outputs[0] = source
    ir.passes.common.RemoveUnusedNodesPass()(model)
    return head
