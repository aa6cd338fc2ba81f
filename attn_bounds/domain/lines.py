"""Ranges of scalar functions, and lines below and above them, for relaxations over boxes.

Any slope makes a line: `activations.errors` bounds how far the function is from it. So the slopes are looked
for by samples, and only the offsets need care.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from .activations import EPS, Function, errors, negated

SAMPLES = 17  # over the range of an entry, besides those where activations bend
BENDS = (-6.0, -4.0, -3.0, -2.0, -1.4, -0.7, 0.0, 0.7, 1.4, 2.0, 3.0, 4.0, 6.0)
STEPS = 16  # of bisection in the slope
CHUNK = 2**16  # entries whose samples are held at once
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


def _sampled_slope(f: Function, low: Tensor, high: Tensor, point: Tensor) -> Tensor:
    """Slope of the line below the samples that is highest at the point, (k) each."""
    grid = low + torch.linspace(0, 1, SAMPLES, dtype=low.dtype).unsqueeze(1) * (high - low)
    bends = torch.tensor([*BENDS, *f.breaks], dtype=low.dtype).unsqueeze(1).expand(-1, len(low))
    x = torch.cat([grid, bends.clamp(min=low, max=high)])
    value, x = f.value(x), x - point
    ends = [s for piece in f.pieces(low, high, (low + high) / 2) for s in f.slopes(*piece)]
    a, b = torch.stack(ends).amin(0), torch.stack(ends).amax(0)
    for _ in range(STEPS):
        middle = (a + b) / 2
        touched = (value - middle * x).argmin(0, keepdim=True)
        left = x.gather(0, touched)[0] < 0
        a, b = torch.where(left, middle, a), torch.where(left, b, middle)
    return (a + b) / 2


def _line_below(f: Function, low: Tensor, high: Tensor, point: Tensor, dtype: torch.dtype) -> Lines:
    """The highest line at the point, about; slope in the given precision. (k) each, float64."""
    size = 1.0 + low.abs() + high.abs()
    narrow = high - low <= 1e-7 * size
    tangent = f.slope(point)
    chord = (f.value(high) - f.value(low)) / torch.where(narrow, torch.ones_like(low), high - low)
    bends = torch.zeros_like(narrow)
    for b in f.breaks:
        bends |= (low < b) & (b < high)
    convex = f.slope(high) >= f.slope(low)
    slope = torch.where(narrow | (convex & ~bends), tangent, chord)
    candidates = [slope]
    if bool((pick := bends & ~narrow).any()):
        sampled = slope.clone()
        parts = zip(*(t[pick].split(CHUNK) for t in (low, high, point)), strict=True)
        sampled[pick] = torch.cat([_sampled_slope(f, *part) for part in parts])
        candidates = [sampled, torch.where(pick, tangent, slope), slope]
    best: Lines | None = None
    for one in candidates:
        one = one.to(dtype).double()
        line = Lines(one, _offset(f, one, low, high, point))
        if best is None:
            best = line
            continue
        better = line.slope * point + line.offset > best.slope * point + best.offset
        best = Lines(*(torch.where(better, new, old) for new, old in zip(line, best, strict=True)))
    assert best is not None
    return best


def _offset(f: Function, slope: Tensor, low: Tensor, high: Tensor, point: Tensor) -> Tensor:
    """Lower bound of `σ(x) − slope x` over [low, high]."""
    at = f.value(point)
    offset = at + errors(f, point, at, slope, low, high).low - slope * point
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
    found = [_line_below(f, low, high, low + p * (high - low), dtype) for p in points or (0.5,)]
    room = 2.0 * torch.finfo(dtype).eps * (dtype != torch.float64)

    def finished(t: Tensor) -> Tensor:
        t = torch.where(known, t, torch.nan).to(dtype)
        return t.reshape(shape)

    slopes = [finished(line.slope) for line in found]
    offsets = [finished(line.offset - room * line.offset.abs()) for line in found]
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
