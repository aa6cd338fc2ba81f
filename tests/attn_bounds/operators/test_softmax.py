"""A softmax outside attention, reciprocals and roots under `BoundContract`; what is refused, and masks."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from attn_bounds.errors import InputError

from ..contract import BoundContract, Case, bounds
from .test_attention import SelfAttention, tensor


class Softmax(nn.Module):
    """Linear, softmax over an axis, linear."""

    def __init__(self, d: int, seed: int, axis: int = -1, size: float = 1.0) -> None:
        super().__init__()
        self.axis = axis
        self.register_buffer("one", tensor(seed, d, d, scale=size))
        self.register_buffer("two", tensor(seed + 1, d, 3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.matmul(torch.softmax(torch.matmul(x, self.one), self.axis), self.two)


class Quotient(nn.Module):
    """`(x W) / √(1 + (x V)²)` by multiplication, as importers write it."""

    def __init__(self, seed: int, shift: float = 1.0) -> None:
        super().__init__()
        self.shift = shift
        self.register_buffer("one", tensor(seed, 4, 3))
        self.register_buffer("two", tensor(seed + 1, 4, 3))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.matmul(x, self.two)
        return torch.matmul(x, self.one) * torch.reciprocal(torch.sqrt(y * y + self.shift))


class Division(nn.Module):
    """A quotient of tensors that move, of either sign, and by a root; one that broadcasts; by a constant."""

    def __init__(self, seed: int, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.register_buffer("one", tensor(seed, 4, 3))
        self.register_buffer("two", tensor(seed + 1, 4, 3))
        self.register_buffer("fixed", tensor(seed + 2, 3))

    def forward(self, x: Tensor) -> Tensor:
        top, below = torch.matmul(x, self.one), torch.matmul(x, self.two)
        if self.kind == "constant":
            return torch.relu(top) / self.fixed
        if self.kind == "root":
            return top / torch.sqrt(below * below + 1.0)
        if self.kind == "broadcast":
            return top / (torch.exp(below).sum(-1, keepdim=True))
        if self.kind == "numerator":
            return self.fixed / (torch.exp(below) + 1.0)
        return top / (torch.sigmoid(below) * -1.0 - 1.0)


class Inverse(nn.Module):
    def __init__(self, sign: float = 1.0, divide: bool = False) -> None:
        super().__init__()
        self.sign, self.divide = sign, divide

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.sign
        return (x + 1.0) / x if self.divide else torch.reciprocal(x)


class TestAlone(BoundContract):
    methods = ("IBP", "CROWN", "forward", "sensitivity")

    @staticmethod
    def cases() -> list[Case]:
        return [
            Case("rows", Softmax(4, 0), [tensor(9, 1, 3, 4)], [0], 0.2),
            Case("one row", Softmax(4, 2), [tensor(8, 1, 4)], [0], 0.5),
            Case("columns", Softmax(4, 4, axis=1), [tensor(7, 1, 3, 4)], [0], 0.2),
            Case("large scores", Softmax(4, 6, size=10.0), [tensor(6, 1, 4)], [0], 0.3),
            Case("a negative divisor", Inverse(-1.0), [tensor(4, 1, 3).abs() + 1.0], [0], 0.5),
        ]


class TestQuotients(BoundContract):
    methods = ("IBP", "CROWN", "sensitivity")

    @staticmethod
    def cases() -> list[Case]:
        kinds = ("negative", "root", "broadcast", "constant", "numerator")
        return [
            *(Case(kind, Division(20, kind), [tensor(5, 1, 2, 4)], [0], 0.1) for kind in kinds),
            Case("by multiplication", Quotient(8), [tensor(5, 1, 4)], [0], 0.1),
        ]


class TestDescent(BoundContract):
    methods = ("alpha-crown",)

    @staticmethod
    def cases() -> list[Case]:
        return [*TestAlone.cases()[:3:2], TestQuotients.cases()[0]]


@pytest.mark.parametrize("divide", [False, True])
@pytest.mark.parametrize("method", ["IBP", "CROWN", "alpha-crown", "forward", "sensitivity"])
def test_division_by_what_may_be_zero_is_unknown(method: str, divide: bool) -> None:
    case = Case("inverse", Inverse(divide=divide), [torch.tensor([[1.0, 0.1]])], [0], 0.5)
    low, high = bounds(case, torch.eye(2).double(), math.inf, method)
    assert not torch.isfinite(low[0, 1]) and not torch.isfinite(high[0, 1])


MASKS = [-math.inf, torch.finfo(torch.float32).min, -1e9, -1e4]


@pytest.mark.parametrize("method", ["IBP", "CROWN", "alpha-crown", "forward", "sensitivity", "lofast"])
def test_masked_keys_are_left_out(method: str) -> None:
    """However a mask is written the bounds are those of the keys that it leaves, in both precisions."""
    found = []
    for value in MASKS[:1] if method == "alpha-crown" else MASKS:
        m = torch.zeros(3, 3, dtype=torch.float64)
        m[0, 1:] = m[1, 2] = value
        case = Case("mask", SelfAttention(4, 2, 35, mask=m), [tensor(45, 1, 3, 4)], [0], 0.1)
        c = tensor(46, 2, 12)
        both = [torch.stack(bounds(case, c, 2.0, method, t)) for t in (torch.float64, torch.float32)]
        assert torch.isfinite(torch.stack(both)).all()
        tolerance = 2e-2 if method == "alpha-crown" else 1e-3
        assert ((both[0] - both[1]).abs() <= tolerance).all()
        found.append(both[0])
    for other in found[1:]:
        assert torch.allclose(found[0], other, atol=1e-3 if method == "alpha-crown" else 1e-9)


@pytest.mark.parametrize("value, words", [(math.nan, "NaN"), (math.inf, "inf"), (-math.inf, "every key")])
def test_masks_without_a_meaning_are_refused(value: float, words: str) -> None:
    module = SelfAttention(4, 2, 35, mask=torch.full((3, 3), value, dtype=torch.float64))
    case = Case("mask", module, [tensor(45, 1, 3, 4)], [0], 0.1)
    with pytest.raises(InputError, match=words):
        bounds(case, tensor(46, 2, 12), 2.0, "CROWN")
