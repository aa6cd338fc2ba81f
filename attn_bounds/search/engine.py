"""One property from start to end: attack, bounds from cheap to tight, then parts of the input set."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..properties import InputSet, Property, Specification
from ..results import Certificate, versions, worse
from .boxes import InputBoxes
from .branch import Outcome, Search

if TYPE_CHECKING:
    from ..verifier import Verifier
    from .helpers import Helpers

BOXES = 4096  # parts of the input set that are bounded where there is no time limit
SHARE = 0.5  # of the time left that the bounds of the whole set may take where it can be cut into parts
FEW = 6  # entries that move, up to which parts of the set are worth more than tight bounds of the whole
LAST = (40, 100)  # restarts and steps of the attacks on what the bounds leave undecided
ROUNDS = 3  # of these attacks
SPLIT_METHODS = ("ibp", "sensitivity", "crown")  # of bounds on parts, cheap to tight

Report = Callable[[Certificate], None]


def prove(
    verifier: Verifier,
    prop: Property,
    *,
    method: str = "auto",
    attack: bool = True,
    restarts: int = 10,
    steps: int = 50,
    seed: int = 0,
    time_limit: float | None = None,
    split: bool | None = None,
    helpers: Callable[[int], Helpers] | None = None,
    report: Report | None = None,
) -> Certificate:
    """Verify a property: all its cases, or a counterexample in one of them.

    The attack goes first, on every case; then each case gets bounds, from cheap to tight with method
    "auto"; what is left undecided is cut into parts, while there is time, and attacked with more effort.

    Arguments:
        method, attack, restarts, steps, seed: as in `Verifier.certify_set`.
        time_limit: seconds after which nothing new is begun; a pass that runs is finished.
        split: whether to cut input sets into parts; None for: with method "auto".
        helpers: makes the processes that may help with a case, by its number.
        report: called with the result so far, which is not "verified" before the last case is.
    """
    deadline = math.inf if time_limit is None else time.perf_counter() + time_limit
    split = method == "auto" if split is None else split
    if not prop.cases:
        return _vacuous(verifier, prop, method)
    options: dict[str, Any] = {"method": method, "restarts": restarts, "steps": steps, "seed": seed}
    tried: list[dict[str, Any]] = []
    wanted = attack

    def attacked(restarts: int, steps: int, seed: int) -> Tensor | None:
        """A counterexample in any case; notes what it took."""
        begin, x = time.perf_counter(), None
        for inputs, spec in prop.cases:
            if x is None and time.perf_counter() < deadline:
                x = verifier.falsify(inputs, spec, restarts=restarts, steps=steps, seed=seed)
        tried.append({"method": "attack", "margin": None, "seconds": time.perf_counter() - begin})
        return x

    if attack and len(prop.cases) > 1:  # a counterexample in any case decides, so look there first
        if (x := attacked(restarts, steps, seed)) is not None:
            blank = verifier.blank(prop.cases[0][0], method, {**options, "attack": True})
            return _found(blank, x, tried)
        attack = False

    def case(inputs: InputSet, spec: Specification, told: Report) -> Certificate:
        """One case, within what is left of the time."""
        parts = split and InputBoxes.applies(inputs)
        left = None if time_limit is None else max(0.0, deadline - time.perf_counter())
        job = dict(options)
        if parts and method == "auto" and InputBoxes.axes(inputs) <= FEW:
            job["method"] = next(m for m in ("sensitivity", "crown") if m in verifier.stages("auto"))
        first = verifier.certify_set(
            inputs,
            spec,
            attack=attack,
            report=told,
            **job,
            time_limit=left if left is None or not parts else SHARE * left,
        )
        if first.status != "unknown" or not parts or time.perf_counter() >= deadline:
            return first
        number = next(i for i, (s, _) in enumerate(prop.cases) if s is inputs)
        others = None if helpers is None else helpers(number)
        try:
            if others is not None:
                torch.set_num_threads(1)  # processes use the cores better than threads on small batches
            return _in_parts(verifier, inputs, spec, first, deadline, told, others)
        finally:
            if others is not None:
                others.close()

    result = together(prop.cases, case, report, tried)
    tried = []
    for number in range(1, 1 + ROUNDS if wanted and method == "auto" else 0):
        first = next(t["seconds"] for t in result.tried if t["method"] == "attack")
        effort = LAST[0] * LAST[1] / (restarts * max(steps, 1))
        if result.status != "unknown" or effort * first > deadline - time.perf_counter():
            break
        if (x := attacked(*LAST, seed + number)) is not None:
            return _found(result, x, tried)
    return replace(result, tried=[*result.tried, *tried], seconds=result.seconds + _total(tried))


def _total(tried: Iterable[dict[str, Any]]) -> float:
    return float(sum(t["seconds"] for t in tried))


def _found(result: Certificate, x: Tensor, tried: list[dict[str, Any]]) -> Certificate:
    """The result with a counterexample that the last of `tried` found."""
    return replace(
        result,
        status="falsified",
        counterexample=x,
        method="attack",
        reason="",
        tried=[*result.tried, *tried],
        seconds=result.seconds + _total(tried),
    )


def _vacuous(verifier: Verifier, prop: Property, method: str) -> Certificate:
    return Certificate(
        status="verified",
        margin=None,
        margins=None,
        rows=None,
        eps=None,
        norm=math.inf,
        method=method,
        seconds=0.0,
        reason=prop.warning,
        versions=versions(),
        model_sha256=verifier.model_sha256,
    )


def together(
    cases: Iterable[tuple[InputSet, Specification]],
    case: Callable[[InputSet, Specification, Report], Certificate],
    report: Report | None,
    tried: Sequence[dict[str, Any]] = (),
) -> Certificate:
    """The worst of the cases; they hold together only if all do. A counterexample ends it.

    Arguments:
        tried: what ran before, for all cases.
    """
    worst: Certificate | None = None
    cases = tuple(cases)

    def with_earlier(found: Certificate) -> Certificate:
        if worst is None:
            return found
        return replace(worse(worst, found), seconds=worst.seconds + found.seconds)

    for number, (inputs, spec) in enumerate(cases, 1):

        def so_far(found: Certificate, done: int = number) -> None:
            found = replace(with_earlier(found), tried=found.tried)  # what of the current case has run
            if done < len(cases) and found.status != "falsified":
                reason = f"case {done} of {len(cases)} was not finished"
                found = replace(found, status="unknown", margin=None, margins=None, reason=reason)
            if report is not None:
                report(found)

        worst = with_earlier(case(inputs, spec, so_far))
        if worst.status == "falsified":
            break
    assert worst is not None
    if tried:
        worst = replace(worst, tried=[*tried, *worst.tried], seconds=worst.seconds + _total(tried))
    return worst


def _in_parts(
    verifier: Verifier,
    inputs: InputSet,
    spec: Specification,
    first: Certificate,
    deadline: float,
    report: Report,
    helpers: Helpers | None,
) -> Certificate:
    """The result with what cutting the input set into boxes adds to it."""
    known = set(verifier.stages("auto"))
    strategy = InputBoxes(verifier, inputs, spec, [m for m in SPLIT_METHODS if m in known], helpers)
    search = Search(strategy, spec, deadline, BOXES if deadline == math.inf else 10**9)
    begin = time.perf_counter()

    def certificate(o: Outcome) -> Certificate:
        seconds = time.perf_counter() - begin
        entry = {
            "method": strategy.name,
            "margin": o.margin if math.isfinite(o.margin) else None,
            "seconds": seconds,
            "parts": o.bounded,
            "bounds": strategy.method,
        }
        result = replace(first, tried=[*first.tried, entry], seconds=first.seconds + seconds)
        if o.counterexample is not None:
            return replace(
                result,
                status="falsified",
                counterexample=o.counterexample,
                reason="",
                method=strategy.name,
            )
        verified = o.open == 0 and o.margin > 0
        if verified or (o.margins is not None and (first.margin is None or o.margin > first.margin)):
            margins = None if o.margins is None else o.margins.tolist()
            result = replace(result, margin=o.margin, margins=margins, method=strategy.name, won=None)
        if verified:
            return replace(result, status="verified", reason="")
        return replace(result, reason=f"{first.reason}; {o.why or 'parts of the input set are left'}")

    return certificate(search.run(lambda o: report(certificate(o))))
