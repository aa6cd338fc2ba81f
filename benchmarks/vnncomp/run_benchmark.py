"""Run a benchmark as the competition does: its instances.csv through our three scripts.

    python benchmarks/vnncomp/run_benchmark.py DIR [--out OUT] [--timeout S] [--only TEXT] [--scripts DIR]

DIR holds instances.csv (model, property, time limit in seconds; paths relative to DIR). Every instance is
prepared and run by the scripts; its time includes start-up, over the limit it counts as timeout, and a "sat"
counts if onnxruntime confirms its witness. Writes to OUT (default results/ beside this file, by the name of
DIR) NAME.csv (category, model, property, seconds to prepare, result, seconds), NAME.json (the summary) and
NAME.png (a cactus plot). Finished rows are kept, so that a run can be taken up again.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

PREPARE_SECONDS = 600.0
KILL_AFTER = 10.0  # seconds over the time limit
INPUT_TOLERANCE = 1e-4  # of the competition's scorer
FIELDS = ("category", "model", "property", "prepare_seconds", "result", "seconds")
SOLVED = ("sat", "unsat")


def instances(folder: Path) -> list[tuple[str, str, float]]:
    """The rows of instances.csv."""
    with open(folder / "instances.csv", newline="") as file:
        return [(r[0].strip(), r[1].strip(), float(r[2])) for r in csv.reader(file) if r]


def call(command: list[str], limit: float) -> tuple[int | None, float]:
    """Exit code (None: it had to be killed) and seconds; what it prints goes to stderr."""
    begin = time.monotonic()
    process = subprocess.Popen(command, stdout=sys.stderr, start_new_session=True)
    try:
        return process.wait(timeout=limit), time.monotonic() - begin
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return None, time.monotonic() - begin
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise


def run(folder: Path, scripts: Path, model: str, prop: str, limit: float) -> dict[str, Any]:
    """One instance, as the competition's runner and scorer treat it."""
    category, onnx, vnnlib = folder.name, str(folder / model), str(folder / prop)
    row = {"category": category, "model": model, "property": prop, "seconds": 0.0}
    code, seconds = call(
        [str(scripts / "prepare_instance.sh"), "v1", category, onnx, vnnlib], PREPARE_SECONDS
    )
    row["prepare_seconds"] = round(seconds, 2)
    if code != 0:
        return {**row, "result": "skipped"}
    with tempfile.TemporaryDirectory() as scratch:
        results = Path(scratch) / "result.txt"
        arguments = ["v1", category, onnx, vnnlib, str(results), f"{limit:g}"]
        code, seconds = call([str(scripts / "run_instance.sh"), *arguments], limit + KILL_AFTER)
        lines = results.read_text().splitlines() if results.is_file() else []
    result = lines[0].strip() if lines else ("timeout" if code is None else "error")
    if result in SOLVED and seconds > limit:
        result = "timeout"
    if result == "sat" and not confirmed(onnx, vnnlib, lines[1:]):
        result = "wrong sat"
    return {**row, "result": result, "seconds": round(seconds, 2)}


def confirmed(onnx: str, vnnlib: str, witness: list[str]) -> bool:
    """Whether the witness of a results file is in the input set and violates strictly in onnxruntime."""
    import numpy as np
    import onnxruntime
    import torch

    from attn_bounds import read_vnnlib

    data = Path(onnx).read_bytes()
    packed = data[:2] == b"\x1f\x8b"
    session = onnxruntime.InferenceSession(gzip.decompress(data) if packed else onnx)
    values, feed, at = numbers(witness), {}, 0
    for declared in session.get_inputs():
        shape = [d if isinstance(d, int) else 1 for d in declared.shape]
        part = values[at : at + math.prod(shape)]
        at += len(part)
        if len(part) != math.prod(shape):
            return False
        kind = np.float64 if "double" in declared.type else np.float32
        feed[declared.name] = np.array(part, dtype=kind).reshape(shape)
    y = torch.cat([torch.from_numpy(v).flatten().double() for v in session.run(None, feed)])
    if len(values) != at + len(y):
        return False
    x = torch.tensor(values[:at], dtype=torch.float64)
    return any(
        bool(inputs.contains(x.reshape(inputs.center.shape), INPUT_TOLERANCE)[0])
        and spec.violated(spec.margins(y))
        for inputs, spec in read_vnnlib(vnnlib).cases
    )


def numbers(witness: list[str]) -> list[float]:
    """The values of a witness of either form, in order."""
    if witness and witness[0].startswith("("):
        return [float(line.strip("() ").split()[1]) for line in witness]
    return [float(line) for line in witness if " " not in line.strip()]


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts, points and times."""
    counts = Counter(r["result"] for r in rows)
    times = [float(r["seconds"]) for r in rows if r["result"] in SOLVED]
    return {
        "instances": len(rows),
        "results": dict(counts.most_common()),
        "points": 10 * len(times) - 150 * counts["wrong sat"],
        "seconds_solved": round(sum(times), 1),
        "seconds_all": round(sum(float(r["seconds"]) for r in rows), 1),
    }


def cactus(rows: list[dict[str, Any]], path: Path, title: str) -> None:
    """How many instances were solved within how much time each."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    for result in SOLVED:
        times = sorted(float(r["seconds"]) for r in rows if r["result"] == result)
        axes.plot(range(1, len(times) + 1), times, marker="o", markersize=3, label=f"{result}: {len(times)}")
    axes.set(xlabel="instances solved", ylabel="seconds each", yscale="log", title=title)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--timeout", type=float, help="instead of the instances' own")
    parser.add_argument("--only", default="", help="instances whose property or model contains this text")
    parser.add_argument("--scripts", type=Path, default=HERE, help="where the three scripts are")
    args = parser.parse_args()
    folder = args.folder.resolve()
    if not (folder / "instances.csv").is_file():
        sys.exit(f"{folder}: there is no instances.csv")
    args.out.mkdir(parents=True, exist_ok=True)
    table = args.out / f"{folder.name}.csv"
    rows: list[dict[str, Any]] = []
    if table.is_file():
        with open(table, newline="") as file:
            rows = list(csv.DictReader(file))
    done = {(r["model"], r["property"]) for r in rows}
    for model, prop, limit in instances(folder):
        if (model, prop) in done or args.only not in f"{model} {prop}":
            continue
        row = run(folder, args.scripts.resolve(), model, prop, args.timeout or limit)
        rows.append(row)
        print(f"{row['result']:10} {row['seconds']:8.2f} s  {prop}", flush=True)
        with open(table, "w", newline="") as file:
            writer = csv.DictWriter(file, FIELDS)
            writer.writeheader()
            writer.writerows(rows)
    found = summary(rows)
    (args.out / f"{folder.name}.json").write_text(json.dumps(found, indent=1) + "\n")
    cactus(rows, args.out / f"{folder.name}.png", folder.name)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
