"""One attention unit: what was found of it, and the three operators of `ops.py` that take its place."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from . import views
from .algebra import MASKED, scalar
from .distances import unscaled
from .graph import Builder, count, passes, replace, sizes
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
class Scores:
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


@dataclass(frozen=True)
class Average:
    """The product of the weights and the values."""

    node: ir.Node
    steps: list[Step]  # from the weights to the operand
    left: bool  # the weights are the first operand
    guarded: bool  # weights of a query without any key are 0, not NaN


def emit(graph: ir.Graph, softmax: ir.Node, scores: Scores, average: Average) -> Attention:
    """Put the three operators in place of the product, the softmax and the average."""
    out = average.node.outputs[0]
    builder = Builder(graph, average.node.name or str(out.name), softmax.outputs[0].dtype)
    query, key_t = scores.query, scores.key
    factor, mask = scores.factor, scores.mask
    if scores.kind == "dot":
        (of_query, query), (of_key, key_t) = (_peeled(builder, v) for v in (query, key_t))
        factor = factor * (of_query * of_key)
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


def _peeled(builder: Builder, value: ir.Value) -> tuple[float, ir.Value]:
    """(c, v) with `value = c · v`; the factor may stand in front of Transposes and Reshapes."""
    source, factor = value, 1.0
    steps: list[Step] = []
    while True:
        own, source = unscaled(source)[-1]
        factor *= own
        node = source.producer()
        step = views.step_of(node) if node is not None else None
        if node is None or step is None or node.inputs[0] is None:
            break
        steps.insert(0, step)
        source = node.inputs[0]
    if factor == 1.0:
        return 1.0, value
    return factor, views.apply(builder, views.composed(steps), source)


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
