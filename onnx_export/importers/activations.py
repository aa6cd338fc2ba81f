"""Functions of single entries, and softmax."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from .context import Context, Function, Unsupported


def unary(f: Function) -> Callable[[Context], Function]:
    return lambda ctx: f


def leaky_relu(ctx: Context) -> Function:
    slope = ctx.attr_float("alpha", 0.01)
    return lambda x: F.leaky_relu(x, slope)


def softmax(ctx: Context) -> Function:
    last = len(ctx.shapes[0]) - 1
    axis = ctx.axis(ctx.attr_int("axis", 1 if ctx.opset < 13 else -1))
    if ctx.opset < 13 and math.prod(ctx.shapes[0][axis + 1 :]) != 1:
        raise Unsupported("Softmax of an opset below 13 over several axes at once")
    if axis != last:
        perm = list(range(last + 1))
        perm[axis], perm[last] = last, axis
        return lambda x: torch.softmax(x.permute(perm), -1).permute(perm)
    return lambda x: torch.softmax(x, -1)
