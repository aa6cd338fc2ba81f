"""ONNX file → small static graph: shapes fixed, constants folded, attention named as such.

Folding, shape inference and rewriting are `onnx_ir`'s and `onnxscript`'s. What is ours is `fuse_attention`,
which recognises attention by what the subgraph computes: a Softmax over the last axis whose input is a
scaled and masked product of two tensors, or the squared distances of their rows, and whose output multiplies
a third.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
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

from .ops import DOMAIN

FOLD_LIMIT = 50_000_000  # elements; folding must never stop short of a shape or a class token


@dataclass(frozen=True)
class Attention:
    """One attention unit of a loaded graph. Sizes are those of one sample."""

    name: str
    heads: int
    queries: int
    keys: int
    head_dim: int
    value_dim: int
    masked: bool
    scale: float
    distance: bool = False  # scores are −scale · squared distances, not scale · products


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


def opset(model: ir.Model) -> int:
    """Version of the standard operator set that the model imports."""
    return model.opset_imports.get("", model.opset_imports.get("ai.onnx", 1))


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


def constant(value: ir.Value | None) -> np.ndarray | None:
    """The array of a constant input, or None."""
    tensor = ir.convenience.get_const_tensor(value) if value is not None else None
    return None if tensor is None else tensor.numpy()


def _sole_consumer(value: ir.Value) -> ir.Node | None:
    uses = list(value.uses())
    return uses[0].node if len(uses) == 1 and not value.is_graph_output() else None


def _softmax_is_over_last_axis(node: ir.Node, version: int) -> bool:
    axis = node.attributes.get_int("axis", 1 if version < 13 else -1)
    shape = node.inputs[0].shape if node.inputs[0] is not None else None
    return axis == -1 or (shape is not None and axis == len(shape) - 1)


def _operands(node: ir.Node) -> tuple[ir.Value, np.ndarray] | None:
    """Split a binary node into its variable operand and its constant one."""
    a, b = node.inputs
    if a is None or b is None:
        return None
    if (c := constant(b)) is not None:
        return a, c
    if node.op_type in ("Add", "Mul") and (c := constant(a)) is not None:
        return b, c
    return None


def _scores(value: ir.Value) -> tuple[ir.Node, float, np.ndarray | None] | None:
    """Walk from the Softmax's input up to the product: (MatMul node, scale, mask)."""
    scale, mask = 1.0, None
    while (node := value.producer()) is not None:
        if node.op_type == "MatMul":
            return (node, scale, mask) if all(constant(v) is None for v in node.inputs) else None
        if node.op_type not in ("Mul", "Div", "Add") or (pair := _operands(node)) is None:
            return None
        if not value.is_graph_output() and len(list(value.uses())) != 1:
            return None  # the scores are used elsewhere too
        value, c = pair
        if node.op_type == "Add":
            # scale was collected below this node: it applies to what is added here as well
            mask = c.astype(np.float64) * scale + (0.0 if mask is None else mask)
        elif c.size != 1:
            return None
        else:
            factor = float(c.reshape(()))
            scale *= factor if node.op_type == "Mul" else 1.0 / factor
    return None


def _terms(
    value: ir.Value, factor: float, terms: list[tuple[float, ir.Value]], masks: list[np.ndarray]
) -> bool:
    """Take a value apart into `Σ factor · term + masks`, the masks constant; False where that cannot be."""
    node = value.producer()
    if value.is_graph_output():
        return False
    if node is None or node.op_type not in ("Add", "Sub", "Mul", "Div", "Neg"):
        terms.append((factor, value))
        return True
    inputs = list(node.inputs)
    if node.op_type == "Neg":
        assert inputs[0] is not None
        return _terms(inputs[0], -factor, terms, masks)
    if node.op_type in ("Mul", "Div"):
        pair = _operands(node)
        if pair is None or pair[1].size != 1:
            terms.append((factor, value))
            return True
        c = float(pair[1].reshape(()))
        return _terms(pair[0], factor * c if node.op_type == "Mul" else factor / c, terms, masks)
    for operand, sign in zip(inputs, (1.0, -1.0 if node.op_type == "Sub" else 1.0), strict=True):
        if operand is None:
            return False
        if (c_array := constant(operand)) is not None:
            masks.append(c_array.astype(np.float64) * (sign * factor))
        elif not _terms(operand, sign * factor, terms, masks):
            return False
    return True


def _untransposed(value: ir.Value) -> tuple[ir.Value, tuple[int, ...]]:
    """The value behind any Transposes, and their joint permutation."""
    assert value.shape is not None
    perm = tuple(range(len(value.shape)))
    while (node := value.producer()) is not None and node.op_type == "Transpose":
        own = node.attributes.get_ints("perm", None) or list(range(len(perm)))[::-1]
        perm = tuple(own[i] for i in perm)
        assert node.inputs[0] is not None
        value = node.inputs[0]
    return value, perm


def _is_swapped(a: ir.Value, b: ir.Value) -> bool:
    """Whether a is b with its last two axes exchanged."""
    (source_a, perm_a), (source_b, perm_b) = _untransposed(a), _untransposed(b)
    return source_a is source_b and perm_a == (*perm_b[:-2], perm_b[-1], perm_b[-2])


def _square_norm(value: ir.Value) -> tuple[ir.Value, tuple[int, ...]] | None:
    """The x of `Σ x²` over the last axis, and the shape in which it arrives, axes of size 1 put anywhere."""
    shape = value.shape
    if shape is None or not shape.is_static():
        return None
    wanted = tuple(int(d) for d in shape.numpy())
    while (node := value.producer()) is not None and node.op_type in (
        "Unsqueeze",
        "Squeeze",
        "Reshape",
        "Transpose",
        "Identity",
    ):
        source = node.inputs[0]
        if source is None or source.shape is None or not source.shape.is_static():
            return None
        if node.op_type == "Transpose":  # only axes of size 1 may pass others
            sizes = source.shape.numpy()
            perm = node.attributes.get_ints("perm", None) or list(range(len(sizes)))[::-1]
            kept = [p for p in perm if sizes[p] != 1]
            if kept != sorted(kept):
                return None
        value = source
    if node is None or node.op_type not in ("ReduceSum", "ReduceSumSquare"):
        return None
    square = node.inputs[0]
    axes = node.attributes.get_ints("axes", None)
    if axes is None and len(node.inputs) > 1 and (given := constant(node.inputs[1])) is not None:
        axes = [int(v) for v in given.reshape(-1)]
    if square is None or square.shape is None or axes is None or len(axes) != 1:
        return None
    if axes[0] not in (-1, len(square.shape) - 1):
        return None
    if node.op_type == "ReduceSumSquare":
        return square, wanted
    product = square.producer()
    if product is None or len(product.inputs) != 2:
        return None
    first, second = product.inputs
    exponent = constant(second) if product.op_type == "Pow" else None
    squared = product.op_type == "Mul" and first is second
    if exponent is not None and exponent.size == 1:
        squared = float(exponent.reshape(())) == 2.0
    return (first, wanted) if squared and first is not None else None


def _distances(value: ir.Value) -> tuple[ir.Node, ir.Value, ir.Value, float, np.ndarray | None] | None:
    """(MatMul node, query, key, scale, mask) of `mask − scale (‖q_i‖² − 2 q_i · k_j + ‖k_j‖²)`.

    The term of the queries may be missing: the softmax does not see it.
    """
    terms: list[tuple[float, ir.Value]] = []
    masks: list[np.ndarray] = []
    if not _terms(value, 1.0, terms, masks):
        return None
    products = [
        (f, v.producer()) for f, v in terms if (node := v.producer()) is not None and node.op_type == "MatMul"
    ]
    norms = [(f, found) for f, v in terms if (found := _square_norm(v)) is not None]
    if len(products) != 1 or len(products) + len(norms) != len(terms) or not 1 <= len(norms) <= 2:
        return None
    factor, product = products[0]
    assert product is not None
    if any(v is None or constant(v) is not None for v in product.inputs):
        return None
    mask = None if not masks else sum(masks[1:], masks[0])
    queries, keys = (_unscaled(v) for v in product.inputs if v is not None)
    for (q_factor, query), (k_factor, key_t) in itertools.product(queries, keys):
        scale = factor * q_factor * k_factor / 2.0
        key = _matched(query, key_t, [n for f, n in norms if math.isclose(f, -scale, rel_tol=1e-6)])
        if key is not None and all(math.isclose(f, -scale, rel_tol=1e-6) for f, _ in norms):
            return product, query, key, scale, mask
    return None


def _unscaled(value: ir.Value) -> list[tuple[float, ir.Value]]:
    """(factor, v) with `value = factor · v`: the value itself, and behind each constant factor."""
    found = [(1.0, value)]
    while (node := value.producer()) is not None and node.op_type in ("Mul", "Div"):
        pair = _operands(node)
        if pair is None or pair[1].size != 1:
            break
        value, c = pair[0], float(pair[1].reshape(()))
        found.append((found[-1][0] * (c if node.op_type == "Mul" else 1.0 / c), value))
    return found


def _matched(
    query: ir.Value, key_t: ir.Value, norms: list[tuple[ir.Value, tuple[int, ...]]]
) -> ir.Value | None:
    """The keys, if the squared norms are those of the columns of key_t, and of the rows of query if any."""
    if query.shape is None or key_t.shape is None:
        return None
    if not (query.shape.is_static() and key_t.shape.is_static()) or len(query.shape) != len(key_t.shape):
        return None
    lead, n, m = tuple(query.shape.numpy()[:-2]), query.shape.numpy()[-2], key_t.shape.numpy()[-1]
    key: ir.Value | None = None
    row = False
    for source, shape in norms:
        if key is None and shape == (*lead, 1, m) and _is_swapped(key_t, source):
            key = source
        elif not row and shape == (*lead, n, 1) and source is query:
            row = True
        else:
            return None
    return key


def fuse_attention(model: ir.Model) -> list[Attention]:
    """Replace each recognised attention by the three operators of `ops.py`, in place.

    Recognised: `Softmax(mask + scale · A B) C` with the softmax over the last axis, scale and mask constant
    and in any order. The key operand is `Bᵀ`; a Transpose that already stands there is merged. And, in place
    of `A B`, squared distances `‖a_i‖² − 2 a_i · b_j + ‖b_j‖²`, the first term at will.

    Returns:
        What was found, in graph order. A Softmax that fits no attention is left as it is.
    """
    graph, version = model.graph, opset(model)
    found: list[Attention] = []
    for node in list(graph):
        if node.op_type != "Softmax" or not _softmax_is_over_last_axis(node, version):
            continue
        weights, scores_in = node.outputs[0], node.inputs[0]
        consumer = _sole_consumer(weights)
        if (
            scores_in is None
            or consumer is None
            or consumer.op_type != "MatMul"
            or consumer.inputs[0] is not weights
        ):
            continue
        key: ir.Value | None = None
        if (walked := _scores(scores_in)) is not None:
            product, scale, mask = walked
            query, key_t = product.inputs
        elif len(list(scores_in.uses())) == 1 and (distances := _distances(scores_in)) is not None:
            product, query, key, scale, mask = distances
            key_t = product.inputs[1]
        else:
            continue
        value, out = consumer.inputs[1], consumer.outputs[0]
        shapes = [v.shape if v is not None else None for v in (query, key_t, value)]
        if any(s is None or not s.is_static() or len(s) < 3 for s in shapes):
            continue
        assert query is not None and key_t is not None and value is not None
        assert query.shape and key_t.shape and value.shape
        rank = len(key_t.shape)
        q_shape, k_shape, v_shape = (s.numpy() for s in (query.shape, key_t.shape, value.shape))
        added: list[ir.Node] = []
        kind = "AttentionScores" if key is None else "L2Scores"
        if key is None:
            swap = ir.Node(
                "",
                "Transpose",
                [key_t],
                [ir.AttrInt64s("perm", [*range(rank - 2), rank - 1, rank - 2])],
                name=f"{product.name}/key",
            )
            key, added = swap.outputs[0], [swap]
            key.name = f"{key_t.name}/key"
            key.shape = ir.Shape([*k_shape[:-2], k_shape[-1], k_shape[-2]])
            if key_t.dtype is not None:
                key.dtype = key_t.dtype
        inputs: list[ir.Value] = [query, key]
        if mask is not None:
            dtype = np.float32 if query.dtype in (None, ir.DataType.FLOAT) else np.float64
            tensor = ir.tensor(mask.astype(dtype), name=f"{product.name}/mask")
            mask_value = ir.Value(name=tensor.name, const_value=tensor)
            graph.initializers[tensor.name or ""] = mask_value
            inputs.append(mask_value)
        scores = ir.Node(
            DOMAIN,
            kind,
            inputs,
            [ir.AttrFloat32("scale", scale)],
            name=f"{product.name}/{kind}",
        )
        probs = ir.Node(DOMAIN, "AttentionWeights", [scores.outputs[0]], name=f"{node.name}/AttentionWeights")
        average = ir.Node(
            DOMAIN,
            "AttentionAverage",
            [scores.outputs[0], probs.outputs[0], value],
            name=f"{consumer.name}/AttentionAverage",
        )
        for new, old in ((scores, scores_in), (probs, weights), (average, out)):
            new.outputs[0].shape = old.shape
            if old.dtype is not None:
                new.outputs[0].dtype = old.dtype
        names = scores_in.name, weights.name, out.name
        ir.convenience.replace_nodes_and_values(
            graph,
            consumer,
            [consumer],
            [*added, scores, probs, average],
            [out],
            [average.outputs[0]],
        )
        scores.outputs[0].name, probs.outputs[0].name, average.outputs[0].name = names
        heads = int(np.prod(q_shape[1:-2])) if len(q_shape) > 3 else 1
        found.append(
            Attention(
                name=product.name or str(names[0]),
                heads=heads,
                queries=q_shape[-2],
                keys=k_shape[-1],
                head_dim=q_shape[-1],
                value_dim=v_shape[-1],
                masked=mask is not None,
                scale=scale,
                distance=kind == "L2Scores",
            )
        )
    ir.passes.common.RemoveUnusedNodesPass()(model)
    rewrite(model, [transpose_transpose_rule, no_op_transpose_rule])
    return found


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
