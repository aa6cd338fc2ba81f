"""Operators on single entries; `Node` first, then the inputs, None for an absent one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from . import functions as f
from .arithmetic import Interval, align
from .dual import (
    FLOAT,
    Dual,
    add,
    applied,
    chosen,
    divide,
    jumping,
    larger,
    multiply,
    negative,
)
from .node import FLOATS, Node, element_type

ONE, ZERO = Interval.of(1.0), Interval.of(0.0)
Function = Callable[..., Any]
INTEGERS = {f"{sign}int{bits}": bits for sign in ("", "u") for bits in (8, 16, 32, 64)}


def checked(node: Node, value: Dual) -> Dual:
    """Integers that stay in the range of their type, and in that of whole float64 numbers."""
    if value.kind in INTEGERS:
        bits = min(INTEGERS[value.kind] - (value.kind[0] == "i"), 53)
        low = 0 if value.kind[0] == "u" else -(2**bits)
        if not bool(((value.v.lo >= low) & (value.v.hi < 2**bits)).all()):
            node.fail(f"a result may be beyond the range of {value.kind}")
    return value


def plus(node: Node, a: Dual, b: Dual) -> Dual:
    return checked(node, add(a, b, node.floats))


def minus(node: Node, a: Dual, b: Dual) -> Dual:
    return plus(node, a, negative(b))


def times(node: Node, a: Dual, b: Dual) -> Dual:
    return checked(node, multiply(a, b, node.floats))


def over(node: Node, a: Dual, b: Dual) -> Dual:
    if a.kind == FLOAT:
        return divide(a, b, node.floats)
    x, y = align(a.v, b.v)
    if bool(((y.lo <= 0) & (y.hi >= 0)).any()):
        node.fail("integers are divided by what may be 0")
    q = x / y
    return jumping([a, b], Interval(np.trunc(q.lo), np.trunc(q.hi)), a.kind)


def opposite(node: Node, a: Dual) -> Dual:
    return checked(node, negative(a))


def several(pair: Callable[[Node, Dual, Dual], Dual]) -> Function:
    """From a function of two inputs to one of any number."""

    def result(node: Node, *inputs: Dual) -> Dual:
        value = inputs[0]
        for other in inputs[1:]:
            value = pair(node, value, other)
        return value

    return result


def maximum(node: Node, a: Dual, b: Dual) -> Dual:
    return larger(a, b)


def minimum(node: Node, a: Dual, b: Dual) -> Dual:
    return negative(larger(negative(a), negative(b)))


def clip(node: Node, a: Dual, low: Dual | None = None, high: Dual | None = None) -> Dual:
    if node.opset < 11:
        low, high = (
            None if v is None else Dual(Interval.of([v])) for v in (node.get("min"), node.get("max"))
        )
    if low is not None:
        a = larger(a, low)
    return a if high is None else minimum(node, a, high)


def relu(node: Node, a: Dual) -> Dual:
    value = Interval(np.maximum(a.v.lo, 0.0), np.maximum(a.v.hi, 0.0))
    return applied(a, value, lambda: _step(a.v))


def _step(x: Interval) -> Interval:
    """The derivative of relu."""
    return Interval((x.lo > 0).astype(np.float64), (x.hi >= 0).astype(np.float64))


def leaky_relu(node: Node, a: Dual) -> Dual:
    alpha = Interval.of(float(np.float32(node.get("alpha", 0.01))))
    if alpha.lo < 0:
        node.fail("its alpha is negative")
    scaled = f.rounded(a.v * alpha, node.floats)
    value = Interval(np.where(a.v.lo < 0, scaled.lo, a.v.lo), np.where(a.v.hi < 0, scaled.hi, a.v.hi))
    if alpha.lo > 1:
        node.fail("its alpha is larger than 1")
    step = _step(a.v)
    return applied(a, value, lambda: Interval(np.maximum(step.lo, alpha.lo), np.maximum(step.hi, alpha.lo)))


def absolute(node: Node, a: Dual) -> Dual:
    low = np.where((a.v.lo <= 0) & (a.v.hi >= 0), 0.0, np.minimum(abs(a.v.lo), abs(a.v.hi)))
    step = _step(a.v)
    return applied(a, Interval(low, a.v.largest()), lambda: Interval(2 * step.lo - 1, 2 * step.hi - 1))


def elementary(
    function: Callable[[Interval], Interval],
    slope: Callable[[Interval, Interval], Interval],
    scale: float = 0.0,
) -> Function:
    """A smooth function.

    Arguments:
        slope: its derivative from the argument and the value. scale: as in `functions.computed`.
    """

    def result(node: Node, a: Dual) -> Dual:
        node.float_only(a)
        value = function(a.v)
        return applied(a, f.computed(value, node.floats, scale), lambda: slope(a.v, value))

    return result


exp = elementary(f.exp, lambda x, y: y)
log = elementary(f.log, lambda x, y: ONE / x, 1.0)
sqrt = elementary(f.sqrt, lambda x, y: ONE / (y + y))
sigmoid = elementary(f.sigmoid, lambda x, y: y * (ONE - y), 1.0)
tanh = elementary(f.tanh, lambda x, y: (ONE - y.power(2)).meet(Interval(np.zeros(()), np.ones(()))), 1.0)
erf = elementary(f.erf, lambda x, y: f.exp(-x.power(2)) * Interval.of(2 / np.pi**0.5).moved(1e-15), 1.0)
reciprocal = elementary(lambda x: ONE / x, lambda x, y: -y.power(2))


def softmax(node: Node, a: Dual) -> Dual:
    node.float_only(a)
    rank = len(a.shape)
    axis = node.axis(node.get("axis", -1 if node.opset >= 13 else 1), rank) if rank else 0
    if node.opset < 13:  # all axes from `axis` on are one
        shape = a.shape
        rows = int(np.prod(shape[:axis]))
        flat = _softmax(node, a.mapped(lambda x: x.reshape(x.shape[0], rows, -1)))
        return flat.mapped(lambda x: x.reshape(x.shape[0], *shape))

    def swap(x: Interval) -> Interval:
        return Interval(np.swapaxes(x.lo, axis + 1, -1), np.swapaxes(x.hi, axis + 1, -1))

    return _softmax(node, a.mapped(swap)).mapped(swap)


def _softmax(node: Node, a: Dual) -> Dual:
    """Of the last axis; the derivative is that of s_i = sum over j of s_i s_j (dx_i - dx_j)."""
    s = f.softmax(a.v)
    error = f.softmax_error(a.v, node.floats)
    v = s
    if error:
        least = max(f.LEAST[n] for n in node.floats)
        wide = s.moved(s.hi * error + least)
        # the largest exponent is 0 and the sum not below 1, so no result is beyond 0 or 1
        v = Interval(np.clip(wide.lo, 0.0, 1.0), np.clip(wide.hi, 0.0, 1.0))
    d = None
    if a.d is not None:
        pairs = s[..., :, None] * s[..., None, :]
        pairs = Interval(pairs.lo, np.minimum(pairs.hi, 0.25 + 0.75 * np.eye(s.shape[-1])))
        moves = a.d[..., :, None] - a.d[..., None, :]
        same = np.eye(s.shape[-1], dtype=bool)
        moves = Interval(np.where(same, 0.0, moves.lo), np.where(same, 0.0, moves.hi))
        products = pairs[:, None] * moves
        d = products[..., 0]
        for j in range(1, s.shape[-1]):
            d = d + products[..., j]
    return Dual(v, d, a.kind)


def power(node: Node, a: Dual, b: Dual) -> Dual:
    node.float_only(a)
    exponents = b.constant
    if exponents is None:
        return _power_of(node, a, b)
    shape = np.broadcast_shapes(a.shape, b.shape)
    if exponents.size == 1:
        return _power(node, a, float(exponents.ravel()[0]), shape)
    exponents = np.broadcast_to(exponents, shape)
    result: Dual | None = None
    for e in np.unique(exponents):
        part = _power(node, a, float(e), shape)
        here = Interval.of((exponents == e)[None].astype(np.float64))
        result = part if result is None else chosen(here, part, result)
    assert result is not None
    return result


def _power(node: Node, a: Dual, e: float, shape: tuple[int, ...]) -> Dual:
    """a to a constant power."""
    a = a.mapped(
        lambda x: align(x, Interval.of(np.zeros((1, *shape))))[0] + Interval.of(np.zeros((1, *shape)))
    )
    if e == 0:
        return Dual(Interval.of(np.ones((1, *shape))), None, a.kind)
    if e == int(e) and 1 <= e <= 16:
        n = int(e)
        value = a.v.power(n)
        slope: Callable[[], Interval] = lambda: a.v.power(n - 1) * Interval.of(float(n)) if n > 1 else ONE  # noqa: E731
    elif e == int(e) and -16 <= e < 0:
        value = ONE / a.v.power(int(-e))
        slope = lambda: value / a.v * Interval.of(e)  # noqa: E731
    else:
        if e == int(e):
            node.fail(f"exponent {e:g}; whole ones from -16 to 16 can be read")
        inside = Interval(np.maximum(a.v.lo, 0.0), np.maximum(a.v.hi, 0.0))
        value = _real_power(inside, e)
        bad = a.v.lo < 0
        value = Interval(np.where(bad, -np.inf, value.lo), np.where(bad, np.inf, value.hi))
        if e < 0:
            value = Interval(value.lo, np.where(a.v.lo <= 0, np.inf, value.hi))
        slope = lambda: value / a.v * Interval.of(e)  # noqa: E731
    return applied(a, value if e == 1 else f.computed(value, node.floats), slope)


def _real_power(x: Interval, e: float) -> Interval:
    """Of numbers of 0 or more."""
    if e > 0:
        return f.monotone(lambda v: np.power(v, e), x, low=0.0)
    y = f.monotone(lambda v: -np.power(v, e), x, high=0.0)
    return -y


def _power_of(node: Node, a: Dual, b: Dual) -> Dual:
    """A power with an exponent that moves: exp(b log a)."""
    base = a.constant
    if base is None or not bool((base > 0).all()):
        node.fail("a base that moves, or is not positive, with an exponent that moves")
    x, y = align(a.v, b.v)
    # monotone in the exponent, growing where the base is 1 or more
    first, last = np.where(x.lo >= 1, y.lo, y.hi), np.where(x.lo >= 1, y.hi, y.lo)
    ends = [f.monotone(lambda v: np.power(x.lo, v), Interval.of(end), low=0.0) for end in (first, last)]
    value = Interval(ends[0].lo, ends[1].hi)
    logarithm = f.log(a.v)
    return applied(b, f.computed(value, node.floats), lambda: value * logarithm)


def compare(decide: Callable[[Interval, Interval], tuple[Any, Any]]) -> Function:
    """A comparison; decide: where it surely holds, and where it may."""

    def result(node: Node, a: Dual, b: Dual) -> Dual:
        x, y = align(a.v, b.v)
        sure, possible = decide(x, y)
        return jumping([a, b], Interval(sure.astype(np.float64), possible.astype(np.float64)), "bool")

    return result


greater = compare(lambda x, y: (x.lo > y.hi, x.hi > y.lo))
greater_equal = compare(lambda x, y: (x.lo >= y.hi, x.hi >= y.lo))
less = compare(lambda x, y: (x.hi < y.lo, x.lo < y.hi))
less_equal = compare(lambda x, y: (x.hi <= y.lo, x.lo <= y.hi))
equal = compare(lambda x, y: ((x.lo == y.hi) & (x.hi == y.lo), (x.lo <= y.hi) & (x.hi >= y.lo)))


def logical_not(node: Node, a: Dual) -> Dual:
    return jumping([a], ONE - a.v, "bool")


def logical_and(node: Node, a: Dual, b: Dual) -> Dual:
    x, y = align(a.v, b.v)
    return jumping([a, b], Interval(np.minimum(x.lo, y.lo), np.minimum(x.hi, y.hi)), "bool")


def logical_or(node: Node, a: Dual, b: Dual) -> Dual:
    x, y = align(a.v, b.v)
    return jumping([a, b], Interval(np.maximum(x.lo, y.lo), np.maximum(x.hi, y.hi)), "bool")


def where(node: Node, condition: Dual, a: Dual, b: Dual) -> Dual:
    return chosen(condition.v, a, b)


def whole(function: Callable[[Any], Any]) -> Function:
    """floor and the like."""
    return lambda node, a: jumping([a], Interval(function(a.v.lo), function(a.v.hi)), a.kind)


def cast(node: Node, a: Dual) -> Dual:
    to = element_type(node.get("to"))
    if to in FLOATS:
        value = f.rounded(a.v, node.floats) if a.kind in (FLOAT, *INTEGERS) else a.v
        return Dual(value, a.d, FLOAT)
    if to == "bool":
        zero = (a.v.lo <= 0) & (a.v.hi >= 0)
        only = (a.v.lo == 0) & (a.v.hi == 0)
        return jumping([a], Interval(np.where(zero, 0.0, 1.0), np.where(only, 0.0, 1.0)), "bool")
    if to in INTEGERS:
        return checked(node, jumping([a], Interval(np.trunc(a.v.lo), np.trunc(a.v.hi)), to))
    node.fail(f"to {to}; numbers and bool can be read")
