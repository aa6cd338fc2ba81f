"""The passes that the sensitivity methods are made of, cheap to tight; the best bound per functional counts.

* `forward`: one pass in affine forms, and the joint bound of its output (domain/joint.py);
* `forward, cut`: again, an l2 ball not reduced but cut by the input's limits, where these cut anything;
* `backward`: auto_LiRPA's backward pass with the intermediate bounds and Jacobians of the forward pass;
* `refined`: neurons that may be unstable bounded over all earlier nodes at once, in the layers where
  `explain` says that it pays; more effort for the output;
* `alpha`: the backward pass with the bounds of `refined`, its slopes and mixtures optimised.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .alpha import Bounds
from .domain.joint import QUICK, THOROUGH, Effort

if TYPE_CHECKING:
    from .domain.propagate import Propagation, Share
    from .module import BoundedModule

SENSITIVITY_METHODS = ("sensitivity", "sensitivity-crown", "sensitivity-alpha")
PAYS = 0.02  # part of what all error sets take, from which on a layer's neurons are bounded again
ITERATIONS = 30


class Pass(NamedTuple):
    """Bounds of one pass.

    Attributes:
        lower, upper: (batch, spec), None for a side that is not wanted.
        seconds: what it took.
    """

    name: str
    lower: Tensor | None
    upper: Tensor | None
    seconds: float


def sensitivity_passes(
    graph: BoundedModule,
    method: str,
    x: Sequence[Any],
    C: Tensor | None,
    bound_lower: bool = True,
    bound_upper: bool = True,
    memory: float | None = None,
    deadline: float | None = None,
) -> Iterator[Pass]:
    """Run a method pass by pass; a caller may stop as soon as the bounds found so far suffice.

    Arguments:
        method: one of `SENSITIVITY_METHODS`.
        x: one `BoundedTensor`. C: (batch, spec, outputs), or None for the outputs themselves.
        memory: see `BoundedModule.propagate`.
        deadline: `time.perf_counter()` after which no pass but the first begins, and no iteration.
    """
    begin = time.perf_counter()

    def done(name: str, bounds: Bounds) -> Pass:
        nonlocal begin
        seconds, begin = time.perf_counter() - begin, time.perf_counter()
        return Pass(name, *bounds, seconds)

    def over() -> bool:
        return deadline is not None and time.perf_counter() >= deadline

    sides: list[list[Share]] = []

    def both(found: Propagation, effort: Effort) -> Bounds:
        rows = _rows(C, found.output.centre)

        def lower(a: Tensor) -> Tensor:
            low, parts = found.lower(a, effort)
            sides.append(parts)
            return low

        return lower(rows) if bound_lower else None, -lower(-rows) if bound_upper else None

    crown, alpha = method == "sensitivity-crown", method == "sensitivity-alpha"
    forwards = graph.forward_passes(x, memory, backward=crown or alpha)
    forward = next(forwards)
    bounds = both(forward, QUICK)
    graph.note_folded(forward, sides[0], next(t for t in bounds if t is not None))
    labels = frozenset().union(*(paying(shares) for shares in sides))
    yield done("forward", bounds)
    if not over() and (cut := next(forwards, None)) is not None:
        yield done("forward, cut", both(cut, QUICK))
    rows = _rows(C, forward.output.centre)
    if crown and not over() and (found := graph.backward_bounds(forward, x, rows, bound_lower, bound_upper)):
        yield done("backward", found)
    if not alpha:
        return
    if not over():
        if labels:
            forward = graph.propagate(x, memory, backward=True, refine=labels)
        yield done("refined", both(forward, THOROUGH))
    if not over():
        found = graph.backward_bounds(forward, x, rows, bound_lower, bound_upper, ITERATIONS, deadline)
        if found is not None:
            yield done("alpha", found)


def paying(shares: Sequence[Share]) -> frozenset[str]:
    """Labels of the error sets that take a fair part of some functional's bound, the input's own left out."""
    if not shares:
        return frozenset()
    total = torch.zeros_like(shares[0].loss)
    for s in shares:
        total = total + s.loss.nan_to_num(0.0, 0.0, 0.0)
    worth = [s for s in shares[1:] if not bool((s.loss <= PAYS * total).all())]
    return frozenset(s.label for s in worth)


def _rows(C: Tensor | None, like: Tensor) -> Tensor:
    """Functionals (batch, spec, outputs) in the dtype of the outputs."""
    if C is None:
        C = torch.eye(like[0].numel(), dtype=like.dtype, device=like.device)
    return C.to(like).expand(len(like), *C.shape[-2:])
