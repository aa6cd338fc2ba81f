"""What moves values without changing them."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

from .arithmetic import expanded
from .context import Context, Function, Unsupported, linear_map, placement, reshape_to, select
from .folding import fold_node

DENSE_LIMIT = 16_000_000  # entries of a 0/1 matrix between flattened values


def reshape(ctx: Context) -> Function:
    return reshape_to(ctx.out_shape)


def transpose(ctx: Context) -> Function:
    perm = ctx.attr_ints("perm") or list(range(ctx.rank))[::-1]
    if sorted(perm) != list(range(ctx.rank)):
        raise Unsupported(f"perm {perm} of {ctx.rank} dimensions")
    if ctx.lifted:
        perm = [0, *(p + 1 for p in perm)]
    if perm[0] != 0:
        raise Unsupported(f"perm {perm} moves the batch axis")
    moved = [p for p in perm if ctx.shapes[0][p] != 1]
    if moved == sorted(moved):  # only axes of size 1 move
        return reshape_to(ctx.out_shape)
    return lambda x: x.permute(perm)


def expand(ctx: Context) -> Function:
    return expanded(ctx, 0)


def tile(ctx: Context) -> Function:
    repeats = ctx.ints(1, "repeats")
    if repeats is None or len(repeats) != ctx.rank:
        raise Unsupported(f"repeats {repeats} of {ctx.rank} dimensions")
    maps = []
    for i, r in enumerate(repeats):
        if r != 1:
            axis = ctx.axis(i)
            size = ctx.shapes[0][axis]
            get = ctx.parameter(placement(list(range(size)) * r, size))
            maps.append(linear_map(axis, len(ctx.shapes[0]), get))
    return _chain(maps)


def _chain(maps: list[Function]) -> Function:
    def run(x: Tensor) -> Tensor:
        for f in maps:
            x = f(x)
        return x

    return run


def concat(ctx: Context) -> Function:
    """Constants (a class token, say) enter as a linear placement plus a constant: no copy per sample."""
    rank = len(ctx.out_shape)
    axis = ctx.attr_int("axis", 0)
    axis = axis + rank - ctx.lifted if axis < 0 else axis
    axis += ctx.lifted
    if axis == 0:
        raise Unsupported("acts on the batch axis")
    if all(c is None for c in ctx.constants):
        return lambda *xs: torch.cat(xs, axis)
    fill = torch.zeros(ctx.out_shape[1:], dtype=torch.float64)
    columns, start = [], 0
    for c, shape in zip(ctx.constants, ctx.shapes, strict=True):
        if c is None:
            size = shape[axis]
            columns += list(range(start, start + size))
        else:
            own = c if ctx.lifted else c[0]
            size = own.shape[axis - 1]
            fill.narrow(axis - 1, start, size).copy_(own)
        start += size
    place = linear_map(axis, rank, ctx.parameter(placement(columns, start).T))
    get_fill = ctx.parameter(fill)
    return lambda *xs: place(xs[0] if len(xs) == 1 else torch.cat(xs, axis)) + get_fill()


def split(ctx: Context) -> list[Function]:
    axis = ctx.axis(ctx.attr_int("axis", 0))
    functions, start = [], 0
    if len(ctx.out_shapes) != len(ctx.node.outputs):
        raise Unsupported("the shapes of its outputs could not be inferred")
    for shape in ctx.out_shapes:
        functions.append(select(ctx, axis, list(range(start, start + shape[axis]))))
        start += shape[axis]
    if start != ctx.shapes[0][axis]:
        raise Unsupported(f"its parts have {start} of {ctx.shapes[0][axis]} entries")
    return functions


def gather(ctx: Context) -> Function:
    index = ctx.constants[1]
    if index is None:
        raise Unsupported(
            "the indices depend on the input; bounds of an embedding start behind it, see input_node"
        )
    axis = ctx.axis(ctx.attr_int("axis", 0))
    size = ctx.shapes[0][axis]
    entries = [int(i) for i in index.flatten()]
    if any(not -size <= i < size for i in entries):
        raise Unsupported(f"an index out of range: the axis has {size} entries")
    pick = select(ctx, axis, [i % size for i in entries])
    if index.ndim == 1:
        return pick
    end = reshape_to(ctx.out_shape)
    return lambda x: end(pick(x))


def slice_(ctx: Context) -> Function:
    starts, ends = ctx.ints(1, "starts"), ctx.ints(2, "ends")
    if starts is None or ends is None:
        raise Unsupported("starts and ends must be constants")
    axes = ctx.ints(3, "axes") or list(range(len(starts)))
    steps = ctx.ints(4, "steps") or [1] * len(starts)
    if not len(starts) == len(ends) == len(axes) == len(steps) or 0 in steps:
        raise Unsupported(f"starts {starts}, ends {ends}, axes {axes}, steps {steps}")
    maps = []
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        if not -ctx.rank <= axis < ctx.rank:
            raise Unsupported(f"axis {axis} does not exist: the input has {ctx.rank} dimensions")
        own = axis % ctx.rank + ctx.lifted
        size = ctx.shapes[0][own]
        indices = list(range(size))[slice(start, end, step)]
        if indices != list(range(size)):
            maps.append(select(ctx, ctx.axis(axis), indices))
    return _chain(maps)


def pad(ctx: Context) -> Function:
    """Constant padding along any axes; the other modes as a selection of entries."""
    mode = ctx.attr_string("mode", "constant")
    pads = ctx.ints(1, "pads") or ctx.ints(1, "paddings") or []
    axes = ctx.ints(3, "axes") if len(ctx.present) > 3 else None
    axes = list(range(ctx.rank)) if axes is None else axes
    if len(pads) != 2 * len(axes) or mode not in ("constant", "reflect", "edge", "wrap"):
        raise Unsupported(f"mode {mode!r}, pads {pads}")
    value = ctx.optional(2)
    fill = ctx.attr_float("value", 0.0) if value is None else float(value)
    maps, shape = [], list(ctx.shapes[0])
    inside = torch.ones(ctx.shapes[0][1:], dtype=torch.float64)
    for axis, before, after in zip(axes, pads[: len(axes)], pads[len(axes) :], strict=True):
        if before == after == 0:
            continue
        own = ctx.axis(axis)
        size = shape[own]
        numbers = np.arange(1, size + 1)
        if before < 0 or after < 0:
            if mode != "constant":
                raise Unsupported(f"mode {mode!r}, pads {pads}")
            numbers = numbers[max(-before, 0) : size - max(-after, 0)]
        widths = (max(before, 0), max(after, 0))
        numbers = np.pad(numbers, widths, mode=mode)  # type: ignore[call-overload]
        matrix = torch.zeros(size, len(numbers), dtype=torch.float64)
        for j, i in enumerate(numbers):
            if i > 0:  # else the constant
                matrix[i - 1, j] = 1.0
        maps.append(linear_map(own, len(shape), ctx.parameter(matrix)))
        inside = linear_map(own - 1, inside.ndim, lambda m=matrix: m)(inside)  # type: ignore[misc]
        shape[own] = len(numbers)
    run = _chain(maps)
    if fill == 0.0 or mode != "constant" or bool((inside > 0).all()):
        return run
    get = ctx.parameter((inside == 0).double() * fill)
    return lambda x: run(x) + get()


def trilu(ctx: Context) -> Function:
    """A triangle of every matrix: a product with 0 and 1."""
    offset = ctx.optional(1)
    k = 0 if offset is None else int(offset)
    ones = torch.ones(ctx.shapes[0][-2:], dtype=torch.float64)
    get = ctx.parameter(torch.triu(ones, k) if ctx.attr_int("upper", 1) else torch.tril(ones, k))
    return lambda x: x * get()


def cum_sum(ctx: Context) -> Function:
    axis = ctx.axis(int(ctx.constant(1, "the axis")))
    matrix = torch.triu(torch.ones(ctx.shapes[0][axis], ctx.shapes[0][axis], dtype=torch.float64))
    if ctx.attr_int("exclusive", 0):
        matrix = torch.triu(matrix, 1)
    if ctx.attr_int("reverse", 0):
        matrix = matrix.T
    return linear_map(axis, len(ctx.shapes[0]), ctx.parameter(matrix))


def moved(ctx: Context) -> Function:
    """Any operator that only picks entries: what it does to their numbers says which."""
    if any(c is None for c in ctx.constants[1:]):
        raise Unsupported("its other inputs must be constants")
    size = math.prod(ctx.shapes[0])
    count = math.prod(ctx.out_shape)
    if size * count > DENSE_LIMIT:
        raise Unsupported(f"picks {count} of {size} entries; too many for a matrix")
    numbers = np.arange(1.0, size + 1).reshape(ctx.shapes[0][ctx.lifted :])
    others = [None if c is None else c.numpy() for c in ctx.constants[1:]]
    found = fold_node(ctx.node, [numbers, *others], ctx.opset)[0]
    picked = [int(i) - 1 for i in found.flatten()]
    if len(picked) != count or min(picked) < 0:
        raise Unsupported("does not only pick entries")
    get = ctx.parameter(placement(picked, size))
    end = reshape_to(ctx.out_shape)
    return lambda x: end(torch.matmul(x.reshape(-1, size), get()))


def identity(ctx: Context) -> Function:
    return lambda x: x


def dropout(ctx: Context) -> Function:
    training = ctx.optional(2) if ctx.opset >= 12 else None
    if (training is not None and bool(training)) or (ctx.opset < 7 and not ctx.attr_int("is_test", 0)):
        raise Unsupported("training mode; export the model in eval mode")
    return lambda x: x


def cast(ctx: Context) -> Function:
    if ctx.attr_int("to", 1) not in (ir.DataType.FLOAT, ir.DataType.DOUBLE):
        raise Unsupported("cast of data to a type that is not float or double")
    return lambda x: x
