"""Interval arithmetic in float64, rounded outwards, but exact wherever float64 is.

The error of a rounded sum or product is itself a float64 (Knuth's TwoSum, Dekker's product; Muller et al.,
Handbook of Floating-Point Arithmetic, 4.3-4.4), so whether and which way a result was rounded is known: a
bound moves by one unit only if it must. So 0.5 + 1 is [1.5, 1.5], and a constraint that is met exactly at
the end of a range is decided.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]

LARGEST = np.finfo(np.float64).max
_SPLITTER = 2.0**27 + 1
_SAFE = 1e150  # factors and sums below this have exact errors
_LEAST = 1e-280  # products above this have exact errors


@dataclass(frozen=True)
class Interval:
    """Real numbers between two bounds, elementwise; bounds may be infinite, the numbers are not.

    Attributes:
        lo, hi: float64, same shape. The first axis counts boxes: a value of size 1 there is the same in all.
    """

    lo: Array
    hi: Array

    @classmethod
    def of(cls, value: Any) -> Interval:
        """Numbers as they are."""
        value = np.asarray(value, dtype=np.float64)
        return cls(value, value)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.lo.shape

    @property
    def rank(self) -> int:
        return self.lo.ndim

    def __neg__(self) -> Interval:
        return Interval(-self.hi, -self.lo)

    def __add__(self, other: Interval) -> Interval:
        return Interval(_sum(self.lo, other.lo, -np.inf), _sum(self.hi, other.hi, np.inf))

    def __sub__(self, other: Interval) -> Interval:
        return self + -other

    def __mul__(self, other: Interval) -> Interval:
        ends = [(a, b) for a in _ends(self) for b in _ends(other)]
        lo = _fold(np.minimum, [_product(a, b, -np.inf) for a, b in ends])
        hi = _fold(np.maximum, [_product(a, b, np.inf) for a, b in ends])
        return Interval(lo, hi)

    def __truediv__(self, other: Interval) -> Interval:
        """The whole line where the divisor may be 0."""
        ends = [(a, b) for a in _ends(self) for b in _ends(other)]
        lo = _fold(np.minimum, [_quotient(a, b, -np.inf) for a, b in ends])
        hi = _fold(np.maximum, [_quotient(a, b, np.inf) for a, b in ends])
        zero = (other.lo <= 0) & (other.hi >= 0)
        return Interval(np.where(zero, -np.inf, lo), np.where(zero, np.inf, hi))

    def __getitem__(self, key: Any) -> Interval:
        return Interval(self.lo[key], self.hi[key])

    def reshape(self, *shape: int) -> Interval:
        return Interval(self.lo.reshape(shape), self.hi.reshape(shape))

    def power(self, exponent: int) -> Interval:
        """A power with an exponent of 1 or more, as a product; even powers are not negative."""
        if exponent % 2:
            return self if exponent == 1 else self * self.power(exponent - 1)
        small = Interval.of(
            np.where((self.lo <= 0) & (self.hi >= 0), 0.0, np.minimum(abs(self.lo), abs(self.hi)))
        )
        large = Interval.of(np.maximum(abs(self.lo), abs(self.hi)))
        lo, hi = small, large
        for _ in range(exponent - 1):
            lo, hi = lo * small, hi * large
        return Interval(np.maximum(lo.lo, 0.0), hi.hi)

    def moved(self, amount: Array | float) -> Interval:
        """Both bounds away from each other."""
        return Interval(
            _sum(self.lo, -np.asarray(amount), -np.inf), _sum(self.hi, np.asarray(amount), np.inf)
        )

    def hull(self, other: Interval) -> Interval:
        return Interval(np.minimum(self.lo, other.lo), np.maximum(self.hi, other.hi))

    def meet(self, other: Interval) -> Interval:
        """What both allow; both must hold the same numbers."""
        return Interval(np.maximum(self.lo, other.lo), np.minimum(self.hi, other.hi))

    def largest(self) -> Array:
        """Of the absolute values."""
        return np.maximum(abs(self.lo), abs(self.hi))

    def contains(self, value: Any) -> Any:
        return (self.lo <= value) & (value <= self.hi)


def align(a: Interval, b: Interval) -> tuple[Interval, Interval]:
    """Both with the same rank: axes of size 1 are inserted behind the first one, as ONNX broadcasts."""
    rank = max(a.rank, b.rank)
    return _padded(a, rank), _padded(b, rank)


def _padded(a: Interval, rank: int) -> Interval:
    return a if a.rank == rank else a.reshape(a.shape[0], *(1,) * (rank - a.rank), *a.shape[1:])


def total(a: Interval, axis: int) -> Interval:
    """The sum along an axis, one after the other."""
    parts = [a[(slice(None),) * (axis % a.rank) + (i,)] for i in range(a.shape[axis])]
    result = parts[0]
    for part in parts[1:]:
        result = result + part
    return result


def _ends(a: Interval) -> tuple[Array, ...]:
    return (a.lo,) if a.lo is a.hi else (a.lo, a.hi)


def _fold(function: Any, values: list[Array]) -> Array:
    result = values[0]
    for value in values[1:]:
        result = function(result, value)
    return result


def _away(value: Array, moves: Any, towards: float) -> Array:
    return np.where(moves, np.nextafter(value, towards), value)


def _sum(a: Array, b: Array, towards: float) -> Array:
    """a + b rounded towards minus or plus infinity; inf - inf is `towards`."""
    with np.errstate(all="ignore"):
        s = a + b
        t = s - a
        error = (a - (s - t)) + (b - t)
        wrong = error < 0 if towards < 0 else error > 0
        huge = ~(abs(s) < _SAFE) & np.isfinite(a) & np.isfinite(b)
        s = _away(s, wrong | huge, towards)
    return np.where(np.isnan(s), towards, s)


def _error(x: Array, y: Array, p: Array) -> Array:
    """x * y - p, where it is exact."""
    u, v = _SPLITTER * x, _SPLITTER * y
    xh, yh = u - (u - x), v - (v - y)
    xl, yl = x - xh, y - yh
    return xl * yl - (((p - xh * yh) - xl * yh) - xh * yl)


def _product(x: Array, y: Array, towards: float) -> Array:
    """x * y rounded towards minus or plus infinity; 0 times infinity is 0."""
    with np.errstate(all="ignore"):
        p = x * y
        error = _error(x, y, p)
        wrong = error < 0 if towards < 0 else error > 0
        exact = (abs(x) < _SAFE) & (abs(y) < _SAFE) & (abs(p) > _LEAST)
        p = _away(p, wrong | ~exact, towards)
    return np.where((x == 0) | (y == 0), 0.0, p)


def _quotient(x: Array, y: Array, towards: float) -> Array:
    """x / y rounded towards minus or plus infinity; anything where y is 0."""
    with np.errstate(all="ignore"):
        q = x / y
        p = q * y
        rest = (x - p) - _error(q, y, p)
        safe = (abs(q) < _SAFE) & (abs(y) < _SAFE) & (abs(p) > _LEAST)
        q = _away(q, ~safe | (rest != 0), towards)
    both = np.isinf(x) & np.isinf(y)
    return np.where((x == 0) & (y != 0), 0.0, np.where(both, 0.0, q))
