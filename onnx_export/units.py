"""One attention unit: what was found of it, and the three operators of `ops.py` that take its place."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from attn_bounds.sensitivity.softmax import FULLY_MASKED

from . import views
from .algebra import scalar
from .distances import unscaled
from .graph import Builder, passes, replace, sizes
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


# A constant in place of a score excludes the key if no other score of the query is as low.
REPLACED = -1e8


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
    values: ir.Value
    steps: list[Step]  # from the weights to the operand
    left: bool  # the weights are the first operand
    guarded: bool  # weights of a query without any key are 0, not NaN


@dataclass(frozen=True)
class _Plan:
    """Sizes of a unit in the axes of its product, and the way from its weights to the values."""

    lead: tuple[int, ...]
    queries: int
    keys: int
    head_dim: int
    value_dim: int
    swapped: bool  # the softmax is over the rows of the product: queries and keys change roles
    steps: list[Step]  # of the leading axes, from the weights to where they meet the values
    lead_out: tuple[int, ...]  # leading axes there

    @property
    def unit(self) -> tuple[int, ...]:
        """Leading axes that the operators take: the batch, of size 1 here, and one axis for the heads."""
        plain = len(self.lead) in (1, 2) and self.lead[0] == 1
        return self.lead if plain else (1, math.prod(self.lead))


def _plan(query: ir.Value, key: ir.Value, scores: Scores, average: Average) -> _Plan:
    q_shape, k_shape = sizes(query), sizes(key)
    if q_shape is None or k_shape is None or min(len(q_shape), len(k_shape)) < 2:
        raise NoUnit("the shapes of queries and keys are not known")
    lead = tuple(np.broadcast_shapes(q_shape[:-2], k_shape[:-2]))
    rank = len(lead) + 2
    if scores.axis not in (rank - 1, rank - 2):
        raise NoUnit("it is over an axis that is neither that of the queries nor that of the keys")
    swapped = scores.axis == rank - 2
    rows = views.on_rows(views.composed([*scores.steps, *average.steps]))
    if rows is None:
        raise NoUnit("its weights do not meet the values as rows")
    steps, turned = rows
    if (turned ^ swapped) == average.left:
        raise NoUnit("the values are averaged over the queries")
    v_shape = sizes(average.values)
    out_shape, lead_out = sizes(average.node.outputs[0]), steps[-1].after if steps else lead
    if v_shape is None or out_shape is None or len(v_shape) < 2:
        raise NoUnit("the shape of the values is not known")
    n, m = q_shape[-2], k_shape[-2 if scores.transposed else -1]
    if swapped:
        n, m = m, n
    m_values, width = v_shape[-2:] if average.left else v_shape[:-3:-1]
    if m_values != m or out_shape[:-2] != lead_out:
        raise NoUnit(f"values of shape {v_shape} do not match {n} queries and {m} keys")
    return _Plan(lead, n, m, q_shape[-1], width, swapped, steps, lead_out)


def _operands(
    builder: Builder,
    plan: _Plan,
    scores: Scores,
    average: Average,
    query: ir.Value,
    key: ir.Value,
    f: _Factors,
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Queries (…, n, d), keys (…, m, d) and values (…, m, dv) as the operators take them."""
    if not scores.transposed:
        key = builder.swapped(key)
    query, key = (builder.expand(v, (*plan.lead, *(sizes(v) or ())[-2:])) for v in (query, key))
    if plan.swapped:
        query, key = key, query
    if f.of_queries is not None:
        query = builder.node("Mul", [query, builder.constant(f.of_queries, "factor")], sizes(query))
    if f.of_keys is not None:
        key = builder.node("Mul", [key, builder.constant(f.of_keys, "factor")], sizes(key))
    values = average.values if average.left else builder.swapped(average.values)
    values = builder.expand(values, (*plan.lead_out, plan.keys, plan.value_dim))
    values = views.apply(builder, views.inverted(plan.steps), values, kept=2)
    query, key, values = (
        builder.reshape(v, (*plan.unit, *(sizes(v) or ())[-2:])) for v in (query, key, values)
    )
    return query, key, values


def _mask(builder: Builder, plan: _Plan, mask: np.ndarray) -> ir.Value:
    """The mask in the axes of the operators, stored once where all heads share it."""
    n, m = plan.queries, plan.keys
    full = np.broadcast_to(mask, (*plan.lead, n, m)).reshape(*plan.unit, n, m)
    shared = full[:1, :1] if len(plan.unit) == 2 else full
    same = np.array_equal(full, np.broadcast_to(shared, full.shape))
    return builder.constant(np.ascontiguousarray(shared if same else full), "mask")


def emit(graph: ir.Graph, softmax: ir.Node, scores: Scores, average: Average) -> Attention:
    """Put the three operators in place of the product, the softmax and the average.

    Raises:
        NoUnit: the sizes do not fit, or the scores are more than scaled and masked; nothing has changed then.
    """
    out, weights = average.node.outputs[0], softmax.outputs[0]
    builder = Builder(graph, average.node.name or str(out.name), weights.dtype)
    query, key, factor = scores.query, scores.key, scores.factor
    if scores.kind == "dot":
        (of_query, query), (of_key, key) = (_peeled(builder, v) for v in (query, key))
        factor = factor * (of_query * of_key)
    plan = _plan(query, key, scores, average)
    n, m = plan.queries, plan.keys
    product = (*plan.lead, *((m, n) if plan.swapped else (n, m)))
    for array in (factor, scores.mask):
        if array is not None and np.broadcast_shapes(np.shape(array), product) != product:
            raise NoUnit("one product serves several softmaxes, with a mask for each")
    f = _factors(factor, scores.mask, len(plan.lead) + 2, plan.swapped)
    if f.dead is not None and not average.guarded:
        raise NoUnit("its mask excludes every key of some query")
    if scores.kind != "dot" and (f.of_queries is not None or f.of_keys is not None):
        raise NoUnit("its distances are scaled row by row")
    repeated = max(_repeated(key), math.prod(plan.lead) // math.prod((sizes(key) or ())[:-2]))
    q, k, v = _operands(builder, plan, scores, average, query, key, f)
    inputs = [q, k] if f.mask is None else [q, k, _mask(builder, plan, f.mask)]
    kind = "AttentionScores" if scores.kind == "dot" else "L2Scores"
    s = builder.node(kind, inputs, (*plan.unit, n, m), {"scale": f.scale}, DOMAIN)
    p = builder.node("AttentionWeights", [s], (*plan.unit, n, m), domain=DOMAIN)
    y = builder.node("AttentionAverage", [s, p, v], (*plan.unit, n, plan.value_dim), domain=DOMAIN)
    if f.dead is not None:
        alive = np.broadcast_to(~f.dead, (*plan.lead, n, 1)).reshape(*plan.unit, n, 1)
        keep = builder.constant(alive.astype(np.float64), "queries_with_keys")
        y = builder.node("Mul", [y, keep], sizes(y))
    y = views.apply(builder, plan.steps, builder.reshape(y, (*plan.lead, n, plan.value_dim)), kept=2)
    y = y if average.left else builder.swapped(y)
    builder.insert_before(average.node)
    replace(out, y)
    if weights.uses() and f.dead is None:  # by others than the average
        other = builder.reshape(p, (*plan.lead, n, m))
        other = views.apply(builder, scores.steps, builder.swapped(other) if plan.swapped else other)
        builder.insert_before(average.node)
        ir.convenience.replace_all_uses_with(weights, other, replace_graph_outputs=True)
    heads = math.prod(plan.lead)
    return Attention(
        name=scores.name,
        heads=heads,
        kv_heads=max(1, heads // repeated),
        queries=n,
        keys=m,
        head_dim=plan.head_dim,
        value_dim=plan.value_dim,
        masked=f.mask is not None,
        scale=f.scale,
        kind=scores.kind,
        causal=f.mask is not None and _is_causal(f.mask, n, m),
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


@dataclass(frozen=True)
class _Factors:
    """What scores are multiplied by, and what is added: `scale · (of_queries · of_keys)` and `mask`."""

    scale: float
    of_queries: np.ndarray | None = None  # (…, n, 1)
    of_keys: np.ndarray | None = None  # (…, m, 1)
    mask: np.ndarray | None = None
    dead: np.ndarray | None = None  # (…, n, 1), queries without any key; their mask is 0


def _factors(factor: np.ndarray, mask: np.ndarray | None, rank: int, swapped: bool) -> _Factors:
    """Take the factor of the scores apart; `swapped`: it is given for the transposed scores.

    A factor of 0 where the score is replaced by one that excludes it (`Where`) makes no difference.
    """

    def aligned(array: np.ndarray) -> np.ndarray:
        array = np.asarray(array)
        array = array.reshape((1,) * (rank - array.ndim) + array.shape)
        return array.swapaxes(-1, -2) if swapped else array

    factor, dead = aligned(factor), None
    if mask is not None:
        mask = aligned(mask)
        top = mask.max(axis=-1, keepdims=True)
        dead = np.isneginf(top)
        if np.any(factor == 0.0):
            factor, hidden, rows = np.broadcast_arrays(factor, mask <= FULLY_MASKED, top > FULLY_MASKED)
            if not np.all((hidden & (rows | dead))[factor == 0.0]):
                raise NoUnit("some of its scores are replaced by a constant")
            # a score that is replaced does not depend on what it was, as one that is lowered does
            replaced = (factor == 0.0) & ~dead
            mask = np.broadcast_to(mask, replaced.shape)
            if np.any(replaced) and mask[replaced].max() > REPLACED:
                raise NoUnit(
                    f"scores are replaced by {mask[replaced].max():g}, which others may fall below; "
                    "-inf excludes a key"
                )
            mask = np.where(replaced, -np.inf, mask)
            kept = factor[factor != 0.0]
            if kept.size and np.all(kept == kept[0]):
                factor = np.full((1,) * rank, kept[0])
        mask = np.where(dead, 0.0, mask)
        # what a whole row is lowered by does not matter
        mask = mask - np.where((top <= FULLY_MASKED) & ~dead, top, 0.0)
        mask, dead = mask if np.any(mask) else None, dead if np.any(dead) else None
    if not np.all(np.isfinite(factor)):
        raise NoUnit("its scores are scaled by what is not finite")
    if (value := scalar(factor)) is not None:
        return _Factors(value, mask=mask, dead=dead)
    by_query, by_key = factor[..., :1], factor[..., :1, :]
    if np.array_equal(factor, np.broadcast_to(by_query, factor.shape)):
        return _Factors(1.0, of_queries=by_query, mask=mask, dead=dead)
    if np.array_equal(factor, np.broadcast_to(by_key, factor.shape)):
        return _Factors(1.0, of_keys=by_key.swapaxes(-1, -2), mask=mask, dead=dead)
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
        if node.op_type in ("Expand", "Tile") and math.prod(after) > math.prod(before):
            return math.prod(after) // math.prod(before)
        if node.op_type == "Gather" and math.prod(after) > math.prod(before):
            return math.prod(after) // math.prod(before)
        if node.op_type not in (*views.RESHAPES, "Transpose", "Expand", "Tile") and not passes(node):
            return 1
        value = node.inputs[0]
    return 1


def _is_causal(mask: np.ndarray, n: int, m: int) -> bool:
    """Whether every key behind the query is excluded, and no other."""
    excluded = np.broadcast_to(mask <= FULLY_MASKED, (*mask.shape[:-2], n, m))
    wanted = np.triu(np.ones((n, m), dtype=bool), 1 + m - n)
    return m > 1 and bool(np.all(excluded == wanted))
