"""Elementary functions of intervals and of their derivatives, and the rounding of other element types."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from .arithmetic import Array, Interval, total

# numpy's float64 functions are within 4 units in the last place; twice as much is allowed for
LIBRARY = 2.0**-50
# what an implementation of a float type may err in exp, tanh and the like, in units of its rounding
ULPS = 16
UNITS = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}
_STORED = {"float16": np.float16, "float32": np.float32}
LARGEST = {
    "float16": 65504.0,
    "bfloat16": 3.3895313892515355e38,
    "float32": 3.4028234663852886e38,
    "float64": float(np.finfo(np.float64).max),
}
LEAST = {"float16": 2.0**-24, "bfloat16": 2.0**-133, "float32": 2.0**-149, "float64": 2.0**-1074}

_erf = np.vectorize(math.erf, otypes=[np.float64])


def rounded(x: Interval, floats: Sequence[str]) -> Interval:
    """All that a correctly rounded operation can give whose exact results lie in x.

    Rounding is monotone, so the rounded ends are the ends of the rounded results; float64 results lie
    between ends that were rounded outwards already.

    Arguments:
        floats: element types of the network; none if it stands for real numbers.
    """
    lo, hi = x.lo, x.hi
    for name in floats:
        if name in _STORED:
            with np.errstate(all="ignore"):
                low, high = (v.astype(_STORED[name]).astype(np.float64) for v in (x.lo, x.hi))
            lo, hi = np.minimum(lo, low), np.maximum(hi, high)
        elif name == "bfloat16":
            moved = x.moved(x.largest() * UNITS[name] + LEAST[name])
            lo, hi = np.minimum(lo, moved.lo), np.maximum(hi, moved.hi)
    return Interval(lo, hi)


def accumulated(x: Interval, size: Array, terms: int, floats: Sequence[str]) -> Interval:
    """All that a sum of `terms` products, added in any order, can give.

    Higham, Accuracy and Stability, 3.1: the error is at most gamma_n times the sum of absolute products.

    Arguments:
        x: the exact sum. size: a bound of the sum of absolute products.
    """
    if not floats or terms <= 1:
        return rounded(x, floats)
    unit = max(UNITS[name] for name in floats)
    gamma = terms * unit / (1 - terms * unit) if terms * unit < 1 else np.inf
    least = max(LEAST[name] for name in floats)
    error = size * gamma * (1 + LIBRARY) + terms * least
    overflow = size + error >= min(LARGEST[name] for name in floats)  # of a partial sum
    return x.moved(np.where(overflow, np.inf, error))


def computed(x: Interval, floats: Sequence[str], scale: float = 0.0) -> Interval:
    """All that an implementation of an elementary function can give; errors relative to x, or to scale if
    that is larger."""
    if not floats:
        return x
    unit = max(UNITS[name] for name in floats)
    return x.moved(np.maximum(x.largest(), scale) * (ULPS * unit) + max(LEAST[n] for n in floats))


def monotone(
    f: Callable[[Array], Array], x: Interval, low: float = -np.inf, high: float = np.inf
) -> Interval:
    """A growing function with values in [low, high], evaluated by the library."""
    with np.errstate(all="ignore"):
        lo, hi = f(x.lo), f(x.hi)
        lo = np.where(np.isnan(lo), low, lo - abs(lo) * LIBRARY - 8 * LEAST["float64"])
        hi = np.where(np.isnan(hi), high, hi + abs(hi) * LIBRARY + 8 * LEAST["float64"])
    lo = np.where(np.isposinf(lo), np.finfo(np.float64).max, lo)  # overflow, not infinity
    return Interval(np.maximum(lo, low), np.minimum(hi, high))


def exp(x: Interval) -> Interval:
    return monotone(np.exp, x, low=0.0)


def log(x: Interval) -> Interval:
    """The whole line where x may be 0 or less."""
    y = monotone(np.log, Interval(np.maximum(x.lo, 0.0), np.maximum(x.hi, 0.0)))
    bad = x.lo <= 0
    return Interval(np.where(bad, -np.inf, y.lo), np.where(x.hi <= 0, np.inf, y.hi))


def sqrt(x: Interval) -> Interval:
    """IEEE square roots are rounded correctly: exact ones are known by their square."""
    with np.errstate(all="ignore"):
        low, high = np.sqrt(np.maximum(x.lo, 0.0)), np.sqrt(np.maximum(x.hi, 0.0))
        square_low, square_high = Interval.of(low) * Interval.of(low), Interval.of(high) * Interval.of(high)
        lo = np.where(square_low.hi > x.lo, np.nextafter(low, -np.inf), low)
        hi = np.where(square_high.lo < x.hi, np.nextafter(high, np.inf), high)
    bad = x.lo < 0
    return Interval(np.where(bad, -np.inf, np.maximum(lo, 0.0)), np.where(bad, np.inf, hi))


def sigmoid(x: Interval) -> Interval:
    def f(v: Array) -> Array:
        e = np.exp(-abs(v))
        return np.where(v >= 0, 1 / (1 + e), e / (1 + e))

    return monotone(f, x, 0.0, 1.0)


def tanh(x: Interval) -> Interval:
    return monotone(np.tanh, x, -1.0, 1.0)


def erf(x: Interval) -> Interval:
    return monotone(_erf, x, -1.0, 1.0)


def softmax(x: Interval) -> Interval:
    """Of the last axis: 1 / (1 + sum of exp(x_j - x_i)), where every x_j moves on its own; in [0, 1]."""
    n = x.shape[-1]
    if n == 1:
        return Interval.of(np.ones(x.shape))
    others = ~np.eye(n, dtype=bool)
    parts = [
        exp(x[..., others[i]] - x[..., i : i + 1])  # (..., n - 1)
        for i in range(n)
    ]
    one = Interval.of(1.0)
    values = [one / (one + total(p, -1)) for p in parts]
    lo, hi = (np.stack([getattr(v, side) for v in values], axis=-1) for side in ("lo", "hi"))
    return Interval(np.clip(lo, 0.0, 1.0), np.clip(hi, 0.0, 1.0))


def softmax_error(x: Interval, floats: Sequence[str]) -> float:
    """Relative error of an implementation: differences to the maximum are rounded before exp sees them.

    Below exp(-104) float32 is 0, so differences count up to there (float64: 745, float16: 17)."""
    if not floats:
        return 0.0
    unit = max(UNITS[name] for name in floats)
    reach = max(-math.log(LEAST[name]) for name in floats)
    return (x.shape[-1] + ULPS + 2 * reach) * unit
