"""VNN-LIB files of both versions: what they mean after reading, what is refused, and how fast."""

from __future__ import annotations

import gzip
import random
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_bounds.errors import InputError
from attn_bounds.properties import Property, Specification
from attn_bounds.vnnlib import read_vnnlib

SHARED = Path(__file__).resolve().parents[2] / ".." / "shared" / "data" / "vnncomp_vit"


def header(inputs: int, outputs: int) -> str:
    names = [f"X_{i}" for i in range(inputs)] + [f"Y_{j}" for j in range(outputs)]
    return "".join(f"(declare-const {name} Real)\n" for name in names)


UNIT = "(assert (>= X_0 0)) (assert (<= X_0 1)) (assert (>= X_1 0)) (assert (<= X_1 1))\n"


def write(tmp_path: Path, text: str, name: str = "p.vnnlib") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def rows(spec: Specification) -> list[list[tuple[list[float], float]]]:
    """The groups as lists of (coefficients, limit)."""
    return [[(spec.A[i].tolist(), spec.b[i].item()) for i in group] for group in spec.groups]


def test_small_file_and_gzip(tmp_path: Path) -> None:
    text = (
        "; a comment (with brackets ; and more\n(set-logic QF_LRA)\n"
        + header(2, 3)
        + "(assert (<= X_0 0.1)) ; (assert (<= X_0 -5))\n(assert (>= X_0 -2.5e-1))\n"
        + "(assert (and (>= 3 X_1) (< -1. X_1)))(assert (<= X_0 7))\n"
        + "(assert (or (and (>= Y_0 Y_2)) (and (>= Y_1 Y_2) (<= Y_0 3.5))))\n(check-sat)"
    )
    plain = read_vnnlib(write(tmp_path, text), (2, 1), 3)
    # the name does not matter, the content does
    (tmp_path / "q.vnnlib.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "q.vnnlib").write_bytes(gzip.compress(text.encode()))
    for prop in (
        plain,
        read_vnnlib(tmp_path / "q.vnnlib.gz", (2, 1)),
        read_vnnlib(tmp_path / "q.vnnlib", (2, 1)),
    ):
        ((inputs, spec),) = prop.cases
        assert inputs.lower is not None and inputs.upper is not None and inputs.lower.dtype == torch.float64
        assert inputs.lower.tolist() == [[[-0.25], [-1.0]]] and inputs.upper.tolist() == [[[0.1], [3.0]]]
        assert rows(spec) == [[([-1, 0, 1], 0)], [([0, -1, 1], 0), ([1, 0, 0], 3.5)]]
    assert plain.name == "p" and read_vnnlib(tmp_path / "q.vnnlib.gz").name == "q"
    assert read_vnnlib(tmp_path / "p.vnnlib").cases[0][0].center.shape == (1, 2)


@pytest.mark.parametrize(
    ("formula", "coefficients", "limit"),
    [
        ("(<= (+ Y_0 (* 2.0 Y_1)) (- Y_2 1.0))", [1, 2, -1], -1),
        ("(>= Y_0 3.5)", [-1, 0, 0], -3.5),
        ("(<= 3.5 Y_0)", [-1, 0, 0], -3.5),
        ("(> (- Y_1) (/ Y_2 4))", [0, 1, 0.25], 0),
        ("(< (- 5 Y_0 Y_1 (- 2)) (* 3 (+ Y_2 1) 2))", [-1, -1, -6], -1),
        ("(<= (* Y_0 -0.5) (+ Y_0 Y_1 Y_2))", [-1.5, -1, -1], 0),
        ("(<= (- Y_0 Y_0) -1)", [0, 0, 0], -1),
    ],
)
def test_linear_constraints(tmp_path: Path, formula: str, coefficients: list[float], limit: float) -> None:
    prop = read_vnnlib(write(tmp_path, header(2, 3) + UNIT + f"(assert {formula})"))
    assert rows(prop.cases[0][1]) == [[(coefficients, limit)]]


def test_equality_chain_and_constant_bounds(tmp_path: Path) -> None:
    text = header(3, 1) + (
        "(assert (= X_0 0.5))(assert (<= -1 X_1 (/ 1 4)))(assert (<= (* -2 X_2) 3))(assert (<= (* 3 X_2) 1))"
        "(assert (= Y_0 2))"
    )
    ((inputs, spec),) = read_vnnlib(write(tmp_path, text)).cases
    assert inputs.lower is not None and inputs.upper is not None
    assert inputs.lower.tolist() == [[0.5, -1, -1.5]] and inputs.upper[0, :2].tolist() == [0.5, 0.25]
    assert Fraction(inputs.upper[0, 2].item()) >= Fraction(1, 3)  # rounded outwards
    assert inputs.upper[0, 2].item() == pytest.approx(1 / 3)
    assert rows(spec) == [[([1], 2), ([-1], -2)]]


def test_input_disjunction_gives_cases_and_merges_equal_boxes(tmp_path: Path) -> None:
    text = (
        header(2, 2)
        + UNIT
        + (
            "(assert (or (and (<= X_0 0.25) (<= Y_0 0)) (and (>= X_0 0.75) (<= Y_1 0))"
            " (and (<= X_0 0.25) (<= Y_1 1)) (and (<= X_0 0.25) (>= X_0 0.5) (<= Y_1 2))))"
            "(assert (>= Y_0 Y_1))"
        )
    )
    first, second = read_vnnlib(write(tmp_path, text)).cases
    assert first[0].upper is not None and second[0].lower is not None
    assert first[0].upper.tolist() == [[0.25, 1]] and second[0].lower.tolist() == [[0.75, 0]]
    shared = ([-1, 1], 0)
    assert rows(first[1]) == [[shared, ([1, 0], 0)], [shared, ([0, 1], 1)]]
    assert rows(second[1]) == [[shared, ([0, 1], 0)]]


def random_formula(source: random.Random, depth: int) -> Any:
    if depth == 0 or source.random() < 0.2:
        if source.random() < 0.4:
            return (source.choice(["<=", ">="]), f"X_{source.randrange(2)}", round(source.uniform(0, 1), 2))
        return (source.choice(["<=", ">="]), f"Y_{source.randrange(2)}", round(source.uniform(-1, 1), 2))
    items = [random_formula(source, depth - 1) for _ in range(source.randint(1, 3))]
    return (source.choice(["and", "or"]), items)


def spell(formula: Any) -> str:
    if len(formula) == 3:
        return f"({formula[0]} {formula[1]} {formula[2]})"
    return f"({formula[0]}\n {' '.join(map(spell, formula[1]))})"


def holds(formula: Any, values: dict[str, Tensor]) -> Tensor:
    if len(formula) == 3:
        value = values[formula[1]]
        return value <= formula[2] if formula[0] == "<=" else value >= formula[2]
    parts = torch.stack([holds(item, values) for item in formula[1]])
    return parts.all(0) if formula[0] == "and" else parts.any(0)


def test_random_formulas_mean_the_same_after_reading(tmp_path: Path) -> None:
    """An independent evaluation of the formula agrees with the union of the cases, at random points."""
    source = random.Random(0)
    generator = torch.Generator().manual_seed(10)
    x = torch.rand(400, 2, dtype=torch.float64, generator=generator)
    y = 2 * torch.rand(400, 2, dtype=torch.float64, generator=generator) - 1
    values = {"X_0": x[:, 0], "X_1": x[:, 1], "Y_0": y[:, 0], "Y_1": y[:, 1]}
    read, cases = 0, 0
    for _ in range(150):
        formulas = [random_formula(source, 3) for _ in range(2)] + [("<=", "Y_0", 0.9)]
        text = header(2, 2) + UNIT + "".join(f"(assert {spell(formula)})\n" for formula in formulas)
        expected = torch.stack([holds(formula, values) for formula in formulas]).all(0)
        prop = read_vnnlib(write(tmp_path, text))
        assert bool(prop.warning) == (not prop.cases)
        unsafe = torch.zeros(400, dtype=torch.bool)
        for inputs, spec in prop.cases:
            unsafe |= inputs.contains(x) & (spec.margin(spec.margins(y)) <= 0)
        assert torch.equal(unsafe, expected)
        read += bool(prop.cases)
        cases += len(prop.cases)
    assert 100 < read < 150 and cases > 2 * read


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        (header(1, 1) + "(assert (<= X_0 1))\n(assert (<= X_1 1))", 4, "X_1 is not declared"),
        (header(2, 1) + UNIT + "(assert (<= Y_0\n Y_7))", 6, "Y_7 is not declared"),
        (header(2, 1) + UNIT + "(assert (<= Y_0 foo))", 5, "foo is neither"),
        (
            header(2, 1) + "(assert (<= X_0 1))(assert (>= X_0 1))(assert (<= X_1 1))",
            2,
            "X_1 has no lower bound",
        ),
        (header(2, 1) + UNIT + "(assert (<= Y_0 1)", 5, "never closed"),
        (header(2, 1) + UNIT + "\n(assert (<= Y_0 1)))", 6, "'\\)' without"),
        (header(2, 1) + UNIT + "hello", 5, "syntax error"),
        (header(2, 1) + UNIT + "(assert (=> (<= Y_0 1) (<= Y_0 2)))", 5, "cannot read '=>'"),
        (header(2, 1) + UNIT + "(assert (<= Y_0 1) (<= Y_0 2))", 5, "assert takes one"),
        (header(2, 1) + UNIT + "(assert (or (assert (<= X_0 1)) (<= Y_0 2)))", 5, "cannot read 'assert'"),
        (header(2, 1) + UNIT + "(assert (<= Y_0 (sin Y_0)))", 5, "cannot read 'sin'"),
        (header(2, 1) + UNIT + "(assert (<= (* Y_0 Y_0) 1))", 5, "non-linear"),
        (header(2, 1) + UNIT + "(assert (<= (/ 1 Y_0) 1))", 5, "non-linear"),
        (header(2, 1) + UNIT + "(assert (<= (/ Y_0 0) 1))", 5, "division by zero"),
        (header(2, 1) + UNIT + "(assert (<= X_0 X_1))", 5, "X_0 and X_1 in one constraint"),
        (header(2, 1) + UNIT + "(assert (<= Y_0 X_1))", 5, "in one constraint"),
        (header(2, 1) + UNIT + "(assert (or (>= X_1 0.5) (<= Y_0 -1)))", 5, "no constraint on the outputs"),
        (header(2, 1) + UNIT + "(assert (<= X_0 1e999))", 5, "not a finite"),
        (header(2, 1) + "(declare-const Y_0 Real)", 4, "Y_0 is declared twice"),
        (header(2, 1) + "(declare-const Z_0 Real)", 4, "declare-const X_i Real"),
        (header(2, 1) + "(declare-const Y_1 Int)", 4, "declare-const X_i Real"),
        (header(1, 1) + "(declare-const X_2 Real)", 3, "X_2 is declared, but X_1 is not"),
        (header(2, 1) + UNIT + "(assert " + "(and " * 200 + "(<= Y_0 1)" + ")" * 201, 5, "nested more than"),
        (header(2, 1) + UNIT + "(assert (or (<= Y_0 1) (<= Y_0 2)))\n" * 15, 19, "multiply to 32768 cases"),
    ],
)
def test_bad_files_are_refused_with_file_and_line(tmp_path: Path, text: str, line: int, message: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(InputError, match=message) as caught:
        read_vnnlib(path)
    assert str(caught.value).startswith(f"{path}:{line}: ")
    assert "\n" not in str(caught.value)


def test_bad_counts_and_bytes_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, header(2, 3) + UNIT + "(assert (<= Y_0 1))")
    with pytest.raises(
        InputError, match=r"p\.vnnlib: declares 2 inputs, but an input of shape \(3, 2\) has 6"
    ):
        read_vnnlib(path, (3, 2))
    with pytest.raises(InputError, match=r"p\.vnnlib: declares 3 outputs, but the model has 10"):
        read_vnnlib(path, (2,), 10)
    with pytest.raises(InputError, match="no constraint on the outputs"):
        read_vnnlib(write(tmp_path, header(2, 3) + UNIT))
    with pytest.raises(InputError, match="no X_i is declared"):
        read_vnnlib(write(tmp_path, ""))
    with pytest.raises(InputError, match=r"missing\.vnnlib: cannot be read"):
        read_vnnlib(tmp_path / "missing.vnnlib")
    (tmp_path / "cut.vnnlib.gz").write_bytes(gzip.compress(b"(declare-const X_0 Real)" * 50)[:-12])
    with pytest.raises(InputError, match="gzip data is damaged"):
        read_vnnlib(tmp_path / "cut.vnnlib.gz")
    (tmp_path / "bytes.vnnlib").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="neither text nor gzip"):
        read_vnnlib(tmp_path / "bytes.vnnlib")


def test_comments_do_not_slow_the_reader_down(tmp_path: Path) -> None:
    """Runs of semicolons and blanks once made regular expressions of this kind exponential."""
    noise = (";" * 300 + " " * 300 + "\n" + " " * 300) * 20
    text = noise + header(2, 1) + noise + UNIT + noise + "(assert (<= Y_0 1))" + noise + ";" * 300
    path = write(tmp_path, text)
    start = time.perf_counter()
    read_vnnlib(path)
    assert time.perf_counter() - start < 0.5


def large_file() -> str:
    """As many lines as a property of a 3 x 32 x 32 image has."""
    bounds = "".join(
        f"(assert (<= X_{i} {i + 0.5}))\n(assert (>= X_{i} {i - 0.25}))\n\n" for i in range(3072)
    )
    worse = " ".join(f"(and (>= Y_{j} Y_9))" for j in range(9))
    return header(3072, 10) + bounds + f"(assert (or {worse}))\n"


def check_large(path: Path) -> Property:
    start = time.perf_counter()
    prop = read_vnnlib(path, (3, 32, 32), 10)
    assert time.perf_counter() - start < 0.3
    return prop


def test_large_file_reads_fast_and_right(tmp_path: Path) -> None:
    path = tmp_path / "large.vnnlib.gz"
    path.write_bytes(gzip.compress(large_file().encode()))
    ((inputs, spec),) = check_large(path).cases
    index = torch.arange(3072, dtype=torch.float64).reshape(1, 3, 32, 32)
    assert inputs.lower is not None and inputs.upper is not None
    assert torch.equal(inputs.lower, index - 0.25) and torch.equal(inputs.upper, index + 0.5)
    expected = Specification.classification(9, 10)
    assert torch.equal(spec.A, expected.A) and spec.groups == expected.groups


@pytest.mark.skipif(not SHARED.is_dir(), reason="the folder of VNN-COMP files is not there")
def test_competition_files() -> None:
    paths = sorted((SHARED / "vnnlib").glob("*.vnnlib.gz"))
    assert paths
    for path in paths:
        ((inputs, spec),) = check_large(path).cases
        first = gzip.decompress(path.read_bytes()).decode().split("\n", 1)[0]
        label = int(first.removeprefix("; Property with label: ").rstrip("."))
        expected = Specification.classification(label, 10)
        assert torch.equal(spec.A, expected.A) and not spec.b.any() and len(spec.groups) == 9
        assert inputs.lower is not None and inputs.upper is not None
        # 1/255 in pixel units, divided by the channel's standard deviation
        width = (inputs.upper - inputs.lower).amax((0, 2, 3))
        deviation = 2 / 255 / width
        assert ((deviation > 0.15) & (deviation < 0.3)).all()


def test_contradictory_boxes_hold_with_a_warning(tmp_path: Path) -> None:
    for text in ("(assert (>= X_1 1.5))", "(assert (or (>= X_1 2) (<= X_1 -1)))", "(assert (< X_1 0))"):
        prop = read_vnnlib(write(tmp_path, header(2, 1) + UNIT + text + "(assert (<= Y_0 0))"))
        assert (
            prop.cases == () and "no input satisfies the property" in prop.warning and "X_1" in prop.warning
        )
    # the boundary alone is an input, unless it is excluded
    prop = read_vnnlib(write(tmp_path, header(2, 1) + UNIT + "(assert (<= X_1 0))(assert (<= Y_0 0))"))
    assert len(prop.cases) == 1 and not prop.warning


def test_strict_bounds_exclude_the_boundary_from_counterexamples_only(tmp_path: Path) -> None:
    text = header(2, 2) + UNIT + "(assert (< X_0 0.5))(assert (> X_1 0.1))(assert (<= X_1 1))"
    text += "(assert (or (< Y_0 1) (<= Y_1 2)))"
    ((inputs, spec),) = read_vnnlib(write(tmp_path, text)).cases
    assert inputs.lower is not None and inputs.upper is not None and inputs.inner is not None
    assert inputs.upper.tolist() == [[0.5, 1]] and inputs.lower.tolist() == [[0, 0.1]]
    below, above = torch.tensor([0.5]), torch.tensor([0.1])  # 0.1 in float32 is above 0.1
    assert inputs.inner.upper is not None and inputs.inner.lower is not None
    assert inputs.inner.upper.tolist() == [[torch.nextafter(below, -below).item(), 1]]
    assert inputs.inner.lower.tolist() == [[0, above.item()]]
    assert spec.strict == (True, False)
    for values, inside, touching in (([0, 1], False, False), ([1, 0], False, True), ([1, -1], True, True)):
        found = torch.tensor(values, dtype=torch.float64)
        assert spec.violated(found) == inside and spec.violated(found, boundary=True) == touching


# VNN-LIB 2.0


def version_2(body: str, inputs: str = "X float32 [2]", outputs: str = "Y float32 [2]") -> str:
    declared = [f"(declare-input {v})" for v in inputs.split(";")]
    declared += [f"(declare-output {v})" for v in outputs.split(";")]
    return f"(vnnlib-version <2.0>)\n(declare-network N {' '.join(declared)})\n{body}"


BOX = "(assert (and (>= X[0] 0.0) (<= X[0] 1.0) (>= X[1] 0.0) (<= X[1] 1.0)))\n"


def test_version_2_means_the_same_as_version_1(tmp_path: Path) -> None:
    """Every formula of the 1.0 tests, spelled in 2.0, gives the same cases."""
    source = random.Random(1)
    for number in range(60):
        formulas = [spell(random_formula(source, 3)) for _ in range(2)] + ["(<= Y_0 0.9)"]
        one = header(2, 2) + UNIT + "".join(f"(assert {f})\n" for f in formulas)
        two = version_2(BOX + "".join(f"(assert {f})\n" for f in formulas))
        for kind, i in (("X", 0), ("X", 1), ("Y", 0), ("Y", 1)):
            two = two.replace(f"{kind}_{i}", f"{kind}[{i}]")
        a, b = read_vnnlib(write(tmp_path, one)), read_vnnlib(write(tmp_path, two))
        assert len(a.cases) == len(b.cases), number
        for (s, p), (t, q) in zip(a.cases, b.cases, strict=True):
            for mine, theirs in ((s.lower, t.lower), (s.upper, t.upper), (p.A, q.A), (p.b, q.b)):
                assert mine is not None and theirs is not None and torch.equal(mine, theirs)
            assert p.groups == q.groups


def test_version_2_expressions_and_several_variables(tmp_path: Path) -> None:
    text = version_2(
        "; inputs\n(assert (and (>= A 0.5) (<= A 2.0) (== B[0,0] (- 1.0)) (<= 0.0 B[0,1]) (> 0.5 B[0,1])))\n"
        "(assert (< (+ (* 2.0 C[0]) (- 1.0 C[1])) (* -3.0 D)))\n(assert (!= C[0] 3.0)) ; end",
        "A real [];B float64 [1,2]",
        "C real [2];D real []",
    )
    prop = read_vnnlib(write(tmp_path, text), (3,), 3)
    assert [(v.name, v.type, v.shape) for v in (*prop.inputs, *prop.outputs)] == [
        ("A", "real", ()),
        ("B", "float64", (1, 2)),
        ("C", "real", (2,)),
        ("D", "real", ()),
    ]
    ((inputs, spec),) = prop.cases
    assert inputs.lower is not None and inputs.upper is not None and inputs.inner is not None
    assert inputs.lower.tolist() == [[0.5, -1, 0]] and inputs.upper.tolist() == [[2, -1, 0.5]]
    shared = ([2, -1, 3], -1)
    assert rows(spec) == [[shared, ([1, 0, 0], 3)], [shared, ([-1, 0, 0], -3)]] and all(spec.strict)


@pytest.mark.parametrize(
    ("ball", "center", "eps"),
    [
        ("(<= (+ (* (- X[0] 0.25) (- X[0] 0.25)) (* X[1] X[1])) 0.25)", [0.25, 0], 0.5),
        ("(>= 1.0 (* 4.0 (+ (* (- 0.25 X[0]) (- 0.25 X[0])) (* X[1] X[1]))))", [0.25, 0], 0.5),
        ("(<= (+ (* X[0] X[0]) (* X[0] -0.5) (* X[1] X[1])) 0.1875)", [0.25, 0], 0.5),
        ("(<= (+ (* (- X[0] 0.1) (- X[0] 0.1)) (* (- X[1] 0.3) (- X[1] 0.3))) 0.01)", [0.1, 0.3], 0.1),
    ],
)
def test_quadratic_constraints_are_l2_balls(
    tmp_path: Path, ball: str, center: list[float], eps: float
) -> None:
    text = version_2(f"(assert {ball})\n(assert (>= Y[0] 0.0))")
    ((inputs, _),) = read_vnnlib(write(tmp_path, text), (2, 1)).cases
    assert inputs.norm == 2 and inputs.lower is None and inputs.center.flatten().tolist() == center
    assert inputs.eps is not None and eps <= inputs.eps < eps * (1 + 1e-14) and inputs.inner is None
    # with a box as well it is cut
    ((cut, _),) = read_vnnlib(write(tmp_path, text + BOX)).cases
    assert cut.norm == 2 and cut.lower is not None and cut.lower.tolist() == [[0, 0]]
    # a strict one has a smaller set for counterexamples
    ((open_, _),) = read_vnnlib(write(tmp_path, text.replace("(<= (+", "(< (+").replace(">= 1", "> 1"))).cases
    assert open_.eps == inputs.eps and open_.inner is not None and open_.inner.eps is not None
    assert eps * 0.99999 < open_.inner.eps < eps
    # fixed inputs may stand beside the ball, moving ones not
    more = text.replace("X float32 [2]", "X float32 [2]) (declare-input Z float32 [1]")
    fixed = read_vnnlib(write(tmp_path, more + "(assert (== Z[0] 2.0))"))
    assert fixed.cases[0][0].center.flatten().tolist() == [*center, 2]
    with pytest.raises(InputError, match=r"p\.vnnlib:3: Z\[0\] moves, but not in this l2 ball"):
        read_vnnlib(write(tmp_path, more + "(assert (>= Z[0] 2.0)) (assert (<= Z[0] 2.5))"))


@pytest.mark.parametrize(
    ("body", "line", "message"),
    [
        (BOX + "(assert (<= Y[0] Q[0]))", 4, "Undeclared variable: Q"),
        (BOX + "\n(assert (<= Y[7] 0.0))", 5, "out of bounds"),
        (BOX + "(assert (<= Y[0] 1))", 4, "PositiveIntConstant"),
        (BOX + "(assert (<= Y[0] nan))", 4, "Undeclared variable: nan"),
        (BOX + "(assert (<= Y[0] 1.0)", 4, "syntax error"),
        (BOX + "(assert (=> (<= Y[0] 1.0) (<= Y[0] 1.0)))", 4, "syntax error"),
        (BOX + "(assert (<= X[0] X[1]))", 4, r"X\[0\] and X\[1\] in one constraint"),
        (BOX + "(assert (<= Y[0] X[1]))", 4, r"in one constraint"),
        (BOX + "(assert (>= (* X[0] X[1]) 0.5))", 4, r"the product X\[0\] \* X\[1\]"),
        (BOX + "(assert (>= (* Y[0] Y[0]) 0.5))", 4, r"the square of the output Y\[0\]"),
        (BOX + "(assert (>= (* X[0] X[0]) 0.5))", 4, "not an upper limit"),
        (BOX + "(assert (<= (+ (* X[0] X[0]) (* 2.0 X[1] X[1])) 0.5))", 4, "different coefficients"),
        (BOX + "(assert (<= (+ (* X[0] X[0]) X[1]) 0.5))", 4, r"X\[1\] outside the squares"),
        (BOX + "(assert (<= (* X[0] X[0] X[0]) 0.5))", 4, "product of three"),
        (f"(assert (<= X[0] 1{'0' * 310}.0))", None, "beyond the range of float64"),
        (
            f"(assert (<= (+ (* X[0] X[0]) (* X[1] X[1])) (* 1{'0' * 200}.0 1{'0' * 200}.0)))\n"
            "(assert (<= Y[0] 0.0))",
            3,
            "radius of the l2 ball",
        ),
        (
            BOX + "(assert (<= (+ (* (- X[0] 3.0) (- X[0] 3.0)) (* X[1] X[1])) 9.0))\n(assert (<= Y[0] 0.0))",
            4,
            "centre of the l2",
        ),
        (BOX + "(assert " + "(and " * 200 + "(<= Y[0] 1.0)" + ")" * 201, 4, "nested more than"),
        (BOX + "(assert (or (<= Y[0] 1.0) (<= Y[0] 2.0)))\n" * 15, 18, "multiply to 32768 cases"),
        (BOX.replace("(<= X[1] 1.0)", "") + "(assert (<= Y[0] 0.0))", None, r"X\[1\] has no upper bound"),
        (BOX, None, "no constraint on the outputs"),
    ],
)
def test_bad_version_2_files_are_refused(tmp_path: Path, body: str, line: int | None, message: str) -> None:
    path = write(tmp_path, version_2(body))
    with pytest.raises(InputError, match=message) as caught:
        read_vnnlib(path)
    assert str(caught.value).startswith(f"{path}:{'' if line is None else f'{line}:'} ")
    assert "\n" not in str(caught.value)


def test_bad_version_2_declarations_are_refused(tmp_path: Path) -> None:
    body = BOX + "(assert (<= Y[0] 0.0))"
    integers = "(assert (<= X[0] 1))\n"
    for inputs, text, message in (("X float32 [0]", body, "positive"), ("X int64 [2]", integers, "type I64")):
        with pytest.raises(InputError, match=message):
            read_vnnlib(write(tmp_path, version_2(text, inputs)))
    text = version_2(body)
    with pytest.raises(InputError, match=r"declares 2 inputs \(X \[2\]\), but an input of shape \(3,\)"):
        read_vnnlib(write(tmp_path, text), (3,))
    hidden = text.replace("(declare-output", '(declare-hidden H float32 [2] "h") (declare-output')
    with pytest.raises(InputError, match=r"hidden nodes \(H\) are not supported"):
        read_vnnlib(write(tmp_path, hidden))
    second = "(declare-network M (declare-input Z float32 [2]) (declare-output W float32 [2]))\n"
    with pytest.raises(InputError, match=r"2 networks \(N, M\)"):
        read_vnnlib(write(tmp_path, text.replace("(assert", second + "(assert", 1)))


def test_large_version_2_file_reads_fast(tmp_path: Path) -> None:
    index = [f"X[0,{i // 1024},{i // 32 % 32},{i % 32}]" for i in range(3072)]
    bounds = "".join(f"(assert (<= {x} {i}.5))\n(assert (>= {x} {i}.25))\n" for i, x in enumerate(index))
    worse = " ".join(f"(>= Y[0,{j}] Y[0,9])" for j in range(9))
    text = version_2(bounds + f"(assert (or {worse}))", "X float32 [1,3,32,32]", "Y float32 [1,10]")
    check_large(write(tmp_path, text))
