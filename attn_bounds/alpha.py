"""α-CROWN for the final node: our own descent over auto_LiRPA's backward pass, intermediate bounds given.

auto_LiRPA's own loop pays for a full CROWN pass first, has no time limit, and differs between versions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import lirpa
from .descent import Adam

Bounds = tuple[Tensor | None, Tensor | None]
RATE, DECAY = 0.05, 0.98
PATIENCE = 10  # iterations without progress
PROGRESS = 1e-4  # of the bounds' width, that counts as some


def better(one: Bounds, two: Bounds) -> Bounds:
    """The best of two bounds, functional by functional; NaN never counts."""
    (a, b), (c, d) = one, two
    low = a if c is None else c if a is None else torch.fmax(a, c)
    return low, b if d is None else d if b is None else torch.fmin(b, d)


def optimise(
    bound: Callable[[], Bounds],
    nodes: Sequence[Any],
    name: str,
    functionals: int,
    iterations: int,
    deadline: float | None = None,
) -> Bounds:
    """Best bounds over a plain pass and a descent in the α of `nodes`; any α gives bounds.

    Arguments:
        bound: a backward pass with the current α: lower and upper bounds (batch, functionals), None for a
            side that is not wanted.
        nodes: auto_LiRPA's relaxed nodes. name: of the final one.
        deadline: `time.perf_counter()` after which no iteration begins, or None.
    """
    for node in nodes:
        node.opt_init()
    with torch.no_grad():
        best = plain = bound()
    if not nodes or (deadline is not None and time.perf_counter() >= deadline):
        return best
    start = (name, functionals, None) if lirpa.is_old() else (name, functionals, None, True)
    for node in nodes:
        node.init_opt_parameters([start])
        node.opt_start()
    alphas = [alpha.requires_grad_() for node in nodes for alpha in node.alpha.values()]
    adam = Adam(alphas, RATE, DECAY)
    width = sum(float(t.abs().nan_to_num(0.0, 0.0, 0.0).mean()) for t in plain if t is not None)
    reached, since = _total(best), 0
    for _ in range(iterations):
        if deadline is not None and time.perf_counter() >= deadline:
            break
        with torch.enable_grad():
            found = bound()
            total = _total(found)
            gradients = torch.autograd.grad(-total, alphas, allow_unused=True)
        best = better(best, tuple(None if t is None else t.detach() for t in found))  # type: ignore[arg-type]
        adam.step(gradients)
        for node in nodes:
            node.clip_alpha_() if lirpa.is_old() else node.clip_alpha()
        now = _total(best)
        since = 0 if float(now - reached) > PROGRESS * width else since + 1
        reached = torch.maximum(reached, now)
        if since >= PATIENCE:
            break
    return best


def _total(bounds: Bounds) -> Tensor:
    """Sum of the finite lower bounds, minus that of the upper ones."""
    signed = [t if side == 0 else -t for side, t in enumerate(bounds) if t is not None]
    finite = [torch.where(torch.isfinite(t), t, 0.0).sum() for t in signed]
    return torch.stack(finite).sum()
