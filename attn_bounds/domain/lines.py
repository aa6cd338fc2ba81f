"""Ranges of scalar functions, and lines below and above them, for relaxations over boxes.

Any slope makes a line: `activations.errors` bounds how far the function is from it. So the slopes are looked
for by samples, and only the offsets need care.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .activations import EPS, Function, errors, negated

SAMPLES = 21  # over the range of an entry, besides those where activations bend
BENDS = (-6.0, -4.0, -3.0, -2.0, -1.4, -0.7, 0.0, 0.7, 1.4, 2.0, 3.0, 4.0, 6.0)
HULL_STEPS = 7  # of a search for the edge of their lower hull
GOLDEN_STEPS = 10
CHUNK = 2**14  # entries whose samples are held at once
POINTS = (0.02, 0.25, 0.5, 0.75, 0.98)  # of the range, where the lines of a family are highest


class Lines(NamedTuple):
    """`slope x + offset`, (…) each or with a dimension for the members of a family behind."""

    slope: Tensor
    offset: Tensor


def _usable(f: Function, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Where a range is known and inside the domain, and the ends in float64, harmless ones elsewhere."""
    low, high = low.double(), high.double()
    known = torch.isfinite(low) & torch.isfinite(high) & (low <= high) & f.domain(low, high)
    one = torch.ones_like(low)
    return known, torch.where(known, low, one), torch.where(known, high, one)


def value_range(f: Function, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Smallest and largest value on [low, high], rounded outwards; NaN where the function is not defined."""
    dtype = low.dtype
    known, low, high = _usable(f, low, high)
    zero = torch.zeros_like(low)
    found = errors(f, low, zero, zero, low, high)
    room = 2.0 * torch.finfo(dtype).eps * (dtype != torch.float64)
    lower, upper = found.low - room * found.low.abs(), found.high + room * found.high.abs()
    return tuple(torch.where(known, t, torch.nan).to(dtype) for t in (lower, upper))  # type: ignore[return-value]


def _sampled_slopes(f: Function, low: Tensor, high: Tensor, points: list[Tensor]) -> list[Tensor]:
    """Slopes of the lines below samples that are highest at each point: edges of their hull; (k) each."""
    grid = low + torch.linspace(0, 1, SAMPLES, dtype=low.dtype).unsqueeze(1) * (high - low)
    bends = torch.tensor([*BENDS, *f.breaks], dtype=low.dtype).unsqueeze(1).expand(-1, len(low))
    x = torch.cat([grid, bends.clamp(min=low, max=high)])
    value, step = f.value(x), (high - low) / (SAMPLES - 1)
    found = []
    for point in points:
        x_left, x_right, left, right = low, high, value[0], value[SAMPLES - 1]
        for _ in range(HULL_STEPS):
            slope = (right - left) / (x_right - x_left)
            lowest = (value - slope * x).argmin(0, keepdim=True)
            x_new, new = x.gather(0, lowest)[0], value.gather(0, lowest)[0]
            side = x_new < point
            x_left, left = torch.where(side, x_new, x_left), torch.where(side, new, left)
            x_right, right = torch.where(side, x_right, x_new), torch.where(side, right, new)
        # between the samples; where both are next to the point the line is its tangent
        x_right = _best(
            _from(f, x_left, left, 1.0),
            torch.maximum(x_right - step, point),
            torch.minimum(x_right + step, high),
        )
        right = f.value(x_right)
        x_left = _best(
            _from(f, x_right, right, -1.0),
            torch.maximum(x_left - step, low),
            torch.minimum(x_left + step, point),
        )
        slope = (right - f.value(x_left)) / (x_right - x_left)
        found.append(torch.where(x_right - x_left <= 2.0 * step, f.slope(point), slope))
    return found


def _from(f: Function, x: Tensor, value: Tensor, sign: float) -> Callable[[Tensor], Tensor]:
    """The slope of the chord from a point, times a sign."""
    return lambda t: sign * (f.value(t) - value) / (t - x)


def _best(f: Callable[[Tensor], Tensor], a: Tensor, b: Tensor) -> Tensor:
    """Where f is about the smallest between a and b, by golden section."""
    ratio = (math.sqrt(5) - 1) / 2
    for _ in range(GOLDEN_STEPS):
        left, right = b - ratio * (b - a), a + ratio * (b - a)
        smaller = f(left) < f(right)
        a, b = torch.where(smaller, a, left), torch.where(smaller, right, b)
    return (a + b) / 2


def _slopes(f: Function, low: Tensor, high: Tensor, points: list[Tensor]) -> list[Tensor]:
    """Slopes of lines that are about the highest at each point, (k) each: any would do."""
    narrow = high - low <= 1e-7 * (1.0 + low.abs() + high.abs())
    chord = (f.value(high) - f.value(low)) / torch.where(narrow, torch.ones_like(low), high - low)
    bends = torch.zeros_like(narrow)
    for b in f.breaks:
        bends |= (low < b) & (b < high)
    tangent = narrow | ((f.slope(high) >= f.slope(low)) & ~bends)  # σ is convex there
    slopes = [torch.where(tangent, f.slope(point), chord) for point in points]
    pick = bends & ~narrow
    if bool(pick.any()):
        # samples in single precision: it is enough, and fast
        parts = zip(*(t[pick].float().split(CHUNK) for t in (low, high, *points)), strict=True)
        sampled = [_sampled_slopes(f, part[0], part[1], list(part[2:])) for part in parts]
        for k, slope in enumerate(slopes):
            own = torch.cat([s[k] for s in sampled]).double()
            slope[pick] = torch.where(torch.isfinite(own), own, chord[pick])
    return slopes


def _offset(f: Function, slope: Tensor, low: Tensor, high: Tensor, point: Tensor, steps: int) -> Tensor:
    """Lower bound of `σ(x) − slope x` over [low, high]."""
    at = f.value(point)
    offset = at + errors(f, point, at, slope, low, high, steps).low - slope * point
    return offset - 4 * EPS * (at.abs() + (slope * point).abs())


def lines_below(f: Function, low: Tensor, high: Tensor, points: tuple[float, ...] | None = None) -> Lines:
    """Lines that lie below σ on [low, high], highest at the midpoint or at several parts of the range.

    Arguments:
        low, high: (…), any dtype, which is that of the lines; offsets are rounded down.
        points: None for the midpoint.

    Returns:
        (…), or (…, len(points)); NaN where the range is not finite or σ is not defined on all of it.
    """
    dtype, shape = low.dtype, low.shape
    known, low, high = (t.flatten() for t in _usable(f, low, high))
    places = [low + p * (high - low) for p in points or (0.5,)]
    slopes = [slope.to(dtype).double() for slope in _slopes(f, low, high, places)]
    steps = 24 if dtype == torch.float64 else 14  # of bisection; what it leaves shrinks by four with each
    offsets = [_offset(f, slope, low, high, p, steps) for slope, p in zip(slopes, places, strict=True)]
    room = 2.0 * torch.finfo(dtype).eps * (dtype != torch.float64)

    def finished(t: Tensor) -> Tensor:
        return torch.where(known, t, torch.nan).to(dtype).reshape(shape)

    slopes = [finished(slope) for slope in slopes]
    offsets = [finished(offset - room * offset.abs()) for offset in offsets]
    if points is None:
        return Lines(slopes[0], offsets[0])
    return Lines(torch.stack(slopes, -1), torch.stack(offsets, -1))


def lines_above(f: Function, low: Tensor, high: Tensor, points: tuple[float, ...] | None = None) -> Lines:
    """As `lines_below`, above."""
    slope, offset = lines_below(negated(f), low, high, points)
    return Lines(-slope, -offset)


def member(family: Lines, where: Tensor) -> Lines:
    """A member between those of a family, by its place in [0, 1]: lines below stay below.

    Arguments:
        family: (…, k) each. where: broadcastable to (spec, …).
    """
    k = family.slope.shape[-1]
    place = where * (k - 1)
    parts = [(1.0 - (place - i).abs()).clamp(min=0.0) for i in range(k)]
    slope, offset = (
        sum(part * t[..., i] for part, i in zip(parts, itertools.count(), strict=False)) for t in family
    )
    return Lines(slope, offset)  # type: ignore[arg-type]
