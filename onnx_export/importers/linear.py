"""Products: MatMul, Gemm, Einsum and Conv with constant weights, and products of two tensors."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .arithmetic import expanded
from .context import Context, Function, Unsupported, linear_map

BLOCK_LIMIT = 50_000_000  # entries of a block-diagonal matrix that stands for a batch of matrices


def weighted(ctx: Context, weight: Tensor, shape: tuple[int, ...]) -> Function:
    """x @ weight with x (batch, …, n, k) of this shape and weight (k, m) or (…, k, m).

    A batch of matrices is one block-diagonal matrix: no version bounds a product with more than two axes
    of weights.
    """
    while weight.ndim > 2 and weight.shape[0] == 1:
        weight = weight[0]
    if weight.ndim == 2:
        get = ctx.parameter(weight)
        return lambda x: torch.matmul(x, get())
    outer = tuple(weight.shape[:-2])
    k, m = weight.shape[-2:]
    lead = shape[1:-2]
    if len(outer) > len(lead):
        raise Unsupported(f"product with a constant of rank {weight.ndim}, larger than the data's")
    count = math.prod(outer)
    own = lead[len(lead) - len(outer) :]
    if any(a not in (1, b) for a, b in zip(own, outer, strict=True)) and own != outer:
        weight = weight.expand(*own, k, m)
        outer, count = own, math.prod(own)
    if count * k * count * m > BLOCK_LIMIT:
        raise Unsupported(f"product with a batch of {count} matrices of {k} x {m}")
    blocks = ctx.parameter(torch.block_diag(*weight.reshape(count, k, m)))
    free, n = lead[: len(lead) - len(outer)], shape[-2]
    repeats = [
        (1 + len(free) + i, ctx.parameter(torch.ones(1, b, dtype=torch.float64)))
        for i, (a, b) in enumerate(zip(own, outer, strict=True))
        if a != b
    ]
    rank = len(shape)
    places = [linear_map(axis, rank, ones) for axis, ones in repeats]
    f = len(free)
    into = [0, *range(1, 1 + f), 1 + f + 1, 1 + f, 1 + f + 2]  # (batch, free, count, n, k) → (…, n, count, k)

    def run(x: Tensor) -> Tensor:
        for place in places:
            x = place(x)
        x = x.reshape(-1, *free, count, n, k).permute(into).reshape(-1, *free, n, count * k)
        y = torch.matmul(x, blocks()).reshape(-1, *free, n, count, m).permute(into)
        return y.reshape(-1, *free, *outer, n, m)

    return run


def _turned(f: Function) -> Function:
    return lambda x: f(x.transpose(-2, -1)).transpose(-2, -1)


def _constant_right(ctx: Context, i: int, b: Tensor) -> Function:
    """Data input i times a constant."""
    shape = ctx.shapes[i]
    if b.ndim == 1:
        column = _constant_right_matrix(ctx, shape, b.reshape(-1, 1))
        target = ctx.out_shape[1:]
        return lambda x: column(x).reshape(-1, *target)
    if b.ndim > 2 and len(shape) - ctx.lifted == 1:
        raise Unsupported("product of a vector with a batch of constants")
    return _constant_right_matrix(ctx, shape, b)


def _constant_right_matrix(ctx: Context, shape: tuple[int, ...], b: Tensor) -> Function:
    rank = len(ctx.out_shape)
    if b.ndim == 2 or all(d == 1 for d in b.shape[:-2]):
        return weighted(ctx, b.reshape(b.shape[-2:]), shape)
    if not ctx.lifted and b.ndim == rank and b.shape[0] == 1:
        b = b[0]
    if len(shape) < rank:  # the constant has more axes than the data
        target = (-1, *[1] * (rank - len(shape)), *shape[1:])
        inner = weighted(ctx, b, (1, *target[1:]))
        return lambda x: inner(x.reshape(target))
    return weighted(ctx, b, shape)


def _constant_left(ctx: Context, a: Tensor) -> Function:
    shape = ctx.shapes[1]
    turned = (*shape[:-2], *reversed(shape[-2:]))
    if a.ndim == 1:
        a = a.reshape(1, -1)
        target = ctx.out_shape[1:]
        row = _turned(_constant_right_matrix(ctx, turned, a.mT))
        return lambda x: row(x).reshape(-1, *target)
    if len(shape) - ctx.lifted == 1:  # matrix times vector
        if a.ndim != 2:
            raise Unsupported("product of a batch of constants with a vector")
        get = ctx.parameter(a.mT)
        return lambda x: torch.matmul(x, get())
    if len(shape) < 3:
        raise Unsupported("a constant on the left of a value without a batch dimension mixes the batch")
    return _turned(_constant_right_matrix(ctx, turned, a.mT))


def product(ctx: Context) -> Function:
    """Two tensors, each (…, n, k) and (…, k, m) in the file."""
    ranks = [len(s) for s in ctx.shapes[:2]]
    if min(ranks) < 3 or min(ranks) - ctx.lifted < 2:
        raise Unsupported("product of two tensors without a batch dimension")
    lead, rank = ctx.out_shape[:-2], len(ctx.out_shape)
    sides = []
    for i in (0, 1):
        shape = ctx.shapes[i]
        shape = (1, *[1] * (rank - len(shape)), *shape[1:])
        ones = [
            linear_map(axis, rank, ctx.parameter(torch.ones(1, lead[axis], dtype=torch.float64)))
            for axis in range(1, rank - 2)
            if shape[axis] != lead[axis]
        ]
        sides.append((None if len(ctx.shapes[i]) == rank else (-1, *shape[1:]), ones))

    def run(x: Tensor, y: Tensor) -> Tensor:
        values = []
        for v, (target, ones) in zip((x, y), sides, strict=True):
            v = v if target is None else v.reshape(target)
            for f in ones:
                v = f(v)
            values.append(v)
        return torch.matmul(*values)

    return run


def matmul(ctx: Context) -> Function:
    a, b = ctx.constants[:2]
    if b is not None:
        return _constant_right(ctx, 0, b)
    return product(ctx) if a is None else _constant_left(ctx, a)


def _scaled(f: Function, factor: float) -> Function:
    return f if factor == 1.0 else lambda *xs: f(*xs) * factor


def _general(ctx: Context, turn_a: int, turn_b: int, alpha: float) -> Function:
    a, b = ctx.constants[:2]
    turned = (a is None and turn_a) or (b is None and turn_b)
    moving = [s for s, c in zip(ctx.shapes[:2], (a, b), strict=True) if c is None]
    if turned and min(map(len, moving)) < 3:
        raise Unsupported("transposes the batch axis")
    shapes = list(ctx.shapes)
    flips = []
    for i, (c, turn) in enumerate(((a, turn_a), (b, turn_b))):
        if c is not None and turn:
            c = c.mT
        if c is None:
            flips.append(bool(turn))
        shapes[i] = (*shapes[i][:-2], *reversed(shapes[i][-2:])) if turn else shapes[i]
        if i == 0:
            a = c
        else:
            b = c * alpha if c is not None else None
    if b is None and a is not None:
        a, alpha = a * alpha, 1.0
    elif b is not None:
        alpha = 1.0
    inner_ctx = Context(
        ctx.node, ctx.opset, [a, b], ctx.present[:2], shapes, ctx.out_shapes, ctx.lifted, ctx.parameter
    )
    inner = _scaled(matmul(inner_ctx), alpha)
    if not any(flips):
        return inner
    return lambda *xs: inner(*(x.transpose(-2, -1) if flip else x for x, flip in zip(xs, flips, strict=True)))


def gemm(ctx: Context) -> Function:
    alpha, beta = ctx.attr_float("alpha", 1.0), ctx.attr_float("beta", 1.0)
    turn_a, turn_b = ctx.attr_int("transA", 0), ctx.attr_int("transB", 0)
    given = len(ctx.present) > 2 and ctx.present[2] and beta != 0.0
    bias = ctx.constants[2] if given else None
    weight = ctx.constants[1]
    rows = bias is None or bias.ndim < 2 or bias.shape[0] == 1
    if weight is not None and not turn_a and rows and not (given and bias is None):
        weight = weight * alpha if turn_b else weight.T * alpha
        n = weight.shape[0]
        b = torch.zeros(n, dtype=torch.float64)
        if bias is not None:
            if bias.numel() not in (1, n):
                raise Unsupported(f"a bias of shape {tuple(bias.shape)} for {n} outputs")
            b = torch.broadcast_to(bias.double() * beta, (1, n))[0]
        if len(ctx.shapes[0]) > 2:  # a trace of F.linear would transpose the weight in a node of its own
            get_t, get_c = ctx.parameter(weight.T), ctx.parameter(b)
            return lambda x: torch.matmul(x, get_t()) + get_c()
        get_w, get_b = ctx.parameter(weight), ctx.parameter(b)
        return lambda x: F.linear(x, get_w(), get_b())
    run = _general(ctx, turn_a, turn_b, alpha)
    if not given:
        return run
    if bias is not None:
        get = ctx.stored(bias * beta)
        return lambda *xs: run(*xs) + get()
    spread = expanded(ctx, 2)
    return lambda *xs: run(*xs[:-1]) + spread(xs[-1]) * beta
