"""`attn-bounds verify` in real processes: limits, signals, results files, and what is printed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import psutil
import pytest

from attn_bounds import InputError
from attn_bounds.search import worker
from attn_bounds.search.answer import Answer, Job, Witness

from ..cli_tools import Files, rows, run
from ..small_models import DIGITS

COMMAND = [sys.executable, "-m", "attn_bounds.cli", "verify"]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("verify"))


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A property of the digits model that is neither refuted nor proved within minutes."""
    path = tmp_path_factory.mktemp("slow") / "slow.vnnlib"
    with np.load(DIGITS.with_name("digits_test.npz")) as data:
        x, label = data["x"][0].astype(float).flatten(), int(data["y"][0])
    lines = [f"(declare-const X_{i} Real)" for i in range(64)] + [
        f"(declare-const Y_{j} Real)" for j in range(10)
    ]
    lines += [
        f"(assert (<= X_{i} {v + 0.06:.6f}))(assert (>= X_{i} {v - 0.06:.6f}))" for i, v in enumerate(x)
    ]
    worse = " ".join(f"(and (>= Y_{j} (+ Y_{label} 0.5)))" for j in range(10) if j != label)
    path.write_text("\n".join([*lines, f"(assert (or {worse}))"]))
    return path


def start(*arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def child_of(process: subprocess.Popen[str]) -> psutil.Process:
    """The process that computes, once it has loaded torch."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for child in psutil.Process(process.pid).children():
            if child.memory_info().rss > 150e6:
                return child
        time.sleep(0.05)
    raise AssertionError("no child process computes")


def test_verdicts_and_results_files(files: Files, tmp_path: Path) -> None:
    result = tmp_path / "result.txt"
    (row,) = rows("verify", files.model, "--vnnlib", files.vnnlib(0.01), "--results-file", result)
    assert row["property"] == "width_0.01" and row["status"] == "unsat" and row["margin"] > 0
    assert row["witness"] is None and row["method"] and row["seconds"] > 0
    assert result.read_text() == "unsat\n"
    # a file that cannot be written does not cost the verdict
    missing = tmp_path / "missing" / "r"
    out = run("verify", files.model, "--vnnlib", files.vnnlib(5.0), "--results-file", missing, code=2)
    assert out.stdout.splitlines()[0] == "sat" and "by attack" in out.stdout
    assert f"{missing}: cannot be written" in out.stderr


def test_a_property_of_values_inside_the_model(tmp_path: Path) -> None:
    """`--input-node`: the last linear layer of the bundled model, whose outputs are then 32 numbers away."""
    prop, width = tmp_path / "inside.vnnlib", 32
    lines = [
        f"(declare-const X_{i} Real)(assert (<= X_{i} 0.0))(assert (>= X_{i} 0.0))" for i in range(width)
    ]
    lines += [f"(declare-const Y_{j} Real)" for j in range(10)]
    for sign, status in ((">=", "unsat"), ("<=", "sat")):  # all inputs are 0: the logits are the bias
        prop.write_text("\n".join([*lines, f"(assert ({sign} Y_0 1000.0))"]))
        (row,) = rows("verify", DIGITS, "--vnnlib", prop, "--input-node", "/ReduceMean_output_0")
        assert row["status"] == status, row["reason"]
    out = run("verify", DIGITS, "--vnnlib", prop, "--input-node", "nothing", code=2)
    assert "nothing" in out.stderr and out.stdout.splitlines()[0] == "error"


def test_witness_in_the_form_of_version_1(files: Files, tmp_path: Path) -> None:
    result = tmp_path / "result.txt"
    job = Job(str(files.model), str(files.vnnlib(5.0)), str(tmp_path))
    worker.verify(job, lambda _: None).save(result)
    first, *pairs = result.read_text().splitlines()
    assert first == "sat" and pairs[0].startswith("((X_0 ") and pairs[-1].endswith("))")
    values = {name: float(value) for name, value in (p.strip("()").split() for p in pairs)}
    assert list(values) == [*(f"X_{i}" for i in range(4)), *(f"Y_{j}" for j in range(3))]
    x = np.array([[values[f"X_{i}"] for i in range(4)]], dtype=np.float32)
    assert [float(v) for v in x[0]] == [values[f"X_{i}"] for i in range(4)]  # nothing was rounded
    y = onnxruntime.InferenceSession(str(files.model)).run(None, {"x": x})[0][0]
    assert [float(v) for v in y] == [values[f"Y_{j}"] for j in range(3)]  # as the competition replays it
    assert np.abs(x).max() <= 5 and max(y[j] for j in range(3) if j != files.label) > y[files.label]


def test_version_2_result_by_variable(files: Files, tmp_path: Path) -> None:
    prop = tmp_path / "two.vnnlib"
    entries = [f"A[0,{i},{j}]" for i in (0, 1) for j in (0, 1)]
    prop.write_text(
        "(vnnlib-version <2.0>)\n(declare-network N (declare-input A float32 [1,2,2]) "
        "(declare-output B real [1,3]))\n"
        + "".join(f"(assert (and (<= {a} 5.0) (>= {a} -5.0)))" for a in entries)
        + f"(assert (< B[0,{files.label}] B[0,{(files.label + 1) % 3}]))"
    )
    answer = worker.verify(Job(str(files.model), str(prop), str(tmp_path)), lambda _: None)
    answer.save(tmp_path / "r")
    lines = (tmp_path / "r").read_text().splitlines()
    assert answer.witness is not None and answer.status == lines[0] == "sat"
    assert lines[1] == "A float32 [1,2,2]" and lines[6] == "B real [1,3]" and len(lines) == 10
    assert [float(v) for v in lines[2:6]] == answer.witness.inputs
    assert [float(v) for v in lines[7:]] == answer.witness.outputs


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--timeout", "0"), "timeout is 0"),
        (("--timeout", "nan"), "timeout is nan"),
        (("--memory", "lots"), "memory limit 'lots' is malformed"),
        (("--method", "magic"), "unknown method 'magic'"),
        (("--dtype", "float16"), "unknown dtype"),
    ],
)
def test_bad_options(files: Files, tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    result = tmp_path / "r"
    out = run(
        "verify", files.model, "--vnnlib", files.vnnlib(0.1), "--results-file", result, *arguments, code=2
    )
    assert words in out.stderr and out.stdout.startswith("error\n") and result.read_text() == "error\n"


def test_bad_properties(files: Files, tmp_path: Path) -> None:
    out = run("verify", DIGITS, "--vnnlib", files.vnnlib(0.1), code=2)
    assert "declares 4 inputs" in out.stderr and "give the property of this model" in out.stderr
    text, path = files.vnnlib(0.1).read_text(), tmp_path / "bad.vnnlib"
    job = Job(str(files.model), str(path), str(tmp_path))
    path.write_text(text.replace("(assert (<= X_1 0.1))", ""))
    with pytest.raises(InputError, match="X_1 has no upper bound"):
        worker.verify(job, lambda _: None)
    path.write_text(text + "(assert (>= X_1 7.0))")
    answer = worker.verify(job, lambda _: None)
    assert answer.status == "unsat" and "no input satisfies the property" in answer.reason


def test_certify_shares_the_engine(files: Files) -> None:
    """A box that only its parts prove."""
    (row,) = rows("certify", files.model, "--vnnlib", files.vnnlib(0.13))
    (same,) = rows("verify", files.model, "--vnnlib", files.vnnlib(0.13))
    assert (row["status"], same["status"]) == ("verified", "unsat")
    assert row["method"] == same["method"] == "input boxes" and row["margin"] == same["margin"]


@pytest.mark.parametrize("timeout", [1.0, 6.0])
def test_time_limit_includes_everything(slow: Path, tmp_path: Path, timeout: float) -> None:
    result, begin = tmp_path / "r", time.monotonic()
    process = start(
        DIGITS, "--vnnlib", slow, "--timeout", timeout, "--results-file", result, "--json", "--no-attack"
    )
    out, _ = process.communicate(timeout=60)
    took = time.monotonic() - begin
    row: dict[str, Any] = json.loads(out)
    assert process.returncode == 0 and row["status"] == "timeout" and took < timeout + 2
    assert result.read_text() == "timeout\n" and list(tmp_path.iterdir()) == [result]
    if timeout > 5 and row["margin"] is not None:  # what was found by then
        assert row["margin"] < 0 and row["method"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_killed_while_running(slow: Path, tmp_path: Path, number: signal.Signals) -> None:
    """The results file is whole or as it was, and no process is left."""
    result = tmp_path / "r"
    result.write_text("what was there before\n")
    process = start(DIGITS, "--vnnlib", slow, "--timeout", "200", "--results-file", result)
    child = child_of(process)
    os.kill(process.pid, number)
    out, _ = process.communicate(timeout=20)
    if number == signal.SIGKILL:
        assert process.returncode == -number and result.read_text() == "what was there before\n"
    else:
        assert process.returncode == 128 + number and out.startswith("unknown\n") and number.name in out
        assert result.read_text() == "unknown\n"
    psutil.wait_procs([child], timeout=10)
    assert not child.is_running() and list(tmp_path.iterdir()) == [result]


def test_memory_limit(slow: Path) -> None:
    process = start(DIGITS, "--vnnlib", slow, "--memory", "100MB", "--timeout", "100", "--json")
    out, _ = process.communicate(timeout=60)
    row = json.loads(out)
    assert row["status"] == "unknown" and row["reason"] == "memory limit of 100 MB passed"


def test_a_results_file_is_replaced_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "r"
    answer = Answer("p", "sat", witness=Witness([0.1], [2.0]))
    answer.save(path)
    assert path.read_text() == "sat\n((X_0 0.1)\n(Y_0 2.0))\n" and path.stat().st_mode & 0o777 in (
        0o644,
        0o664,
    )

    def broken(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(OSError, match="No space"):
        Answer("p", "unsat").save(path)
    assert path.read_text().startswith("sat") and list(tmp_path.iterdir()) == [path]


def test_the_watching_process_needs_no_torch() -> None:
    code = "import sys, attn_bounds.cli, attn_bounds.search.watch; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "False\n"
