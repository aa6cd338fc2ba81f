"""Tiny ONNX files with known weights, and the bundled digits example."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor

EXAMPLES = Path(__file__).parents[2] / "examples"
DIGITS = EXAMPLES / "digits_vit.onnx"
DIGITS_DATA = EXAMPLES / "digits_test.npz"


def digits(count: int) -> tuple[Tensor, list[int]]:
    """The first inputs of the digits test set and their labels: (count, 1, 8, 8), count labels."""
    with np.load(DIGITS_DATA) as data:
        return torch.from_numpy(data["x"][:count]), [int(v) for v in data["y"][:count]]


def weights(outputs: int, inputs: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Weight (outputs, inputs) and bias (outputs,) in float32."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(outputs, inputs)).astype(np.float32), rng.normal(size=outputs).astype(np.float32)


def linear_model(
    path: Path,
    weight: np.ndarray,
    bias: np.ndarray,
    shape: tuple[int, ...] | None = None,
    head: str = "",
    unsupported: tuple[str, ...] = (),
) -> Path:
    """Write `head(weight · flatten(x) + bias)`, input (batch, *shape); other operators may follow it."""
    shape = (weight.shape[1],) if shape is None else shape
    nodes = [
        helper.make_node("Flatten", ["x"], ["flat"], name="flatten", axis=1),
        helper.make_node("Gemm", ["flat", "weight", "bias"], ["v0"], name="gemm", transB=1),
    ]
    chain = [*unsupported, *([head] if head else [])]
    for i, op in enumerate(chain):
        options = {"axis": 1} if op in ("Softmax", "ArgMax") else {}
        nodes.append(helper.make_node(op, [f"v{i}"], [f"v{i + 1}"], name=op.lower(), **options))
    kind = TensorProto.INT64 if head == "ArgMax" else TensorProto.FLOAT
    return write(
        path,
        nodes,
        {"weight": weight, "bias": bias},
        shape,
        helper.make_tensor_value_info(f"v{len(chain)}", kind, None),
    )


def relu_model(path: Path, hidden: int = 8, classes: int = 3, scale: float = 1.0, nan: bool = False) -> Path:
    """Write a perceptron with one hidden layer, input (batch, 4); `nan` puts a NaN into its weights."""
    first, bias1 = weights(hidden, 4, 1)
    second, bias2 = weights(classes, hidden, 2)
    first = first * np.float32(scale)
    if nan:
        second[0, 0] = np.nan
    nodes = [
        helper.make_node("Gemm", ["x", "w1", "b1"], ["h"], name="first", transB=1),
        helper.make_node("Relu", ["h"], ["r"], name="relu"),
        helper.make_node("Gemm", ["r", "w2", "b2"], ["y"], name="second", transB=1),
    ]
    arrays = {"w1": first, "b1": bias1, "w2": second, "b2": bias2}
    return write(path, nodes, arrays, (4,), helper.make_tensor_value_info("y", TensorProto.FLOAT, None))


def write(
    path: Path,
    nodes: list[onnx.NodeProto],
    arrays: dict[str, np.ndarray],
    shape: tuple[int, ...],
    output: onnx.ValueInfoProto,
    external: bool = False,
) -> Path:
    """Save a graph with input x (batch, *shape); returns the path."""
    graph = helper.make_graph(
        nodes,
        "test",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", *shape])],
        [output],
        [numpy_helper.from_array(a, name) for name, a in arrays.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    if external:
        onnx.save(model, path, save_as_external_data=True, location=path.name + ".data", size_threshold=0)
    else:
        onnx.save(model, path)
    return path
