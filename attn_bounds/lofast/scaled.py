"""Moves times a factor per entry, as the slopes of an activation are."""

from __future__ import annotations

import math
from typing import cast

from torch import Tensor

from .columns import Columns, Sloped
from .forms import GROW, Anchor, Form, Key, Reach, Term, Terms, norm


class Scaled:
    """`‖factor ∘ move‖` for factors of entries and any radii: by the largest of each feature, or by entry."""

    def __init__(self, x: Form, known: dict[Key, Columns]) -> None:
        self.n, self.d = x.n, x.d
        self.reach = x.entry_reach()
        self.maps: list[tuple[Anchor, list[Columns | list[Term]]]] = []  # for each of an anchor's bounds
        for a, ts in x.terms.items():
            own: list[Columns | list[Term]] = []
            for g, _ in a.every():
                terms = [t.behind(g) for t in ts]
                if len(terms) > 1 or terms[0].h is not None or terms[0].w is None:
                    own.append(terms)
                    continue
                w, key = cast(Tensor, terms[0].matrix()), terms[0].key
                own.append(Columns(w) if key is None else known.setdefault(key, Columns(w)))
            self.maps.append((a, own))

    def times(self, x: Form, slope: Tensor) -> Terms:
        """The terms of x times a factor per feature, (d)."""
        terms = x.times(slope).terms if any(not isinstance(own[0], Columns) for _, own in self.maps) else {}
        for a, (way, *_) in self.maps:
            if isinstance(way, Columns):
                terms[a] = [Term(None, Sloped(way, slope) if way.large else way.w * slope)]
        return terms

    def entries(self) -> Tensor:
        """Bound of each entry's move, (n, d)."""
        return self.reach.bound().reshape(self.n, self.d)

    def radius(self, factor: Tensor, reach: Tensor, roughly: bool = False) -> float:
        """factor, reach: (n, d), what `entries` returns. roughly: where it counts less."""
        f = factor.amax(0)

        def size(way: Columns | list[Term]) -> float:
            if isinstance(way, Columns):
                return (way.scaled_norm_roughly(f) if roughly else way.scaled_norm(f)) * GROW
            return norm([t.times(f) for t in way], self.n, self.d)

        by_norm = Reach((a, [size(m) for m in own]) for a, own in self.maps).radius()
        if by_norm == 0.0:
            return 0.0
        found = min(by_norm, float((factor * reach).norm()) * GROW)
        return found if found == found else math.inf
