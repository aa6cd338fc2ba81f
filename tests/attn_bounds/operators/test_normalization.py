"""LayerNorm and RMSNorm as operators under `BoundContract`, and against their decomposed form."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from attn_bounds.module import BoundedModule, StockModule
from onnx_export import functions

from ..contract import BoundContract, Case, Flat, bounded_inputs, bounds, smallest
from .test_attention import tensor


class Normalized(nn.Module):
    """A linear layer and its skip connection, the norm with gain and bias, another linear layer."""

    def __init__(
        self, d: int, seed: int, kind: str = "layer", eps: float = 1e-5, size: float = 1.0, axes: int = 1
    ) -> None:
        super().__init__()
        self.kind, self.eps, self.axes = kind, eps, axes
        self.register_buffer("one", tensor(seed, d, d, scale=size / math.sqrt(d)))
        self.register_buffer("shift", tensor(seed + 1, d, scale=0.1 * size))
        self.register_buffer("gain", tensor(seed + 2, d))
        self.register_buffer("two", tensor(seed + 3, d, d, scale=1.0 / math.sqrt(d)))
        self.gain[0] = 0.0

    def forward(self, x: Tensor) -> Tensor:
        x = torch.matmul(x, self.one) + self.shift
        if self.kind == "layer":
            x = functions.layer_norm(x, self.gain, self.shift, axes=self.axes, eps=self.eps)
        else:
            x = functions.rms_norm(x, self.gain, axes=self.axes, eps=self.eps)
        return torch.matmul(x, self.two)


class Constant(nn.Module):
    """LayerNorm over one entry."""

    def forward(self, x: Tensor) -> Tensor:
        return functions.layer_norm(x, None, None, eps=1e-5) + 1.0


def standard_cases() -> list[Case]:
    return [
        Case("layer norm", Normalized(4, 0), [tensor(9, 1, 3, 4)], [0], 0.1),
        Case("rms norm", Normalized(4, 10, "rms"), [tensor(8, 1, 3, 4)], [0], 0.1),
        Case("small", Normalized(5, 20), [tensor(7, 1, 2, 5)], [0], 1e-4),
        Case("wide", Normalized(4, 30), [tensor(6, 1, 2, 4)], [0], 2.0),
        Case("wide rms", Normalized(4, 40, "rms"), [tensor(5, 1, 4)], [0], 3.0),
        Case("tiny variance", Normalized(4, 50, size=1e-3), [tensor(4, 1, 2, 4)], [0], 0.05),
        Case("large range", Normalized(3, 60, size=100.0), [tensor(3, 1, 3)], [0], 10.0),
        Case("two entries", Normalized(2, 70), [tensor(2, 1, 2, 2)], [0], 0.1),
        Case("two axes", Normalized(3, 80, axes=2), [tensor(1, 1, 2, 3)], [0], 0.1),
    ]


class TestNormalizations(BoundContract):
    methods = ("IBP", "CROWN")

    @staticmethod
    def cases() -> list[Case]:
        return standard_cases()


class TestDescent(BoundContract):
    methods = ("alpha-crown",)

    @staticmethod
    def cases() -> list[Case]:
        return standard_cases()[:6:2]


class TestOtherMethods(BoundContract):
    methods = ("forward", "sensitivity")

    @staticmethod
    def cases() -> list[Case]:
        return standard_cases()[:6:2] + standard_cases()[7:]


@pytest.mark.parametrize("method", ["IBP", "CROWN", "forward", "sensitivity", "lofast"])
def test_one_entry_is_constant(method: str) -> None:
    case = Case("constant", Constant(), [tensor(0, 1, 3, 1)], [0], 1.0)
    low, high = bounds(case, torch.eye(3).double(), 2.0, method)
    assert torch.allclose(low, torch.ones(1, 3).double(), atol=1e-6)
    assert torch.allclose(high, torch.ones(1, 3).double(), atol=1e-6)


@pytest.mark.parametrize("method", ["lofast", "lofast-paper"])
def test_lofast_is_never_violated(method: str) -> None:
    for case in standard_cases():
        c = tensor(70, 2, case.module(case.inputs[0])[0].numel())
        low, high = bounds(case, c, 2.0, method)
        assert (low <= smallest(case, c, 2.0) + 1e-9).all() and (
            high >= -smallest(case, -c, 2.0) - 1e-9
        ).all()


class Decomposed(Normalized):
    """The same in the operators that auto_LiRPA itself would see."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.matmul(x, self.one) + self.shift
        z = x + x.mean(-1, keepdim=True) * -1.0
        z = z / torch.sqrt((z * z).mean(-1, keepdim=True) + self.eps)
        return torch.matmul(z * self.gain + self.shift, self.two)


@pytest.mark.parametrize("eps", [1e-2, 1e-1])
def test_is_not_looser_than_the_decomposed_form(eps: float) -> None:
    """But for a few percent of a vector of few entries: the decomposed form also bounds z by itself."""
    x, c = tensor(9, 1, 3, 4), tensor(11, 1, 6, 12)
    for norm in (2.0, math.inf):
        widths = []
        for kind, module in ((BoundedModule, Normalized(4, 0)), (StockModule, Decomposed(4, 0))):
            case = Case("norm", module.double(), [x], [0], eps)
            graph = kind(Flat(case.module, 12), x)
            low, high = graph.compute_bounds(x=bounded_inputs(case, norm, x.dtype), C=c, method="CROWN")
            widths.append(float((high - low).mean()))
        assert widths[0] <= (1.03 if eps < 0.1 else 0.99) * widths[1], (norm, widths)
