"""Values of a network over boxes: an interval, and intervals of the derivatives by the inputs that move."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from .arithmetic import Array, Interval, align, total
from .functions import accumulated, rounded

FLOAT = "float"  # kind of all floating point values; others have the names of ONNX' integer types, or bool
EXACT = 128  # products of at most so many multiplications are exact where float64 is


@dataclass(frozen=True)
class Dual:
    """One value.

    Attributes:
        v: (boxes, *shape), what the real function and the network's own arithmetic can give.
        d: derivatives of the real function, (boxes, inputs, *shape); None for a value that does not move.
        kind: `FLOAT`, an integer type, or bool.
    """

    v: Interval
    d: Interval | None = None
    kind: str = FLOAT

    @property
    def shape(self) -> tuple[int, ...]:
        """Without the axis of boxes."""
        return self.v.shape[1:]

    @property
    def constant(self) -> Array | None:
        """The value if it is the same number everywhere, else None."""
        same = self.v.shape[0] == 1 and bool((self.v.lo == self.v.hi).all())
        return self.v.lo[0] if same else None

    def mapped(self, f: Callable[[Interval], Interval]) -> Dual:
        """A linear function that acts on each box alone and rounds nothing, such as a transposition."""
        return Dual(f(self.v), along(self.d, f), self.kind)


def along(d: Interval | None, f: Callable[[Interval], Interval]) -> Interval | None:
    """A linear function of values, applied to derivatives: their inputs are taken for boxes."""
    if d is None:
        return None
    flat = f(d.reshape(-1, *d.shape[2:]))
    return flat.reshape(*d.shape[:2], *flat.shape[1:])


def scaled(d: Interval | None, factor: Interval) -> Interval | None:
    """Derivatives times a factor per value, (boxes, *shape); both broadcast."""
    if d is None:
        return None
    d, factor = _aligned(d, factor)
    return d * factor


def added(a: Interval | None, b: Interval | None) -> Interval | None:
    """Sum of derivatives of values that broadcast."""
    if a is None or b is None:
        return a if b is None else b
    rank = max(a.rank, b.rank)
    a, b = (x.reshape(*x.shape[:2], *(1,) * (rank - x.rank), *x.shape[2:]) for x in (a, b))
    return a + b


def spread(d: Interval | None, shape: tuple[int, ...]) -> Interval | None:
    """Derivatives of a value that was broadcast to a shape."""
    if d is None or d.shape[2:] == shape:
        return d
    d = d.reshape(*d.shape[:2], *(1,) * (len(shape) - d.rank + 2), *d.shape[2:])
    return Interval(*(np.broadcast_to(x, (*d.shape[:2], *shape)) for x in (d.lo, d.hi)))


def _aligned(d: Interval, factor: Interval) -> tuple[Interval, Interval]:
    rank = max(d.rank - 2, factor.rank - 1)
    d = d.reshape(*d.shape[:2], *(1,) * (rank - d.rank + 2), *d.shape[2:])
    factor = factor.reshape(factor.shape[0], 1, *(1,) * (rank - factor.rank + 1), *factor.shape[1:])
    return d, factor


def add(a: Dual, b: Dual, floats: Sequence[str]) -> Dual:
    x, y = align(a.v, b.v)
    v = x + y
    if a.kind == FLOAT:
        v = rounded(v, floats)
    return Dual(v, spread(added(a.d, b.d), v.shape[1:]), a.kind)


def negative(a: Dual) -> Dual:
    return a.mapped(lambda x: -x)


def multiply(a: Dual, b: Dual, floats: Sequence[str]) -> Dual:
    x, y = align(a.v, b.v)
    v = a.v.power(2) if a is b else x * y
    if a.kind == FLOAT:
        v = rounded(v, floats)
    return Dual(v, spread(added(scaled(a.d, b.v), scaled(b.d, a.v)), v.shape[1:]), a.kind)


def divide(a: Dual, b: Dual, floats: Sequence[str]) -> Dual:
    """a / b; the derivative is (da - (a / b) db) / b."""
    x, y = align(a.v, b.v)
    v = x / y
    d = None
    if a.d is not None or b.d is not None:
        inverse = Interval.of(1.0) / b.v
        d = spread(added(scaled(a.d, inverse), scaled(scaled(b.d, -v), inverse)), v.shape[1:])
    return Dual(rounded(v, floats), d, a.kind)


def applied(a: Dual, value: Interval, slope: Callable[[], Interval]) -> Dual:
    """A function of single entries: its values, and its derivative at `a`, computed only if asked for."""
    return Dual(value, None if a.d is None else scaled(a.d, slope()), a.kind)


def jumping(parts: Sequence[Dual], value: Interval, kind: str = FLOAT) -> Dual:
    """A function that may jump: its derivative is 0 where it cannot move, and anything else elsewhere."""
    moving = next((p.d for p in parts if p.d is not None), None)
    if moving is None:
        return Dual(value, None, kind)
    still = (value.lo == value.hi)[:, None]
    shape = (max(value.shape[0], moving.shape[0]), moving.shape[1], *value.shape[1:])
    d = Interval(
        np.broadcast_to(np.where(still, 0.0, -np.inf), shape),
        np.broadcast_to(np.where(still, 0.0, np.inf), shape),
    )
    return Dual(value, d, kind)


def _derivatives(a: Dual, b: Dual, shape: tuple[int, ...]) -> tuple[Interval, Interval] | None:
    """Both derivatives at one shape, 0 for what does not move; None where neither does."""
    moving = next((d for d in (a.d, b.d) if d is not None), None)
    if moving is None:
        return None
    zero = Interval.of(np.zeros((1, moving.shape[1], *shape)))
    da, db = (zero if d is None else spread(d, shape) for d in (a.d, b.d))
    assert da is not None and db is not None
    return da, db


def chosen(condition: Interval, a: Dual, b: Dual) -> Dual:
    """a where the condition is 1, b where it is 0, either where it is not decided."""
    rank = max(condition.rank, a.v.rank, b.v.rank)
    c, x, y = (v.reshape(v.shape[0], *(1,) * (rank - v.rank), *v.shape[1:]) for v in (condition, a.v, b.v))
    both = x.hull(y)
    lo = np.where(c.lo == 1, x.lo, np.where(c.hi == 0, y.lo, both.lo))
    hi = np.where(c.lo == 1, x.hi, np.where(c.hi == 0, y.hi, both.hi))
    v = Interval(lo, hi)
    derivatives = _derivatives(a, b, v.shape[1:])
    if derivatives is None:
        return Dual(v, None, a.kind)
    da, db = derivatives
    first, second = (c.lo == 1)[:, None], (c.hi == 0)[:, None]
    lo = np.where(first, da.lo, np.where(second, db.lo, -np.inf))
    hi = np.where(first, da.hi, np.where(second, db.hi, np.inf))
    return Dual(v, Interval(lo, hi), a.kind)


def larger(a: Dual, b: Dual) -> Dual:
    """The maximum; its derivative is one of the two, or a mean of both."""
    x, y = align(a.v, b.v)
    v = Interval(np.maximum(x.lo, y.lo), np.maximum(x.hi, y.hi))
    derivatives = _derivatives(a, b, v.shape[1:])
    if derivatives is None:
        return Dual(v, None, a.kind)
    da, db = derivatives
    first, second = (x.lo > y.hi)[:, None], (y.lo > x.hi)[:, None]
    both = da.hull(db)
    lo = np.where(first, da.lo, np.where(second, db.lo, both.lo))
    hi = np.where(first, da.hi, np.where(second, db.hi, both.hi))
    return Dual(v, Interval(lo, hi), a.kind)


def summed(a: Dual, axis: int, floats: Sequence[str]) -> Dual:
    """Sum over an axis of the shape, counted from the end (negative)."""
    v = total(a.v, axis)
    if a.kind == FLOAT:
        v = accumulated(v, abs_total(a.v, axis), a.v.shape[axis] - 1, floats)
    return Dual(v, None if a.d is None else total(a.d, axis), a.kind)


def abs_total(x: Interval, axis: int) -> Array:
    n = x.shape[axis]
    size: Array = x.largest().sum(axis) * (1 + n * 2.0**-52)
    return size


def dot(a: Dual, b: Dual, floats: Sequence[str]) -> Dual:
    """Matrix products of (..., m, k) and (..., k, n), whose leading axes broadcast."""
    v = product(a.v, b.v)
    size = abs_product(a.v, b.v)
    if a.kind == FLOAT:
        v = accumulated(v, size, a.v.shape[-1], floats)
    d = None
    for x, y, left in ((a.d, b.v, False), (b.d, a.v, True)):
        if x is not None:
            x, y = _aligned(x, y)
            first, second = (y, x) if left else (x, y)
            finite = bool(np.isfinite(x.lo).all() and np.isfinite(x.hi).all())
            d = added(d, product(first, second, exact=not finite))  # of slopes no digit decides
    return Dual(v, d, a.kind)


def product(a: Interval, b: Interval, exact: bool | None = None) -> Interval:
    """Matrix products of intervals; exact where float64 is if asked for, by default if they are small."""
    a, b = align(a, b)
    k = a.shape[-1]
    if k == 0:
        return Interval.of(np.zeros(np.broadcast_shapes((*a.shape[:-1], 1), (*b.shape[:-2], 1, b.shape[-1]))))
    if exact is None:
        exact = a.shape[-2] * k * b.shape[-1] <= EXACT
    if exact:
        result = a[..., :, :1] * b[..., :1, :]
        for i in range(1, k):
            result = result + a[..., :, i : i + 1] * b[..., i : i + 1, :]
        return result
    mid_a, mid_b = (x.lo / 2 + x.hi / 2 for x in (a, b))
    rad_a, rad_b = (np.maximum(x.hi - m, m - x.lo) * (1 + 2.0**-50) for x, m in ((a, mid_a), (b, mid_b)))
    # |ab - mid| <= |mid_a| rad_b + rad_a (|mid_b| + rad_b), and rounding of all three products
    middle = mid_a @ mid_b
    radius = abs(mid_a) @ rad_b + rad_a @ (abs(mid_b) + rad_b)
    radius = (radius + (k + 4) * 2.0**-52 * abs_product(a, b)) * (1 + (k + 4) * 2.0**-51) + k * 2.0**-1060
    middle, radius = (np.where(np.isfinite(radius), x, y) for x, y in ((middle, 0.0), (radius, np.inf)))
    return Interval.of(middle).moved(radius)


def abs_product(a: Interval, b: Interval) -> Array:
    """A bound of the sums of absolute products."""
    a, b = align(a, b)
    with np.errstate(all="ignore"):
        size: Array = (a.largest() @ b.largest()) * (1 + (a.shape[-1] + 2) * 2.0**-51)
    return np.where(np.isnan(size), np.inf, size)
