"""The box of a query's inputs, as written, rounded outwards, and as the numbers that models can be given."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from .arithmetic import Interval
from .elementwise import INTEGERS
from .functions import LARGEST, rounded
from .node import FLOATS

Array = np.ndarray[Any, Any]

NUMPY = {"float16": np.float16, "float32": np.float32, "float64": np.float64, "bool": np.bool_}


@dataclass(frozen=True)
class Variable:
    """One declared tensor.

    Attributes:
        kind: input, hidden or output. use: number of its network. tensor: its name in the ONNX graph.
        stored: its element type there. first: where an input begins in the vector of all inputs.
    """

    name: str
    kind: str
    type: str
    shape: tuple[int, ...]
    use: int
    tensor: str
    stored: str
    first: int = 0

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def enclosed(exact: Fraction, floats: Sequence[str]) -> Interval:
    """Holds a number, and its rounded forms if the query is about floating point numbers.

    The standard types a number like the variable it stands beside, so that 0.1 may be float32's 0.1; a
    verdict must be right for both. Raises OverflowError."""
    near = float(exact)
    low = near if Fraction(near) <= exact else math.nextafter(near, -math.inf)
    high = near if Fraction(near) >= exact else math.nextafter(near, math.inf)
    return rounded(Interval(np.asarray(low), np.asarray(high)), floats)


class Inputs:
    """All inputs of a query as one vector.

    Attributes:
        variables: the inputs. types: (n,) element types in the models.
        lower, upper: (n,) bounds, rounded outwards.
        inner_lower, inner_upper: (n,) numbers from and to which points may lie, where possible of the
            model's type. They are inside of the bounds as written until `relax` is called.
        empty: why no input is allowed, or "".
    """

    def __init__(self, variables: Sequence[Variable], floats: Sequence[str]) -> None:
        self.variables, self.floats = tuple(variables), tuple(floats)
        n = sum(v.size for v in variables)
        self.types = np.repeat([v.stored for v in variables], [v.size for v in variables])
        self.lower, self.upper = np.full(n, -np.inf), np.full(n, np.inf)
        self.empty = ""
        self._exact: dict[tuple[int, bool], tuple[Fraction, bool]] = {}  # by input and side; strict?
        for v in variables:
            part = slice(v.first, v.first + v.size)
            self.lower[part], self.upper[part] = _range(v)
        self.inner_lower, self.inner_upper = self.lower.copy(), self.upper.copy()

    def bound(self, i: int, limit: Fraction, is_upper: bool, strict: bool) -> None:
        """Input i is at most, or at least, a number."""
        outer = enclosed(limit, self.floats)
        if is_upper:
            self.upper[i] = min(self.upper[i], float(outer.hi))
        else:
            self.lower[i] = max(self.lower[i], float(outer.lo))
        old = self._exact.get((i, is_upper))
        tighter = old is None or (limit < old[0] if is_upper else limit > old[0])
        if tighter or (old is not None and limit == old[0] and strict):
            self._exact[i, is_upper] = (limit, strict)

    def close(self) -> None:
        """Works out the numbers inside, once all bounds are known."""
        whole = np.array([t not in FLOATS for t in self.types], dtype=bool)
        self.lower[whole], self.upper[whole] = np.ceil(self.lower[whole]), np.floor(self.upper[whole])
        for i in {i for i, _ in self._exact}:
            low, high = self._exact.get((i, False)), self._exact.get((i, True))
            nothing = False
            if low is not None and high is not None:
                nothing = low[0] > high[0] and not self.floats
                nothing = nothing or (low[0] == high[0] and (low[1] or high[1]))
            if nothing or self.lower[i] > self.upper[i]:
                self.empty = f"an input has lower bound {self.lower[i]:g} and upper bound {self.upper[i]:g}"
                self.empty += ", one of them strict" if self.lower[i] <= self.upper[i] else ""
        self._narrow(as_written=True)
        if (self.inner_lower > self.inner_upper).any():
            self.relax()

    def relax(self) -> None:
        """Points may lie up to the bounds as the model's type rounds them."""
        self._narrow(as_written=False)

    def _narrow(self, as_written: bool) -> None:
        for (i, is_upper), (limit, strict) in self._exact.items():
            side = self.inner_upper if is_upper else self.inner_lower
            side[i] = self._inner(i, limit, is_upper, strict, as_written)

    def _inner(self, i: int, limit: Fraction, is_upper: bool, strict: bool, as_written: bool) -> float:
        towards = -math.inf if is_upper else math.inf
        value, kind = np.array([float(limit)]), self.types[i : i + 1]
        if self.floats and kind[0] in FLOATS:
            value = stored(value, kind)
            if not as_written:
                return float(following(value, towards, kind)[0] if strict else value[0])
        else:
            kind = np.array(["float64"])
        exact = Fraction(float(value[0])) if math.isfinite(value[0]) else None
        outside = exact is not None and (exact > limit if is_upper else exact < limit)
        if outside or (strict and exact == limit):
            value = following(value, towards, kind)
        return float(value[0])

    def inside(self, points: Array) -> Array:
        """Points (k, n), each moved to the nearest numbers inside that the models can be given; where there
        is none the nearest number outside."""
        lower, upper = self.inner_lower, self.inner_upper
        points = stored(np.clip(points, lower, np.maximum(lower, upper)), self.types)
        points = np.where(points < lower, following(points, np.inf, self.types), points)
        return np.where(points > upper, following(points, -np.inf, self.types), points)

    def outside(self, points: Array) -> Array:
        """Where points are not inside."""
        return (points < self.inner_lower) | (points > self.inner_upper)


def _range(v: Variable) -> tuple[float, float]:
    """What an input's type allows."""
    if v.type == "bool":
        return 0.0, 1.0
    if v.type in INTEGERS:
        bits = INTEGERS[v.type]
        return (0.0, 2.0**bits) if v.type[0] == "u" else (-(2.0 ** (bits - 1)), 2.0 ** (bits - 1))
    limits = (
        [LARGEST[t] for t in (v.type, v.stored) if t in LARGEST and t != "float64"]
        if v.type != "real"
        else []
    )
    return (-min(limits), min(limits)) if limits else (-math.inf, math.inf)


def stored(values: Array, types: Array) -> Array:
    """Each number rounded to what its type can hold."""
    result = np.array(values, dtype=np.float64)
    with np.errstate(all="ignore"):
        for name in set(types.tolist()):
            here = types == name
            if name in ("float16", "float32"):
                result[..., here] = result[..., here].astype(NUMPY[name]).astype(np.float64)
            elif name not in FLOATS:
                result[..., here] = np.rint(result[..., here])
    return result


def following(values: Array, towards: float, types: Array) -> Array:
    """The next number of each one's type."""
    result = values.copy()
    for name in set(types.tolist()):
        here = types == name
        if name in ("float16", "float32"):
            kind = np.float16 if name == "float16" else np.float32
            moved = np.nextafter(values[..., here].astype(kind), kind(towards)).astype(np.float64)
        elif name in FLOATS:
            moved = np.nextafter(values[..., here], towards)
        else:
            moved = values[..., here] + np.sign(towards)
        result[..., here] = moved
    return result
