"""Arithmetic with constants and between tensors."""

from __future__ import annotations

from torch import Tensor

from .context import Context, Function, Unsupported


def _add_constant(ctx: Context, c: Tensor) -> Function:
    get = ctx.parameter(ctx.unbatched(c))
    return lambda x: x + get()


def _mul_constant(ctx: Context, c: Tensor) -> Function:
    get = ctx.parameter(ctx.unbatched(c))
    return lambda x: x * get()


def binary(ctx: Context) -> Function:
    op, (a, b) = ctx.node.op_type, ctx.constants[:2]
    data_rank = max((len(s) for s, c in zip(ctx.shapes, ctx.constants, strict=True) if c is None), default=0)
    if data_rank < len(ctx.out_shape):
        raise Unsupported("a constant of higher rank than the data would shift the batch dimension")
    if op == "Add":
        if b is not None:
            return _add_constant(ctx, b)
        return _add_constant(ctx, a) if a is not None else lambda x, y: x + y
    if op == "Sub":
        if b is not None:
            return _add_constant(ctx, -b)
        if a is not None:
            get = ctx.parameter(ctx.unbatched(a))
            return lambda x: x * -1.0 + get()
        return lambda x, y: x + y * -1.0
    if op == "Mul":
        if b is not None:
            return _mul_constant(ctx, b)
        return _mul_constant(ctx, a) if a is not None else lambda x, y: x * y
    if b is not None:  # Div
        if bool((b == 0).any()):
            raise Unsupported("division by a constant zero")
        return _mul_constant(ctx, 1.0 / b)
    raise Unsupported("division by a tensor that depends on the input")


def neg(ctx: Context) -> Function:
    return lambda x: x * -1.0
