"""Reductions over axes of a sample."""

from __future__ import annotations

import math

import torch

from .context import Context, Function, Unsupported


def reduce_mean(ctx: Context) -> Function:
    axes = ctx.ints(1, "axes")
    if axes is None:
        raise Unsupported("mean over all axes, the batch included")
    axes = sorted(ctx.axis(a) for a in axes)
    keep = bool(ctx.attr_int("keepdims", 1))
    count = math.prod(ctx.shapes[0][a] for a in axes)
    if ctx.node.op_type == "ReduceMean":
        return lambda x: torch.mean(x, axes, keepdim=keep)
    return lambda x: torch.mean(x, axes, keepdim=keep) * float(count)
