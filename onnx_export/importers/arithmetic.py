"""Arithmetic with constants and between tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from attn_bounds.sensitivity.softmax import MASKED

from .context import Context, Function, Unsupported, linear_map

HUGE = 1e30  # a limit beyond this is none: exporters write the largest float for "unlimited"


def expanded(ctx: Context, i: int) -> Function:
    """Data input i at the shape of the result: axes of size 1 are repeated by linear maps."""
    shape, out = ctx.shapes[i], ctx.out_shape
    shape = (1, *[1] * (len(out) - len(shape)), *shape[1:])
    maps = []
    for axis, (n, m) in enumerate(zip(shape, out, strict=True)):
        if n != m and axis > 0:
            ones = ctx.parameter(torch.ones(1, m, dtype=torch.float64))
            maps.append(linear_map(axis, len(out), ones))
    reshape = len(shape) != len(ctx.shapes[i])

    def run(x: Tensor) -> Tensor:
        x = x.reshape(-1, *shape[1:]) if reshape else x
        for f in maps:
            x = f(x)
        return x

    return run


def _only_softmax_follows(ctx: Context) -> bool:
    values, through = (
        [ctx.node.outputs[0]],
        ("Reshape", "Transpose", "Add", "Identity", "Squeeze", "Unsqueeze"),
    )
    while values:
        value = values.pop()
        uses = list(value.uses())
        if value.is_graph_output() or not uses:
            return False
        for use in uses:
            if use.node.op_type == "Softmax":
                continue
            if use.node.op_type not in through:
                return False
            values.append(use.node.outputs[0])
    return True


def masked(ctx: Context, c: Tensor) -> Tensor:
    """−inf in a constant becomes a finite number where only a softmax reads the result."""
    if bool((c == -math.inf).any()):
        if not _only_softmax_follows(ctx):
            raise Unsupported("adds −inf to what is not the argument of a softmax")
        c = c.clamp(min=MASKED)
    return c


def _with_constant(ctx: Context, factor: Tensor | float | None, term: Tensor | None) -> Function:
    """x · factor + term of the one data input, expanded where a constant is larger than it."""
    i = next(i for i, c in enumerate(ctx.constants) if c is None)
    spread = expanded(ctx, i)
    get_factor = ctx.stored(factor) if isinstance(factor, Tensor) else None
    get_term = None if term is None else ctx.stored(masked(ctx, term))

    def run(x: Tensor) -> Tensor:
        x = spread(x)
        if get_factor is not None:
            x = x * get_factor()
        elif factor is not None:
            x = x * factor
        return x if get_term is None else x + get_term()

    return run


def add(ctx: Context) -> Function:
    a, b = ctx.constants[:2]
    if (c := b if b is not None else a) is not None:
        return _with_constant(ctx, None, c)
    return ctx.aligned(lambda x, y: x + y)


def sub(ctx: Context) -> Function:
    a, b = ctx.constants[:2]
    if b is not None:
        return _with_constant(ctx, None, -b)
    if a is not None:
        return _with_constant(ctx, -1.0, a)
    return ctx.aligned(lambda x, y: x + y * -1.0)


def mul(ctx: Context) -> Function:
    a, b = ctx.constants[:2]
    if (c := b if b is not None else a) is not None:
        return _with_constant(ctx, c, None)
    return _product(ctx, lambda y: y)


def _product(ctx: Context, second: Function) -> Function:
    if ctx.node.inputs[0] is ctx.node.inputs[1]:
        return lambda x, _: x * second(x)
    first, other = expanded(ctx, 0), expanded(ctx, 1)
    return lambda x, y: first(x) * other(second(y))


def div(ctx: Context) -> Function:
    a, b = ctx.constants[:2]
    if b is not None:
        if bool((b == 0).any()):
            raise Unsupported("division by a constant zero")
        if not b.is_floating_point():
            raise Unsupported("division of integers")
        return _with_constant(ctx, 1.0 / b, None)
    if a is not None:
        scaled = _with_constant(ctx, a, None)
        return lambda y: scaled(torch.reciprocal(y))
    # not a division node: 0.3 takes a / √b for a layer normalisation
    return _product(ctx, torch.reciprocal)


def neg(ctx: Context) -> Function:
    return lambda x: x * -1.0


def power(ctx: Context) -> Function:
    """Integer powers to 8, ±1/2, and their reciprocals."""
    if ctx.constants[0] is not None:
        raise Unsupported("the exponent depends on the input")
    exponents = ctx.constant(1, "the exponent").double().unique()
    if len(exponents) != 1 or (ctx.constants[1].numel() != 1 and len(ctx.out_shape) != len(ctx.shapes[0])):  # type: ignore[union-attr]
        raise Unsupported("several exponents in one node")
    p = float(exponents[0])
    if abs(p) == 0.5:
        root = torch.sqrt
        return root if p > 0 else lambda x: torch.reciprocal(torch.sqrt(x))
    if p != int(p) or not 1 <= abs(p) <= 8:
        raise Unsupported(f"exponent {p:g}; integers up to 8 and ±0.5 are supported")

    def run(x: Tensor) -> Tensor:
        result, square, n = None, x, int(abs(p))
        while n:
            if n & 1:
                result = square if result is None else result * square
            n >>= 1
            square = square * square if n else square
        assert result is not None
        return result if p > 0 else torch.reciprocal(result)

    return run


def _is(ctx: Context, i: int) -> bool:
    return ctx.constants[i] is not None


def total(ctx: Context) -> Function:
    """Sum, and Mean, of any number of tensors and constants."""
    factor = 1.0 / len(ctx.constants) if ctx.node.op_type == "Mean" else 1.0
    fixed = [c for c in ctx.constants if c is not None]
    spreads = [expanded(ctx, i) for i, c in enumerate(ctx.constants) if c is None]
    get = ctx.stored(sum(fixed[1:], fixed[0])) if fixed else None

    def run(*xs: Tensor) -> Tensor:
        parts = [f(x) for f, x in zip(spreads, xs, strict=True)]
        y = parts[0]
        for part in parts[1:]:
            y = y + part
        y = y if get is None else y + get()
        return y if factor == 1.0 else y * factor

    return run


def largest(ctx: Context) -> Function:
    """Max and Min of tensors and constants, by ReLU: max(x, y) = y + relu(x − y)."""
    sign = 1.0 if ctx.node.op_type == "Max" else -1.0
    fixed = [sign * c for c in ctx.constants if c is not None]
    spreads = [expanded(ctx, i) for i, c in enumerate(ctx.constants) if c is None]
    limit = None
    for c in fixed:
        limit = c if limit is None else torch.maximum(*torch.broadcast_tensors(limit, c))
    get = None if limit is None else ctx.stored(limit)

    def run(*xs: Tensor) -> Tensor:
        parts = [f(x) for f, x in zip(spreads, xs, strict=True)]
        y = parts[0] if sign > 0 else parts[0] * -1.0
        for part in parts[1:]:
            y = torch.relu(y + part * -sign) + (part if sign > 0 else part * -1.0)
        if get is not None:
            y = torch.relu(y - get()) + get()
        return y if sign > 0 else y * -1.0

    return run


def _limit(ctx: Context, i: int, name: str) -> float | None:
    if i < len(ctx.present) and ctx.present[i]:
        value = ctx.constant(i, f"its {name}")
        if value.numel() != 1:
            raise Unsupported(f"its {name} has {value.numel()} entries; one is needed")
        found = float(value)
    elif name in ctx.node.attributes:
        found = ctx.attr_float(name, 0.0)
    else:
        return None
    if math.isnan(found):
        raise Unsupported(f"its {name} is NaN")
    return None if abs(found) > HUGE else found


def clip(ctx: Context) -> Function:
    """Limits as attributes (opset 6) or inputs (11 on), either of them optional."""
    return clamped(_limit(ctx, 1, "min"), _limit(ctx, 2, "max"))


def clamped(low: float | None, high: float | None) -> Function:
    """min(max(x, low), high), by ReLU; with low > high the result is high, as in ONNX."""
    if low is not None and high is not None and low > high:
        low = high

    def run(x: Tensor) -> Tensor:
        if low is not None:
            x = torch.relu(x - low) if low else torch.relu(x)
            x = x + low if low else x
        if high is not None:
            x = torch.relu(x * -1.0 + high) * -1.0 + high
        return x

    return run


def where(ctx: Context) -> Function:
    """Between two values by a constant condition."""
    condition = ctx.constants[0]
    if condition is None:
        raise Unsupported("the condition depends on the input")
    condition = condition.bool()
    parts: list[tuple[Function, Sequence[Tensor]]] = []
    fill: Tensor | None = None
    for i, chosen in ((1, condition), (2, ~condition)):
        c = ctx.constants[i]
        if c is None:
            parts.append((expanded(ctx, i), [chosen]))
        else:
            kept = torch.where(chosen, c.double(), 0.0)
            fill = kept if fill is None else fill + kept
    factors = [ctx.stored(chosen.double()) for _, (chosen,) in parts]
    get_fill = None if fill is None else ctx.stored(masked(ctx, fill))

    def run(*xs: Tensor) -> Tensor:
        terms = [f(x) * factor() for (f, _), factor, x in zip(parts, factors, xs, strict=True)]
        y = terms[0] if len(terms) == 1 else terms[0] + terms[1]
        return y if get_fill is None else y + get_fill()

    return run
