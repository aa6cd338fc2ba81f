"""Operators of scalar functions under `BoundContract`; lines and ranges by brute force."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from attn_bounds.domain.activations import ERF, GELU, QUICK_GELU, RECIPROCAL, SILU, TANH_GELU
from attn_bounds.domain.lines import POINTS, lines_above, lines_below, member, value_range
from onnx_export import functions

from ..contract import BoundContract, Case, bounds, smallest
from .test_attention import tensor

SMOOTH = {"erf": ERF, "gelu": GELU, "tanh gelu": TANH_GELU, "silu": SILU, "quick gelu": QUICK_GELU}
TORCH: dict[str, Callable[[Tensor], Tensor]] = {
    "erf": functions.erf,
    "gelu": functions.gelu,
    "tanh gelu": lambda x: functions.gelu(x, "tanh"),
    "silu": functions.silu,
    "quick gelu": functions.quick_gelu,
}


def ranges(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Narrow and wide, centred and far out where the functions are flat or a line."""
    generator = torch.Generator().manual_seed(2)
    n = 400
    centre = torch.randn(n, generator=generator, dtype=torch.float64) * torch.tensor(
        [1.0, 4.0, 30.0, 300.0]
    ).repeat(n // 4)
    width = 10.0 ** torch.linspace(-8, 2.5, n, dtype=torch.float64)[torch.randperm(n, generator=generator)]
    low, high = (centre - width).to(dtype), (centre + width).to(dtype)
    high[:5] = low[:5]
    return low, high


def points(low: Tensor, high: Tensor) -> Tensor:
    t = torch.linspace(0, 1, 1001, dtype=torch.float64).unsqueeze(1)
    return (low.double() + t * (high.double() - low.double())).clamp(min=low.double(), max=high.double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", SMOOTH)
def test_lines_and_ranges_by_brute_force(name: str, dtype: torch.dtype) -> None:
    f = SMOOTH[name]
    low, high = ranges(dtype)
    x = points(low, high)
    y = f.value(x)
    lower, upper = value_range(f, low, high)
    assert lower.dtype == dtype and (lower.double() <= y).all() and (upper.double() >= y).all()
    step = (high - low).double() / 1000
    room = (
        1.2 * step + 1e-6 * (1 + y.abs().amax(0)) * (dtype == torch.float32) + 1e-12 * (1 + y.abs().amax(0))
    )
    assert (y.amin(0) - lower <= room).all() and (upper - y.amax(0) <= room).all()
    for sign, make in ((1, lines_below), (-1, lines_above)):
        line = make(f, low, high)
        assert (sign * (y - line.slope.double() * x - line.offset.double()) >= 0).all()
        family = make(f, low, high, POINTS)
        for where in (0.0, 0.1, 0.5, 0.77, 1.0):
            one = member(family, torch.tensor(where, dtype=dtype))
            gap = sign * (y - one.slope.double() * x - one.offset.double())
            # the members between two are put together in the precision of the lines
            size = y.abs() + one.slope.double().abs() * x.abs() + one.offset.double().abs()
            assert (gap >= -4 * torch.finfo(dtype).eps * size).all()


@pytest.mark.parametrize("name", SMOOTH)
def test_lines_are_the_best_at_the_middle(name: str) -> None:
    """No slope of a fine grid gives a line that is better there by more than a hundredth of the range."""
    f = SMOOTH[name]
    low, high = (
        torch.tensor([-3.0, -0.5, -6.0, 0.2, -1.0, -9.0, 1.0]).double(),
        torch.tensor([2.0, 0.7, 6.0, 1.1, 5.0, -0.5, 1.0 + 1e-9]).double(),
    )
    middle, x = (low + high) / 2, points(low, high)
    y = f.value(x)
    slopes = torch.linspace(-0.5, 1.5, 801, dtype=torch.float64).reshape(-1, 1, 1)
    span = y.amax(0) - y.amin(0)
    for sign, make in ((1, lines_below), (-1, lines_above)):
        ideal = (sign * (y - slopes * (x - middle))).amin(1).amax(0)  # value at the middle
        line = make(f, low, high)
        own = sign * (line.slope * middle + line.offset)
        assert (own >= ideal - 0.01 * span - 1e-9).all(), (name, sign, own, ideal)


def test_what_is_not_known_stays_unknown() -> None:
    low, high = torch.tensor([-1.0, -math.inf, math.nan, 0.5]), torch.tensor([1.0, 0.0, 1.0, 2.0])
    for found in (value_range(GELU, low, high), lines_below(GELU, low, high)):
        assert torch.isfinite(torch.stack(tuple(found))).all(0).tolist() == [True, False, False, True]
    for found in (value_range(RECIPROCAL, low, high), lines_above(RECIPROCAL, low, high)):
        assert torch.isfinite(torch.stack(tuple(found))).all(0).tolist() == [False, False, False, True]


class Activated(nn.Module):
    """A linear layer, the function, another one."""

    def __init__(self, name: str, seed: int, size: float = 1.0) -> None:
        super().__init__()
        self.name = name
        self.register_buffer("one", tensor(seed, 4, 5, scale=size))
        self.register_buffer("two", tensor(seed + 1, 5, 3))
        self.one[1] = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return torch.matmul(TORCH[self.name](torch.matmul(x, self.one)), self.two)


class Direct(nn.Module):
    """The function on the input itself."""

    def forward(self, x: Tensor) -> Tensor:
        return functions.gelu(x)


class TestScalarFunctions(BoundContract):
    methods = ("IBP", "CROWN", "forward")

    @staticmethod
    def cases() -> list[Case]:
        return [
            Case("gelu", Activated("gelu", 0), [tensor(9, 1, 3, 4)], [0], 0.3),
            Case("tanh gelu", Activated("tanh gelu", 2), [tensor(8, 1, 4)], [0], 0.6),
            Case("silu", Activated("silu", 4), [tensor(7, 1, 4)], [0], 1e-3),
            Case("quick gelu", Activated("quick gelu", 6, 5.0), [tensor(6, 1, 4)], [0], 0.5),
            Case("erf", Activated("erf", 8), [tensor(5, 1, 4)], [0], 0.5),
            Case("saturated", Activated("gelu", 10, 30.0), [tensor(4, 1, 4)], [0], 0.1),
            Case("large range", Activated("silu", 12, 30.0), [tensor(3, 1, 4)], [0], 10.0),
            Case("on the input", Direct(), [tensor(2, 1, 4)], [0], 0.5),
        ]


class TestDescentAndForwardPass(BoundContract):
    methods = ("alpha-crown", "sensitivity")

    @staticmethod
    def cases() -> list[Case]:
        return TestScalarFunctions.cases()[1::2]


def test_saturated_tails_in_float32() -> None:
    """Far out GELU is 0 or the identity: the bounds must not lose that in single precision."""

    class Shifted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return functions.gelu(x + 0.0)

    x = torch.tensor([[-30.0, -8.0, 12.0, 1000.0]])
    case = Case("tails", Shifted(), [x], [0], 0.5)
    for method in ("IBP", "CROWN"):
        low, high = bounds(case, torch.eye(4).double(), math.inf, method, torch.float32)
        assert (low[0, :2] <= 0).all() and (low[0, :2] >= -1e-6).all() and (high[0, :2].abs() <= 1e-6).all()
        assert torch.allclose(low[0, 2:], x[0, 2:].double() - 0.5, rtol=1e-6)
        assert torch.allclose(high[0, 2:], x[0, 2:].double() + 0.5, rtol=1e-6)


def test_lofast_is_never_violated() -> None:
    for case in TestScalarFunctions.cases():
        c = tensor(70, 2, case.module(case.inputs[0])[0].numel())
        low, high = bounds(case, c, 2.0, "lofast")
        assert (low <= smallest(case, c, 2.0) + 1e-9).all() and (
            high >= -smallest(case, -c, 2.0) - 1e-9
        ).all()
