"""Branch and bound: a set in parts, each with a bound of its own, the worst ones cut first.

How a set is cut is the business of a `Strategy`; what is here is the same for all of them.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from ..properties import Specification

Part = TypeVar("Part")

FIRST_BATCH, LARGEST_BATCH = 8, 512
HOPELESS = 64  # parts without any bound (NaN or infinite) after which it ends
BATCH_SECONDS = 0.5  # batches of parts grow while they take less than this


class Strategy(Protocol[Part]):
    """A way of cutting a set into parts."""

    name: str

    def parts(self) -> list[Part]:
        """Parts that together cover the set."""

    def bounds(self, parts: Sequence[Part]) -> Tensor:
        """Lower bounds of the specification's rows on each part, (parts, rows) float64; NaN for none."""

    def cut(self, parts: Sequence[Part]) -> list[list[Part] | None]:
        """For each part smaller ones that together cover it (none if it is empty), or None: cannot be cut."""

    def counterexample(self, parts: Sequence[Part]) -> Tensor | None:
        """A replayed counterexample (1, *input) in one of the parts, if one is found quickly."""


@dataclass
class Outcome:
    """What became of the search.

    Attributes:
        margins: lower bound per row of the specification over the whole set, (rows,); None if a part has
            none.
        margin: lower bound of the smallest margin; the set is verified if `open` is 0.
        counterexample: (1, *input) or None.
        bounded: parts that were bounded. open: parts that are not verified.
        why: why it ended with open parts.
    """

    margins: Tensor | None
    margin: float
    counterexample: Tensor | None
    bounded: int
    open: int
    why: str = ""


def usable(rows: Tensor) -> Tensor:
    """Lower bounds with -inf for those that are NaN or infinite of either sign: they say nothing."""
    return torch.where(rows.isfinite(), rows, -math.inf)


class Search(Generic[Part]):
    """One search, which can be asked for what is known so far.

    Arguments:
        strategy: cuts and bounds.
        spec: what is to be shown.
        deadline: `time.perf_counter()` after which no batch begins; budget: most parts that are bounded.
    """

    def __init__(
        self, strategy: Strategy[Part], spec: Specification, deadline: float = math.inf, budget: int = 4096
    ) -> None:
        self.strategy, self.spec, self.deadline, self.budget = strategy, spec, deadline, budget
        self.heap: list[tuple[float, int, Part, Tensor]] = []  # worst margin first
        self.stuck: list[Tensor] = []  # bounds of parts that cannot be cut
        self.done: Tensor | None = None  # smallest bounds of verified parts, per row
        self.done_margin = math.inf
        self.bounded = 0
        self.finite = False  # whether any part had a bound
        self._count = itertools.count()

    def run(self, report: Callable[[Outcome], None] | None = None) -> Outcome:
        """Search until everything is verified, a counterexample is found, or time or budget is used up."""
        parts, size = self.strategy.parts(), FIRST_BATCH
        while True:
            begin = time.perf_counter()
            if parts:
                for part, rows in zip(parts, self.strategy.bounds(parts), strict=True):
                    self._sort_in(part, rows)
                self.bounded += len(parts)
                if report is not None:
                    report(self.outcome())
            if not self.heap:
                return self.outcome("parts cannot be cut further" if self.stuck else "")
            if self.bounded >= HOPELESS and not self.finite:
                return self.outcome("the bounds of all parts are NaN or infinite")
            if time.perf_counter() >= self.deadline or self.bounded >= self.budget:
                return self.outcome(f"{len(self.heap) + len(self.stuck)} parts left")
            worst = [heapq.heappop(self.heap) for _ in range(min(size, len(self.heap)))]
            chosen = [part for _, _, part, _ in worst]
            found = self.strategy.counterexample(chosen)
            if found is not None:
                self.stuck += [rows for *_, rows in worst]
                return self.outcome("", found)
            parts = []
            for entry, smaller in zip(worst, self.strategy.cut(chosen), strict=True):
                if smaller is None:
                    self.stuck.append(entry[3])
                else:
                    parts += smaller
            if time.perf_counter() - begin < BATCH_SECONDS:
                size = min(2 * size, LARGEST_BATCH)

    def _sort_in(self, part: Part, rows: Tensor) -> None:
        """Among the verified, or into the queue."""
        known = usable(rows)
        margin = float(self.spec.margin(known))
        self.finite |= math.isfinite(margin)
        if margin > 0:
            self.done = known if self.done is None else torch.minimum(self.done, known)
            self.done_margin = min(self.done_margin, margin)
        else:
            heapq.heappush(self.heap, (margin, next(self._count), part, known))

    def outcome(self, why: str = "", counterexample: Tensor | None = None) -> Outcome:
        """What is known now."""
        left = [*(e[3] for e in self.heap), *self.stuck]
        rows = left if self.done is None else [self.done, *left]
        margins = torch.stack(rows).amin(0) if rows else None
        # not that of `margins`: each part may have another row of a group above zero
        margin = min([self.done_margin, *(float(self.spec.margin(r)) for r in left)])
        if margins is not None and not bool(margins.isfinite().all()):
            margins = None
        return Outcome(margins, margin, counterexample, self.bounded, len(self.heap) + len(self.stuck), why)
