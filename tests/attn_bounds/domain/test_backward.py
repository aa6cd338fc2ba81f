"""Backward passes with what a forward pass knows, and more effort for the final functionals."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from attn_bounds import lirpa
from attn_bounds.domain.propagate import Propagation
from attn_bounds.module import BoundedModule
from attn_bounds.operators.base import mixed

from ..contract import BoundContract, Case, Flat, bounded_inputs, bounds
from ..operators.test_attention import SelfAttention, mask, tensor
from .test_propagate import Block, TestSensitivity


class Gated(nn.Module):
    """Attention between products of activations, which auto_LiRPA bounds more nodes for."""

    def __init__(self, gelu: bool) -> None:
        super().__init__()
        self.gelu, self.attention = gelu, SelfAttention(4, 2, 740)
        self.up = nn.Parameter(tensor(741, 4, 6), requires_grad=False)
        self.down = nn.Parameter(tensor(742, 6, 4), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.matmul(x + self.attention(x), self.up)
        if self.gelu:
            y = 0.5 * y * (1.0 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y * y * y)))
        else:
            y = y * torch.sigmoid(y)
        return torch.matmul(y, self.down)


GATED = [Case(f"gated {g}", Gated(g), [tensor(743, 1, 3, 4)], [0], 0.05) for g in (False, True)]


class TestBackward(BoundContract):
    methods = ("sensitivity-crown",)

    @staticmethod
    def cases() -> list[Case]:
        return [*TestSensitivity.cases(), *GATED]


class TestEffort(BoundContract):
    methods = ("sensitivity-alpha",)

    @staticmethod
    def cases() -> list[Case]:
        return [*(c for c in TestSensitivity.cases() if c.name in ("two blocks", "wide")), *GATED]


class TestBackwardAlone(BoundContract):
    """Without the forward pass's own bound, which would hide a wrong one."""

    methods = ("sensitivity-crown",)

    @pytest.fixture(autouse=True)
    def alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def nothing(
            self: Propagation, a: torch.Tensor, effort: object = None
        ) -> tuple[torch.Tensor, list[object]]:
            return torch.full(a.shape[:2], -math.inf, dtype=a.dtype), []

        monkeypatch.setattr(Propagation, "lower", nothing)

    @staticmethod
    def cases() -> list[Case]:
        return [
            *TestSensitivity.cases(),
            Case("wide scores", SelfAttention(4, 2, 705, 2.0), [tensor(706, 1, 3, 4)], [0], 1.0),
            Case("masked", SelfAttention(4, 2, 50, mask=mask(3, 3)), [tensor(6, 1, 3, 4)], [0], 0.3),
        ]


@pytest.mark.parametrize("eps", [1e-3, 0.05, 0.2])
def test_backward_equals_forward_where_slopes_are_equal(eps: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """One attention, no activation: the backward pass has the forward pass's slopes and errors."""
    case = Case("attention", SelfAttention(4, 2, 710), [tensor(711, 1, 3, 4)], [0], eps)
    c = tensor(712, 1, 3, 12)
    # the joint bound is another one
    monkeypatch.setattr(Propagation, "is_better", staticmethod(lambda a, b: torch.zeros_like(a) > 0))
    x = bounded_inputs(case, 2.0, torch.float64)
    graph = BoundedModule(Flat(case.module, 12), tuple(case.inputs))
    found = graph.propagate(x, backward=True)
    forward, _ = found.lower(c)
    with lirpa.default_dtype(torch.float64):
        bounds = graph.backward_bounds(found, x, c, True, False)
    assert bounds is not None
    backward = bounds[0]
    centre = (case.module(case.inputs[0]).flatten(1) @ c[0].T)[0]
    assert backward is not None
    loss = (centre - forward)[0].detach()
    assert torch.allclose(forward, backward, rtol=0, atol=2e-6 * float(loss.max())), (forward, backward)


@pytest.mark.parametrize("norm", [2.0, math.inf])
def test_more_effort_never_loosens(norm: float) -> None:
    case = Case("wide", Block(4, 1, 722), [tensor(723, 1, 3, 4)], [0], 0.5)
    c = tensor(724, 3, 3)
    quick = bounds(case, c, norm, "sensitivity")
    for method in ("sensitivity-crown", "sensitivity-alpha"):
        low, high = bounds(case, c, norm, method)
        assert (low >= quick[0] - 1e-12).all() and (high <= quick[1] + 1e-12).all()


def test_descent_is_stopped_by_the_clock_and_starts_from_the_plain_bound() -> None:
    case = Case("wide", Block(4, 1, 722), [tensor(723, 1, 3, 4)], [0], 0.5)
    x, c = bounded_inputs(case, 2.0, torch.float64), tensor(724, 1, 3, 3)
    graph = BoundedModule(case.module, tuple(case.inputs))
    found = graph.propagate(x, backward=True)
    with lirpa.default_dtype(torch.float64):
        plain = graph.backward_bounds(found, x, c)
        none = graph.backward_bounds(found, x, c, iterations=1000, deadline=0.0)
        some = graph.backward_bounds(found, x, c, iterations=5)
        more = graph.backward_bounds(found, x, c, iterations=15)
    assert plain is not None and none is not None and some is not None and more is not None
    for side, sign in ((0, 1.0), (1, -1.0)):
        a, b, d, e = (sign * t[side] for t in (plain, none, some, more))  # type: ignore[operator]
        assert torch.allclose(a, b, rtol=1e-12) and (d >= b).all() and (e >= d - 1e-12).all()
        assert float((e - a).amax()) > 1e-3  # something is gained


def test_mixed_planes_ignore_what_is_not_finite() -> None:
    first = torch.tensor([[True, False, True]])
    one = [torch.full((1, 3, 2), 2.0), None], torch.tensor([[1.0, math.inf, -math.inf]])
    two = [torch.full((1, 3, 2), 4.0), torch.ones((1, 3, 5))], torch.tensor([[3.0, 5.0, math.nan]])
    for mix in (None, torch.full((1, 3), 0.25)):
        coefficients, bias = mixed(first, one, two, mix)  # type: ignore[arg-type]
        part = 1.0 if mix is None else 0.75
        assert bias[0, 0] == part * 1.0 + (1.0 - part) * 3.0 and bias[0, 1] == 5.0
        assert not torch.isfinite(bias[0, 2])  # neither is: the bound must say so
        assert coefficients[0] is not None and coefficients[1] is not None
        assert coefficients[0][0, 0, 0] == part * 2.0 + (1.0 - part) * 4.0 and coefficients[0][0, 1, 0] == 4.0
        assert coefficients[1][0, 0, 0] == 1.0 - part and coefficients[1][0, 1, 0] == 1.0


def test_operators_forget_the_forward_pass() -> None:
    """What one input's pass knows must not serve another."""
    case = Case("block", Block(4, 1, 730), [tensor(731, 1, 3, 4)], [0], 0.3)
    graph = BoundedModule(case.module, tuple(case.inputs))
    x = bounded_inputs(case, 2.0, torch.float64)
    before = graph.compute_bounds(x=x, method="CROWN")
    graph.store.clear()
    graph.compute_bounds(x=x, method="sensitivity-crown")
    assert all(getattr(n, "local", None) is None for n in graph.all_nodes())
    after = graph.compute_bounds(x=x, method="CROWN")
    assert torch.equal(before[0], after[0])
