"""What moves values without changing them."""

from __future__ import annotations

import onnx_ir as ir
import torch
from torch import Tensor

from .context import Context, Function, Unsupported, reshape_to, select


def reshape(ctx: Context) -> Function:
    return reshape_to(ctx.out_shape)


def transpose(ctx: Context) -> Function:
    perm = ctx.attr_ints("perm") or list(range(len(ctx.out_shape)))[::-1]
    if perm[0] != 0:
        raise Unsupported(f"perm {perm} moves the batch axis")
    return lambda x: x.permute(perm)


def concat(ctx: Context) -> Function:
    """Constants (a class token, say) enter as a linear placement plus a constant: no copy per sample."""
    axis = ctx.axis(ctx.attr_int("axis", 0))
    if all(c is None for c in ctx.constants):
        return lambda *xs: torch.cat(xs, axis)
    sizes = [s[axis] for s in ctx.shapes]
    fill = torch.zeros(ctx.out_shape, dtype=torch.float64)
    columns, start = [], 0
    for c, size in zip(ctx.constants, sizes, strict=True):
        if c is None:
            columns += list(range(start, start + size))
        else:
            fill.narrow(axis, start, size).copy_(c)
        start += size
    place = torch.zeros(len(columns), start, dtype=torch.float64)
    place[torch.arange(len(columns)), torch.tensor(columns)] = 1.0
    get_place, get_fill = ctx.parameter(place), ctx.parameter(ctx.unbatched(fill))
    last = len(ctx.out_shape) - 1
    perm = list(range(last + 1))
    perm[axis], perm[last] = last, axis

    def run(*xs: Tensor) -> Tensor:
        x = xs[0] if len(xs) == 1 else torch.cat(xs, axis)
        if axis == last:
            return torch.matmul(x, get_place()) + get_fill()
        return torch.matmul(x.permute(perm), get_place()).permute(perm) + get_fill()

    return run


def split(ctx: Context) -> list[Function]:
    axis = ctx.axis(ctx.attr_int("axis", 0))
    functions, start = [], 0
    for shape in ctx.out_shapes:
        functions.append(select(ctx, axis, list(range(start, start + shape[axis])), keep=True))
        start += shape[axis]
    return functions


def gather(ctx: Context) -> Function:
    axis = ctx.axis(ctx.attr_int("axis", 0))
    index = ctx.constant(1, "the index")
    if index.ndim > 1:
        raise Unsupported(f"index of rank {index.ndim}")
    size = ctx.shapes[0][axis]
    return select(ctx, axis, [int(i) % size for i in index.flatten()], keep=index.ndim == 1)


def slice_(ctx: Context) -> Function:
    starts, ends = ctx.ints(1, "starts"), ctx.ints(2, "ends")
    if starts is None or ends is None:
        raise Unsupported("starts and ends must be constants")
    axes = ctx.ints(3, "axes") or list(range(len(starts)))
    steps = ctx.ints(4, "steps") or [1] * len(starts)
    active = []
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        size = ctx.shapes[0][axis]
        indices = list(range(size))[slice(start, end if abs(end) < 2**31 else None, step)]
        if len(indices) != size:
            active.append((ctx.axis(axis), indices))
        elif step != 1:
            raise Unsupported(f"step {step}")
    if len(active) > 1:
        raise Unsupported("slices along several axes at once")
    if not active:
        return lambda x: x
    return select(ctx, *active[0], keep=True)


def identity(ctx: Context) -> Function:
    return lambda x: x


def cast(ctx: Context) -> Function:
    if ctx.attr_int("to", 1) not in (ir.DataType.FLOAT, ir.DataType.DOUBLE):
        raise Unsupported("cast of data to a type that is not float or double")
    return lambda x: x
