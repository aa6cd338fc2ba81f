"""Recognition of attention by what the subgraph computes, and its replacement by the operators of `ops.py`.

A unit is `softmax(scale · Q Kᵀ + mask) V`, or squared distances in place of `Q Kᵀ`, with scale and mask
constant. Scale and mask may stand anywhere and in any order (`algebra`), axes may be permuted, heads split
and merged between the product, the softmax and the average (`views`), and the average may be written from
either side. Everything is brought back to the axes of the product `Q Kᵀ`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from . import views
from .algebra import MASKED, ONE, parse, scalar
from .distances import distances, unscaled
from .graph import Builder, constant, count, opset, passes, replace, sizes
from .ops import DOMAIN
from .views import Step


@dataclass(frozen=True)
class Attention:
    """One attention unit of a loaded graph. Sizes are those of one sample.

    Attributes:
        kind: "dot", or "distance": scores are −scale · squared distances, not scale · products.
        kv_heads: heads of the keys before they were repeated for grouped queries, or `heads`.
        masked: a constant is added to the scores, or some are excluded.
        causal: what the mask excludes is every key behind the query, and nothing else.
    """

    name: str
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_dim: int
    value_dim: int
    masked: bool
    scale: float
    kind: str = "dot"
    causal: bool = False


class NoUnit(Exception):
    """Why a Softmax is no attention unit."""


@dataclass(frozen=True)
class _Scores:
    """What a softmax is taken of, in the axes of the product: `factor · (query keyᵀ) + mask`."""

    query: ir.Value
    key: ir.Value  # (…, m, d) if `transposed` else (…, d, m)
    transposed: bool
    kind: str
    factor: np.ndarray
    mask: np.ndarray | None
    steps: list[Step]  # from the product to the softmax's input
    axis: int  # of the product, that the softmax is over
    name: str


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


def _trace_scores(node: ir.Node, axis: int) -> _Scores:
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
            part = factor * own
            mask = part if mask is None else mask + part
        if len(terms) != 1:
            found = distances(terms)
            if found is None:
                raise NoUnit("its input is a sum of several terms that depend on the model's input")
            return _Scores(
                found.query,
                found.key,
                True,
                "distance",
                factor * found.scale,
                mask,
                steps,
                axis,
                found.product.name or str(found.product.outputs[0].name),
            )
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
        if source.op_type != "MatMul":
            raise NoUnit(_between(source))
        query, key = source.inputs
        assert query is not None and key is not None
        if constant(query) is not None or constant(key) is not None:
            raise NoUnit(_mixing(source))
        return _Scores(
            query, key, False, "dot", factor, mask, steps, axis, source.name or str(source.outputs[0].name)
        )


def _between(node: ir.Node) -> str:
    if node.op_type == "Tanh":
        return "the scores are capped by Tanh (softcap) before it"
    if node.op_type == "Conv":
        return _mixing(node)
    return f"its input comes from {node.op_type} {node.name}, which is no product of queries and keys"


def _mixing(node: ir.Node) -> str:
    """Reason for a linear map in front of a softmax: of scores (talking heads), or of anything else."""
    todo: list[ir.Value | None] = list(node.inputs)
    seen: set[int] = set()
    while todo and len(seen) < 40:
        value = todo.pop()
        source = value.producer() if value is not None else None
        if source is None or id(source) in seen:
            continue
        seen.add(id(source))
        if source.op_type == "MatMul" and all(constant(v) is None for v in source.inputs):
            return f"{node.op_type} {node.name} mixes the heads between scores and softmax (talking heads)"
        if source.op_type in (*views.RESHAPES, "Transpose", "Mul", "Div", "Add", "Where"):
            todo.extend(source.inputs)
    return "its input is a linear map, no product of queries and keys"


@dataclass(frozen=True)
class _Average:
    """The product of the weights and the values."""

    node: ir.Node
    steps: list[Step]  # from the weights to the operand
    left: bool  # the weights are the first operand
    guarded: bool  # weights of a query without any key are 0, not NaN


def _trace_average(value: ir.Value, steps: list[Step], guarded: bool, depth: int = 12) -> _Average:
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
                return _Average(node, steps, use.idx == 0, guarded)
            if use.idx == 0 and passes(node):
                return _trace_average(node.outputs[0], steps, guarded, depth - 1)
            if use.idx == 0 and (step := views.step_of(node)) is not None:
                return _trace_average(node.outputs[0], [*steps, step], guarded, depth - 1)
            if node.op_type == "Where" and use.idx == 2 and _is_guard(node, value):
                return _trace_average(node.outputs[0], steps, True, depth - 1)
            if node.op_type not in ("IsNaN", "Where", "ReduceMean"):
                reason = f"its output goes through {node.op_type} {node.name} before it meets the values"
        except NoUnit as e:
            reason = str(e)
    raise NoUnit(reason)


def _is_guard(node: ir.Node, weights: ir.Value) -> bool:
    """`Where(IsNaN(p), 0, p)`: exported around a softmax whose mask may exclude every key."""
    condition, zero = node.inputs[0], constant(node.inputs[1])
    test = condition.producer() if condition is not None else None
    return (
        test is not None
        and test.op_type == "IsNaN"
        and test.inputs[0] is weights
        and zero is not None
        and not np.any(zero)
    )


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
            found.append(_emit(graph, node, scores, average))
        except NoUnit as e:
            notes.append(f"Softmax at {node.name or node.outputs[0].name} is no attention unit: {e}")
    ir.passes.common.RemoveUnusedNodesPass()(model)
    graph.sort()
    return found, notes


def _emit(graph: ir.Graph, softmax: ir.Node, scores: _Scores, average: _Average) -> Attention:
    """Put the three operators in place of the product, the softmax and the average."""
    out = average.node.outputs[0]
    builder = Builder(graph, average.node.name or str(out.name), softmax.outputs[0].dtype)
    query, key_t = scores.query, scores.key
    factor, mask = scores.factor, scores.mask
    if scores.kind == "dot":
        query, key_t, factor = _peeled(query, key_t, factor)
    q_shape, k_shape = sizes(query), sizes(key_t)
    if q_shape is None or k_shape is None or min(len(q_shape), len(k_shape)) < 2:
        raise NoUnit("the shapes of queries and keys are not known")
    key_shape = k_shape if scores.transposed else (*k_shape[:-2], k_shape[-1], k_shape[-2])
    lead = tuple(np.broadcast_shapes(q_shape[:-2], k_shape[:-2]))
    rank = len(lead) + 2
    if scores.axis not in (rank - 1, rank - 2):
        raise NoUnit("it is over an axis that is neither that of the queries nor that of the keys")
    rows = views.on_rows(views.composed([*scores.steps, *average.steps]))
    if rows is None:
        raise NoUnit("its weights do not meet the values as rows")
    steps, swap = rows
    swap_product = (
        scores.axis == rank - 2
    )  # softmax over the rows of the product: queries and keys change roles
    if (swap ^ swap_product) == average.left:
        raise NoUnit("the values are averaged over the queries")
    values = average.node.inputs[1 if average.left else 0]
    v_shape, out_shape = sizes(values), sizes(out)
    n, m = q_shape[-2], key_shape[-2]
    if swap_product:
        n, m = m, n
    lead_out = steps[-1].after if steps else lead
    if values is None or v_shape is None or out_shape is None or len(v_shape) < 2:
        raise NoUnit("the shape of the values is not known")
    v_t = not average.left
    v_dim = v_shape[-2 if v_t else -1]
    if v_shape[-1 if v_t else -2] != m or out_shape[:-2] != lead_out:
        raise NoUnit(f"values of shape {v_shape} do not match {n} queries and {m} keys")
    scale, row_factor, key_factor, mask, dead = _factors(
        factor, mask, (*lead, q_shape[-2], key_shape[-2]), swap_product
    )
    if dead is not None and not average.guarded:
        raise NoUnit("its mask excludes every key of some query")

    # queries (…, n, d), keys (…, m, d) and values (…, m, dv), all with the leading axes of the product
    key = key_t if scores.transposed else builder.swapped(key_t)
    query = builder.expand(query, (*lead, *q_shape[-2:]))
    kv = _repeated(key_t)
    key = builder.expand(key, (*lead, *key_shape[-2:]))
    if swap_product:
        query, key = key, query
    if row_factor is not None:
        query = builder.node("Mul", [query, builder.constant(row_factor, "factor")], sizes(query))
    if key_factor is not None:
        key = builder.node("Mul", [key, builder.constant(key_factor, "factor")], sizes(key))
    if v_t:
        values = builder.swapped(values)
    values = builder.expand(values, (*lead_out, m, v_dim))
    values = views.apply(builder, views.inverted(steps), values, kept=2)

    # the operators want the batch, of size 1 here, first and one axis for the heads
    plain = len(lead) in (1, 2) and lead[0] == 1
    heads = count(lead)
    unit = lead if plain else (1, heads)
    query, key, values = (builder.reshape(v, (*unit, *(sizes(v) or ())[-2:])) for v in (query, key, values))
    inputs = [query, key]
    if mask is not None:
        full = np.broadcast_to(mask, (*lead, n, m)).reshape(*unit, n, m)
        shared = full[:1, :1] if len(unit) == 2 else full
        inputs.append(
            builder.constant(
                shared if np.array_equal(full, np.broadcast_to(shared, full.shape)) else full, "mask"
            )
        )
    kind = "AttentionScores" if scores.kind == "dot" else "L2Scores"
    s = builder.node(kind, inputs, (*unit, n, m), {"scale": scale}, DOMAIN)
    p = builder.node("AttentionWeights", [s], (*unit, n, m), domain=DOMAIN)
    y = builder.node("AttentionAverage", [s, p, values], (*unit, n, v_dim), domain=DOMAIN)
    if dead is not None:
        alive = np.broadcast_to(~dead, (*lead, n, 1)).reshape(*unit, n, 1)
        keep = builder.constant(alive.astype(np.float64), "queries_with_keys")
        y = builder.node("Mul", [y, keep], (*unit, n, v_dim))
    y = builder.reshape(y, (*lead, n, v_dim))
    y = views.apply(builder, steps, y, kept=2)
    if v_t:
        y = builder.swapped(y)
    builder.insert_before(average.node)
    replace(out, y)
    if softmax.outputs[0].uses() and dead is None:  # by others than the average
        other = builder.reshape(p, (*lead, n, m))
        if swap_product:
            other = builder.swapped(other)
        other = views.apply(builder, scores.steps, other)
        builder.insert_before(average.node)
        weights = softmax.outputs[0]
        ir.convenience.replace_all_uses_with(weights, other, replace_graph_outputs=True)
    return Attention(
        name=scores.name,
        heads=heads,
        kv_heads=max(1, heads // max(kv, count(lead) // count(k_shape[:-2]))),
        queries=n,
        keys=m,
        head_dim=q_shape[-1],
        value_dim=v_dim,
        masked=mask is not None,
        scale=scale,
        kind=scores.kind,
        causal=mask is not None and _is_causal(mask, n, m),
    )


def _peeled(query: ir.Value, key_t: ir.Value, factor: np.ndarray) -> tuple[ir.Value, ir.Value, np.ndarray]:
    """Constant factors of queries and keys (both scaled by the root of the scale, say) join the scale."""
    (a, query), (b, key_t) = unscaled(query)[-1], unscaled(key_t)[-1]
    return query, key_t, factor * (a * b)


def _factors(
    factor: np.ndarray, mask: np.ndarray | None, shape: tuple[int, ...], swap: bool
) -> tuple[float, np.ndarray | None, np.ndarray | None, np.ndarray | None, np.ndarray | None]:
    """(scale, factor per query, factor per key, mask, queries without any key); `swap`: of the transposed.

    A factor of 0 where the score is replaced by one that excludes it (`Where`) makes no difference.
    """
    factor = np.broadcast_to(factor, (1,) * (len(shape) - np.ndim(factor)) + np.shape(factor))
    if mask is not None:
        mask = np.asarray(mask).reshape((1,) * (len(shape) - np.ndim(mask)) + np.shape(mask))
    if swap:
        factor = factor.swapaxes(-1, -2)
        mask = None if mask is None else mask.swapaxes(-1, -2)
    dead = None
    if mask is not None:
        excluded = mask <= MASKED
        if np.any(factor == 0.0):
            factor, hidden = np.broadcast_arrays(factor, excluded)
            if not np.all(hidden[factor == 0.0]):
                raise NoUnit("some of its scores are replaced by a constant")
            kept = factor[factor != 0.0]
            if kept.size and np.all(kept == kept[0]):
                factor = np.full((1,) * len(shape), kept[0])
        none = np.all(excluded, axis=-1, keepdims=True)
        if np.any(none):
            dead = none
            mask = np.where(dead, 0.0, mask)
        if not np.any(mask):
            mask = None
    if (value := scalar(factor)) is not None:
        return value, None, None, mask, dead
    if not np.all(np.isfinite(factor)):
        raise NoUnit("its scores are scaled by infinity")
    if factor.shape[-1] == 1 or np.array_equal(factor, np.broadcast_to(factor[..., :1], factor.shape)):
        return 1.0, factor[..., :1], None, mask, dead
    if factor.shape[-2] == 1 or np.array_equal(factor, np.broadcast_to(factor[..., :1, :], factor.shape)):
        return 1.0, None, factor[..., :1, :].swapaxes(-1, -2), mask, dead
    raise NoUnit("its scores are scaled entry by entry")


def _repeated(value: ir.Value) -> int:
    """How many times the heads of the keys were repeated (Expand, Tile, or Gather with repeated indices)."""
    for _ in range(8):
        node = value.producer()
        if node is None or not node.inputs or node.inputs[0] is None:
            return 1
        before, after = sizes(node.inputs[0]), sizes(value)
        if before is None or after is None:
            return 1
        if node.op_type in ("Expand", "Tile") and count(after) > count(before):
            return count(after) // count(before)
        if node.op_type == "Gather" and count(after) > count(before):
            return count(after) // count(before)
        if node.op_type not in (*views.RESHAPES, "Transpose", "Expand", "Tile") and not passes(node):
            return 1
        value = node.inputs[0]
    return 1


def _is_causal(mask: np.ndarray, n: int, m: int) -> bool:
    """Whether every key behind the query is excluded, and no other."""
    excluded = np.broadcast_to(mask <= MASKED, (*mask.shape[:-2], n, m))
    wanted = np.triu(np.ones((n, m), dtype=bool), 1 + m - n)
    return m > 1 and bool(np.all(excluded == wanted))
