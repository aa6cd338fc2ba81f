"""Intervals against exact fractions."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest

from attn_bounds.intervals import functions
from attn_bounds.intervals.arithmetic import Interval

RNG = np.random.default_rng(0)
SPECIAL = [0.0, 1.0, -1.0, 0.1, -0.3, 2.0**-1074, -(2.0**-1040), 1e-300, 1e160, -1e300, 1.7e308, 3.0, 1 / 3]


def numbers() -> np.ndarray:
    wild = RNG.standard_normal(60) * 10.0 ** RNG.integers(-320, 300, 60).astype(float)
    return np.concatenate([SPECIAL, wild, RNG.standard_normal(60)])


def holds(low: float, exact: Fraction, high: float) -> bool:
    return (low == -math.inf or Fraction(low) <= exact) and (high == math.inf or exact <= Fraction(high))


@pytest.mark.parametrize("name", ["+", "-", "*", "/"])
def test_an_operation_encloses_the_exact_result_and_is_exact_where_float64_is(name: str) -> None:
    x, y = numbers(), RNG.permutation(numbers())
    if name == "/":
        y = np.where(y == 0, 1.0, y)
    a, b = Interval.of(x), Interval.of(y)
    found = {"+": a.__add__, "-": a.__sub__, "*": a.__mul__, "/": a.__truediv__}[name](b)
    sharp = 0
    for u, v, low, high in zip(x, y, found.lo, found.hi, strict=True):
        p, q = Fraction(float(u)), Fraction(float(v))
        exact = {"+": p + q, "-": p - q, "*": p * q, "/": p / q if q else Fraction(0)}[name]
        assert holds(low, exact, high), (u, name, v, low, high)
        try:
            near = float(exact)
        except OverflowError:
            continue
        plain = all(1e-130 < abs(w) < 1e130 for w in (u, v))  # elsewhere a unit may be given away
        if plain and near == exact and near:
            assert low == high == near, (u, name, v)
            sharp += 1
        elif plain:
            assert high - low <= 4 * np.spacing(max(abs(near), 1e-290)), (u, name, v)
    assert sharp >= 1


def test_operations_on_ranges_hold_every_combination_of_points() -> None:
    ends = np.sort(RNG.integers(-4, 5, (400, 4)) / 2.0, axis=1)
    pick = RNG.permuted(ends, axis=1)
    a = Interval(np.minimum(pick[:, 0], pick[:, 1]), np.maximum(pick[:, 0], pick[:, 1]))
    b = Interval(np.minimum(pick[:, 2], pick[:, 3]), np.maximum(pick[:, 2], pick[:, 3]))
    for s, t in itertools.product(np.linspace(0, 1, 5), repeat=2):
        x, y = a.lo + s * (a.hi - a.lo), b.lo + t * (b.hi - b.lo)
        for found, value in (
            (a + b, x + y),
            (a - b, x - y),
            (a * b, x * y),
            (a.power(2), x * x),
            (a.power(3), x**3),
        ):
            assert found.contains(value).all()
        with np.errstate(all="ignore"):
            assert ((a / b).contains(x / y) | (y == 0)).all()


def test_unbounded_ranges_keep_their_finite_side() -> None:
    half, zero = Interval(np.array([0.0]), np.array([np.inf])), Interval.of([0.0])
    assert (half * zero).hi == 0 and (half + half).lo == 0 and (half - half).lo == -np.inf
    assert (Interval.of([1.0]) / (half + Interval.of([1.0]))).lo == pytest.approx(0, abs=1e-300)


@pytest.mark.parametrize("name", ["exp", "log", "sqrt", "sigmoid", "tanh", "erf"])
def test_elementary_functions_enclose_values_of_high_precision(name: str) -> None:
    from mpmath import mp

    mp.prec = 200
    x = RNG.standard_normal(60) * np.array([0.01, 1, 10, 300] * 15)
    x = abs(x) if name in ("log", "sqrt") else x
    found = getattr(functions, name)(Interval.of(x))
    reference = {"sigmoid": lambda v: 1 / (1 + mp.exp(-v))}.get(name) or getattr(mp, name)
    for v, low, high in zip(x, found.lo, found.hi, strict=True):
        assert mp.mpf(float(low)) <= reference(mp.mpf(float(v))) <= mp.mpf(float(high)), (name, v)
        assert high - low <= 1e-14 * max(abs(high), 1e-300)


def test_square_roots_of_squares_are_exact() -> None:
    root = functions.sqrt(Interval.of([0.0, 4.0, 2.25, 2.0]))
    assert (root.lo == root.hi).tolist() == [True, True, True, False]


def test_softmax_is_in_0_1_and_holds_samples_of_wide_boxes() -> None:
    wide = Interval(np.full((1, 3), -1000.0), np.full((1, 3), 1000.0))
    found = functions.softmax(wide)
    assert (found.lo == 0).all() and (found.hi == 1).all()
    low = RNG.standard_normal((50, 4))
    box = Interval(low, low + RNG.random((50, 4)))
    found = functions.softmax(box)
    for _ in range(200):
        x = box.lo + RNG.integers(0, 2, box.shape) * (box.hi - box.lo)
        e = np.exp(x - x.max(1, keepdims=True))
        s = e / e.sum(1, keepdims=True)
        assert ((found.lo - 1e-15 <= s) & (s <= found.hi + 1e-15)).all()


def test_rounding_to_float32_keeps_what_float32_holds() -> None:
    x = Interval.of([1.5, 0.1, 1e39, 1e-50])
    found = functions.rounded(x, ("float32",))
    assert found.lo[0] == found.hi[0] == 1.5
    assert found.hi[1] == float(np.float32(0.1)) and found.lo[1] == 0.1
    assert found.hi[2] == np.inf and found.lo[2] == 1e39
    assert found.lo[3] == 0.0
