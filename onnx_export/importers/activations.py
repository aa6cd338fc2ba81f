"""Functions of single entries, and softmax."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import functions
from .arithmetic import clamped
from .context import Context, Function, Unsupported


def unary(f: Function) -> Callable[[Context], Function]:
    return lambda ctx: f


def leaky_relu(ctx: Context) -> Function:
    slope = ctx.attr_float("alpha", 0.01)
    if 0 <= slope <= 1:
        return lambda x: F.leaky_relu(x, slope)
    return lambda x: torch.relu(x) + torch.relu(x * -1.0) * -slope


def prelu(ctx: Context) -> Function:
    slope = ctx.stored(ctx.constant(1, "the slope") * -1.0)
    return lambda x: torch.relu(x) + torch.relu(x * -1.0) * slope()


def _exponential_below(scale: float, inner: float, gain: float) -> Function:
    """gain · (relu(x) + scale (e^(min(x, 0) / inner) − 1))."""

    def run(x: Tensor) -> Tensor:
        below = torch.exp(torch.relu(x * -1.0) * (-1.0 / inner))
        return torch.relu(x) * gain + (below * (scale * gain) + -scale * gain)

    return run


def elu(ctx: Context) -> Function:
    return _exponential_below(ctx.attr_float("alpha", 1.0), 1.0, 1.0)


def celu(ctx: Context) -> Function:
    alpha = ctx.attr_float("alpha", 1.0)
    if alpha <= 0:
        raise Unsupported(f"alpha={alpha:g}; it must be positive")
    return _exponential_below(alpha, alpha, 1.0)


def selu(ctx: Context) -> Function:
    alpha = ctx.attr_float("alpha", 1.67326319217681884765625)
    return _exponential_below(alpha, 1.0, ctx.attr_float("gamma", 1.05070102214813232421875))


def softsign(ctx: Context) -> Function:
    def run(x: Tensor) -> Tensor:
        return x * torch.reciprocal(torch.abs(x) + 1.0)

    return run


def hard_sigmoid(ctx: Context) -> Function:
    slope, shift = ctx.attr_float("alpha", 0.2), ctx.attr_float("beta", 0.5)
    limits = clamped(0.0, 1.0)
    return lambda x: limits(x * slope + shift)


def hard_swish(ctx: Context) -> Function:
    limits = clamped(0.0, 1.0)
    return lambda x: x * limits(x * (1.0 / 6.0) + 0.5)


def gelu(ctx: Context) -> Function:
    """Exact, or by tanh."""
    approximate = ctx.attr_string("approximate", "none")
    if approximate not in ("none", "tanh"):
        raise Unsupported(f"approximate={approximate!r}")
    return lambda x: functions.gelu(x, approximate)


def swish(ctx: Context) -> Function:
    """x σ(αx)."""
    alpha = ctx.attr_float("alpha", 1.0)
    if abs(alpha - functions.QUICK) < 1e-6:
        return functions.quick_gelu
    if alpha == 1.0:
        return functions.silu
    if alpha == 0.0:
        return lambda x: x * 0.5
    return lambda x: functions.silu(x * alpha) * (1.0 / alpha)


def _flat(ctx: Context, f: Function) -> Function:
    """f over the last axis, input 0 turned so that the softmax's axis is there.

    Before opset 13 that axis and all that follow are one.
    """
    shape = ctx.shapes[0]
    last = len(shape) - 1
    axis = ctx.axis(ctx.attr_int("axis", 1 if ctx.opset < 13 else -1))
    if ctx.opset < 13 and math.prod(shape[axis + 1 :]) != 1:
        rows = (-1, *shape[1:axis], math.prod(shape[axis:]))
        whole = (-1, *shape[1:])
        return lambda x: f(x.reshape(rows)).reshape(whole)
    if axis == last:
        return f
    perm = list(range(last + 1))
    perm[axis], perm[last] = last, axis
    return lambda x: f(x.permute(perm)).permute(perm)


def softmax(ctx: Context) -> Function:
    return _flat(ctx, lambda x: torch.softmax(x, -1))


def log_sum_exp(x: Tensor) -> Tensor:
    """Of values whose mean over the last axis is 0: the sum is then at least the number of values."""
    return torch.log(torch.exp(x).sum(-1, keepdim=True))


def log_softmax(ctx: Context) -> Function:
    def run(x: Tensor) -> Tensor:
        centred = x + x.mean(-1, keepdim=True) * -1.0
        return centred + log_sum_exp(centred) * -1.0

    return _flat(ctx, run)
