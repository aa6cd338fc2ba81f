"""Input sets against brute force and optimality conditions, specifications, and VNN-LIB files."""

from __future__ import annotations

import gzip
import itertools
import math
import random
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_bounds.errors import InputError
from attn_bounds.properties import InputSet, Property, Specification
from attn_bounds.vnnlib import read_vnnlib

INF = math.inf
NORMS = (1.0, 2.0, INF)
SHARED = Path(__file__).resolve().parents[2] / ".." / "shared" / "data" / "vnncomp_vit"


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def tensor(*values: float, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor([values], dtype=dtype)


def length(x: Tensor, norm: float) -> Tensor:
    return torch.linalg.vector_norm(x.flatten(1), ord=norm, dim=1)


# input sets


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("clip", [None, (-0.5, 0.6)])
def test_projection_matches_brute_force_in_two_dimensions(
    norm: float, clip: tuple[float, float] | None
) -> None:
    center, eps = tensor(0.2, -0.3), 0.7
    inputs = InputSet.ball(center, norm, eps, clip)
    axis = torch.linspace(-1.2, 1.2, 601, dtype=torch.float64)
    grid = torch.cartesian_prod(axis, axis)
    member = length(grid - center, norm) <= eps
    if clip is not None:
        member &= ((grid >= clip[0]) & (grid <= clip[1])).all(1)
    z = 2 * torch.randn(200, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    p = inputs.project(z)
    assert inputs.contains(p).all()
    nearest = torch.cdist(z, grid[member]).amin(1)
    distance = length(z - p, 2)
    # nothing on the grid is nearer, and the grid (spacing 0.004) has a point nearly as near
    assert (distance <= nearest + 1e-12).all()
    assert (distance >= nearest - 0.01).all()


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("clip", [None, (0.0, 1.0), (0.0, INF)])
def test_projection_satisfies_the_optimality_condition(norm: float, clip: tuple[float, float] | None) -> None:
    generator = torch.Generator().manual_seed(1)
    center = torch.rand(1, 3, 10, dtype=torch.float64, generator=generator)
    center[0, 0, :4] = torch.tensor([0.0, 1.0, 0.0, 1.0])  # no room on one side
    inputs = InputSet.ball(center, norm, {1.0: 3.0, 2.0: 0.9, INF: 0.2}[norm], clip)
    z = center + torch.randn(40, 3, 10, dtype=torch.float64, generator=generator)
    p = inputs.project(z)
    # p is the projection iff <z - p, q - p> <= 0 for every q of the set; the worst q is a linear minimiser
    q = inputs.minimize_linear(p - z)
    assert inputs.contains(p).all() and inputs.contains(q).all()
    assert (p - z).abs().amax() > 0.1
    assert ((z - p) * (q - p)).flatten(1).sum(1).amax() < 1e-9


@pytest.mark.parametrize("norm", NORMS)
def test_linear_minimiser_is_exact(norm: float) -> None:
    """Dual norm without limits; with limits the continuous knapsack, by brute force over all orders."""
    generator = torch.Generator().manual_seed(2)
    center = torch.rand(1, 50, dtype=torch.float64, generator=generator)
    g = torch.randn(20, 50, dtype=torch.float64, generator=generator)
    dual = {1.0: INF, 2.0: 2.0, INF: 1.0}[norm]
    q = InputSet.ball(center, norm, 0.4).minimize_linear(g)
    torch.testing.assert_close((g * (q - center)).sum(1), -0.4 * length(g, dual))

    small = InputSet.ball(tensor(0.5, 0.9, 0.1, 0.4), norm, 0.8, (0.0, 1.0))
    axis = torch.linspace(0, 1, 21, dtype=torch.float64)
    grid = torch.cartesian_prod(axis, axis, axis, axis)
    grid = grid[small.contains(grid)]
    g = torch.randn(30, 4, dtype=torch.float64, generator=generator)
    value = (g * small.minimize_linear(g)).sum(1)
    best = (g @ grid.T).amin(1)
    assert (value <= best + 1e-12).all()
    assert (value >= best - 0.05 * g.abs().sum(1)).all()  # one spacing of the grid


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("clip", [None, (0.0, 1.0)])
def test_projected_points_never_exceed_the_radius(
    norm: float, dtype: torch.dtype, clip: tuple[float, float] | None
) -> None:
    generator = torch.Generator().manual_seed(3)
    center = torch.rand(1, 3, 32, 32, dtype=dtype, generator=generator)
    for eps in (0.0, 1e-6, 1 / 255, 0.3):
        inputs = InputSet.ball(center, norm, eps, clip)
        x = inputs.project(center + torch.randn(5, 3, 32, 32, dtype=dtype, generator=generator))
        assert x.dtype == dtype and x.shape == (5, 3, 32, 32)
        away = x.double() - center.double()
        assert (length(away, norm) <= eps).all()
        # in whatever order one adds up
        backwards = away.flatten(1).flip(1).abs().cumsum(1)[:, -1]
        assert norm != 1 or (backwards <= eps).all()
        if clip is not None:
            assert x.amin() >= 0 and x.amax() <= 1
        # and the radius is used
        if eps > 1e-3:
            assert (length(away, norm) > eps * (1 - 1e-3)).all()
        again = inputs.project(x)
        assert inputs.contains(x).all() and (again - x).abs().amax() <= 1e-6 * eps


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("clip", [None, (0.1, 0.9)])
def test_float32_points_of_a_float64_ball_are_inside(norm: float, clip: tuple[float, float] | None) -> None:
    """Neither the centre nor the limits are float32 numbers here."""
    generator = torch.Generator().manual_seed(11)
    center = 0.1 + 0.8 * torch.rand(1, 200, dtype=torch.float64, generator=generator)
    for eps in (1e-4, 0.01, 1.0, 8.0):
        inputs = InputSet.ball(center, norm, eps, clip)
        x = inputs.project(center.float() + torch.randn(20, 200, generator=generator))
        assert x.dtype == torch.float32 and inputs.contains(x).all()
        if clip is None and norm != INF:
            assert (length(x.double() - center, norm) > eps * 0.8).all()


@pytest.mark.parametrize("norm", [1.0, 2.0])
def test_rounding_does_not_leave_the_clip_range(norm: float) -> None:
    """Here center + (0.3 - center) rounds to more than 0.3 for about half of the elements."""
    generator = torch.Generator().manual_seed(12)
    center = 0.3 - 3 * torch.rand(1, 100, dtype=torch.float64, generator=generator)
    assert (center + (0.3 - center) > 0.3).any()
    x = InputSet.ball(center, norm, 1000.0, (-5.0, 0.3)).project(center + 10)
    assert x.amax() <= 0.3 and x.amin() > 0.3 - 1e-12


def test_box_in_float64_gives_float32_points_inside() -> None:
    lower = torch.rand(1, 1000, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    inputs = InputSet.box(lower, lower + 1e-6)
    for far in (-1.0, 2.0):
        x = inputs.project(torch.full((1, 1000), far))
        assert x.dtype == torch.float32
        assert (x.double() >= lower).all() and (x.double() <= lower + 1e-6).all()
    # plain rounding of the limits does leave the box, so the test above is not empty
    assert (lower.float().double() < lower).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_linf_limits_enclose_the_exact_ball_tightly(dtype: torch.dtype) -> None:
    center = torch.randn(1, 500, dtype=dtype, generator=torch.Generator().manual_seed(5))
    eps = 0.1
    inputs = InputSet.ball(center, INF, eps)
    assert inputs.lower is not None and inputs.upper is not None
    for c, low, high in zip(center[0], inputs.lower[0], inputs.upper[0], strict=True):
        exact_low = Fraction(c.item()) - Fraction(eps)
        exact_high = Fraction(c.item()) + Fraction(eps)
        assert (
            Fraction(low.item())
            <= exact_low
            < Fraction(torch.nextafter(low, torch.full_like(low, INF)).item())
        )
        assert Fraction(torch.nextafter(high, torch.full_like(high, -INF)).item()) < exact_high
        assert exact_high <= Fraction(high.item())


@pytest.mark.parametrize("norm", NORMS)
def test_conversion_never_shrinks_the_set(norm: float) -> None:
    generator = torch.Generator().manual_seed(6)
    center = torch.rand(1, 30, dtype=torch.float64, generator=generator)
    inputs = InputSet.ball(center, norm, 1e-5, (0.0, 0.9999999))
    narrow = inputs.to(torch.float32)
    assert narrow.center.dtype == torch.float32
    extreme = inputs.minimize_linear(torch.randn(200, 30, dtype=torch.float64, generator=generator))
    assert narrow.contains(extreme).all()
    # the check can fail: the same set around the rounded centre misses some of these points
    rounded = InputSet.ball(center.float(), norm, 1e-5)
    assert not rounded.contains(extreme).all()
    assert narrow.to(torch.float64).eps == narrow.eps


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("clip", [None, (0.0, 1.0)])
def test_samples_are_members_and_spread(norm: float, clip: tuple[float, float] | None) -> None:
    center = torch.full((1, 2, 3), 0.3, dtype=torch.float32)
    inputs = InputSet.ball(center, norm, 0.5, clip)
    x = inputs.sample(2000, torch.Generator().manual_seed(7))
    assert x.shape == (2000, 2, 3) and x.dtype == torch.float32
    assert inputs.contains(x).all()
    assert torch.equal(x, inputs.sample(2000, torch.Generator().manual_seed(7)))
    if clip is None:
        # P(||x - c|| <= r) = (r / eps)^n for the uniform distribution
        near = (length(x.double() - center, norm) <= 0.5 * 0.8).double().mean().item()
        assert abs(near - 0.8**6) < 0.04
        assert (x - center).mean(0).abs().amax() < 0.03


def test_contains_tells_members_from_others() -> None:
    x = torch.tensor([[0.6, 0.0], [0.6, 0.5], [0.8, 0.7]], dtype=torch.float64)
    zero = tensor(0.0, 0.0)
    assert InputSet.ball(zero, 1, 1.0).contains(x).tolist() == [True, False, False]
    assert InputSet.ball(zero, 2, 1.0).contains(x).tolist() == [True, True, False]
    assert InputSet.ball(zero, INF, 0.75).contains(x).tolist() == [True, True, False]
    assert InputSet.ball(zero, INF, 0.75).contains(x, tol=0.06).tolist() == [True, True, True]
    assert InputSet.ball(zero, 1, 1.0, (-1.0, 0.55)).contains(x).tolist() == [False, False, False]
    assert InputSet.ball(zero, 1, 1.0).contains(x, tol=0.11).tolist() == [True, True, False]
    assert InputSet.ball(zero, 2, 2.0).contains(torch.full((1, 2), math.nan)).tolist() == [False]


def test_clip_and_box_limits() -> None:
    inputs = InputSet.ball(tensor(0.125, 0.5), INF, 0.25, (0.0, 1.0))
    assert inputs.lower is not None and inputs.upper is not None
    assert torch.equal(inputs.lower, tensor(0.0, 0.25)) and torch.equal(inputs.upper, tensor(0.375, 0.75))
    box = InputSet.box(tensor(0.0, -1.0), tensor(1.0, 3.0))
    assert torch.equal(box.center, tensor(0.5, 1.0)) and box.eps is None and box.norm == INF
    # a clipped box need not contain its centre, and projection then returns the corner nearest to it
    aside = InputSet.ball(tensor(1.25), INF, 0.5, (0.0, 1.0))
    assert aside.project(aside.center).item() == 1.0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: InputSet.ball(tensor(0.0), 2, -0.1), "eps is -0.1"),
        (lambda: InputSet.ball(tensor(0.0), INF, math.nan), "eps is nan"),
        (lambda: InputSet.ball(tensor(0.0), 1, INF), "eps is inf"),
        (lambda: InputSet.ball(tensor(math.nan), 1, 1.0), "center has values that are not finite"),
        (lambda: InputSet.ball(tensor(0.0), 3, 1.0), "norm 3 is not known"),
        (lambda: InputSet.ball(torch.zeros(4, 2), 2, 1.0), "one input"),
        (lambda: InputSet.ball(torch.zeros(1, 2, dtype=torch.int64), 2, 1.0), "float32 or float64"),
        (lambda: InputSet.box(tensor(0.0, 2.0), tensor(1.0, 1.0)), "element 1 has lower 2.0 > upper 1.0"),
        (lambda: InputSet.box(tensor(0.0), tensor(INF)), "upper has values that are not finite"),
        (lambda: InputSet.box(tensor(0.0), tensor(0.0, 1.0)), "must agree"),
        (lambda: InputSet.ball(tensor(2.0), INF, 0.5, (0.0, 1.0)), "empty box"),
        (lambda: InputSet.ball(tensor(0.5, 1.5), 2, 1.0, (0.0, 1.0)), "element 1 of center lies outside"),
        (lambda: InputSet.ball(tensor(0.5), 1, 1.0, (1.0, 0.0)), "is not a range"),
        (lambda: InputSet(tensor(0.5), INF, 1.0), "needs lower and upper"),
        (lambda: InputSet(tensor(0.5), 2, None), "needs a radius"),
        (lambda: InputSet.ball(tensor(0.5), 2, 1.0).project(torch.zeros(2, 3)), r"needs \(rows, 1\)"),
    ],
)
def test_bad_input_sets_are_refused(make: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()


# specifications


def test_classification_rows_and_margin() -> None:
    spec = Specification.classification(2, 4)
    assert spec.A.tolist() == [[-1, 0, 1, 0], [0, -1, 1, 0], [0, 0, 1, -1]]
    assert spec.b.tolist() == [0, 0, 0] and spec.groups == ((0,), (1,), (2,))
    y = torch.tensor([[1.0, 2.0, 5.0, 3.5], [1.0, 2.0, 5.0, 5.0]])
    assert spec.margins(y).tolist() == [[4, 3, 1.5], [4, 3, 0]]
    assert spec.margins(y).dtype == torch.float32
    assert spec.margin(spec.margins(y)).tolist() == [1.5, 0]
    some = Specification.classification(2, 4, targets=[3, 0])
    assert some.A.tolist() == [[-1, 0, 1, 0], [0, 0, 1, -1]]


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_top_k_agrees_with_sorting(k: int) -> None:
    spec = Specification.top_k(1, 5, k)
    y = torch.randn(300, 5, generator=torch.Generator().manual_seed(8))
    at_least = ((y >= y[:, 1:2]).sum(1) - 1) >= k  # how many others reach the label's logit
    assert 0 < at_least.sum() < 300
    assert torch.equal(spec.margin(spec.margins(y)) <= 0, at_least)
    if k == 1:
        other = Specification.classification(1, 5)
        assert torch.equal(spec.A, other.A) and spec.groups == other.groups


def test_groups_of_different_sizes_and_leading_axes() -> None:
    spec = Specification(torch.eye(3), torch.tensor([0.0, 1.0, 2.0]), ((0, 1), (2,), (0, 1, 2)))
    values = torch.randn(4, 7, 3, generator=torch.Generator().manual_seed(9))
    expected = torch.stack([values[..., :2].amax(-1), values[..., 2], values.amax(-1)], -1)
    assert torch.equal(spec.group_margins(values), expected)
    assert torch.equal(spec.margin(values), expected.amin(-1))
    assert torch.equal(spec.margins(values), values - torch.tensor([0.0, 1.0, 2.0]))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Specification.classification(10, 10), "label 10 is out of range"),
        (lambda: Specification.classification(-1, 10), "label -1 is out of range"),
        (lambda: Specification.classification(1, 10, [10]), "target 10"),
        (lambda: Specification.classification(1, 10, [1]), "target 1"),
        (lambda: Specification.classification(1, 10, []), "no class to compare"),
        (lambda: Specification.top_k(1, 10, 10), "k is 10"),
        (lambda: Specification.top_k(1, 10, 0), "k is 0"),
        (lambda: Specification.top_k(0, 1000, 2), "498501 groups"),
        (lambda: Specification(torch.eye(2), torch.zeros(3), ((0,),)), "must be"),
        (lambda: Specification(torch.eye(2), torch.zeros(2), ((0, 2),)), "outside 0..1"),
        (lambda: Specification(torch.eye(2), torch.zeros(2), ((),)), "at least one row"),
        (lambda: Specification(torch.eye(2) * math.nan, torch.zeros(2), ((0,),)), "not finite"),
        (lambda: Specification.classification(0, 3).margins(torch.zeros(2, 4)), "the property 3"),
    ],
)
def test_bad_specifications_are_refused(make: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()


# VNN-LIB


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
        try:
            prop = read_vnnlib(write(tmp_path, text))
        except InputError as error:
            assert "vacuous" in str(error) and not expected.any()
            continue
        unsafe = torch.zeros(400, dtype=torch.bool)
        for inputs, spec in prop.cases:
            unsafe |= inputs.contains(x) & (spec.margin(spec.margins(y)) <= 0)
        assert torch.equal(unsafe, expected)
        read += 1
        cases += len(prop.cases)
    assert read > 100 and cases > 2 * read


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
        (header(2, 1) + UNIT + "\n\n(assert (>= X_1 1.5))", 7, "vacuous"),
        (header(2, 1) + UNIT + "(assert (or (>= X_1 2) (<= X_1 -1)))(assert (<= Y_0 0))", 5, "vacuous"),
        (header(2, 1) + UNIT + "(assert (or (>= X_1 0.5) (<= Y_0 -1)))", 5, "no constraint on the outputs"),
        (header(2, 1) + UNIT + "(assert (<= X_0 1e999))", 5, "not a finite"),
        (header(2, 1) + "(declare-const Y_0 Real)", 4, "Y_0 is declared twice"),
        (header(2, 1) + "(declare-const Z_0 Real)", 4, "declare-const X_i Real"),
        (header(2, 1) + "(declare-const Y_1 Int)", 4, "declare-const X_i Real"),
        (header(1, 1) + "(declare-const X_2 Real)", 3, "X_2 is declared, but X_1 is not"),
        ("; new\n(vnnlib-version <2.0>)\n(declare-network N)", 2, "VNN-LIB 2.0 file, which is not supported"),
        ("\n(declare-network N (declare-input X Real [2]))", 2, "VNN-LIB 2.0 file, which is not supported"),
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
        InputError, match=r"p\.vnnlib: declares 2 inputs X_i, but an input of shape \(3, 2\) has 6"
    ):
        read_vnnlib(path, (3, 2))
    with pytest.raises(InputError, match=r"p\.vnnlib: declares 3 outputs Y_j, but the model has 10"):
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


def test_conversion_changes_the_type_and_projection_keeps_it() -> None:
    for norm, dtype in itertools.product(NORMS, (torch.float32, torch.float64)):
        inputs = InputSet.ball(torch.zeros(1, 2, dtype=torch.float64), norm, 0.5, (-1.0, 1.0)).to(dtype)
        for point in (inputs.center, inputs.lower, inputs.upper, inputs.sample(1)):
            assert point is not None and point.dtype == dtype
        assert inputs.project(torch.ones(3, 2, dtype=torch.float32)).dtype == torch.float32
