"""The command line: keys, exit codes, one line per error, and stdout that holds JSON only."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from attn_bounds import Verifier, __version__, limits
from attn_bounds.cli import app

from .cli_tools import Files, rows, run
from .small_models import DIGITS, DIGITS_DATA, linear_model, relu_model, weights

CERTIFY_KEYS = {"status", "margin", "eps", "norm", "method", "seconds", "reason"}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("cli"))


def process(*args: object, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "attn_bounds.cli", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, **kwargs)


# -- certify --------------------------------------------------------------------------------------------


def test_certify_keys_and_exit_code(files: Files) -> None:
    good = rows("certify", files.model, "--data", files.data, "--eps", 0.001, "--method", "crown")
    assert [r["index"] for r in good] == [0, 1, 2, 3]
    for i, r in enumerate(good):
        assert r.keys() >= CERTIFY_KEYS and r["label"] == files.y[i]
        assert r["status"] == "verified" and r["margin"] > 0 and r["reason"] == ""
        assert r["norm"] == "inf" and r["eps"] == 0.001 and r["method"] == "crown" and r["seconds"] > 0
        assert "counterexample" not in r and r["options"]["operators"] == "attn_bounds"
    bad = rows(
        "certify",
        files.model,
        "--data",
        files.data,
        "--eps",
        4,
        "--norm",
        2,
        "--index",
        2,
        "--index",
        0,
        code=1,
    )
    assert [r["index"] for r in bad] == [2, 0]
    for r in bad:
        assert r["status"] == "falsified" and r["norm"] == 2 and len(r["counterexample"]) == 4
        x = torch.tensor(r["counterexample"])
        assert int(files.verifier.module(x[None]).argmax()) != r["label"]
        assert float((x - torch.from_numpy(files.x[r["index"]])).norm()) <= 4 * (1 + 1e-6)


def test_certify_options(files: Files) -> None:
    base = ("certify", files.model, "--data", files.data, "--eps", 0.01, "--method", "crown", "--no-attack")
    plain = rows(*base)
    assert [r["tried"][0]["method"] for r in plain] == ["crown"] * 4
    batch = rows(*base, "--batch", 3)
    assert [r["margin"] for r in batch] == pytest.approx([r["margin"] for r in plain], rel=1e-5)
    assert len(rows(*base, "--count", 2)) == 2
    double = rows(*base, "--dtype", "float64", "--count", 1)[0]
    assert double["options"]["dtype"] == "float64" and double["margin"] == pytest.approx(
        plain[0]["margin"], abs=0.02
    )
    target = next(j for j in range(3) if j not in files.y[:1])
    one = rows(*base, "--index", 0, "--target", target)[0]
    assert one["rows"] == [target] and len(one["margins"]) == 1
    assert rows(*base, "--count", 1, "--top-k", 2)[0]["margin"] == pytest.approx(max(plain[0]["margins"]))
    # in pixel units with std 0.5 a radius is twice as large in the model's
    pixels = ("certify", files.model, "--data", files.data, "--method", "crown", "--no-attack", "--mean", 0.2)
    scaled = rows(*pixels, "--std", 0.5, "--eps", 0.005)
    assert [r["margin"] for r in scaled] == pytest.approx([r["margin"] for r in plain], abs=1e-4)
    low, high = float(files.x.min()), float(files.x.max())
    clipped = rows(*base, "--clip", low, high)
    assert all(a["margin"] >= b["margin"] for a, b in zip(clipped, plain, strict=True))
    assert any(a["margin"] > b["margin"] + 1e-4 for a, b in zip(clipped, plain, strict=True))


def test_certify_properties(files: Files) -> None:
    narrow, wide = files.vnnlib(0.001), files.vnnlib(5.0)
    found = rows("certify", files.model, "--vnnlib", narrow, "--vnnlib", wide, code=1)
    assert [(r["property"], r["status"]) for r in found] == [
        ("width_0.001", "verified"),
        ("width_5.0", "falsified"),
    ]
    assert found[0]["eps"] is None and "note" not in found[0]
    result = run("certify", files.model, "--vnnlib", wide, "--norm", 2, "--eps", 0.001, "--json", code=0)
    row = json.loads(result.stdout)
    assert row["status"] == "verified" and row["eps"] == 0.001 and "l2 ball" in row["note"]
    assert "l2 ball" in result.stderr
    assert (
        "note: each property's box"
        in run("certify", files.model, "--vnnlib", wide, "--norm", 2, "--eps", 0.001, code=0).stdout
    )


def test_limits_on_the_command_line(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    args = ("certify", files.model, "--data", files.data, "--count", 1, "--eps", 0.01, "--method", "crown")
    plain = rows(*args)[0]
    inside = rows(*args, "--timeout", 300, "--memory", "8GB")[0]
    assert inside["margins"] == pytest.approx(plain["margins"]) and inside["status"] == plain["status"]
    monkeypatch.setattr(limits.LimitedVerifier, "_messages", _no_time(limits.LimitedVerifier._messages))
    late = rows(*args, "--timeout", 7, code=1)[0]
    assert late["status"] == "unknown" and late["reason"] == "time limit of 7 s passed"
    assert late.keys() >= CERTIFY_KEYS


def _no_time(original: Any) -> Any:
    """`_messages` for which the job's time is over at once; loading still gets its time."""

    def messages(self: Any, seconds: float | None, phase: str) -> Any:
        if not phase:
            raise limits.Stopped(f"time limit of {seconds:g} s passed{phase}")
        return original(self, seconds, phase)

    return messages


def test_unknown_because_of_nan_says_so(tmp_path: Path, files: Files) -> None:
    model = relu_model(tmp_path / "nan.onnx", nan=True)
    for command, code in (("certify", 1), ("radius", 0)):
        eps = ("--eps", 0.01) if command == "certify" else ()
        row = rows(command, model, "--data", files.data, "--count", 1, "--method", "crown", *eps, code=code)[
            0
        ]
        assert "NaN" in row["reason"] and row.get("margin") is None and not row.get("radius")


# -- the other commands ---------------------------------------------------------------------------------


def test_a_property_of_a_model_with_a_head(tmp_path: Path, files: Files) -> None:
    # among logits the largest is at least 1 here, among probabilities it is below
    model = linear_model(
        tmp_path / "s.onnx", np.eye(3, 4, dtype=np.float32), np.arange(3, dtype=np.float32), head="Softmax"
    )
    text = files.vnnlib(0.01).read_text()
    declared, _ = text.split("(assert (or")
    (tmp_path / "p.vnnlib").write_text(declared + "(assert (<= Y_2 1.0))")
    found = rows("certify", model, "--vnnlib", tmp_path / "p.vnnlib", "--method", "crown", code=1)
    assert found[0]["status"] == "falsified"
    assert rows("radius", model, "--vnnlib", tmp_path / "p.vnnlib", "--method", "crown")[0]["radius"] == 0


def test_radius(files: Files) -> None:
    args = ("radius", files.model, "--data", files.data, "--count", 2, "--norm", 2, "--method", "crown")
    for i, r in enumerate(rows(*args, "--tol", 0.05)):
        assert r.keys() >= {"index", "radius", "attack_radius", "method", "seconds"}
        assert r["index"] == i and 0 < r["radius"] <= r["attack_radius"] and r["norm"] == 2
        at = ("certify", files.model, "--data", files.data, "--index", i, "--norm", 2, "--method", "crown")
        rows(*at, "--eps", r["radius"])
        rows(*at, "--eps", r["radius"] * 1.06, code=1)
    quick = rows(*args, "--no-attack", "--upper", 1e-4)[0]
    assert quick["radius"] == 1e-4 and quick["attack_radius"] == "inf" and "largest" in quick["reason"]
    prop = rows("radius", files.model, "--vnnlib", files.vnnlib(0.001), "--norm", 2, "--method", "crown")[0]
    assert prop["property"] == "width_0.001" and prop["radius"] > 0 and "ball" in prop["note"]


def test_compare(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    args = (
        "compare",
        files.model,
        "--data",
        files.data,
        "--count",
        2,
        "--norm",
        2,
        "--eps",
        0.01,
        "--eps",
        4,
    )
    found = rows(*args)
    methods = ["ibp", "sensitivity", "crown", "alpha-crown", "stock-ibp", "stock-crown"]
    assert [(r["index"], r["eps"], r["method"]) for r in found] == [
        (i, e, m) for i in (0, 1) for e in (0.01, 4.0) for m in methods
    ]
    for r in found:
        assert r.keys() >= CERTIFY_KEYS and [t["method"] for t in r["tried"]] == [r["method"]]
        assert r["status"] == ("falsified" if r["eps"] == 4 else "verified" if r["margin"] > 0 else "unknown")
        assert ("counterexample" in r) == (r["status"] == "falsified")
        certificate = ("certify", files.model, "--data", files.data, "--index", r["index"], "--norm", 2)
        if r["eps"] == 0.01:
            one = rows(*certificate, "--eps", 0.01, "--method", r["method"], code=int(r["margin"] <= 0))[0]
            assert r["margin"] == pytest.approx(one["margin"])
    # every bound is computed from scratch, or its seconds would be another method's
    forgotten = 0
    original = Verifier.forget

    def forget(self: Verifier) -> None:
        nonlocal forgotten
        forgotten += 1
        original(self)
        assert not any(graph.store.of(()) for graph in self._graphs.values())

    monkeypatch.setattr(Verifier, "forget", forget)
    table = run(*args, code=0).stdout
    assert forgotten == len(found)
    assert "stock-crown" in table and "repaired" in table and "+0" in table and "1.00" in table
    without = run(*args, "--methods", "ibp,crown", code=0).stdout
    assert "repaired" not in without and "–" in without


def test_inspect(files: Files, tmp_path: Path) -> None:
    (row,) = rows("inspect", DIGITS)
    assert set(row) >= {"model", "opset", "inputs", "outputs", "attention", "unsupported"}
    assert row["inputs"] == {"image": ["batch", 1, 8, 8]} and row["outputs"] == {"logits": ["batch", 10]}
    assert len(row["attention"]) == 2 and row["unsupported"] == []
    unit = row["attention"][0]
    assert set(unit) >= {"name", "heads", "queries", "keys", "head_dim", "value_dim", "masked", "scale"}
    assert unit["heads"] * unit["head_dim"] == 32 and unit["queries"] == unit["keys"] == 5
    assert [[p["kind"] for p in block] for block in row["structure"]["blocks"]] == [["attention", "mlp"]] * 2
    tree = run("inspect", DIGITS, code=0).stdout
    for line in ("blocks 1 to 2, each: ", "attention: (batch, 5, 32), 2 heads of 16, 5 tokens", "residual"):
        assert line in tree
    assert "no attention found" in run("inspect", files.model, code=0).stdout
    weight, bias = weights(3, 4)
    model = linear_model(tmp_path / "u.onnx", weight, bias, unsupported=("Sin", "Cos"))
    (row,) = rows("inspect", model)
    assert [u["op"] for u in row["unsupported"]] == ["Sin", "Cos"] and row["unsupported"][0]["node"] == "sin"
    text = run("inspect", model, code=0).stdout
    assert all(word in text for word in ("Sin", "Cos", "not supported: 2", "not supported: sin", "GELU"))
    argmax = linear_model(tmp_path / "a.onnx", weight, bias, head="ArgMax")
    (row,) = rows("inspect", argmax)
    assert row["head"] == "ArgMax" and row["unsupported"] == []


def test_tables_fit_100_columns(files: Files) -> None:
    environment = {"COLUMNS": "100"}
    data = ("--data", files.data, "--norm", "2")
    for args, words in (
        (
            ("certify", files.model, *data, "--eps", "4", "--method", "ibp"),
            ("falsified", "input", "4 falsified"),
        ),
        (("radius", files.model, *data, "--count", "1", "--method", "crown"), ("radius ≥", "mean")),
        (("compare", files.model, *data, "--eps", "0.01"), ("mean margin ≥", "alpha-crown")),
        (("inspect", DIGITS), ("head_dim", "masked")),
    ):
        result = CliRunner(env=environment).invoke(app, list(map(str, args)))
        assert max(map(len, result.stdout.splitlines())) <= 100, result.stdout
        assert all(w in result.stdout for w in words)


def test_help_has_examples() -> None:
    for command in ("inspect", "certify", "radius", "compare"):
        text = run(command, "--help", code=0).stdout
        assert f"attn-bounds {command} " in text and "Example" in text
    assert all(c in run("--help", code=0).stdout for c in ("inspect", "certify", "radius", "compare"))


# -- real processes -------------------------------------------------------------------------------------


def test_what_libraries_print_is_kept_off_stdout(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Verifier.row_passes

    def talkative(self: Verifier, *args: Any) -> Any:
        print("Early stop!")
        warnings.warn("deprecated", DeprecationWarning, stacklevel=1)
        return original(self, *args)

    monkeypatch.setattr(Verifier, "row_passes", talkative)
    result = run("certify", files.model, "--data", files.data, "--count", 1, "--eps", 0.001, "--json", code=0)
    assert json.loads(result.stdout)["status"] == "verified"
    assert "Early stop!" in result.stderr and "deprecated" not in result.stderr


@pytest.mark.parametrize("limit", [(), ("--timeout", 300)])
def test_stdout_of_a_real_process_is_json_only(files: Files, limit: tuple[object, ...]) -> None:
    args = ("--data", files.data, "--count", 1, "--eps", 0.2, "--norm", "inf", "--json", *limit)
    found = process("compare", files.model, *args, "--methods", "crown,alpha-crown,stock-alpha-crown")
    assert found.returncode == 0
    assert [json.loads(line)["method"] for line in found.stdout.splitlines()] == [
        "crown", "alpha-crown", "stock-alpha-crown",
    ]  # fmt: skip
    assert "Warning" not in found.stderr and "Traceback" not in found.stderr


def test_version() -> None:
    found = process("--version")
    assert found.returncode == 0 and found.stderr == ""
    assert found.stdout.startswith(f"attn-bounds {__version__}, auto_LiRPA 0.")
    assert found.stdout.endswith(f"torch {torch.__version__}\n")


def test_a_missing_auto_lirpa_says_how_to_get_it(files: Files, tmp_path: Path) -> None:
    (tmp_path / "auto_LiRPA").mkdir()
    (tmp_path / "auto_LiRPA" / "__init__.py").write_text("raise ImportError('it is a fake')")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    found = process("certify", files.model, "--data", files.data, "--eps", 0.1, env=environment)
    assert found.returncode == 2 and found.stdout == "" and "Traceback" not in found.stderr
    assert "pip install --no-deps auto_LiRPA" in found.stderr and "it is a fake" in found.stderr


def test_help_needs_no_torch() -> None:
    code = "import sys, attn_bounds.cli; print(sorted({'torch', 'onnx', 'auto_LiRPA'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"


@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")
@pytest.mark.parametrize("limit", [(), ("--timeout", 300)])
def test_ctrl_c_is_quiet(files: Files, limit: tuple[object, ...]) -> None:
    args = [
        "certify",
        DIGITS,
        "--data",
        DIGITS_DATA,
        "--eps",
        0.003,
        "--method",
        "crown",
        "--json",
        "--threads",
        1,
        *limit,
    ]
    running = subprocess.Popen(
        [sys.executable, "-m", "attn_bounds.cli", *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # a shell's background jobs ignore interrupts, and hand that down
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert running.stdout is not None and json.loads(running.stdout.readline())["index"] == 0
    for attempt in range(10):
        os.killpg(running.pid, signal.SIGINT)  # as a terminal does: the child process gets it, too
        try:
            _, errors = running.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            continue  # compiled code can swallow an interrupt; a user presses again
        assert running.returncode == 130 and (errors == "" or attempt > 0)
        return
    running.kill()
    pytest.fail("ten interrupts did not end it")
