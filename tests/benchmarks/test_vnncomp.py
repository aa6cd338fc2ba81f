"""The competition's scripts, called as its runner calls them, and the runner of our own."""

from __future__ import annotations

import csv
import gzip
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from attn_bounds.search import worker
from attn_bounds.search.answer import Job

from ..attn_bounds.cli_tools import Files

SCRIPTS = Path(__file__).resolve().parents[2] / "benchmarks" / "vnncomp"


@pytest.fixture(scope="module")
def run_benchmark() -> Iterator[ModuleType]:
    sys.path.insert(0, str(SCRIPTS))
    import run_benchmark

    yield run_benchmark
    sys.path.remove(str(SCRIPTS))


@pytest.fixture(autouse=True)
def this_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTN_BOUNDS_PYTHON", sys.executable)


def call(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [str(SCRIPTS / script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_a_benchmark_from_instances_to_plot(
    run_benchmark: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A property that holds, one that does not, and one of another model; files compressed."""
    folder, out = tmp_path / "bench", tmp_path / "out"
    folder.mkdir()
    files = Files(folder)
    (folder / "m.onnx.gz").write_bytes(gzip.compress(files.model.read_bytes()))
    holds, fails = files.vnnlib(0.01), files.vnnlib(5.0)
    (folder / "holds.vnnlib.gz").write_bytes(gzip.compress(holds.read_bytes()))
    (folder / "other.vnnlib").write_text(holds.read_text() + "(declare-const X_4 Real)")
    lines = ["m.onnx.gz,holds.vnnlib.gz,100", f"m.onnx,{fails.name},100", "m.onnx,other.vnnlib,50"]
    (folder / "instances.csv").write_text("\n".join([*lines, "m.onnx,missing.vnnlib,50"]) + "\n")
    scripts = tmp_path / "scripts"  # ours, but that nothing is put in the cache
    scripts.mkdir()
    for name, text in (("prepare", 'test -r "$4"'), ("run", f'exec {SCRIPTS}/run_instance.sh "$@"')):
        (scripts / f"{name}_instance.sh").write_text(f"#!/bin/sh\n{text}\n")
        (scripts / f"{name}_instance.sh").chmod(0o755)
    arguments = [str(folder), "--out", str(out), "--scripts", str(scripts)]
    monkeypatch.setattr(sys, "argv", ["run_benchmark.py", *arguments])
    run_benchmark.main()
    with open(out / "bench.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [r["result"] for r in rows] == ["unsat", "sat", "error", "skipped"]
    summary = json.loads((out / "bench.json").read_text())
    assert summary["instances"] == 4 and summary["points"] == 20
    assert (out / "bench.png").stat().st_size > 1000
    # taken up again, nothing is run twice
    monkeypatch.setattr(run_benchmark, "run", None)
    run_benchmark.main()


def test_a_witness_is_replayed(run_benchmark: ModuleType, tmp_path: Path) -> None:
    files = Files(tmp_path)
    prop = files.vnnlib(5.0)
    answer = worker.verify(Job(str(files.model), str(prop), str(tmp_path)), lambda _: None)
    assert answer.witness is not None
    witness = list(answer.witness.lines())
    assert run_benchmark.confirmed(str(files.model), str(prop), witness)
    assert not run_benchmark.confirmed(str(files.model), str(files.vnnlib(0.01)), witness)
    assert not run_benchmark.confirmed(str(files.model), str(prop), witness[1:])
    by_name = ["X float32 [2]", "1.5", "2", "Y real []", "3"]
    assert run_benchmark.numbers(by_name) == [1.5, 2, 3]


def test_networks_by_name(tmp_path: Path) -> None:
    """Newer runners give (name, path) pairs."""
    for given, path in (("m.onnx", "m.onnx"), ("[('N', 'a b.onnx')]", "a b.onnx")):
        command = ["bash", "-c", f'. {SCRIPTS}/environment.sh; network "$1"', "bash", given]
        assert subprocess.run(command, capture_output=True, text=True).stdout == f"{path}\n"
    result = tmp_path / "r"
    two = "[('N', 'm.onnx'), ('M', 'm.onnx')]"
    found = call("run_instance.sh", "v1", "any", two, "p.vnnlib", result, 60)
    assert found.returncode == 0 and result.read_text() == "unknown\n" and "2 networks" in found.stderr


def test_bad_calls(tmp_path: Path) -> None:
    for script, arguments in (
        ("run_instance.sh", ("v2", "any", "m", "p", "r", 60)),
        ("run_instance.sh", ("v1", "any", "m", "p", "r")),
        ("prepare_instance.sh", ("v1", "any", "m")),
        ("prepare_instance.sh", ("v1", "any", tmp_path / "m.onnx", tmp_path / "p.vnnlib")),
        ("install_tool.sh", ("v2",)),
    ):
        found = call(script, *arguments)
        assert found.returncode != 0 and found.stderr and not found.stdout, script
    result = tmp_path / "r"
    call("run_instance.sh", "v1", "any", tmp_path / "m.onnx", tmp_path / "p.vnnlib", result, 60)
    assert result.read_text() == "error\n"


@pytest.mark.slow
def test_the_shared_vits_as_the_runner_calls_them(vnncomp_vit: Path, tmp_path: Path) -> None:
    """One that is proved at once, and one that is stopped at the limit."""
    result = tmp_path / "r"
    for name, limit, verdict in (("pgd_2_3_16_4021", 100, "unsat"), ("ibp_3_3_8_453", 3, "timeout")):
        model = vnncomp_vit / f"{name.rsplit('_', 1)[0]}.onnx"
        prop = vnncomp_vit / "vnnlib" / f"{name}.vnnlib.gz"
        assert call("prepare_instance.sh", "v1", "vit", model, prop).returncode == 0
        begin = time.monotonic()
        assert call("run_instance.sh", "v1", "vit", model, prop, result, limit).returncode == 0
        assert result.read_text() == f"{verdict}\n" and time.monotonic() - begin < limit + 2
        os.unlink(result)
