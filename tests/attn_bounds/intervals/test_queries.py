"""Queries of every form on small networks, with verdicts known by hand."""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
import onnx.parser
import pytest

from attn_bounds.errors import InputError, UnsupportedModelError
from attn_bounds.intervals.query import Query
from attn_bounds.intervals.solve import Outcome, Solver

HEAD = '<ir_version: 8, opset_import: ["" : 18]> net '
IDENTITY = "(float[2] x) => (float[2] y) { y = Identity(x) }"
RELU = "(float[1] x) => (float[1] y) { y = Relu(x) }"
SOFTMAX = "(float[3] x) => (float[3] y) { y = Softmax<axis = -1>(x) }"
TWO = "(float[1] a, float[1] b) => (float[1] s, float[1] p) { s = Sub(a, b) p = Mul(a, b) }"
INNER = "(float[1] x) => (float[1] y) { h = Add(x, x) y = Tanh(h) }"
COUNTED = "(int64[1] x) => (float[1] y) { y = Cast<to = 1>(x) }"
CHOSEN = """(bool[1] x) => (float[1] y)
<float a = {1.5}, float b = {-2.0}> { y = Where(x, a, b) }"""
HALF = "(float16[1] x) => (float16[1] y) { y = Mul(x, x) }"
DOUBLE = "(double[1] x) => (double[1] y) { y = Mul(x, x) }"
SQUARED = "(float[1] x) => (float[1] y) { h = Mul(x, x) z = Sub(h, h) y = Relu(z) }"
TRUNCATED = "(float[1] x) => (int64[1] y) { y = Cast<to = 7>(x) }"
SWITCH = """(float[1] x) => (float[1] y)
<float t = {1.0}, float big = {9.0}> { c = Greater(x, t) y = Where(c, big, x) }"""
FILLED = """(float[2] x) => (float[2] y)
{ s = Shape(x) c = ConstantOfShape<value = float[1] {2.0}>(s) y = Mul(x, c) }"""
POOL = """(float[1,1,3] x) => (float[1,1,2] y)
{ y = MaxPool<kernel_shape = [2], strides = [2], ceil_mode = 1>(x) }"""
THIRD = "(float[1] x) => (float[1] y) <float c = {0.33333334}> { y = Mul(x, c) }"
ODD = "(float[2] x) => (float[2] y) { a = Tanh(x) b = Neg(x) d = Tanh(b) y = Add(a, d) }"


def declared(kind: str, sizes: str = "[1]", name: str = "N", suffix: str = "", relation: str = "") -> str:
    return (
        f"(declare-network {name} {relation} (declare-input X{suffix} {kind} {sizes}) "
        f"(declare-output Y{suffix} {kind} {sizes}))\n"
    )


def box(*bounds: tuple[str, float, float]) -> str:
    return "".join(f"(assert (and (>= {name} {low}) (<= {name} {high})))\n" for name, low, high in bounds)


class Case(NamedTuple):
    name: str
    graph: str
    query: str
    verdict: str
    networks: tuple[str, ...] = ("N",)


WIDE = declared("real", "[3]") + box(*((f"X[{i}]", -1000.0, 1000.0) for i in range(3)))
UNIT = declared("float32", "[2]") + box(("X[0]", 0.0, 1.0), ("X[1]", 0.0, 1.0))
ONE = declared("real") + box(("X[0]", -1.0, 1.0))
FLOAT = declared("float32") + box(("X[0]", -1.0, 1.0))
PAIR = """(declare-network N (declare-input A float32 [1]) (declare-input B float32 [1])
(declare-output S float32 [1]) (declare-output P float32 [1]))
""" + box(("A[0]", 0.0, 1.0), ("B[0]", 0.0, 1.0))
HIDDEN = """(declare-network N (declare-input X real [1]) (declare-hidden H real [1] "h")
(declare-output Y real [1]))
""" + box(("X[0]", 0.0, 1.0))
TWICE = box(("X[0]", 0.0, 1.0), ("X2[0]", 2.0, 3.0)) + "(assert (<= Y2[0] Y[0]))"
WHOLE = "(declare-network N (declare-input X int64 [1]) (declare-output Y float32 [1]))\n"
LOGIC = "(declare-network N (declare-input X bool [1]) (declare-output Y float32 [1]))\n"
INTEGER = "(declare-network N (declare-input X float32 [1]) (declare-output Y int64 [1]))\n" + box(
    ("X[0]", -2.9, 2.9)
)

CASES = [
    Case("softmax leaves [0, 1]", SOFTMAX, WIDE + "(assert (or (< Y[0] 0.0) (> Y[2] 1.0)))", "unsat"),
    Case("softmax may underflow", SOFTMAX, WIDE + "(assert (> Y[0] 0.999))", "sat"),
    Case(
        "the sum of a softmax",
        SOFTMAX,
        declared("real", "[3]")
        + box(*((f"X[{i}]", -2.0, 2.0) for i in range(3)))
        + "(assert (> (+ Y[0] Y[1] Y[2]) 1.2))",
        "unsat",
    ),
    Case("relu below 0", RELU, ONE + "(assert (< Y[0] 0.0))", "unsat"),
    Case("relu at 0", RELU, ONE + "(assert (<= Y[0] 0.0))", "sat"),
    Case("relu at 0 in float32", RELU, FLOAT + "(assert (<= Y[0] 0.0))", "sat"),
    Case("the end of the range", IDENTITY, UNIT + "(assert (>= (+ (* 0.5 Y[0]) Y[1]) 1.5))", "sat"),
    Case("beyond the end of the range", IDENTITY, UNIT + "(assert (> (+ (* 0.5 Y[0]) Y[1]) 1.5))", "unsat"),
    Case(
        "comparison of outputs",
        IDENTITY,
        UNIT + "(assert (and (> Y[0] Y[1]) (> Y[1] (+ Y[0] 0.1))))",
        "unsat",
    ),
    Case(
        "an input and its output",
        IDENTITY,
        UNIT.replace("float32", "real") + "(assert (!= X[0] Y[0]))",
        "unsat",
    ),
    Case("equality", IDENTITY, UNIT + "(assert (== Y[0] 0.5)) (assert (== Y[1] 0.5))", "sat"),
    Case("product", IDENTITY, UNIT + "(assert (> (* X[0] X[1]) 1.0))", "unsat"),
    Case(
        "ring",
        IDENTITY,
        UNIT + "(assert (<= (+ (* X[0] X[0]) (* Y[1] Y[1])) 0.01)) (assert (>= Y[0] 0.09))",
        "sat",
    ),
    Case(
        "outside of the ring", IDENTITY, UNIT + "(assert (>= (+ (* X[0] X[0]) (* Y[1] Y[1])) 2.1))", "unsat"
    ),
    Case("linear inputs", IDENTITY, UNIT + "(assert (>= (+ X[0] X[1]) 1.9)) (assert (<= Y[0] 0.8))", "unsat"),
    Case(
        "a number no float has",
        IDENTITY,
        UNIT + "(assert (>= X[0] 0.1)) (assert (<= X[0] 0.1)) (assert (>= Y[0] 0.05))",
        "sat",
    ),
    Case(
        "a real number no float has",
        IDENTITY,
        declared("real", "[2]") + box(("X[0]", 0.1, 0.1), ("X[1]", 0.0, 1.0)) + "(assert (<= Y[0] 0.11))",
        "sat",
    ),
    Case("empty box", IDENTITY, UNIT + "(assert (>= X[0] 2.0)) (assert (>= Y[0] 0.0))", "unsat"),
    Case(
        "empty for its strict side", IDENTITY, UNIT + "(assert (> X[0] 1.0)) (assert (>= Y[0] 0.0))", "unsat"
    ),
    Case(
        "disjunction over inputs",
        RELU,
        FLOAT + "(assert (or (<= X[0] -0.5) (>= X[0] 0.5))) (assert (and (> Y[0] 0.1) (< Y[0] 0.4)))",
        "unsat",
    ),
    Case("two outputs", TWO, PAIR + "(assert (>= S[0] 0.75)) (assert (>= P[0] 0.5))", "unsat"),
    Case("two inputs", TWO, PAIR + "(assert (<= S[0] -0.5)) (assert (>= P[0] 0.25))", "sat"),
    Case("hidden node", INNER, HIDDEN + "(assert (>= H[0] (+ X[0] 0.5))) (assert (<= Y[0] 0.7))", "unsat"),
    Case("hidden node reached", INNER, HIDDEN + "(assert (>= H[0] 1.0)) (assert (<= Y[0] 0.8))", "sat"),
    Case("truncation", TRUNCATED, INTEGER + "(assert (or (>= Y[0] 3) (<= Y[0] -3)))", "unsat"),
    Case("truncation reached", TRUNCATED, INTEGER + "(assert (== Y[0] -2))", "sat"),
    Case(
        "overflow says nothing",
        SQUARED,
        declared("float32")
        + box(("X[0]", 1e25, 1e25)).replace("1e+25", "1" + "0" * 25 + ".0")
        + "(assert (< Y[0] 0.0))",
        "unknown",
    ),
    Case(
        "no overflow",
        SQUARED,
        declared("float32") + box(("X[0]", 9.0, 9.0)) + "(assert (< Y[0] 0.0))",
        "unsat",
    ),
    Case("switch", SWITCH, declared("float32") + box(("X[0]", 0.0, 2.0)) + "(assert (> Y[0] 9.0))", "unsat"),
    Case(
        "switch reached",
        SWITCH,
        declared("float32") + box(("X[0]", 0.0, 2.0)) + "(assert (>= Y[0] 9.0))",
        "sat",
    ),
    Case(
        "whole inputs",
        COUNTED,
        WHOLE + "(assert (and (>= X[0] 0) (<= X[0] 90))) (assert (== (* 2.0 Y[0]) 7.0))",
        "unsat",
    ),
    Case(
        "whole inputs reached",
        COUNTED,
        WHOLE + "(assert (and (> X[0] 2) (<= X[0] 90))) (assert (<= Y[0] 3.0))",
        "sat",
    ),
    Case("logical inputs", CHOSEN, LOGIC + "(assert (and (> Y[0] -2.0) (< Y[0] 1.5)))", "unsat"),
    Case("logical inputs reached", CHOSEN, LOGIC + "(assert (>= Y[0] 1.5))", "sat"),
    Case(
        "the end of the range in float16",
        HALF,
        declared("float16") + box(("X[0]", 1.0, 1.0009765625)) + "(assert (>= Y[0] 1.001953125))",
        "sat",
    ),
    Case(
        "beyond the end of the range in float64",
        DOUBLE,
        declared("float64") + box(("X[0]", 1.0, 1.0009765625)) + "(assert (>= Y[0] 1.0019540787))",
        "unsat",
    ),
    Case("constant of a shape", FILLED, UNIT + "(assert (> Y[1] 2.0))", "unsat"),
    Case(
        "unbounded inputs",
        POOL,
        "(declare-network N (declare-input X float32 [1,1,3]) (declare-output Y float32 [1,1,2]))\n"
        + box(("X[0,0,2]", 5.0, 6.0))
        + "(assert (<= Y[0,0,1] 5.0))",
        "sat",
    ),
    Case(
        "unbounded inputs that do not matter",
        POOL,
        "(declare-network N (declare-input X float32 [1,1,3]) (declare-output Y float32 [1,1,2]))\n"
        + box(("X[0,0,2]", 5.0, 6.0))
        + "(assert (< Y[0,0,1] 5.0))",
        "unsat",
    ),
    Case(
        "rounding decides in float32",
        THIRD,
        declared("float32") + box(("X[0]", 3.0, 3.0)) + "(assert (> Y[0] 1.0))",
        "unknown",
    ),
    Case(
        "rounding does not decide",
        THIRD,
        declared("real") + box(("X[0]", 3.0, 3.0)) + "(assert (> Y[0] 1.0))",
        "sat",
    ),
    Case(
        "an odd function",
        ODD,
        declared("real", "[2]") + box(("X[0]", -1.0, 1.0), ("X[1]", -1.0, 1.0)) + "(assert (> Y[0] 0.01))",
        "unsat",
    ),
    Case(
        "equal networks",
        RELU,
        declared("float32") + declared("float32", name="M", suffix="2", relation="(equal-to N)") + TWICE,
        "unsat",
    ),
    Case(
        "two networks",
        RELU,
        declared("float32") + declared("float32", name="M", suffix="2") + TWICE,
        "unsat",
        ("N", "M"),
    ),
    Case(
        "isomorphic networks of other types",
        RELU,
        declared("float32")
        + declared("float16", name="M", suffix="2", relation="(isomorphic-to N)")
        + box(("X[0]", 0.0, 1.0), ("X2[0]", 2.0, 3.0))
        + "(assert (<= Y2[0] 1.5))",
        "unsat",
        ("N", "M"),
    ),
]


def solve(case: Case, folder: Path, seconds: float = 5.0) -> tuple[Query, Outcome]:
    path = folder / "m.onnx"
    onnx.save(onnx.parser.parse_model(HEAD + case.graph), path)
    query = Query("q.vnnlib", "(vnnlib-version <2.0>)\n" + case.query, dict.fromkeys(case.networks, path))
    return query, Solver(query, time.monotonic() + seconds).run()


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_a_verdict_is_the_one_known_by_hand(case: Case, tmp_path: Path) -> None:
    query, outcome = solve(case, tmp_path)
    assert outcome.status == case.verdict, outcome.reason
    if outcome.status == "sat":
        assert outcome.witness is not None
        assert [v.name for v in outcome.witness.variables] == [v.name for v in query.variables]
        for v, value in zip(outcome.witness.variables, outcome.witness.values, strict=True):
            assert value.shape == v.shape and np.isfinite(value).all()


REFUSED = [
    (IDENTITY, declared("float32", "[3]"), "shape"),
    (IDENTITY, declared("float64", "[2]"), "declared float64, but x of .* is float32"),
    (INNER, HIDDEN.replace('"h"', '"g"'), "no tensor 'g'"),
    (TWO, declared("float32"), "declares 1 inputs"),
    (IDENTITY, UNIT.replace("(>= X[0] 0.0)", "(>= X[0] 1" + "0" * 400 + ".0)"), "beyond the range"),
]


@pytest.mark.parametrize(("graph", "query", "reason"), REFUSED)
def test_a_query_for_another_model_is_refused_with_the_reason(
    graph: str, query: str, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=reason):
        solve(Case("", graph, query + "(assert (<= X[0] 0.0))", ""), tmp_path)


@pytest.mark.parametrize(
    ("graph", "reason"),
    [
        ("(float[2] x) => (float[2] y) { y = Cos(x) }", "no intervals for the operator Cos"),
        ("(float[2] x) => (float[2] y) { y = Pow(x, x) }", "exponent that moves"),
        (
            "(float[2] x) => (float[2] y) { i = Cast<to = 6>(x) j = Mul(i, i) y = Cast<to = 1>(j) }",
            "beyond the range of int32",
        ),
    ],
)
def test_a_model_that_intervals_do_not_know_is_refused(graph: str, reason: str, tmp_path: Path) -> None:
    query = declared("float32", "[2]") + box(("X[0]", 0.0, 1e6), ("X[1]", 0.0, 1e6))
    with pytest.raises(UnsupportedModelError, match=reason):
        solve(Case("", graph, query + "(assert (> Y[0] 1.0))", ""), tmp_path)


@pytest.mark.parametrize(
    ("graph", "sizes", "reason"),
    [
        ("(float[1] x) => (float[1] y) { y = Add(x, z) }", ("[1]", "[1]"), "reads 'z', which no node"),
        (
            "(float[1] x) => (float[1,1,1] y) <int64[2] a = {0, 0}> { y = Unsqueeze(x, a) }",
            ("[1]", "[1,1,1]"),
            "given twice",
        ),
        (
            "(float[4] x) => (float[3] y) <int64[1] s = {3}> { y = Reshape(x, s) }",
            ("[4]", "[3]"),
            "cannot load it|cannot be read",
        ),
    ],
)
def test_a_damaged_model_is_refused_with_the_reason(
    graph: str, sizes: tuple[str, str], reason: str, tmp_path: Path
) -> None:
    query = "(declare-network N (declare-input X real {}) (declare-output Y real {}))\n".format(*sizes)
    with pytest.raises(InputError, match=reason):
        solve(Case("", graph, query + box(("X[0]", 0.0, 1.0)), ""), tmp_path)


def test_a_model_that_is_read_wrongly_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from attn_bounds.intervals import elementwise, table

    monkeypatch.setitem(table.OPERATORS, "Relu", elementwise.absolute)
    with pytest.raises(UnsupportedModelError, match="not what onnxruntime computes"):
        solve(
            Case("", RELU, declared("float32") + box(("X[0]", -1.0, -0.5)) + "(assert (< Y[0] 0.0))", ""),
            tmp_path,
        )


def test_the_search_ends_in_time(tmp_path: Path) -> None:
    begin = time.monotonic()
    query = declared("real", "[2]") + box(("X[0]", -1.0, 1.0), ("X[1]", -1.0, 1.0))
    _, outcome = solve(Case("", ODD, query + "(assert (> (+ Y[0] (* X[0] X[0])) 1.0))", ""), tmp_path, 1.0)
    assert outcome.status in ("timeout", "unknown") and time.monotonic() - begin < 3
