"""The solver front as the standard's tools call it."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import numpy_helper

from attn_bounds import front
from attn_bounds.errors import InputError
from attn_bounds.intervals.query import Query

from .cli_tools import VNNLIB
from .small_models import relu_model

GRAPH = (
    '<ir_version: 8, opset_import: ["" : 18]> net (float[2] x) => (float[2] y) { h = Mul(x, x) y = Neg(h) }'
)
QUERY = """(vnnlib-version <2.0>)
(declare-network N (declare-input X float32 [2]) (declare-hidden H float32 [2] "h")
(declare-output Y float32 [2]))
(assert (and (>= X[0] 0.5) (<= X[0] 2.0)))
(assert (and (>= X[1] 0.5) (<= X[1] 2.0)))
(assert {})
"""
HARD = "(and (<= (+ (* Y[0] X[1]) (* Y[1] X[0])) -1.0) (== (+ Y[0] Y[1]) -3.3) (== (* X[0] X[1]) 1.01))"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    onnx.save(onnx.parser.parse_model(GRAPH), tmp_path / "m.onnx")
    for name, formula in (("sat", "(<= Y[0] -4.0)"), ("unsat", "(> Y[0] -0.25)"), ("hard", HARD)):
        (tmp_path / f"{name}.vnnlib").write_text(QUERY.format(formula))
    return tmp_path


def verify(folder: Path, name: str, *more: str) -> list[str]:
    return ["verify", str(folder / f"{name}.vnnlib"), "--network", f"N={folder / 'm.onnx'}", *more]


def test_a_witness_follows_the_verdict_in_the_order_of_declaration(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert front.main(verify(folder, "sat")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:4] == ["sat", "X float32 [2]", "2.0", lines[3]]
    assert [lines[4], lines[7]] == ["H float32 [2]", "Y float32 [2]"] and len(lines) == 10
    assert float(lines[5]) == 4.0 and float(lines[8]) == -4.0


def test_a_witness_is_saved_as_tensors(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert front.main(verify(folder, "sat", "--serialise-assignments", str(folder / "out"))) == 0
    assert capsys.readouterr().out == "sat\n"
    saved = {}
    for name in "XHY":
        tensor = onnx.TensorProto.FromString((folder / "out" / f"{name}.pb").read_bytes())
        saved[name] = numpy_helper.to_array(tensor)
        assert saved[name].dtype == np.float32 and saved[name].shape == (2,)
    assert (saved["H"] == saved["X"] ** 2).all() and (saved["Y"] == -saved["H"]).all()


def test_small_networks_need_no_torch(folder: Path) -> None:
    code = (
        "import sys; from attn_bounds import front as f; f.main(sys.argv[1:]); print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *verify(folder, "unsat", "--timeout", "30")],
        capture_output=True,
        text=True,
    )
    assert done.stdout == "unsat\nFalse\n", done.stderr


def test_the_process_ends_within_its_time(folder: Path) -> None:
    begin = time.monotonic()
    command = [sys.executable, "-m", "attn_bounds.front", *verify(folder, "hard", "--timeout", "2.5")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert time.monotonic() - begin < 2.5 + 0.5
    assert done.stdout in ("timed-out\n", "unknown\n") and done.returncode == 0


def test_what_intervals_leave_open_goes_to_the_other_engine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    relu_model(tmp_path / "m.onnx")
    text = VNNLIB.format(low=-0.01, high=0.01, a=0, b=1, y=2)  # a file of version 1.0
    (tmp_path / "old.vnnlib").write_text(text)
    assert front.main(verify(tmp_path, "old", "--timeout", "60")) == 0
    assert capsys.readouterr().out.splitlines()[0] in ("sat", "unsat")


def test_what_the_other_engine_does_not_know_gets_all_of_the_time(folder: Path) -> None:
    text = QUERY.format(HARD)
    query = Query("q", text, {"N": folder / "m.onnx"})
    assert not query.simple  # it has a hidden node
    text = re.sub(r"\(declare-hidden[^)]*\)", "", text)
    assert not Query("q", text, {"N": folder / "m.onnx"}).simple  # inputs and outputs in one constraint
    text = text.replace(HARD, "(or (<= (+ Y[0] Y[1]) 0.0) (and (<= X[0] 1.0) (>= Y[0] Y[1])))")
    assert Query("q", text, {"N": folder / "m.onnx"}).simple


def test_a_verdict_stays_if_the_other_engine_refuses(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise InputError("not this one")

    text = re.sub(r"\(declare-hidden[^)]*\)", "", QUERY.format("(== (+ (* 3.0 Y[0]) Y[1]) -3.3)"))
    (folder / "even.vnnlib").write_text(text.replace("float32", "real"))
    monkeypatch.setattr(front, "engine", refuse)
    assert front.main(verify(folder, "even", "--timeout", "9")) == 0
    out, err = capsys.readouterr()
    assert out in ("unknown\n", "timed-out\n") and "not this one" in err


def test_every_capability_is_answered(capsys: pytest.CaptureFixture[str]) -> None:
    answers = {}
    for name in front.CAPABILITIES:
        assert front.main(["supports", f"--{name}"]) == 0
        answers[name] = capsys.readouterr().out.splitlines()
    assert {"Softmax", "MatMul", "Where", "LayerNormalization"} <= set(answers["onnx-operators"])
    assert [int(v) for v in answers["onnx-opset-versions"]] == sorted(
        map(int, answers["onnx-opset-versions"])
    )
    assert answers["vnnlib-versions"] == ["1.0", "2.0"] and answers["serialise-assignments"] == ["true"]
    assert (
        "MNET" in answers["multiple-network-theories"] and "POLY" in answers["arithmetic-complexity-theories"]
    )


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--network", "M=m.onnx"], "no file for the network N"),
        (["--network", "N=missing.onnx"], "cannot be read"),
        (["--network", "N"], "write NAME=FILE"),
        ([], "no network is given"),
        (["--network", "N=m.onnx", "--timeout", "0"], "timeout"),
        (["--network", "N=m.onnx", "--network", "N=m.onnx"], "twice"),
    ],
)
def test_bad_calls_say_why_and_give_no_verdict(
    arguments: list[str],
    reason: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    assert front.main(["verify", "sat.vnnlib", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and reason in err and err.startswith("attn-bounds-vnnlib: ")
