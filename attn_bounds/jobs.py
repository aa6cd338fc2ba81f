"""What can be asked about one model, an input or property at a time; the same here and in a child process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from .errors import InputError
from .properties import InputSet, Property, Specification
from .results import Certificate, Explanation, Radius
from .verifier import Verifier

Clip = tuple[float, float] | None


@dataclass(frozen=True)
class Item:
    """One thing to certify: an input, or a property.

    Attributes:
        name: index into the npz file, or the property's name.
        x: (*input) in the model's units; None for a property.
        label: the class of x; or spec: what must hold around x.
        prop: the property; None for an input.
    """

    name: int | str
    x: Tensor | None = None
    label: int | None = None
    spec: Specification | None = None
    prop: Property | None = None

    @property
    def key(self) -> str:
        """Under which JSON key the name stands."""
        return "index" if self.prop is None else "property"

    def centres(
        self, verifier: Verifier, targets: Sequence[int] | None = None, top_k: int = 1
    ) -> list[tuple[Tensor, Specification]]:
        """Centres (*input) or (1, *input) in the model's units, with what must hold around each.

        Arguments:
            verifier: a `Verifier`.
            targets, top_k: as in `Verifier.specification`.
        """
        if self.prop is not None:
            verifier.check_property(self.prop)
            if not self.prop.cases:
                raise InputError(f"{self.prop.warning}; there is no centre to put a ball around")
            return [(box.center, spec) for box, spec in self.prop.cases]
        assert self.x is not None
        if self.spec is not None:
            return [(self.x, self.spec)]
        assert self.label is not None
        return [(self.x, verifier.specification(self.label, targets, top_k))]

    def rows(self, verifier: Verifier, targets: Sequence[int] | None = None) -> list[int] | None:
        """The class that each row of the specification is against, where there is a label."""
        return None if self.label is None else verifier.row_names(self.label, targets)


class Jobs:
    """Answers about one model, in this process.

    Arguments:
        verifier: a `Verifier`.
        report: called with the result so far.
    """

    def __init__(self, verifier: Verifier, report: Callable[[Any], None] | None = None) -> None:
        self.verifier, self.report = verifier, report
        self.input_shape, self.output_shape = verifier.input_shape, verifier.output_shape
        self.outputs, self.chosen = verifier.outputs, verifier.chosen

    def _sets(
        self,
        item: Item,
        norm: float | None = None,
        eps: float | None = None,
        clip: Clip = None,
        targets: list[int] | None = None,
        top_k: int = 1,
    ) -> list[tuple[InputSet, Specification]]:
        if norm is None or eps is None:
            if item.prop is None:
                raise InputError("an input needs a norm and eps")
            self.verifier.check_property(item.prop)
            return list(item.prop.cases)
        centres = item.centres(self.verifier, targets, top_k)
        return [(self.verifier.ball(x, norm, eps, clip), spec) for x, spec in centres]

    def prepare(self, method: str) -> None:
        """Build what a method needs, so that no input pays for it."""
        self.verifier.prepare(method)

    def certify(
        self,
        item: Item,
        *,
        norm: float | None = None,
        eps: float | None = None,
        clip: Clip = None,
        targets: list[int] | None = None,
        top_k: int = 1,
        fresh: bool = False,
        **job: Any,
    ) -> Certificate:
        """Certify a ball around the item, or without norm and eps a property as it is.

        Arguments:
            fresh: use nothing that other methods left behind, so that the time taken is the method's own.
            job: options of `Verifier.certify_set`.
        """
        if fresh:
            self.verifier.forget()
        if item.prop is not None and eps is None:
            return self.verifier.certify_property(item.prop, report=self.report, **job)
        sets = self._sets(item, norm, eps, clip, targets, top_k)
        rows = item.rows(self.verifier, targets)
        return self.verifier.certify_cases(sets, rows=rows, report=self.report, **job)

    def certify_batch(
        self,
        items: Sequence[Item],
        *,
        norm: float,
        eps: float,
        clip: Clip = None,
        targets: list[int] | None = None,
        top_k: int = 1,
        **job: Any,
    ) -> list[Certificate]:
        """`certify` for several inputs in one pass; their seconds are shared."""
        balls = [self._sets(item, norm, eps, clip, targets, top_k)[0] for item in items]
        rows = [item.rows(self.verifier, targets) for item in items]
        return self.verifier.certify_batch([b for b, _ in balls], [s for _, s in balls], rows=rows, **job)

    def falsify(
        self,
        item: Item,
        *,
        norm: float | None = None,
        eps: float | None = None,
        clip: Clip = None,
        targets: list[int] | None = None,
        top_k: int = 1,
        **job: Any,
    ) -> Tensor | None:
        """A counterexample (1, *input) in the model's units, or None; `job`: of `Verifier.falsify`."""
        sets = self._sets(item, norm, eps, clip, targets, top_k)
        return next((x for b, s in sets if (x := self.verifier.falsify(b, s, **job)) is not None), None)

    def explain(self, item: Item, **ball: Any) -> Explanation:
        """Where the margin of method `sensitivity` goes, for the case with the smallest one; `ball`: as in
        `certify`, from norm to top_k."""
        sets = self._sets(item, **ball)
        return min((self.verifier.explain(b, s) for b, s in sets), key=lambda e: e.margin)

    def radius(
        self,
        item: Item,
        *,
        norm: float,
        clip: Clip = None,
        targets: list[int] | None = None,
        top_k: int = 1,
        **job: Any,
    ) -> Radius:
        """The smallest `Verifier.certified_radius` of the item's cases (an input has one)."""
        centres = item.centres(self.verifier, targets, top_k)
        report = self.report if len(centres) == 1 else None
        found = [
            self.verifier.certified_radius(x, spec, norm=norm, clip=clip, report=report, **job)
            for x, spec in centres
        ]
        return replace(
            min(found, key=lambda r: r.radius),
            attack_radius=min(r.attack_radius for r in found),
            seconds=sum(r.seconds for r in found),
            evaluations=sum(r.evaluations for r in found),
        )
