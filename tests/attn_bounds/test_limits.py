"""Limits, with real child processes.

The children of some tests run `_sabotaged_child`, which makes one method slow, greedy, deadly or talkative
and is otherwise the real one: whether a limit is met must not depend on how fast the machine is.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from attn_bounds import Certificate, InputError, Property, Verifier, certify, limits
from attn_bounds.limits import LimitedVerifier, check_timeout
from attn_bounds.memory import parse_memory
from attn_bounds.verifier import AUTO

from .small_models import DIGITS, digits, relu_model

X = torch.zeros(4)
SAFE = {"norm": 2.0, "eps": 1e-3}
LOOSE = {"norm": 2.0, "eps": 3.0, "attack": False}  # no bound of ours verifies it
REAL_CHILD = limits._child


def _sabotaged_child(connection: Connection, model: str, threads: int, kwargs: dict[str, Any]) -> None:
    """The real child, where bounds by alpha-crown misbehave as the folder of the model says."""
    original = Verifier.row_passes
    hoard = []

    def row_passes(
        self: Verifier, inputs: Any, specs: Any, method: str, deadline: float | None = None
    ) -> Any:
        if method == "alpha-crown":
            what = Path(model).parent.name
            if what == "slow":
                time.sleep(600)
            elif what == "greedy":
                hoard.append(b"x" * 1_500_000_000)
                time.sleep(600)
            elif what == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            elif what == "broken":
                print("on stdout", flush=True)
                os.system("echo on file descriptor 1")
                raise KeyError("a bug")
            elif what == "full":
                raise MemoryError
        return original(self, inputs, specs, method, deadline)

    Verifier.row_passes = row_passes  # type: ignore[method-assign]
    REAL_CHILD(connection, model, threads, kwargs)


@pytest.fixture
def sabotaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Path of a small model whose child misbehaves in the given way."""
    monkeypatch.setattr(limits, "_child", _sabotaged_child)

    def model(what: str) -> Path:
        (tmp_path / what).mkdir()
        return relu_model(tmp_path / what / "m.onnx")

    return model


# -- words ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"),
    [("4GB", 4e9), ("500MB", 5e8), ("2 GiB", 2**31), ("1.5gb", 1.5e9), ("1000", 1e3), (12, 12), ("7b", 7)],
)
def test_memory_in_words(text: str | float, size: float) -> None:
    assert parse_memory(text) == size


@pytest.mark.parametrize("text", ["", "GB", "4XB", "-4GB", "4 G B", "nan", "inf", "0", "4GB!", -1])
def test_malformed_memory(text: str | float) -> None:
    with pytest.raises(InputError, match="4GB, 500MB"):
        parse_memory(text)


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf")])
def test_malformed_timeout(seconds: float) -> None:
    with pytest.raises(InputError, match="timeout"):
        check_timeout(seconds)


# -- time -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_time_limit_keeps_the_stages_that_finished(sabotaged: Callable[[str], Path]) -> None:
    model = sabotaged("slow")
    inside = Verifier(model)
    with LimitedVerifier(model, timeout=1.5) as v:
        begin = time.monotonic()
        c = v.certify_input(X, 0, method="auto", **LOOSE)
        assert time.monotonic() - begin < 60
        assert c.status == "unknown" and c.reason == "time limit of 1.5 s passed during alpha-crown"
        before = list(AUTO[: AUTO.index("alpha-crown")])
        finished = [certify(inside, X, 0, method=m, **LOOSE) for m in before]
        assert [t["method"] for t in c.tried] == before
        plain = finished[before.index("crown")]
        assert isinstance(plain, Certificate)
        best = [f.margins for f in finished if isinstance(f, Certificate) and f.margins is not None]
        assert c.margins == pytest.approx([max(row) for row in zip(*best, strict=True)])
        assert 1.5 <= c.seconds < 10 and c.input_sha256 == plain.input_sha256
        # a new child answers the next jobs, and keeps doing so
        assert v._child is None  # it was killed
        again = v.certify_input(X, 0, method="crown", **LOOSE)
        assert again.margin == pytest.approx(plain.margin) and again.reason == plain.reason
        assert v._child is not None
        pid = v._child.process.pid
        assert v.certify_input(X, int(inside.module(X[None]).argmax()), method="crown", **SAFE).verified
        assert v._child.process.pid == pid
        # of a property with several cases nothing is known before the last one is done
        ball, spec = inside.ball(X, 2.0, 1e-3), inside.specification(int(inside.module(X[None]).argmax()))
        wide = inside.ball(X, 2.0, 3.0)
        prop = Property("p", ((ball, spec), (wide, spec)))
        c = v.certify_property(prop, method="auto", attack=False, split=False)
        assert c.status == "unknown" and c.reason == "time limit of 1.5 s passed during alpha-crown"
        assert not psutil.pid_exists(pid)


@pytest.mark.slow
def test_time_limit_on_the_attack_and_on_a_radius() -> None:
    x, y = digits(1)
    endless = {"restarts": 2000, "steps": 100_000}
    with LimitedVerifier(DIGITS, timeout=3.0) as v:
        c = v.certify_input(x[0], y[0], norm=2.0, eps=0.01, method="crown", **endless)
        assert c.status == "unknown" and c.margin is None
        assert c.reason == "time limit of 3 s passed during attack"
        assert c.versions["torch"] == torch.__version__ and c.eps == 0.01
        # a bisection that never ends
        r = v.certified_radius(x[0], y[0], norm=2.0, method="crown", attack=False, upper=0.4, tol=1e-17)
        assert r.reason == "time limit of 3 s passed"
        assert 0 < r.radius < 0.4 and r.evaluations > 2 and 3 <= r.seconds < 20


# -- memory and death -----------------------------------------------------------------------------------


def test_memory_limit(sabotaged: Callable[[str], Path]) -> None:
    model = sabotaged("greedy")
    with LimitedVerifier(model, memory="1.2GB") as v:
        c = v.certify_input(X, 0, method="auto", **LOOSE)
        assert c.reason == "memory limit of 1.2 GB passed during alpha-crown"
        assert c.status == "unknown" and c.margin is not None and len(c.tried) == len(AUTO) - 1


def test_memory_too_small_to_load_the_model(tmp_path: Path) -> None:
    model = relu_model(tmp_path / "m.onnx")
    with LimitedVerifier(model, memory="50MB") as v:
        c = v.certify_input(X, 0, method="ibp", **LOOSE)
        assert c.status == "unknown" and c.margin is None
        assert c.reason == "memory limit of 50 MB passed while the model was loaded"
        with pytest.raises(InputError, match="memory limit of 50 MB passed while the model was loaded"):
            _ = v.input_shape


@pytest.mark.parametrize(
    ("what", "words"), [("killed", "the child process was killed"), ("full", "memory was used up")]
)
def test_a_child_that_dies(sabotaged: Callable[[str], Path], what: str, words: str) -> None:
    with LimitedVerifier(sabotaged(what), timeout=300) as v:
        c = v.certify_input(X, 0, method="auto", **LOOSE)
        assert c.status == "unknown" and words in c.reason and c.margin is not None


def test_other_errors_and_output_of_the_child(
    sabotaged: Callable[[str], Path], capfd: pytest.CaptureFixture[str]
) -> None:
    with LimitedVerifier(sabotaged("broken"), timeout=300) as v:
        with pytest.raises(RuntimeError, match=r"KeyError in the child process: 'a bug'"):
            v.certify_input(X, 0, method="auto", **LOOSE)
        assert v.certify_input(X, 0, method="crown", **LOOSE).reason == "bound not positive"
    out, err = capfd.readouterr()
    assert out == "" and "on stdout" in err and "on file descriptor 1" in err


# -- errors that are the caller's -----------------------------------------------------------------------


def test_input_errors_are_those_of_the_verifier(tmp_path: Path) -> None:
    model = relu_model(tmp_path / "m.onnx")
    inside = Verifier(model)
    with LimitedVerifier(model, timeout=300) as v:
        assert (v.input_shape, v.outputs) == (inside.input_shape, inside.outputs)
        pid = v._child.process.pid
        for label, x, options in (
            (7, X, SAFE),
            (0, torch.zeros(5), SAFE),
            (0, X, {"norm": 2.0, "eps": -1.0}),
            (0, X, SAFE | {"targets": [0]}),
        ):
            with pytest.raises(InputError) as expected:
                certify(inside, x, label, method="crown", **options)  # type: ignore[arg-type]
            with pytest.raises(InputError) as found:
                v.certify_input(x, label, method="crown", **options)
            assert str(found.value) == str(expected.value)
        with pytest.raises(InputError, match="unknown method"):
            v.certify_input(X, 0, method="magic", **SAFE)
        assert v._child.process.pid == pid  # none of them cost the child
        found_bad = v.falsify(limits.Item(0, X, 0), norm=2.0, eps=3.0, restarts=4, steps=10)
        assert found_bad is not None and inside.violates(found_bad, inside.specification(0))
    assert not psutil.pid_exists(pid)
    (tmp_path / "bad.onnx").write_bytes(b"no model")
    with (
        pytest.raises(InputError, match=r"bad\.onnx: not a readable ONNX file"),
        LimitedVerifier(tmp_path / "bad.onnx", timeout=300) as v,
    ):
        v.certify_input(X, 0, method="crown", **SAFE)


def test_certify_takes_limits(tmp_path: Path) -> None:
    model = relu_model(tmp_path / "m.onnx")
    label = int(Verifier(model).module(X[None]).argmax())
    found = certify(
        model, torch.stack([X, X]), [label, label], timeout=300, memory="8GB", method="crown", **SAFE
    )
    plain = certify(model, X, label, method="crown", **SAFE)
    assert isinstance(found, list) and isinstance(plain, Certificate)
    assert [c.status for c in found] == ["verified"] * 2
    assert found[1].margins == pytest.approx(plain.margins) and found[1].rows == plain.rows
