"""Nodes with several perturbed inputs, and the softmax by itself."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from attn_bounds.domain.forms import AffineForm, Groups
from attn_bounds.domain.products import matmul, multiply
from attn_bounds.domain.sets import Ball, BoxInBall
from attn_bounds.domain.softmax import SoftmaxRemainder, softmax
from onnx_export import attention_average, attention_scores, attention_weights

from ..contract import BoundContract, Case, bounds, smallest
from ..operators.test_attention import tensor

Binary = Callable[[Tensor, Tensor], Tensor]


class Two(nn.Module):
    """A function of two linear maps of the input, (batch, 3, 4) each."""

    def __init__(self, f: Binary, seed: int = 0, scale: float = 1.0) -> None:
        super().__init__()
        self.f = f
        self.register_buffer("w", tensor(seed, 4, 4, scale=scale))
        self.register_buffer("u", tensor(seed + 1, 4, 4, scale=scale))
        self.register_buffer("b", tensor(seed + 2, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.f(torch.matmul(x, self.w) + self.b, torch.matmul(x, self.u))


def soft(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


PRODUCTS: dict[str, Binary] = {
    "product": lambda a, b: a * b,
    "matrix product": lambda a, b: torch.matmul(a, b.transpose(1, 2)),
    "difference": lambda a, b: torch.tanh(a) - a * b,
    "constant minus": lambda a, b: 1.0 - a * b,
    "side by side": lambda a, b: torch.cat([a * b, torch.ones_like(a), b], -1),
    "rows": lambda a, b: torch.cat([torch.relu(a), b], 1),
    "broadcast": lambda a, b: a * torch.relu(b).mean(-1, keepdim=True),
    "by a constant": lambda a, b: torch.relu(a) / 3.0,
    "gate": lambda a, b: torch.nn.functional.silu(a) * b,
    "four dimensions": lambda a, b: torch.matmul(
        a.reshape(-1, 3, 2, 2).permute(0, 2, 1, 3), b.reshape(-1, 3, 2, 2).permute(0, 2, 3, 1)
    ),
}
SOFTMAX: dict[str, Binary] = {
    "softmax": lambda a, b: soft(a),
    "over tokens": lambda a, b: torch.softmax(a, 1),
    "of a product": lambda a, b: torch.matmul(soft(0.5 * torch.matmul(a, b.transpose(1, 2))), b),
    "twice": lambda a, b: soft(soft(a) * b),
    "behind relu": lambda a, b: soft(torch.relu(a)),
    "four dimensions": lambda a, b: soft(torch.stack([a, b], 1)),
}


class TestProducts(BoundContract):
    methods = ("sensitivity",)

    @staticmethod
    def cases() -> list[Case]:
        x = tensor(3, 1, 3, 4)
        return [
            Case(f"{n} {e}", Two(f), [x], [0], e) for n, f in PRODUCTS.items() for e in (1e-3, 0.2, 4.0)
        ] + [Case("quotient", Two(lambda a, b: a / (b * b + 1.0)), [x], [0], 0.05)]


class TestSoftmax(BoundContract):
    methods = ("sensitivity",)

    @staticmethod
    def cases() -> list[Case]:
        x = tensor(3, 1, 3, 4)
        cases = [Case(f"{n} {e}", Two(f), [x], [0], e) for n, f in SOFTMAX.items() for e in (1e-3, 0.2, 4.0)]
        return [*cases, Case("saturated", Two(SOFTMAX["softmax"], 5, 10.0), [x], [0], 0.5)]


def weights_used(a: Tensor, b: Tensor) -> Tensor:
    scores = attention_scores(a, b, scale=0.7)
    weights = attention_weights(scores)
    return attention_average(scores, weights, b) + torch.matmul(weights, torch.relu(a))


def scores_used(a: Tensor, b: Tensor) -> Tensor:
    scores = attention_scores(a, b, scale=-0.7)
    return attention_average(scores, attention_weights(scores), b) + scores.mean(-1, keepdim=True)


def weights_alone(a: Tensor, b: Tensor) -> Tensor:
    return attention_weights(attention_scores(a, b, torch.eye(3).to(a), scale=0.7))


def changed_weights(a: Tensor, b: Tensor) -> Tensor:
    scores = attention_scores(a, b, scale=0.7)
    return attention_average(scores, torch.relu(attention_weights(scores) - 0.2), b)


class TestPartsOfAttention(BoundContract):
    """Scores and weights that somebody else reads as well get forms of their own."""

    methods = ("sensitivity",)

    @staticmethod
    def cases() -> list[Case]:
        x = tensor(3, 1, 3, 4)
        return [
            Case(f.__name__, Two(f), [x], [0], e)
            for f in (weights_used, scores_used, weights_alone, changed_weights)
            for e in (0.01, 0.3)
        ]


def ball(norm: float, *tensors: Tensor) -> Groups:
    groups = Groups(growth=1.0)
    groups.add(Ball("input", tensors[0].shape[1], norm, 1, tensors[0]))
    return groups


def ascend(value: Callable[[Tensor], Tensor], size: int) -> Tensor:
    """Largest value (rows, F) over the unit l2 ball for each of F functions, by projected ascent."""
    count = value(torch.zeros(1, size, dtype=torch.float64)).shape[1]
    z = tensor(90, 40 * count, size)
    pick = torch.arange(count).repeat_interleave(40).unsqueeze(1)
    for step in range(300):
        z = (z / z.norm(dim=1, keepdim=True).clamp(min=1.0)).requires_grad_()
        (g,) = torch.autograd.grad(value(z).gather(1, pick).sum(), z)
        z = z.detach() + (1 - step / 300) * g / g.norm(dim=1, keepdim=True).clamp(min=1e-30)
    z = z / z.norm(dim=1, keepdim=True).clamp(min=1.0)
    return value(z).gather(1, pick).reshape(count, 40).amax(1)


@pytest.mark.parametrize("matrix", [False, True])
def test_remainder_of_a_ball_is_exact(matrix: bool) -> None:
    """Both ends of dx·dy are reached over an l2 ball: centre and half width are those of the true range."""
    g, h = tensor(10, 1, 3, 2, 4), tensor(11, 1, 3, 2, 4)
    x, y = AffineForm(tensor(12, 1, 2, 4), g), AffineForm(tensor(13, 1, 2, 4), h)
    if matrix:
        y = y.linear(lambda t: t.transpose(-1, -2))
    groups = ball(2.0, g)
    out = (matmul if matrix else multiply)(x, y, groups, "product")

    def moved(z: Tensor) -> Tensor:
        dx, dy = (torch.einsum("zk,knd->znd", z, form.generators[0]) for form in (x, y))
        return (dx @ dy if matrix else dx * dy).flatten(1)

    up, down = ascend(moved, 3), -ascend(lambda z: -moved(z), 3)
    product = x.centre @ y.centre if matrix else x.centre * y.centre
    middle = (out.centre - product).flatten()
    box = groups.sets[1]
    assert isinstance(box, BoxInBall)
    assert torch.allclose(middle, (up + down) / 2, atol=1e-6)
    assert torch.allclose(box.upper[0], (up - down) / 2, atol=1e-6)
    assert (middle + box.upper[0] >= up - 1e-12).all() and (middle - box.upper[0] <= down + 1e-12).all()


@pytest.mark.parametrize("matrix", [False, True])
@pytest.mark.parametrize("norm", [1.0, 2.0, math.inf])
def test_ball_of_a_product_holds_its_errors(norm: float, matrix: bool) -> None:
    g, h = tensor(20, 1, 5, 3, 3), tensor(21, 1, 5, 3, 3)
    x, y = AffineForm(tensor(22, 1, 3, 3), g), AffineForm(tensor(23, 1, 3, 3), h)
    groups = ball(norm, g)
    out = (matmul if matrix else multiply)(x, y, groups, "product")
    box = groups.sets[1]
    assert isinstance(box, BoxInBall) and box.radius is not None
    z = torch.cat([tensor(24, 3000, 5), torch.eye(5).double(), tensor(25, 500, 5).sign()])
    z = z / torch.linalg.vector_norm(z, norm, dim=1, keepdim=True)
    a, b = (f.centre + torch.einsum("zk,knd->znd", z, f.generators[0]) for f in (x, y))
    linear = torch.einsum("zk,knd->znd", z, out.generators[0, :5])
    error = ((a @ b if matrix else a * b) - out.centre - linear).flatten(1)
    assert (error.abs() <= box.upper + 1e-12).all()
    assert error.norm(dim=1).max() <= box.radius + 1e-12


@pytest.mark.parametrize("matrix", [False, True])
@pytest.mark.parametrize("norm", [1.0, 2.0, math.inf])
def test_every_pair_of_groups_counts(norm: float, matrix: bool) -> None:
    """The factors share two error sets, in every mixture of sizes."""
    for seed in range(8):
        weight = torch.tensor([seed & 1, seed >> 1 & 1, seed >> 2 & 1, 1 - (seed & 1)]).double() + 0.01
        g, h = tensor(200 + seed, 1, 4, 2, 2), tensor(300 + seed, 1, 4, 2, 2)
        g[:, :2], g[:, 2:], h[:, :2], h[:, 2:] = (
            g[:, :2] * weight[0],
            g[:, 2:] * weight[1],
            h[:, :2] * weight[2],
            h[:, 2:] * weight[3],
        )
        groups = Groups(growth=1.0)
        groups.add(Ball("input", 2, norm, 1, g))
        groups.add(Ball("later", 2, math.inf, 1, g))
        x, y = AffineForm(tensor(22, 1, 2, 2), g), AffineForm(tensor(23, 1, 2, 2), h)
        out = (matmul if matrix else multiply)(x, y, groups, "product")
        box = groups.sets[2]
        assert isinstance(box, BoxInBall) and box.radius is not None
        first = torch.cat([tensor(24, 500, 2), torch.eye(2).double(), tensor(25, 50, 2).sign()])
        first = first / torch.linalg.vector_norm(first, norm, dim=1, keepdim=True)
        corners = torch.tensor([[1, 1], [1, -1], [-1, 1], [-1, -1]]).double()
        z = torch.cat([first.repeat_interleave(4, 0), corners.repeat(len(first), 1)], 1)
        a, b = (f.centre + torch.einsum("zk,knd->znd", z, f.generators[0]) for f in (x, y))
        linear = torch.einsum("zk,knd->znd", z, out.generators[0, :4])
        error = ((a @ b if matrix else a * b) - out.centre - linear).flatten(1)
        assert (error.abs() <= box.upper + 1e-12).all()
        assert error.norm(dim=1).max() <= box.radius + 1e-12


@pytest.mark.parametrize("matrix", [False, True])
def test_ball_of_a_product_beats_its_box(matrix: bool) -> None:
    """Entries that depend on different symbols of an l2 ball cannot all move far."""
    g, h = torch.eye(18).double().reshape(1, 18, 2, 3, 3).unbind(2)
    x, y = AffineForm(tensor(22, 1, 3, 3), g), AffineForm(tensor(23, 1, 3, 3), h)
    groups = ball(2.0, g)
    (matmul if matrix else multiply)(x, y, groups, "product")
    box = groups.sets[1]
    assert isinstance(box, BoxInBall) and box.radius is not None
    assert box.upper.norm() == pytest.approx(1.5, rel=1e-6) and float(box.radius) == pytest.approx(
        1.0, rel=1e-6
    )


def test_square_is_never_negative() -> None:
    """x·x is a convex function of x, not a product of two forms."""
    case = Case("square", Two(lambda a, b: a * a), [torch.zeros(1, 3, 4).double()], [0], 0.5)
    case.module.b.zero_()
    low, high = bounds(case, torch.eye(12, dtype=torch.float64), 2.0, "sensitivity")
    assert low.min() >= -1e-12
    assert torch.allclose(high, 0.25 * case.module.w.norm(dim=0).square().repeat(3), atol=1e-9)


def test_difference_with_itself_vanishes() -> None:
    case = Case("same", Two(lambda a, b: torch.tanh(a) - torch.tanh(a)), [tensor(3, 1, 3, 4)], [0], 0.5)
    low, high = bounds(case, torch.eye(12, dtype=torch.float64), 2.0, "sensitivity")
    assert low.abs().max() < 1e-12 and high.abs().max() < 1e-12


@pytest.mark.parametrize("eps", [1e-3, 0.3, 0.6, 1.0, 2.0, 30.0, 2000.0])
@pytest.mark.parametrize("seed", range(8))
def test_softmax_rule_against_its_definition(seed: int, eps: float) -> None:
    """Errors of points of the ball lie in the box and in the ball, and no functional exceeds its support."""
    g = tensor(30 + seed, 1, 4, 2, 5) * eps
    x = AffineForm(tensor(40 + seed, 1, 2, 5) * min(eps, 3.0) * (1000.0 if eps > 1000 else 1.0), g)
    groups = ball(2.0, g)
    out, (low, high) = softmax(x, groups, "softmax")
    z = torch.cat([tensor(50, 4000, 4), torch.linalg.pinv(g[0].flatten(1)).T.reshape(-1, 4)])
    z = z / z.norm(dim=1, keepdim=True)
    z = torch.cat([z, 0.3 * z])
    p = torch.softmax(x.centre + torch.einsum("zk,knd->znd", z, g[0]), -1)
    assert (p >= low - 1e-12).all() and (p <= high + 1e-12).all()
    e = (p - out.centre - torch.einsum("zk,knd->znd", z, out.generators[0, :4])).flatten(1)
    errors = groups.sets[1]
    w = torch.cat([torch.eye(10, dtype=torch.float64), tensor(60, 10, 20)], 1)
    down, up = errors.range(w.unsqueeze(0))
    assert (e @ w <= up + 1e-12).all() and (e @ w >= down - 1e-12).all()
    assert errors.radius is not None and (e.norm(dim=1) <= errors.radius + 1e-12).all()
    if eps >= 30:
        assert errors.radius <= 2.0 + 1e-9, "two rows, each moves by √2 at most"
    assert isinstance(errors, SoftmaxRemainder)
    flat = (out.generators[0, :4] == 0).all(0).flatten()  # no linear part: the error is all of the move
    assert (errors.box.lower <= (low - out.centre).flatten(1) + 1e-12)[0, flat].all()
    assert (errors.box.upper >= (high - out.centre).flatten(1) - 1e-12)[0, flat].all()
    assert flat.all() or eps < 30
    assert up.max() <= 2.0 * w.abs().sum(0).max(), "probabilities move by 1 at most"


def test_softmax_remainder_is_of_second_order() -> None:
    gaps = []
    for eps in (1e-2, 1e-3):
        case = Case("tight", Two(SOFTMAX["softmax"]), [tensor(3, 1, 3, 4)], [0], eps)
        c = tensor(70, 2, 12)
        low, _ = bounds(case, c, 2.0, "sensitivity")
        gaps.append(float((smallest(case, c, 2.0, restarts=2) - low).max()) / eps**2)
    assert gaps[1] < 1.5 * gaps[0] < 100


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_what_is_not_finite_stays_unknown(broken: float) -> None:
    def out_of(rule: Callable[[AffineForm, AffineForm, Groups], AffineForm], where: str) -> bool:
        centre, g = tensor(80, 1, 2, 2), tensor(81, 1, 3, 2, 2)
        (centre if where == "centre" else g)[..., 0, 0] = broken
        groups = ball(2.0, g)
        x, y = AffineForm(centre, g), AffineForm(tensor(82, 1, 2, 2), tensor(83, 1, 3, 2, 2))
        form = rule(x, y, groups)
        low, high = groups.total(groups.ranges(form.generators), form.centre)
        return not bool(
            torch.isfinite(form.centre + low)[0, 0, 0] or torch.isfinite(form.centre + high)[0, 0, 0]
        )

    for where in ("centre", "generator"):
        assert out_of(lambda x, y, s: multiply(x, y, s, "p"), where)
        assert out_of(lambda x, y, s: matmul(x, y, s, "p"), where)
        assert out_of(lambda x, y, s: softmax(x, s, "p")[0], where)
