"""Random small networks with random queries, and what is known about them from many points."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

UNARY = ("Relu", "Sigmoid", "Tanh", "Abs", "Softmax", "Exp", "Neg", "LeakyRelu", "Erf")


@dataclass
class Example:
    """A query, and how far inside of it the best of many points lies, < 0 if all are outside."""

    text: str
    path: Path
    margin: float


def network(rng: np.random.Generator, inputs: int) -> tuple[onnx.ModelProto, int]:
    """A chain of layers with skips, products and switches; and its number of outputs."""
    nodes: list[Any] = []
    stored: list[Any] = []
    live = [("x", inputs)]

    def constant(value: np.ndarray) -> str:
        stored.append(numpy_helper.from_array(value.astype(np.float32), f"c{len(stored)}"))
        return str(stored[-1].name)

    def node(op: str, given: list[str], size: int, **attributes: Any) -> None:
        live.append((f"t{len(nodes)}", size))
        nodes.append(helper.make_node(op, given, [live[-1][0]], **attributes))

    for _ in range(rng.integers(2, 7)):
        name, size = live[-1]
        kind = rng.integers(0, 8)
        if kind <= 2:
            out = int(rng.integers(1, 5))
            node(
                "MatMul",
                [name, constant(np.round(rng.standard_normal((size, out)), int(rng.integers(0, 4))))],
                out,
            )
            node("Add", [live[-1][0], constant(np.round(rng.standard_normal(out), 1))], out)
        elif kind <= 5:
            node(str(rng.choice(UNARY)), [name], size)
        elif kind == 6:
            other = [n for n in live if n[1] == size]
            node(
                str(rng.choice(["Add", "Mul", "Sub", "Max"])),
                [name, other[rng.integers(len(other))][0]],
                size,
            )
        else:
            node("Greater", [name, constant(np.round(rng.standard_normal(1), 1))], size)
            node("Where", [live[-1][0], name, constant(np.round(rng.standard_normal(1), 1))], size)
            del live[-2]  # the condition is not a number
    name, size = live[-1]
    if name == "x":
        node("Identity", [name], size)
    nodes.append(helper.make_node("Identity", [live[-1][0]], ["y"]))
    graph = helper.make_graph(
        nodes,
        "random",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [inputs])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [size])],
        stored,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8), size


def _sampled(rng: np.random.Generator, path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A network in a file, with a box and the outputs at points of the box: low, high, y."""
    inputs = int(rng.integers(1, 4))
    model, _ = network(rng, inputs)
    onnx.save(model, path)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    low = np.round(rng.uniform(-2, 1, inputs), 1)
    high = np.round(low + rng.uniform(0, 2, inputs), 1)
    grid = np.stack(np.meshgrid(*(np.linspace(a, b, 9) for a, b in zip(low, high, strict=True))), -1)
    points = np.concatenate([grid.reshape(-1, inputs), rng.uniform(low, high, (300, inputs))])
    points = points.astype(np.float32)
    inside = ((points.astype(float) >= low) & (points.astype(float) <= high)).all(1)
    points = points[inside] if inside.any() else points
    return low, high, np.stack([session.run(None, {"x": p})[0] for p in points]).astype(float)


def example(seed: int, folder: Path) -> Example:
    """A query whose limits are near what the outputs reach, from both sides or exactly."""
    rng = np.random.default_rng(seed)
    path = folder / f"{seed}.onnx"
    low, high, y = _sampled(rng, path)
    while not abs(y).max() < 1e6:
        low, high, y = _sampled(rng, path)
    inputs, size = len(low), y.shape[1]
    kind = "real" if rng.random() < 0.5 else "float32"
    lines = [
        "(vnnlib-version <2.0>)",
        f"(declare-network N (declare-input X {kind} [{inputs}]) (declare-output Y {kind} [{size}]))",
    ]
    lines += [
        f"(assert (and (>= X[{i}] {float(low[i])!r}) (<= X[{i}] {float(high[i])!r})))" for i in range(inputs)
    ]
    clauses, margins = [], []
    for _ in range(rng.integers(1, 3)):
        atoms, best = [], np.full(len(y), np.inf)
        for _ in range(rng.integers(1, 3)):
            text, value = _term(rng, y)
            sign = str(rng.choice(["<=", ">=", "<", ">"]))
            end = value.min() if "<" in sign else value.max()
            end = np.quantile(value, rng.random()) if rng.random() < 0.3 else end
            delta = float(rng.choice([0.0, 1e-7, 1e-3, 1e-2, 0.1, 0.3])) * float(rng.choice([-1, 1]))
            limit = float(np.round(end + delta, int(rng.integers(2, 9))))
            atoms.append(f"({sign} {text} {np.format_float_positional(limit, trim='0')})")
            best = np.minimum(best, (limit - value) if "<" in sign else (value - limit))
        clauses.append(f"(and {' '.join(atoms)})" if len(atoms) > 1 else atoms[0])
        margins.append(best)
    lines.append(f"(assert (or {' '.join(clauses)}))" if len(clauses) > 1 else f"(assert {clauses[0]})")
    margin = float(np.nanmax(np.max(margins, axis=0)))
    return Example("\n".join(lines) + "\n", path, margin)


def _term(rng: np.random.Generator, y: np.ndarray) -> tuple[str, np.ndarray]:
    i, j = rng.integers(0, y.shape[1], 2)
    form = rng.integers(0, 4)
    if form == 0:
        return f"(+ (* 0.5 Y[{i}]) (* -2.0 Y[{j}]))", 0.5 * y[:, i] - 2 * y[:, j]
    if form == 1:
        return f"(* Y[{i}] Y[{j}])", y[:, i] * y[:, j]
    return f"Y[{i}]", y[:, i]


def holds(text: str, values: dict[str, np.ndarray], number: Any = Fraction) -> bool:
    """Whether the assertions of a query hold for tensors by name; written without the package.

    number: what a literal stands for."""
    tokens = re.findall(r"[()]|[^\s()]+", text)
    stack: list[list[Any]] = [[]]
    for token in tokens:
        if token == "(":
            stack.append([])
        elif token == ")":
            done = stack.pop()
            stack[-1].append(done)
        else:
            stack[-1].append(token)

    def value(node: Any) -> Any:
        if isinstance(node, list):
            parts = [value(p) for p in node[1:]]
            return FUNCTIONS[node[0]](parts)
        if "[" in node:
            name, index = node[:-1].split("[")
            return Fraction(float(values[name][tuple(map(int, index.split(",")))]))
        return Fraction(number(node))

    return all(value(top[1]) for top in stack[0] if top[0] == "assert")


FUNCTIONS: dict[str, Any] = {
    "and": all,
    "or": any,
    "+": sum,
    "*": math.prod,
    "<=": lambda p: p[0] <= p[1],
    ">=": lambda p: p[0] >= p[1],
    "<": lambda p: p[0] < p[1],
    ">": lambda p: p[0] > p[1],
}
