"""Verdicts against known ones, and what the engine makes of properties with several cases and rows."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from attn_bounds import InputSet, Property, Specification, Verifier
from attn_bounds.results import Certificate

from ..small_models import linear_model, relu_model

VNNCOMP = Path(__file__).resolve().parents[3] / "benchmarks" / "vnncomp"


@pytest.fixture(scope="module")
def known_verdicts() -> Iterator[ModuleType]:
    sys.path.insert(0, str(VNNCOMP))
    import known_verdicts

    yield known_verdicts
    sys.path.remove(str(VNNCOMP))


@pytest.mark.slow
def test_fifty_random_networks_with_known_verdicts(known_verdicts: ModuleType, tmp_path: Path) -> None:
    """Perceptrons and attention; both verdicts, none wrong, and these small ones are all decided."""
    rows = [known_verdicts.outcome(known_verdicts.known(seed, tmp_path), 30.0) for seed in range(50)]
    assert not [(i, r) for i, r in enumerate(rows) if r["wrong"]]
    decided = [r["status"] for r in rows if r["status"] in ("sat", "unsat")]
    assert min(decided.count("sat"), decided.count("unsat")) >= 15 and len(decided) >= 48
    assert {r["method"] for r in rows} >= {"attack", "input boxes"}


def identity(folder: Path) -> Verifier:
    """y = x, two entries."""
    path = linear_model(folder / "id.onnx", np.eye(2, dtype=np.float32), np.zeros(2, dtype=np.float32))
    return Verifier(path, logits=False)


def box(low: list[float], high: list[float]) -> InputSet:
    return InputSet.box(*(torch.tensor([v], dtype=torch.float64) for v in (low, high)))


def below(
    rows: list[list[float]], limits: list[float], groups: Any, strict: tuple[bool, ...] = ()
) -> Specification:
    double = torch.float64
    return Specification(torch.tensor(rows, dtype=double), torch.tensor(limits, dtype=double), groups, strict)


def test_every_case_is_attacked_before_any_is_bounded(tmp_path: Path) -> None:
    verifier = identity(tmp_path)
    spec = below([[1, 0]], [0.0], ((0,),))  # unsafe: y_0 <= 0
    safe, unsafe = box([1, 0], [2, 1]), box([-1, 0], [2, 1])
    told: list[Certificate] = []
    c = verifier.certify_property(Property("p", ((safe, spec), (unsafe, spec))), report=told.append)
    assert c.status == "falsified" and [t["method"] for t in c.tried] == ["attack"] and not told
    assert c.counterexample is not None and c.counterexample[0, 0] < 0
    c = verifier.certify_property(Property("p", ((safe, spec), (safe, spec))), report=told.append)
    assert c.verified and c.margin is not None and 0.999 < c.margin <= 1
    assert c.tried[0]["method"] == "attack" and told and all(not t.verified for t in told[:-1])
    # the same without the attack: bounds alone never say "falsified"
    c = verifier.certify_property(Property("p", ((unsafe, spec),)), attack=False, method="crown")
    assert c.status == "unknown" and c.margin == pytest.approx(-1, abs=1e-3)


def test_what_is_left_is_attacked_once_more(tmp_path: Path) -> None:
    """An attack that looks at the centre only finds nothing; the one at the end does."""
    verifier = Verifier(relu_model(tmp_path / "m.onnx"), logits=False)
    inputs = InputSet.ball(torch.full((1, 4), 0.3), math.inf, 2.0)
    with torch.no_grad():
        lowest = float(verifier.module(inputs.sample(20000, torch.Generator().manual_seed(0)))[:, 0].min())
    prop = Property("p", ((inputs, below([[1, 0, 0]], [lowest], ((0,),))),))
    weak: dict[str, Any] = {"restarts": 1, "steps": 0, "split": False}
    c = verifier.certify_property(prop, **weak)
    assert c.status == "falsified" and [t["method"] for t in c.tried].count("attack") >= 2
    for options in ({"attack": False}, {"method": "crown"}, {"time_limit": 0.0}):
        assert verifier.certify_property(prop, **weak, **options).status == "unknown"


def test_a_property_without_inputs_holds(tmp_path: Path) -> None:
    c = identity(tmp_path).certify_property(Property("p", (), warning="no input at all"))
    assert c.verified and c.reason == "no input at all"


def test_touching_the_limit_is_a_counterexample_only_where_asked_for(tmp_path: Path) -> None:
    """y_0 <= 1 on [1, 2] holds with equality in one point."""
    inputs = box([1, 0], [2, 1])
    identity(tmp_path)
    path = tmp_path / "id.onnx"
    touching = {}
    for boundary in (False, True):
        verifier = Verifier(path, logits=False, boundary=boundary)
        for strict in ((False,), (True,)):
            prop = Property("p", ((inputs, below([[1, 0]], [1.0], ((0,),), strict)),))
            touching[boundary, strict[0]] = verifier.certify_property(prop, time_limit=1.0).status
    assert touching == {
        (False, False): "unknown",
        (False, True): "unknown",
        (True, False): "falsified",
        (True, True): "unknown",
    }


def test_a_counterexample_is_never_on_an_excluded_boundary(tmp_path: Path) -> None:
    """x_0 < 1 and y_0 >= 1 - tiny: only the largest float32 below 1 is left, and it is found or nothing."""
    whole = box([0, 0], [1, 1])
    before = float(np.nextafter(np.float32(1), np.float32(0)))
    inner = box([0, 0], [before, 1])
    open_ = InputSet(whole.center, math.inf, None, whole.lower, whole.upper, inner)
    verifier = identity(tmp_path)
    for limit, status in ((before - 1e-6, "falsified"), ((before + 1) / 2, "unknown")):
        spec = below([[-1, 0]], [-limit], ((0,),))  # unsafe: y_0 >= limit
        assert verifier.certify_property(Property("p", ((open_, spec),))).status == status
        assert verifier.certify_property(Property("p", ((whole, spec),))).status == "falsified"


def test_l2_ball_in_parts(tmp_path: Path) -> None:
    """A perceptron on a ball with a threshold between its minimum there and on the box around it."""
    verifier = Verifier(relu_model(tmp_path / "m.onnx"), logits=False)
    ball = InputSet.ball(torch.full((1, 4), 0.3, dtype=torch.float64), 2.0, 0.8)
    points = ball.sample(20000, torch.Generator().manual_seed(0)).float()
    with torch.no_grad():
        lowest = float(verifier.module(points)[:, 0].min())
    for shift, status in ((0.02, "falsified"), (-0.3, "verified")):
        spec = below([[1, 0, 0]], [lowest + shift], ((0,),))
        c = verifier.certify_property(Property("p", ((ball, spec),)), time_limit=20.0)
        assert c.status == status, c.reason
        assert c.counterexample is None or ball.contains(c.counterexample, 1e-6).all()


def test_nan_weights_verify_nothing(tmp_path: Path) -> None:
    verifier = Verifier(relu_model(tmp_path / "nan.onnx", nan=True), logits=False)
    spec = below([[1, 0, 0]], [-1e6], ((0,),))
    prop = Property("p", ((InputSet.ball(torch.zeros(1, 4), math.inf, 0.1), spec),))
    c = verifier.certify_property(prop, time_limit=60.0)
    assert c.status == "unknown" and c.margin is None and "bounds of all parts are NaN" in c.reason
