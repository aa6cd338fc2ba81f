"""Elementwise activations: the scalar errors by brute force, and whole networks under `BoundContract`."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from attn_bounds.domain.activations import FUNCTIONS, activation, best_slope, errors, leaky_relu
from attn_bounds.domain.forms import AffineForm, Groups
from attn_bounds.domain.sets import Ball, BoxInBall
from attn_bounds.errors import UnsupportedModelError

from ..contract import BoundContract, Case, bounds
from ..operators.test_attention import tensor

ALL = {**FUNCTIONS, "LeakyRelu": leaky_relu(0.2), "steep LeakyRelu": leaky_relu(3.0)}
REFERENCE: dict[str, Callable[[Tensor], Tensor]] = {
    "BoundTanh": torch.tanh,
    "BoundSigmoid": torch.sigmoid,
    "BoundAtan": torch.atan,
    "BoundErf": torch.erf,
    "BoundGelu": torch.nn.functional.gelu,
    "BoundExp": torch.exp,
    "BoundSqr": torch.square,
    "BoundAbs": torch.abs,
    "BoundReciprocal": torch.reciprocal,
    "BoundSqrt": torch.sqrt,
    "BoundLog": torch.log,
    "BoundSoftplus": torch.nn.functional.softplus,
    "LeakyRelu": lambda x: torch.nn.functional.leaky_relu(x, 0.2),
    "steep LeakyRelu": lambda x: torch.nn.functional.leaky_relu(x, 3.0),
}


def intervals(name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Centres and ranges, also far out where the functions saturate and where a range touches 0."""
    generator = torch.Generator().manual_seed(3)

    def uniform(n: int) -> Tensor:
        return torch.rand(n, generator=generator, dtype=torch.float64)

    n = 600
    centre = (uniform(n) - 0.5) * torch.tensor([2.0, 8.0, 40.0]).double().repeat(n // 3)
    width = 10.0 ** (uniform(n) * 5 - 4)
    low, high = centre - width * uniform(n), centre + width * uniform(n)
    low[::7], high[::11] = centre[::7], centre[::11]
    if name in ("BoundReciprocal", "BoundSqrt", "BoundLog"):
        centre, low, high = centre.abs() + 0.01, low.abs() + 0.01, high.abs() + 0.01
        low, high = torch.minimum(low, centre), torch.maximum(high, centre)
    if name == "BoundReciprocal":
        centre[::2], low[::2], high[::2] = -centre[::2], -high[::2], -low[::2]
    return centre, low, high


@pytest.mark.parametrize("name", list(ALL))
def test_scalar_errors_by_brute_force(name: str) -> None:
    """Never outside the box, the ends of the box are reached, and no point has a larger |e/d|."""
    f = ALL[name]
    centre, low, high = intervals(name)
    at = REFERENCE[name](centre)
    for slope in (
        best_slope(f, centre, low, high),
        tensor(4, len(centre)),
        torch.zeros(len(centre)).double(),
    ):
        found = errors(f, centre, at, slope, low, high)
        t = torch.linspace(0, 1, 4001, dtype=torch.float64).unsqueeze(1)
        x = torch.cat([low + t * (high - low), centre.unsqueeze(0)]).clamp(min=low, max=high)
        e = REFERENCE[name](x) - at - slope * (x - centre)
        room = 1e-15 * (1 + at.abs())
        assert (e >= found.low - room).all() and (e <= found.high + room).all()
        width = e.amax(0) - e.amin(0)
        slack = 1e-3 * width + 2e-13 * (1 + at.abs() + REFERENCE[name](high).abs())
        if name == "BoundSoftplus":
            slack += 5e-9 * (high > 20)  # torch's is the identity there
        assert (e.amax(0) >= found.high - slack).all() and (e.amin(0) <= found.low + slack).all()
        d = (x - centre).abs()
        drift = 1e-14 * (1 + at.abs() + REFERENCE[name](high).abs()) + f.extra(low, high)
        assert (e.abs() <= found.kappa * d + 4 * drift).all()


@pytest.mark.parametrize("name", ["BoundTanh", "BoundSigmoid", "BoundAtan", "BoundErf", "BoundGelu"])
def test_slope_is_the_best(name: str) -> None:
    """No slope of a fine grid has an error range that is narrower by more than two percent."""
    f = ALL[name]
    low = torch.tensor([-3.0, -0.5, -6.0, 0.2, -1.0], dtype=torch.float64)
    high = torch.tensor([2.0, 0.7, 6.0, 1.1, 5.0], dtype=torch.float64)
    centre = (low + high) / 2
    at = f.value(centre)

    def width(slope: Tensor) -> Tensor:
        found = errors(f, centre, at, slope, low, high)
        return found.high - found.low

    grid = torch.linspace(-0.5, 1.5, 1001, dtype=torch.float64)
    least = torch.stack([width(s.expand(5)) for s in grid]).amin(0)
    assert (width(best_slope(f, centre, low, high)) <= 1.02 * least + 1e-12).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", list(ALL))
@pytest.mark.parametrize("eps", [1e-4, 0.3])
def test_rule_against_its_definition(name: str, eps: float, dtype: torch.dtype) -> None:
    """For points of the ball, the error that makes the form exact lies in the box and in the ball."""
    g = (tensor(5, 1, 4, 6) * eps).to(dtype)
    centre = (
        tensor(6, 1, 6).abs() + 2.0 if "S" in name or "R" in name or "Lo" in name else tensor(6, 1, 6)
    ).to(dtype)
    groups = Groups(growth=1.0 + 64 * torch.finfo(dtype).eps)
    groups.add(Ball("input", 4, 2.0, 1, g))
    out, (low, high) = activation(AffineForm(centre, g), ALL[name], groups, name)
    z = torch.cat([tensor(7, 500, 4), g[0].double().T])
    z = z / z.norm(dim=1, keepdim=True)
    z = torch.cat([z, 0.5 * z, 1e-3 * z])
    before = centre.double() + z @ g[0].double()
    assert (before >= low.double() - 1e-6).all() and (before <= high.double() + 1e-6).all()
    error = REFERENCE[name](before) - out.centre.double() - z @ out.generators[0, :4].double()
    room = 1e-12 + 3e-6 * eps * (dtype == torch.float32)
    if len(groups.sets) == 1:
        assert error.abs().max() <= room
        return
    box = groups.sets[1]
    assert isinstance(box, BoxInBall) and box.radius is not None
    picked = out.generators[0, 4:].nonzero()[:, 1]
    rest = [i for i in range(6) if i not in picked.tolist()]
    assert not rest or error[:, rest].abs().max() <= room + 1e-6 * (dtype == torch.float32)
    e = error[:, picked]
    assert (e >= box.lower.double() - room).all() and (e <= box.upper.double() + room).all()
    assert (e.norm(dim=1) <= box.radius.double() + room).all()
    if name not in ("BoundAbs", "LeakyRelu", "steep LeakyRelu"):
        assert float(box.radius) < 40 * eps**2 + 1e-5 * (dtype == torch.float32), "second order"


@pytest.mark.parametrize("name", list(ALL))
@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_unknown(name: str, broken: float) -> None:
    for where in ("centre", "generator"):
        centre, g = torch.full((1, 3), 2.0).double(), torch.full((1, 2, 3), 0.1).double()
        (centre if where == "centre" else g)[..., 1] = broken
        groups = Groups(growth=1.0)
        groups.add(Ball("input", 2, 2.0, 1, g))
        out, _ = activation(AffineForm(centre, g), ALL[name], groups, name)
        assert out.centre[0, 1].isnan() and out.generators[0, :, 1].isnan().any()
        assert not out.centre[0, [0, 2]].isnan().any() and not out.generators[..., [0, 2]].isnan().any()


@pytest.mark.parametrize("name", ["BoundReciprocal", "BoundSqrt", "BoundLog"])
@pytest.mark.parametrize("start", [-1.0, 0.0, 0.05])
def test_outside_the_domain_nothing_is_known(name: str, start: float) -> None:
    groups = Groups(growth=1.0)
    g = torch.full((1, 1, 1), 0.1).double()
    groups.add(Ball("input", 1, 2.0, 1, g))
    out, _ = activation(AffineForm(torch.full((1, 1), start).double(), g), ALL[name], groups, name)
    if name == "BoundReciprocal" and start == -1.0:
        assert torch.isfinite(out.centre).all()
    else:
        assert out.centre.isnan().all()


def test_logarithm_of_next_to_nothing_is_unknown() -> None:
    """auto_LiRPA cuts it off at 1e-12."""
    groups = Groups(growth=1.0)
    g = torch.full((1, 1, 1), 1e-13).double()
    groups.add(Ball("input", 1, 2.0, 1, g))
    out, _ = activation(AffineForm(torch.full((1, 1), 9e-13).double(), g), ALL["BoundLog"], groups, "log")
    assert out.centre.isnan().all()


def test_overflow_of_exp_is_unknown() -> None:
    groups = Groups(growth=1.0)
    g = torch.full((1, 1, 1), 800.0).double()
    groups.add(Ball("input", 1, 2.0, 1, g))
    out, _ = activation(AffineForm(torch.zeros(1, 1).double(), g), ALL["BoundExp"], groups, "exp")
    assert out.centre.isnan().all()


class Mapped(nn.Module):
    """`f(x W + b) V`, twice for depth 2."""

    def __init__(self, f: Callable[[Tensor], Tensor], seed: int, scale: float = 1.0, depth: int = 1) -> None:
        super().__init__()
        self.f, self.depth = f, depth
        for i in range(depth):
            self.register_buffer(f"w{i}", tensor(seed + i, 4, 4, scale=scale))
            self.register_buffer(f"b{i}", tensor(seed + 10 + i, 4))
        self.register_buffer("v", tensor(seed + 20, 4, 3))

    def forward(self, x: Tensor) -> Tensor:
        for i in range(self.depth):
            x = self.f(torch.matmul(x, getattr(self, f"w{i}")) + getattr(self, f"b{i}"))
        return torch.matmul(x, self.v)


GRAPHS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "atan": torch.atan,
    "leaky relu": lambda x: torch.nn.functional.leaky_relu(x, 0.2),
    "abs": torch.abs,
    "softplus": torch.nn.functional.softplus,
    "exp": lambda x: torch.exp(0.3 * x),
    "power": lambda x: x**2,
    "square": lambda x: x * x,
    "minus": lambda x: -torch.tanh(x),
    "silu": torch.nn.functional.silu,
    "tanh gelu": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
}
# on a range that stays inside the domain
POSITIVE: dict[str, Callable[[Tensor], Tensor]] = {
    "sqrt": lambda x: torch.sqrt(x * x + 1.0),
    "reciprocal": lambda x: torch.reciprocal(x * x + 1.0),
    "log": lambda x: torch.log(torch.exp(x) + 1.0),
    "quotient": lambda x: x / (x * x + 1.0),
}


class TestActivations(BoundContract):
    methods = ("sensitivity",)

    @staticmethod
    def cases() -> list[Case]:
        x = tensor(30, 1, 3, 4)
        wide = [
            Case(f"{name} {eps}", Mapped(f, 40), [x], [0], eps)
            for name, f in GRAPHS.items()
            for eps in (0.1, 3.0)
        ]
        deep = [
            Case(f"{name} twice", Mapped(GRAPHS[name], 41, 0.5, 2), [x], [0], 0.2)
            for name in ("tanh", "leaky relu", "sigmoid")
        ]
        saturated = [
            Case(f"{name} saturated", Mapped(GRAPHS[name], 42, 5.0), [3 * x], [0], 0.5)
            for name in ("tanh", "sigmoid", "softplus")
        ]
        return wide + deep + saturated + [Case(n, Mapped(f, 43), [x], [0], 0.05) for n, f in POSITIVE.items()]


def test_linear_pieces_are_exact() -> None:
    """Away from the kink a leaky ReLU is a linear map, and the bound is the dual norm."""
    module = Mapped(GRAPHS["leaky relu"], 44)
    x = tensor(45, 1, 4)
    case = Case("exact", module, [x], [0], 1e-5)
    jacobian = torch.autograd.functional.jacobian(lambda t: module(t).flatten(), x).reshape(3, 4)
    low, high = bounds(case, torch.eye(3, dtype=torch.float64), 2.0, "sensitivity")
    spread = 1e-5 * jacobian.norm(dim=1)
    assert torch.allclose(low, module(x) - spread, atol=1e-14, rtol=1e-13)
    assert torch.allclose(high, module(x) + spread, atol=1e-14, rtol=1e-13)


@pytest.mark.parametrize(("f", "kind"), [(torch.sin, "BoundSin"), (lambda x: x**3, "BoundPow")])
def test_others_are_refused_by_name(f: Callable[[Tensor], Tensor], kind: str) -> None:
    case = Case(kind, Mapped(f, 46), [tensor(47, 1, 3, 4)], [0], 0.1)
    with pytest.raises(UnsupportedModelError, match=kind):
        bounds(case, torch.eye(9, dtype=torch.float64), 2.0, "sensitivity")
