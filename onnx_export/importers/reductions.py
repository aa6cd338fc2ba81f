"""Reductions over axes of a sample."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .activations import log_sum_exp
from .context import Context, Function, Unsupported, placement, reshape_to


def _axes(ctx: Context) -> list[int] | None:
    """Axes of what the module holds; None where nothing is reduced."""
    axes = ctx.ints(1, "axes")
    if not axes:
        if ctx.attr_int("noop_with_empty_axes", 0):
            return None
        axes = list(range(ctx.rank))
    return sorted({ctx.axis(a) for a in axes})


def reduce_mean(ctx: Context) -> Function:
    axes = _axes(ctx)
    if axes is None:
        return lambda x: x
    keep = bool(ctx.attr_int("keepdims", 1))
    count = math.prod(ctx.shapes[0][a] for a in axes)
    if ctx.node.op_type == "ReduceMean":
        return lambda x: torch.mean(x, axes, keepdim=keep)
    return lambda x: torch.mean(x, axes, keepdim=keep) * float(count)


def _of_sum(before: Function, after: Function) -> Callable[[Context], Function]:
    def importer(ctx: Context) -> Function:
        axes = _axes(ctx)
        if axes is None:
            return lambda x: after(before(x))
        keep = bool(ctx.attr_int("keepdims", 1))
        count = float(math.prod(ctx.shapes[0][a] for a in axes))
        return lambda x: after(torch.mean(before(x), axes, keepdim=keep) * count)

    return importer


reduce_l1 = _of_sum(torch.abs, lambda x: x)
reduce_l2 = _of_sum(lambda x: x * x, torch.sqrt)
reduce_sum_square = _of_sum(lambda x: x * x, lambda x: x)
reduce_log_sum = _of_sum(lambda x: x, torch.log)


def _rows(ctx: Context, f: Function) -> Function:
    """f: (batch, …, n) → (batch, …, 1) of the reduced axes as one."""
    axes = _axes(ctx)
    if axes is None:
        raise Unsupported("reduces nothing")
    shape = ctx.shapes[0]
    kept = [a for a in range(len(shape)) if a not in axes]
    perm = [*kept, *axes]
    rows = (-1, *(shape[a] for a in kept[1:]), math.prod(shape[a] for a in axes))
    end = reshape_to(ctx.out_shape)
    return lambda x: end(f(x.permute(perm).reshape(rows)))


def reduce_max(ctx: Context) -> Function:
    """By halves, max(a, b) = b + relu(a − b): auto_LiRPA bounds no maximum as such that it may shift."""
    axes = _axes(ctx)
    n = 1 if axes is None else math.prod(ctx.shapes[0][a] for a in axes)
    sign = 1.0 if ctx.node.op_type == "ReduceMax" else -1.0
    rounds = []
    while n > 1:
        half = (n + 1) // 2
        second = placement([min(i + half, n - 1) for i in range(half)], n)
        difference = placement(list(range(half)), n) - second
        rounds.append((ctx.parameter(difference), ctx.parameter(second)))
        n = half

    def run(x: Tensor) -> Tensor:
        x = x if sign > 0 else x * -1.0
        for difference, second in rounds:
            x = torch.relu(torch.matmul(x, difference())) + torch.matmul(x, second())
        return x if sign > 0 else x * -1.0

    return _rows(ctx, run)


def reduce_log_sum_exp(ctx: Context) -> Function:
    def run(x: Tensor) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        return mean + log_sum_exp(x + mean * -1.0)

    return _rows(ctx, run)


def global_average_pool(ctx: Context) -> Function:
    ctx.axis(1)
    axes = list(range(2 + ctx.lifted, len(ctx.shapes[0])))
    return lambda x: torch.mean(x, axes, keepdim=True)
