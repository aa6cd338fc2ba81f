"""The attention operators that `simplify` puts into a graph."""

from __future__ import annotations

from attn_bounds.sensitivity.softmax import FULLY_MASKED, MASKED

from .. import ops
from .context import Context, Function, Unsupported


def attention_scores(ctx: Context) -> Function:
    scores = ops.l2_scores if ctx.node.op_type == "L2Scores" else ops.attention_scores
    scale = ctx.attr_float("scale", 1.0)
    mask = ctx.optional(2)
    if mask is not None and bool((mask <= FULLY_MASKED).all(-1).any()):
        raise Unsupported("the mask excludes every key of some query")
    # −inf would turn into NaN as soon as it is multiplied by a zero coefficient.
    get = (lambda: None) if mask is None else ctx.parameter(ctx.unbatched(mask).clamp(min=MASKED))
    query, key = ctx.constants[:2]
    if query is not None:  # learned queries
        get_q = ctx.parameter(ctx.unbatched(query))
        return lambda k: scores(get_q(), k, get(), scale=scale)
    if key is not None:
        get_k = ctx.parameter(ctx.unbatched(key))
        return lambda q: scores(q, get_k(), get(), scale=scale)
    return lambda q, k: scores(q, k, get(), scale=scale)
