"""Values of nodes whose inputs are all constant: onnx's own reference evaluator, in float64."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from attn_bounds.errors import first_line

from .context import Unsupported

RANDOM = {
    "Bernoulli",
    "Multinomial",
    "RandomNormal",
    "RandomNormalLike",
    "RandomUniform",
    "RandomUniformLike",
}


def exact(array: np.ndarray) -> np.ndarray:
    """Floating-point numbers of any width in float64; everything else as it is."""
    if array.dtype.kind in "biuSUO":
        return array
    return array.astype(np.float64)


def fold_node(node: ir.Node, inputs: Sequence[np.ndarray | None], opset: int) -> list[np.ndarray]:
    """Outputs of a node of constants.

    Arguments:
        inputs: their values, None where absent.
        opset: version of the standard operators.

    Raises:
        Unsupported: the value is random, or cannot be computed.
    """
    if node.op_type in RANDOM or node.domain not in ("", "ai.onnx"):
        raise Unsupported("not a deterministic standard operator, and so no constant")
    arrays = [None if x is None else exact(x) for x in inputs]
    first = arrays[0] if arrays else None
    if node.op_type == "Cast" and first is not None and first.dtype == np.float64:
        wide = (ir.DataType.FLOAT, ir.DataType.DOUBLE)
        if node.attributes.get_int("to", 1) in wide:
            return [first]  # rounded once, when it enters the module
    from onnx.reference import ReferenceEvaluator

    try:
        proto = ir.serde.serialize_node(node)
        names = [n for n in proto.input if n]
        feeds = {n: a for n, a in zip(proto.input, arrays, strict=True) if n and a is not None}
        evaluator = ReferenceEvaluator(proto, opsets={"": opset}, verbose=0)
        found = evaluator.run(None, {n: feeds[n] for n in names})
    except Exception as e:
        raise Unsupported(f"constant expression that could not be computed ({first_line(e)})") from None
    return [np.asarray(v) for v in found]
