"""ONNX file → small static graph: shapes fixed and constants folded.

Folding, shape inference and rewriting are `onnx_ir`'s and `onnxscript`'s.
"""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx_ir as ir
from onnxscript import optimizer
from onnxscript.rewriter import rewrite
from onnxscript.rewriter.rules.common import (
    dropout_inference_rule,
    no_op_transpose_rule,
    transpose_transpose_rule,
)

from attn_bounds.errors import InputError

from .graph import opset

FOLD_LIMIT = 50_000_000  # elements; folding must never stop short of a shape or a class token


def read(path: str | Path) -> ir.Model:
    """Read an ONNX file.

    Raises:
        InputError: not a file, not ONNX, truncated, or its external data is missing.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    try:
        proto = onnx.load(path, load_external_data=False)
    except Exception as e:
        raise InputError(
            f"{path}: not a readable ONNX file, or truncated ({str(e).splitlines()[0]})"
        ) from None
    if not proto.graph.node or not proto.graph.output:
        raise InputError(f"{path}: the ONNX file holds no graph with nodes and outputs")
    try:
        onnx.load_external_data_for_model(proto, str(path.parent))
    except Exception as e:
        raise InputError(
            f"{path}: external data cannot be read ({str(e).splitlines()[0]}); "
            "keep the model's .data file beside it"
        ) from None
    try:
        return ir.serde.deserialize_model(proto)
    except Exception as e:
        raise InputError(f"{path}: invalid ONNX model ({str(e).splitlines()[0]})") from None


def data_inputs(model: ir.Model) -> list[ir.Value]:
    """Graph inputs that are not initializers (old files list the weights among the inputs)."""
    return [v for v in model.graph.inputs if v.name not in model.graph.initializers]


def fix_input_shapes(model: ir.Model, path: str | Path) -> bool:
    """Give the inputs static shapes with batch 1; returns whether the batch was dynamic.

    Raises:
        InputError: a dimension other than the first is dynamic, or there are several inputs.
    """
    inputs = data_inputs(model)
    if len(inputs) != 1:
        raise InputError(
            f"{path}: {len(inputs)} inputs ({', '.join(str(v.name) for v in inputs)}); "
            "models with exactly one input are supported"
        )
    value = inputs[0]
    if value.shape is None or value.dtype not in (ir.DataType.FLOAT, ir.DataType.DOUBLE):
        raise InputError(
            f"{path}: input {value.name} has type {value.dtype} and shape {value.shape}; "
            "a float input with a shape is needed"
        )
    dims = list(value.shape)
    unknown = [i for i, d in enumerate(dims) if not isinstance(d, int) and i > 0]
    if unknown or not dims:
        raise InputError(
            f"{path}: input {value.name} has shape {value.shape}; only the first dimension (batch) may be "
            "dynamic: export with fixed sizes"
        )
    dynamic = not isinstance(dims[0], int)
    if not dynamic and dims[0] != 1:
        raise InputError(
            f"{path}: input {value.name} has a fixed batch of {dims[0]}; export with batch 1 or dynamic"
        )
    value.shape = ir.Shape([1, *dims[1:]])
    for v in model.graph.all_nodes():  # shapes recorded for another batch would contradict ours
        for out in v.outputs:
            out.shape = None
    for out in model.graph.outputs:
        out.shape = None
    return dynamic


def fold(model: ir.Model) -> None:
    """Fold constants and shape arithmetic and infer shapes, in place."""
    optimizer.optimize_ir(
        model,
        num_iterations=4,
        input_size_limit=FOLD_LIMIT,
        output_size_limit=FOLD_LIMIT,
        # by default kept to save space, and with it the shape of a class token that is expanded to the batch
        should_fold=lambda node: True if node.op_type == "ConstantOfShape" else None,
    )
    rewrite(model, [transpose_transpose_rule, no_op_transpose_rule, dropout_inference_rule])


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
