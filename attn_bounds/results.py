"""What certification returns: certificates and radii, and how results of several methods merge."""

from __future__ import annotations

import hashlib
import math
import platform
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import lirpa
from .plain import jsonable
from .properties import InputSet, Specification


@dataclass(frozen=True)
class Certificate:
    """Outcome for one input.

    Attributes:
        status: "verified", "falsified" or "unknown".
        margin: lower bound of the smallest margin (None where no bound was computed). It holds for every
            point of the input set; positive means verified.
        margins: lower bound per row of the specification; for a classification these are the other classes.
        rows: the class (or "target" of a binary model) that each margin is against; None for VNN-LIB.
        won: per row, the method (and, where it has several, the pass) whose bound counts.
        counterexample: input in the model's own units, (1, *input), replayed in onnxruntime; or None.
        eps: radius (None for a box of its own widths); norm: 1, 2 or inf.
        method: the one whose bound is reported; `tried` has every method that ran with margin and seconds,
            and those of its passes where it has several.
        reason: why it is unknown, in words.
        options, versions: what is needed to repeat the computation.
        model_sha256, input_sha256: of the ONNX file ("" for a torch module) and of centre and limits.
    """

    status: str
    margin: float | None
    margins: list[float] | None
    rows: list[int] | None
    eps: float | None
    norm: float
    method: str
    seconds: float
    reason: str = ""
    counterexample: Tensor | None = None
    tried: list[dict[str, Any]] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    model_sha256: str = ""
    input_sha256: str = ""
    won: list[str] | None = None

    @property
    def verified(self) -> bool:
        return self.status == "verified"

    def as_dict(self) -> dict[str, Any]:
        """Everything, as plain JSON types."""
        d = asdict(replace(self, counterexample=None))
        if self.counterexample is not None:
            d["counterexample"] = self.counterexample.flatten().tolist()
        return jsonable(d)


@dataclass(frozen=True)
class Radius:
    """Certified radius of one input.

    Attributes:
        radius: largest radius that was certified (0 if none); a lower bound of the true robust radius.
        attack_radius: smallest radius at which the attack found a counterexample (inf if none).
        evaluations: number of bound computations.
    """

    radius: float
    attack_radius: float
    norm: float
    method: str
    seconds: float
    evaluations: int
    reason: str = ""


@dataclass(frozen=True)
class Explanation:
    """Where the margin of method `sensitivity` goes.

    Attributes:
        row: of the specification, the one that decides the margin.
        margin: its lower bound, rounding slack taken off.
        centre: its value at the centre of the pass (moved centres of attention included).
        shares: (error set, number of symbols, what it takes from the margin), in order of the layers.
    """

    row: int
    margin: float
    centre: float
    shares: list[tuple[str, int, float]]


def merge(
    old: Certificate, stage: str, name: str, row: Tensor, spec: Specification, seconds: float
) -> dict[str, Any]:
    """What changes in a result when row bounds arrive: the best bound per row counts.

    Arguments:
        stage: the method that runs. name: its pass, or again the method where it has only one.
        row: (rows,) lower bounds.
    """
    finite = bool(torch.isfinite(row).all())
    margin = float(spec.margin(row)) if finite else None
    tried = _noted(old.tried, stage, name, margin, seconds)
    if not finite:
        reason = f"the bound of {stage} is NaN or infinite"
        if old.margins is not None or "infinite" in old.reason:
            reason = old.reason if reason in old.reason else f"{old.reason}; {reason}"
        return {"tried": tried, "reason": reason}
    attacked = any(t["method"] == "attack" for t in old.tried)
    before = torch.full_like(row, -math.inf)
    if old.margins is not None:
        before = torch.tensor(old.margins, dtype=row.dtype)
    best = torch.maximum(row, before)
    total = float(spec.margin(best))
    label = stage if name == stage else f"{stage}: {name}"
    won = old.won or [label] * len(row)
    assert margin is not None
    return {
        "tried": tried,
        "status": "verified" if total > 0 else "unknown",
        "reason": "" if total > 0 else "bound not positive" + (", no counterexample" if attacked else ""),
        "margin": total,
        "margins": best.tolist(),
        "won": [label if new > had else w for new, had, w in zip(row, before, won, strict=True)],
        "method": stage if old.margin is None or margin >= old.margin else old.method,
    }


def _noted(
    tried: list[dict[str, Any]], stage: str, name: str, margin: float | None, seconds: float
) -> list[dict[str, Any]]:
    """The record of what was tried, a pass longer; those of one method make one entry."""
    if name == stage:
        return [*tried, {"method": stage, "margin": margin, "seconds": seconds}]
    one = {"pass": name, "margin": margin, "seconds": seconds}
    if not tried or tried[-1]["method"] != stage:
        return [*tried, {"method": stage, "margin": margin, "seconds": seconds, "passes": [one]}]
    last = tried[-1]
    known = [m for m in (last["margin"], margin) if m is not None]
    entry = {
        **last,
        "margin": max(known, default=None),
        "seconds": last["seconds"] + seconds,
        "passes": [*last["passes"], one],
    }
    return [*tried[:-1], entry]


def worse(a: Certificate, b: Certificate) -> Certificate:
    order = {"falsified": 0, "unknown": 1, "verified": 2}

    def key(c: Certificate) -> tuple[int, float]:
        return order[c.status], -math.inf if c.margin is None else c.margin

    return min(a, b, key=key)


def digest(s: InputSet) -> str:
    h = hashlib.sha256(f"{s.norm} {s.eps}".encode())
    for t in (s.center, s.lower, s.upper):
        if t is not None:
            h.update(np.ascontiguousarray(t.detach().cpu().double().numpy()).tobytes())
    return h.hexdigest()


def versions() -> dict[str, str]:
    """Versions that a result depends on."""
    import onnxruntime

    return {
        "auto_LiRPA": lirpa.version(),
        "torch": torch.__version__,
        "onnxruntime": onnxruntime.__version__,
        "python": platform.python_version(),
    }
