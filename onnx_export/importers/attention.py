"""The attention operators that `simplify` puts into a graph."""

from __future__ import annotations

from attn_bounds.sensitivity.softmax import FULLY_MASKED

from .. import ops
from .context import Context, Function, Unsupported


def attention_scores(ctx: Context) -> Function:
    scores = ops.l2_scores if ctx.node.op_type == "L2Scores" else ops.attention_scores
    scale = ctx.attr_float("scale", 1.0)
    mask = ctx.optional(2)
    if mask is None:
        return lambda q, k: scores(q, k, scale=scale)
    if bool((mask <= FULLY_MASKED).all(-1).any()):
        raise Unsupported("the mask excludes every key of some query")
    # −inf would turn into NaN as soon as it is multiplied by a zero coefficient; e^−1e9 is 0 all the same.
    get = ctx.parameter(ctx.unbatched(mask).clamp(min=-1e9))
    return lambda q, k: scores(q, k, get(), scale=scale)
