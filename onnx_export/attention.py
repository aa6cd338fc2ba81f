"""Recognition of attention by what the subgraph computes, and its replacement by the operators of `ops.py`.

A unit is `softmax(scale · Q Kᵀ + mask) V`, or squared distances in place of `Q Kᵀ`, with scale and mask
constant. Scale and mask may stand anywhere and in any order (`algebra`), axes may be permuted, heads split
and merged between the product, the softmax and the average (`views`), and the average may be written from
either side. Everything is brought back to the axes of the product `Q Kᵀ`.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from . import views
from .algebra import ONE, parse
from .distances import Distances, differences, distances
from .graph import constant, opset, passes, sizes
from .patterns import guarded_weights
from .units import Attention, Average, NoUnit, Scores, emit
from .views import Step


def softmax_axis(node: ir.Node, version: int) -> int | None:
    """Non-negative axis of a Softmax over one axis; None where it is over several (opset < 13)."""
    shape = sizes(node.inputs[0])
    if shape is None or not shape:
        return None
    axis = node.attributes.get_int("axis", 1 if version < 13 else -1) % len(shape)
    if version < 13:  # all axes from this one on are one
        rest = [i for i in range(axis, len(shape)) if shape[i] != 1]
        return None if len(rest) > 1 else rest[0] if rest else len(shape) - 1
    return axis


def _trace_scores(node: ir.Node, axis: int) -> Scores:
    """Walk from the softmax's input up to the product."""
    value = node.inputs[0]
    assert value is not None
    factor: np.ndarray = np.array(1.0)
    mask: np.ndarray | None = None
    steps: list[Step] = []
    while True:
        terms = parse(value)
        own = terms.pop(ONE, None)
        if own is not None:
            with np.errstate(invalid="ignore"):  # 0 · −inf where the score is replaced later on
                part = np.where(np.equal(factor, 0.0), 0.0, factor * own)
            mask = part if mask is None else mask + part
        if len(terms) != 1:
            if (found := distances(terms)) is None:
                raise NoUnit("its input is a sum of several terms that depend on the model's input")
            return _of_distances(found, factor, mask, steps, axis)
        ((monomial, c),) = terms.items()
        factor = factor * c
        if len(monomial) != 1 or next(iter(monomial))[1] != 1.0:
            raise NoUnit("its input is a product of values that depend on the model's input, entry by entry")
        ((atom, _),) = monomial
        source = atom.producer()
        if source is None:
            raise NoUnit("its input is no product of queries and keys")
        step = views.step_of(source)
        if step is not None:
            found_axis = step.source_axis(axis)
            if found_axis is None:
                raise NoUnit(f"{source.op_type} {source.name} mixes its axis with others")
            axis, factor = found_axis, step.undone(factor)
            mask = None if mask is None else step.undone(mask)
            steps.insert(0, step)
            assert source.inputs[0] is not None
            value = source.inputs[0]
            continue
        if (found := differences(atom)) is not None:
            return _of_distances(found, factor, mask, steps, axis)
        if source.op_type != "MatMul":
            raise NoUnit(_between(source))
        query, key = source.inputs
        assert query is not None and key is not None
        # queries or keys that are learned are fine; a constant that mixes scores is not
        if any(constant(v) is not None for v in (query, key)) and _mixes_scores(source):
            raise NoUnit(_between(source))
        return Scores(
            query, key, False, "dot", factor, mask, steps, axis, source.name or str(source.outputs[0].name)
        )


def _of_distances(
    found: Distances, factor: np.ndarray, mask: np.ndarray | None, steps: list[Step], axis: int
) -> Scores:
    name = found.product.name or str(found.product.outputs[0].name)
    return Scores(found.query, found.key, True, "distance", factor * found.scale, mask, steps, axis, name)


def _between(node: ir.Node) -> str:
    """What stands between a product and a softmax, in words."""
    if node.op_type == "Tanh":
        return "the scores are capped by Tanh (softcap) before it"
    if node.op_type in ("MatMul", "Einsum", "Conv") and _mixes_scores(node):
        return f"{node.op_type} {node.name} mixes the heads between scores and softmax (talking heads)"
    return f"its input comes from {node.op_type} {node.name}, which is no product of queries and keys"


def _mixes_scores(node: ir.Node) -> bool:
    """Whether a linear map is one of the product of two values."""
    todo: list[ir.Value | None] = list(node.inputs)
    seen: set[int] = set()
    while todo and len(seen) < 40:
        value = todo.pop()
        source = value.producer() if value is not None else None
        if source is None or id(source) in seen:
            continue
        seen.add(id(source))
        if source.op_type == "MatMul" and all(constant(v) is None for v in source.inputs):
            return True
        if source.op_type in (*views.RESHAPES, "Transpose", "Mul", "Div", "Add", "Where"):
            todo.extend(source.inputs)
    return False


def _trace_average(value: ir.Value, steps: list[Step], guarded: bool, depth: int = 12) -> Average:
    """Walk from the softmax's output down to the product with the values."""
    reason = "its output meets no product with values"
    for use in value.uses() if depth else ():
        node = use.node
        try:
            if node.op_type == "MatMul":
                other = node.inputs[1 - use.idx]
                if other is None or constant(other) is not None:
                    raise NoUnit(
                        f"MatMul {node.name} mixes the heads between softmax and average (talking heads)"
                    )
                return Average(node, other, steps, use.idx == 0, guarded)
            if use.idx == 0 and passes(node):
                return _trace_average(node.outputs[0], steps, guarded, depth - 1)
            if use.idx == 0 and (step := views.step_of(node)) is not None:
                return _trace_average(node.outputs[0], [*steps, step], guarded, depth - 1)
            if node.op_type == "Where" and use.idx == 2 and guarded_weights(node) is value:
                return _trace_average(node.outputs[0], steps, True, depth - 1)
            if node.op_type not in ("IsNaN", "Where", "ReduceMean"):
                reason = f"its output goes through {node.op_type} {node.name} before it meets the values"
        except NoUnit as e:
            reason = str(e)
    raise NoUnit(reason)


def fuse_attention(model: ir.Model) -> tuple[list[Attention], list[str]]:
    """Replace each recognised attention by the operators of `ops.py`, in place.

    Returns:
        What was found, in graph order, and a note for each Softmax that is no attention unit; such a Softmax
        is left as it is.
    """
    graph, version = model.graph, opset(model)
    found: list[Attention] = []
    notes: list[str] = []
    for node in list(graph):
        if node.op_type != "Softmax" or node.domain not in ("", "ai.onnx"):
            continue
        if node.outputs[0].is_graph_output() and not node.outputs[0].uses():
            continue  # the model's own head
        try:
            axis = softmax_axis(node, version)
            if axis is None:
                raise NoUnit("it is over several axes at once")
            scores = _trace_scores(node, axis)
            average = _trace_average(node.outputs[0], [], False)
            found.append(emit(graph, node, scores, average))
        except NoUnit as e:
            notes.append(f"Softmax at {node.name or node.outputs[0].name} is no attention unit: {e}")
    ir.passes.common.RemoveUnusedNodesPass()(model)
    graph.sort()
    return found, notes
