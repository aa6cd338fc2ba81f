"""Every operator: what onnxruntime computes lies in the bounds of every box around the point."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from attn_bounds.intervals.arithmetic import Interval, total
from attn_bounds.intervals.dual import Dual
from attn_bounds.intervals.network import Network, seeds
from attn_bounds.intervals.table import OPERATORS


class Case(NamedTuple):
    """One node on inputs of some shapes, then constants; low and high: where inputs lie."""

    op: str
    shapes: list[tuple[int, ...]]
    constants: list[Any] = []  # noqa: RUF012
    attributes: dict[str, Any] = {}  # noqa: RUF012
    low: float = -2.0
    high: float = 2.0
    opset: int = 18
    outputs: int = 1
    to_bool: bool = False  # the inputs are cast to bool first
    name: str = ""


def f(*values: Any) -> np.ndarray:
    return np.asarray(values, dtype=np.float32)


def i(*values: int) -> np.ndarray:
    return np.asarray(values, dtype=np.int64)


RNG = np.random.default_rng(3)


def w(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


CASES = [
    *(Case(op, [(2, 3), (3,)]) for op in ("Add", "Sub", "Mul", "Sum", "Max", "Min")),
    Case("Mul", [(2, 1), (1, 3)], name="Mul-broadcast"),
    Case("Div", [(2, 3), (3,)], low=0.5, high=3.0),
    Case("Pow", [(4,)], [f(2.0)[0]]),
    Case("Pow", [(4,)], [f(3.0)], name="Pow-odd"),
    Case("Pow", [(4,)], [f(-0.5)[0]], low=0.3, name="Pow-root"),
    Case("Pow", [(4,)], [f(-2.0)[0]], low=0.3, name="Pow-negative"),
    Case("Pow", [(3,)], [f(2.0, 0.0, 5.0)], name="Pow-several"),
    *(
        Case(op, [(2, 3)])
        for op in ("Neg", "Abs", "Exp", "Erf", "Sigmoid", "Tanh", "Relu", "Sign", "Floor", "Ceil")
    ),
    *(Case(op, [(5,)], low=0.2, high=4.0) for op in ("Log", "Sqrt", "Reciprocal")),
    Case("LeakyRelu", [(5,)], attributes={"alpha": 0.1}),
    Case("Clip", [(5,)], [f(-1.0)[0], f(0.5)[0]]),
    Case("Clip", [(5,)], attributes={"min": -1.0}, opset=9, name="Clip-9"),
    Case("Softmax", [(2, 3)], attributes={"axis": -1}),
    Case("Softmax", [(2, 3, 2)], attributes={"axis": 1}, low=-300, high=300, name="Softmax-wide"),
    Case("Softmax", [(2, 3, 2)], attributes={"axis": 1}, opset=11, name="Softmax-11"),
    *(Case(op, [(4,), (4,)]) for op in ("Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Equal")),
    Case("Not", [(4,)], to_bool=True),
    *(Case(op, [(4,), (4,)], to_bool=True) for op in ("And", "Or")),
    Case("Cast", [(4,)], attributes={"to": TensorProto.INT64}),
    Case("Cast", [(4,)], attributes={"to": TensorProto.BOOL}, name="Cast-bool"),
    Case("Cast", [(4,)], attributes={"to": TensorProto.DOUBLE}, name="Cast-double"),
    Case("MatMul", [(2, 3)], [w(3, 4)]),
    Case("MatMul", [(2, 3), (3, 2)], name="MatMul-both"),
    Case("MatMul", [(3,)], [w(2, 3, 2)], name="MatMul-vector"),
    Case("MatMul", [(1, 80)], [w(80, 2)], name="MatMul-long"),
    Case("Gemm", [(3, 2)], [w(4, 3), w(4)], {"transA": 1, "transB": 1, "alpha": 0.5, "beta": 2.0}),
    Case("Conv", [(1, 2, 4, 4)], [w(3, 2, 3, 3), w(3)], {"pads": [1, 0, 1, 0], "strides": [2, 1]}),
    Case("Conv", [(1, 4, 5)], [w(4, 2, 2)], {"group": 2, "dilations": [2]}, name="Conv-groups"),
    Case("Conv", [(1, 1, 3, 3)], [w(1, 1, 2, 2)], {"auto_pad": "SAME_LOWER"}, name="Conv-same"),
    Case("MaxPool", [(1, 2, 3, 3)], [], {"kernel_shape": [2, 2], "pads": [1, 1, 0, 0]}),
    Case(
        "MaxPool",
        [(1, 1, 3, 3)],
        [],
        {"kernel_shape": [2, 2], "strides": [2, 2], "ceil_mode": 1},
        name="MaxPool-ceil",
    ),
    Case("AveragePool", [(1, 2, 4, 4)], [], {"kernel_shape": [2, 3], "strides": [2, 1]}),
    Case("GlobalAveragePool", [(1, 2, 3, 2)]),
    Case("GlobalMaxPool", [(1, 2, 3, 2)]),
    Case("BatchNormalization", [(2, 3, 2)], [w(3), w(3), w(3), abs(w(3))]),
    *(
        Case(op, [(2, 3, 2)], [i(1)], {"keepdims": 0})
        for op in ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin")
    ),
    Case("ReduceSum", [(2, 3)], [], {"keepdims": 1, "axes": [-1]}, opset=11, name="ReduceSum-11"),
    Case("ReduceSum", [(2, 3)], [i()], {"noop_with_empty_axes": 1}, name="ReduceSum-noop"),
    Case("Where", [(4,)], [], name="Where"),
    Case("Identity", [(4,)]),
    Case("Dropout", [(4,)]),
    Case("Reshape", [(2, 3)], [i(0, -1, 1)]),
    Case("Flatten", [(2, 3, 2)], [], {"axis": 2}),
    Case("Squeeze", [(1, 3, 1)], [i(0)]),
    Case("Unsqueeze", [(3,)], [i(0, -1)]),
    Case("Transpose", [(2, 3, 1)], [], {"perm": [2, 0, 1]}),
    Case("Expand", [(2, 1)], [i(3, 1, 2)]),
    Case("Tile", [(2, 1)], [i(2, 3)]),
    Case("Concat", [(2, 1), (2, 3)], [w(2, 2)], {"axis": -1}),
    Case("Split", [(2, 5)], [i(2, 3)], {"axis": 1}, outputs=2),
    Case("Split", [(3, 2)], [], {"axis": 0, "num_outputs": 2}, outputs=2, name="Split-even"),
    Case("Slice", [(3, 5)], [i(-1, 4), i(-1000, 0), i(0, 1), i(-1, -2)]),
    Case("Gather", [(2, 4)], [np.array([[1, -1], [0, 0]])], {"axis": 1}),
    Case("Pad", [(2, 2)], [i(0, 1, 1, 0), f(0.5)[0]]),
    Case("Shape", [(2, 3)]),
]


def result_type(case: Case) -> int:
    if case.op == "Cast":
        return int(case.attributes["to"])
    if case.op == "Shape":
        return int(TensorProto.INT64)
    compares = ("Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Equal", "Not", "And", "Or")
    return int(TensorProto.BOOL if case.op in compares else TensorProto.FLOAT)


def build(case: Case) -> onnx.ModelProto:
    names = [f"x{k}" for k in range(len(case.shapes))]
    nodes, given = [], list(names)
    if case.to_bool:
        given = [f"b{n}" for n in names]
        nodes = [
            helper.make_node("Cast", [n], [g], to=TensorProto.BOOL) for n, g in zip(names, given, strict=True)
        ]
    if case.op == "Where":
        nodes.append(helper.make_node("Greater", ["x0", "c0"], ["b"]))
        given = ["b", "x0", "c1"]
    outputs = [f"y{k}" for k in range(case.outputs)]
    constants = [f(0.3), f(7.0)] if case.op == "Where" else case.constants
    stored = [numpy_helper.from_array(np.asarray(c), f"c{k}") for k, c in enumerate(constants)]
    if case.op != "Where":
        given += [t.name for t in stored]
    nodes.append(helper.make_node(case.op, given, outputs, **case.attributes))
    graph = helper.make_graph(
        nodes,
        "case",
        [
            helper.make_tensor_value_info(n, TensorProto.FLOAT, s)
            for n, s in zip(names, case.shapes, strict=True)
        ],
        [helper.make_tensor_value_info(n, result_type(case), None) for n in outputs],
        stored,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", case.opset)], ir_version=8)


def bounds(
    network: Network, lower: np.ndarray, upper: np.ndarray, axes: np.ndarray | None
) -> dict[str, Dual]:
    """All values on boxes (boxes, n)."""
    whole, d = seeds(lower, upper, axes)
    inputs, first = [], 0
    for port in network.inputs:
        size = int(np.prod(port.shape))
        part = slice(first, first + size)
        slope = None if d is None else d[:, :, part].reshape(*d.shape[:2], *port.shape)
        inputs.append(Dual(whole[:, part].reshape(-1, *port.shape), slope))
        first += size
    return network(inputs)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name or c.op)
def test_an_operator_holds_what_onnxruntime_computes(case: Case, tmp_path: Any) -> None:
    model = build(case)
    path = tmp_path / "m.onnx"
    onnx.save(model, path)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    rng = np.random.default_rng(1)
    n = sum(int(np.prod(s)) for s in case.shapes)
    centre = rng.uniform(case.low, case.high, (12, n))
    width = rng.uniform(0, 0.4, (12, n)) * (case.high - case.low) * (rng.random((12, 1)) < 0.8)
    lower, upper = np.maximum(centre - width, case.low), np.minimum(centre + width, case.high)
    lower, upper = (v.astype(np.float32).astype(np.float64) for v in (lower, upper))
    lower, upper = np.minimum(lower, upper), np.maximum(lower, upper)
    network = Network(path)
    names = [o.name for o in session.get_outputs()]
    network.prepare(network.floats)
    held = bounds(network, lower, upper, None)
    network.prepare(())
    real = bounds(network, lower, upper, np.arange(n))
    middle = (lower / 2 + upper / 2).astype(np.float64)
    at_middle = bounds(network, middle, middle, None)
    for _ in range(8):
        t = rng.choice([0.0, 1.0, 0.5], (12, n))
        points = np.clip((lower + t * (upper - lower)).astype(np.float32).astype(np.float64), lower, upper)
        at_point = bounds(network, points, points, None)
        for b in range(12):
            feed, first = {}, 0
            for port, shape in zip(network.inputs, case.shapes, strict=True):
                size = int(np.prod(shape))
                feed[port.name] = points[b, first : first + size].reshape(shape).astype(np.float32)
                first += size
            for name, value in zip(names, session.run(names, feed), strict=True):
                y = held[name].v
                low, high = (v[b if len(v) > 1 else 0] for v in (y.lo, y.hi))
                assert low.shape == value.shape
                assert ((low <= value) & (value <= high)).all(), (name, value, low, high)
        for name in names:
            # the real function: the mean value form and the interval must both hold the point's value
            value, exact = real[name], at_point[name].v
            assert (exact.lo <= value.v.hi).all() and (value.v.lo <= exact.hi).all()
            if value.d is not None:
                offset = (points - middle).reshape(12, n, *(1,) * len(value.shape))
                form = at_middle[name].v + total(value.d * Interval.of(offset), 1)
                assert (exact.lo <= form.hi).all() and (form.lo <= exact.hi).all(), name


def test_every_operator_has_a_case() -> None:
    made = {"Constant", "ConstantOfShape"}  # without inputs; in the queries of test_solve.py
    assert set(OPERATORS) - made == {c.op for c in CASES}
