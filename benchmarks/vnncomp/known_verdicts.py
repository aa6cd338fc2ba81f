"""Random small networks, attention included, with properties whose verdicts are known: are ours the same?

    python benchmarks/vnncomp/known_verdicts.py [--count 500] [--first 0] [--timeout 10]

Each network has two inputs, so that a fine grid knows the smallest margin up to the grid's spacing times the
steepest slope: a threshold above the grid's minimum is "sat", one below by more than that is "unsat". Some
properties have two boxes, some an l2 ball, some both kinds of rows; files are VNN-LIB 1.0 and 2.0. Every
"sat" is replayed here in onnxruntime. Writes results/known_verdicts.json; finished rows are kept.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

GRID = 161  # points of the grid per axis
RESULTS = Path(__file__).parent / "results" / "known_verdicts.json"


class Known(NamedTuple):
    """A model and a property with its verdict ("sat" or "unsat"), and what kind they are."""

    model: Path
    vnnlib: Path
    verdict: str
    kind: str


def known(seed: int, folder: Path) -> Known:
    """The case of this seed, written into a folder."""
    rng = np.random.default_rng(seed)
    kind = ("relu", "attention", "tanh", "two attentions")[seed % 4]
    model = folder / f"{seed}.onnx"
    onnx.save(_network(rng, kind), model)
    centre, size = rng.uniform(-1, 1, 2), rng.uniform(0.05, 0.6, 2)
    ball = seed % 5 == 4
    if ball:
        size[:] = size.min()
    boxes = [(centre - size, centre + size)]
    if seed % 3 == 2 and not ball:
        boxes.append((centre + 2 * size, centre + 3 * size))
    # row = one linear function of the outputs, or the larger of two
    rows = rng.normal(size=(1 + seed % 2, 2))
    lowest, slack = np.inf, 0.0
    for low, high in boxes:
        axes = [np.linspace(a, b, GRID) for a, b in zip(low, high, strict=True)]
        points = np.stack(np.meshgrid(*axes, indexing="ij"), -1)
        values = (_run(model, points.reshape(-1, 2)) @ rows.T).max(1).reshape(GRID, GRID)
        # the steepest difference between neighbours, over the way to the nearest grid point, doubled
        steps = [np.abs(np.diff(values, axis=k)).max() for k in (0, 1)]
        if ball:
            values[((points - centre) ** 2).sum(-1) > size[0] ** 2] = np.inf
        lowest, slack = min(lowest, float(values.min())), max(slack, 2 * float(sum(steps)))
    scale = max(1e-3, float(np.abs(lowest)) * 0.02)
    verdict = "sat" if rng.random() < 0.5 else "unsat"
    threshold = lowest + scale if verdict == "sat" else lowest - slack - scale
    version_2 = ball or seed % 2 == 0
    vnnlib = folder / f"{seed}.vnnlib"
    vnnlib.write_text(_file(boxes, (centre, size[0]) if ball else None, rows, threshold, version_2))
    shape = "l2 ball" if ball else f"{len(boxes)} boxes"
    return Known(model, vnnlib, verdict, f"{kind}, {shape}, VNN-LIB {2 if version_2 else 1}.0")


def replays(case: Known, witness: dict[str, Any]) -> bool:
    """Whether onnxruntime confirms a witness strictly, by the formula in the file."""
    x = np.array([witness["inputs"]], dtype=np.float32)
    text = case.vnnlib.read_text()
    y = _run(case.model, x)[0]
    rows, threshold, inside = json.loads(text.split("; known: ", 1)[1].split("\n", 1)[0])
    member = any(_inside(x[0].astype(float), *region) for region in inside)
    return member and bool((np.array(rows) @ y < threshold).all())


def _inside(x: np.ndarray, low: list[float], high: list[float], radius: float | None) -> bool:
    tol = 1e-6
    if radius is not None and np.linalg.norm(x - (np.array(low) + high) / 2) > radius + tol:
        return False
    return bool((x >= np.array(low) - tol).all() and (x <= np.array(high) + tol).all())


def _file(
    boxes: list[tuple[np.ndarray, np.ndarray]],
    ball: tuple[np.ndarray, float] | None,
    rows: np.ndarray,
    threshold: float,
    version_2: bool,
) -> str:
    """The property file: unsafe iff all rows are below the threshold. A comment holds what it says."""
    x, y = ("X[0,{}]", "Y[0,{}]") if version_2 else ("X_{}", "Y_{}")

    def number(v: float) -> str:
        return np.format_float_positional(v, trim="0")

    def box(low: np.ndarray, high: np.ndarray) -> str:
        parts = [f"(>= {x.format(i)} {number(low[i])}) (<= {x.format(i)} {number(high[i])})" for i in (0, 1)]
        return f"(and {' '.join(parts)})"

    if ball is None:
        inputs = f"(or {' '.join(box(*b) for b in boxes)})" if len(boxes) > 1 else box(*boxes[0])
    else:
        squares = [f"(- {x.format(i)} {number(ball[0][i])})" for i in (0, 1)]
        inputs = f"(<= (+ {' '.join(f'(* {s} {s})' for s in squares)}) {number(ball[1] ** 2)})"
    outputs = [
        f"(<= (+ (* {number(a)} {y.format(0)}) (* {number(b)} {y.format(1)})) {number(threshold)})"
        for a, b in rows
    ]
    regions = [(list(low), list(high), None if ball is None else ball[1]) for low, high in boxes]
    head = f"; known: {json.dumps([rows.tolist(), threshold, regions])}\n"
    if version_2:
        head = (
            "(vnnlib-version <2.0>)\n(declare-network N (declare-input X float32 [1,2]) "
            f"(declare-output Y float32 [1,2]))\n{head}"
        )
    else:
        names = ("X_0", "X_1", "Y_0", "Y_1")
        head += "".join(f"(declare-const {name} Real)\n" for name in names)
    return f"{head}(assert {inputs})\n(assert (and {' '.join(outputs)}))\n"


def _run(model: Path, x: np.ndarray) -> np.ndarray:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
    found: np.ndarray = session.run(None, {"x": x.astype(np.float32)})[0]
    return found.astype(np.float64)


def _network(rng: np.random.Generator, kind: str) -> onnx.ModelProto:
    """x (batch, 2) to y (batch, 2): a perceptron, or tokens with one or two attention layers."""
    arrays: dict[str, np.ndarray] = {}
    nodes: list[onnx.NodeProto] = []

    def weight(name: str, *shape: int) -> str:
        arrays[name] = (rng.normal(size=shape) * 1.5 / np.sqrt(shape[0])).astype(np.float32)
        return name

    def node(op: str, *inputs: str, **attributes: Any) -> str:
        name = f"v{len(nodes)}"
        nodes.append(helper.make_node(op, list(inputs), [name], name=name, **attributes))
        return name

    def linear(value: str, key: str, inputs: int, outputs: int) -> str:
        return node(
            "Add", node("MatMul", value, weight(f"w{key}", inputs, outputs)), weight(f"b{key}", outputs)
        )

    if kind in ("relu", "tanh"):
        op, width = ("Relu", 8) if kind == "relu" else ("Tanh", 6)
        hidden = node(op, linear(node(op, linear("x", "1", 2, width)), "2", width, width))
        last = linear(hidden, "3", width, 2)
    else:
        tokens, width = 3, 4
        arrays["tokens"] = np.array([0, tokens, width], dtype=np.int64)
        arrays["flat"] = np.array([0, tokens * width], dtype=np.int64)
        arrays["scale"] = np.array(1 / np.sqrt(width), dtype=np.float32)
        value = node("Reshape", linear("x", "in", 2, tokens * width), "tokens")
        for layer in range(2 if kind.startswith("two") else 1):
            q, k, v = (linear(value, f"{n}{layer}", width, width) for n in "qkv")
            scores = node("Mul", node("MatMul", q, node("Transpose", k, perm=[0, 2, 1])), "scale")
            mixed = node("MatMul", node("Softmax", scores, axis=-1), v)
            value = node("Add", value, linear(mixed, f"o{layer}", width, width))
        last = linear(node("Reshape", value, "flat"), "out", tokens * width, 2)
    nodes[-1].output[0] = "y"
    assert last
    graph = helper.make_graph(
        nodes,
        "known",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 2])],
        [numpy_helper.from_array(a, name) for name, a in arrays.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def outcome(case: Known, timeout: float) -> dict[str, Any]:
    """Our answer beside the known one, in this process."""
    from attn_bounds.search import worker
    from attn_bounds.search.answer import Job

    begin = time.perf_counter()
    job = Job(str(case.model), str(case.vnnlib), str(case.model.parent), time.time() + timeout)
    answer = worker.verify(job, lambda _: None)
    row = answer.row()
    wrong = {answer.status, case.verdict} == {"sat", "unsat"}
    if answer.status == "sat":
        wrong = wrong or not replays(case, row["witness"])
    return {
        "kind": case.kind,
        "known": case.verdict,
        "status": answer.status,
        "wrong": wrong,
        "method": answer.method,
        "margin": answer.margin,
        "parts": sum(t.get("parts", 0) for t in answer.tried),
        "reason": answer.reason,
        "seconds": round(time.perf_counter() - begin, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=10.0)
    args = parser.parse_args()
    from attn_bounds.report import progress

    before = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {"rows": {}}
    rows: dict[str, Any] = before["rows"]
    todo = [s for s in range(args.first, args.first + args.count) if str(s) not in rows]
    RESULTS.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, progress(len(todo)) as begin:
        for seed in todo:
            begin(f"seed {seed}")
            rows[str(seed)] = outcome(known(seed, Path(folder)), args.timeout)
            counts: dict[str, int] = {}
            for row in rows.values():
                key = "wrong" if row["wrong"] else f"{row['known']}: {row['status']}"
                counts[key] = counts.get(key, 0) + 1
            lines = ",\n".join(f'"{s}": {json.dumps(row)}' for s, row in rows.items())
            RESULTS.write_text(f'{{"summary": {json.dumps(counts)}, "rows": {{\n{lines}\n}}}}\n')
    summary = json.loads(RESULTS.read_text())["summary"]
    print(json.dumps(summary))
    sys.exit(1 if "wrong" in summary else 0)


if __name__ == "__main__":
    main()
