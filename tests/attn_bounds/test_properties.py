"""Input sets against brute force and optimality conditions, and specifications."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_bounds.errors import InputError
from attn_bounds.properties import InputSet, Specification

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


def test_conversion_changes_the_type_and_projection_keeps_it() -> None:
    for norm, dtype in itertools.product(NORMS, (torch.float32, torch.float64)):
        inputs = InputSet.ball(torch.zeros(1, 2, dtype=torch.float64), norm, 0.5, (-1.0, 1.0)).to(dtype)
        for point in (inputs.center, inputs.lower, inputs.upper, inputs.sample(1)):
            assert point is not None and point.dtype == dtype
        assert inputs.project(torch.ones(3, 2, dtype=torch.float32)).dtype == torch.float32
