"""The search: points that satisfy a query, and boxes that cannot, cut until nothing is open."""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import UnsupportedModelError
from .judge import Judge, Judgement
from .node import FLOATS
from .query import Query
from .replay import Replay, Witness

Array = np.ndarray[Any, Any]

MAX_MOVING = 48  # with more inputs that move no derivatives are taken
CORNERS = 6  # all corners of a box of so many moving inputs are tried
MAX_BATCH = 8192  # boxes at once
BATCH_NUMBERS = 1_000_000  # entries of the largest value of a batch, with derivatives
BATCH_SECONDS = 0.3
SMALLEST = 2.0**-40  # part of its first width below which an axis is not cut
MAX_STUCK = 256  # boxes that cannot be cut, after which the search ends
REPLAYS = 40  # points that are tried in onnxruntime though intervals do not decide them
CHECKS = 3  # points at which the intervals must hold what onnxruntime computes
TOLERANCE = 1e-4  # of that comparison, relative


@dataclass(frozen=True)
class Outcome:
    """status: sat, unsat or unknown; why it is unknown, or a warning; boxes that were judged."""

    status: str
    witness: Witness | None = None
    reason: str = ""
    boxes: int = 0


class Solver:
    """Decides one query.

    Arguments:
        query: the query.
        deadline: `time.monotonic()` after which no batch begins.
    """

    def __init__(self, query: Query, deadline: float = math.inf, seed: int = 0) -> None:
        self.query, self.deadline = query, deadline
        self.lower, self.upper = query.inputs.lower, query.inputs.upper
        moving = np.flatnonzero(self.lower < self.upper)
        self.judge = Judge(query, moving if len(moving) <= MAX_MOVING else moving[:0])
        self.replay = Replay(query)
        self.whole = np.array([t not in FLOATS for t in query.inputs.types], dtype=bool)
        self.moving, self.rng = moving, np.random.default_rng(seed)
        self.boxes = self.replays = 0
        self._best: Array | None = None
        middle = query.inputs.inside(
            (np.minimum(self.upper, 1e30) / 2 + np.maximum(self.lower, -1e30) / 2)[None]
        )
        # inputs that are fixed to a real number no model can be given, such as 0.1: the whole of it is judged
        self.fixed = query.inputs.outside(middle)[0] if not query.floats else np.zeros(len(self.lower), bool)

    def run(self) -> Outcome:
        """The outcome; raises UnsupportedModelError for what intervals cannot do."""
        query = self.query
        if query.inputs.empty:
            return Outcome("unsat", reason=f"no input satisfies the bounds: {query.inputs.empty}")
        self._check()
        found = self._points(self._first_points())
        if found is None:
            found = self._climb()
        if found is None and query.floats:
            query.inputs.relax()
            found = self._points(self._first_points())
        return found or self._split()

    # -- points -----------------------------------------------------------------------------------------

    def _inside(self, points: Array) -> Array:
        """Points of the box that the models can be given, (k, n)."""
        points = self.query.inputs.inside(points)
        return points[~(self.query.inputs.outside(points) & ~self.fixed).any(1)]

    def _as_boxes(self, points: Array) -> tuple[Array, Array]:
        """What is judged for points: themselves, and all that a fixed input may be."""
        return np.where(self.fixed, self.lower, points), np.where(self.fixed, self.upper, points)

    def _sides(self) -> tuple[Array, Array]:
        """Finite limits for choosing points."""
        lower, upper = self.lower, self.upper
        low = np.where(lower < -1e6, np.minimum(-10.0, upper - 10.0), lower)
        high = np.where(upper > 1e6, np.maximum(10.0, low + 10.0), upper)
        return np.maximum(np.minimum(low, high), lower), np.minimum(high, upper)

    def _first_points(self) -> Array:
        low, high = self._sides()
        n, moving = len(low), len(self.moving)
        points = [low / 2 + high / 2, low, high, np.clip(0.0, low, high)]
        if 0 < moving <= CORNERS:
            for choice in itertools.product((0, 1), repeat=moving):
                corner = low.copy()
                corner[self.moving] = np.where(choice, high[self.moving], low[self.moving])
                points.append(corner)
        sides = self.rng.random((32, n)) < 0.5
        inner = low + self.rng.random((64, n)) * (high - low)
        return np.concatenate([np.stack(points), np.where(sides, low, high), inner])

    def _points(self, points: Array) -> Outcome | None:
        """An outcome if one of the points satisfies the query."""
        points = self._inside(points)
        if not len(points):
            return None
        judged = self.judge(*self._as_boxes(points), derivatives=False)
        self._best = points[int(judged.score.argmax())]
        for i in np.flatnonzero(judged.certain)[:3]:
            values = self.replay.values(points[i])
            # real numbers: proved at this very point; else onnxruntime has the last word
            if not self.query.floats or self.replay.satisfied(values):
                return Outcome("sat", self.replay.witness(values), "", self.boxes)
        if self.query.floats:
            open_ = np.flatnonzero(judged.possible & ~judged.certain)
            for i in open_[np.argsort(-judged.score[open_], kind="stable")][:4]:
                if self.replays >= REPLAYS:
                    break
                self.replays += 1
                values = self.replay.values(points[i])
                if self.replay.satisfied(values):
                    return Outcome("sat", self.replay.witness(values), "", self.boxes)
        return None

    def _climb(self, rounds: int = 12) -> Outcome | None:
        """Moves one input after the other to where the constraints are met best."""
        if not len(self.moving) or self._best is None:
            return None
        low, high = self._sides()
        begin = time.monotonic()
        limit = min(self.deadline, begin + 0.2 * max(0.0, self.deadline - begin))
        point, step = self._best.copy(), high - low
        for _ in range(rounds):
            trials = [point]
            for i in self.moving[:64]:
                for value in (low[i], high[i], point[i] - step[i] / 4, point[i] + step[i] / 4):
                    other = point.copy()
                    other[i] = min(max(value, low[i]), high[i])
                    trials.append(other)
            found = self._points(np.stack(trials))
            if found is not None:
                return found
            assert self._best is not None
            if (self._best == point).all():
                step = step / 2
            point = self._best.copy()
            if time.monotonic() > limit:
                return None
        return None

    # -- boxes ------------------------------------------------------------------------------------------

    def _split(self) -> Outcome:
        width = self.upper - self.lower
        open_: list[tuple[Array, Array]] = [(self.lower[None], self.upper[None])]
        size, stuck = 1, 0
        per_box = (1 + len(self.judge.axes)) * max(len(width), *(use.widest for use in self.query.uses))
        while open_:
            if time.monotonic() >= self.deadline:
                return Outcome("timeout", None, f"open boxes: {sum(len(b[0]) for b in open_)}", self.boxes)
            begin = time.monotonic()
            lower, upper = open_.pop()
            if len(lower) > size:
                open_.append((lower[size:], upper[size:]))
                lower, upper = lower[:size], upper[:size]
            elif open_ and len(lower) + len(open_[-1][0]) <= size:
                open_[-1] = tuple(
                    np.concatenate(pair) for pair in zip(open_[-1], (lower, upper), strict=True)
                )  # type: ignore[assignment]
                continue
            judged = self.judge(lower, upper)
            self.boxes += len(lower)
            keep = judged.possible
            if keep.any():
                found = self._points(self._promising(lower[keep], upper[keep]))
                if found is not None:
                    return found
                left, right, lost = self._halves(lower[keep], upper[keep], judged, keep, width)
                stuck += lost
                if len(left[0]):
                    open_ += [right, left]
            seconds = time.monotonic() - begin
            if seconds < BATCH_SECONDS:
                size = min(size * 4, MAX_BATCH, max(1, BATCH_NUMBERS // per_box))
            elif seconds > 4 * BATCH_SECONDS:
                size = max(1, size // 2)
            if stuck > MAX_STUCK:
                break
        if stuck:
            return Outcome("unknown", None, "a box cannot be cut further, yet is not decided", self.boxes)
        return Outcome("unsat", boxes=self.boxes)

    def _promising(self, lower: Array, upper: Array) -> Array:
        """A few points of the first boxes."""
        lower, upper = lower[:64], upper[:64]
        low, high = self._sides()
        lower, upper = np.maximum(lower, np.minimum(low, upper)), np.minimum(upper, np.maximum(high, lower))
        return np.concatenate([lower / 2 + upper / 2, lower[:8], upper[:8]])

    def _halves(
        self, lower: Array, upper: Array, judged: Judgement, keep: Array, width: Array
    ) -> tuple[tuple[Array, Array], tuple[Array, Array], int]:
        """Each box in two; and how many cannot be cut."""
        size = upper - lower
        with np.errstate(all="ignore"):
            part = np.where(
                np.isfinite(width),
                size / width,
                np.where(np.isfinite(size), size / (1 + abs(lower) + abs(upper)), 1.0),
            )
            part = np.where((size > 0) & (part > SMALLEST), np.nan_to_num(part), 0.0)
            effect = judged.effect[keep]
            effect = effect / np.maximum(effect.max(1, keepdims=True), 1e-300)
        axis = np.where(part > 0, part * 1e-3 + effect, 0.0).argmax(1)
        rows = np.arange(len(lower))
        low, high = lower[rows, axis], upper[rows, axis]
        middle = _middle(low, high)
        whole = self.whole[axis]  # nothing lies between whole numbers
        possible = np.where(whole, low < high, (part[rows, axis] > 0) & (low < middle) & (middle < high))
        lost = int((~possible).sum())
        left, right = upper.copy(), lower.copy()
        left[rows, axis] = np.where(whole, np.floor(middle), middle)
        right[rows, axis] = np.where(whole, np.floor(middle) + 1, middle)
        return (lower[possible], left[possible]), (right[possible], upper[possible]), lost

    # -- trust ------------------------------------------------------------------------------------------

    def _check(self) -> None:
        """The intervals must hold what onnxruntime computes; raises UnsupportedModelError."""
        low, high = self._sides()
        points = self._inside(low + self.rng.random((CHECKS, len(low))) * (high - low))
        for point in points:
            bounds = self.judge.values(*self._as_boxes(point[None]))
            for v, bound, value in zip(self.query.variables, bounds, self.replay.values(point), strict=True):
                flat = value.astype(np.float64).ravel()
                slack = 0.0 if self.query.floats else TOLERANCE * (1 + abs(flat))
                inside = (bound.v.lo[0] - slack <= flat) & (flat <= bound.v.hi[0] + slack)
                if not (inside | ~np.isfinite(flat)).all():
                    raise UnsupportedModelError(
                        f"{self.query.uses[v.use].path}: {v.name} is not what onnxruntime computes; "
                        "this model is not read correctly"
                    )


def _middle(low: Array, high: Array) -> Array:
    """Where boxes are cut; endless ones at 0 or at growing powers."""
    with np.errstate(all="ignore"):
        middle = low / 2 + high / 2
        far = high - low > 1e6
        middle = np.where(far & (low < 0) & (high > 0), 0.0, middle)
        middle = np.where(far & (low >= 0), np.maximum(1.0, np.minimum(low * 2 + 1, middle)), middle)
        middle = np.where(far & (high <= 0), np.minimum(-1.0, np.maximum(high * 2 - 1, middle)), middle)
    # short numbers make exact sums more likely
    short = middle.astype(np.float32).astype(np.float64)
    return np.where((low < short) & (short < high), short, middle)
