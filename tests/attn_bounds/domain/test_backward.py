"""Backward passes with what a forward pass knows, and more effort for the final functionals."""

from __future__ import annotations

import math

import pytest
import torch

from attn_bounds import lirpa
from attn_bounds.domain.propagate import Propagation
from attn_bounds.module import BoundedModule

from ..contract import BoundContract, Case, Flat, bounded_inputs, bounds
from ..operators.test_attention import SelfAttention, mask, tensor
from .test_propagate import Block, TestSensitivity


class TestBackwardAndEffort(BoundContract):
    methods = ("sensitivity-crown", "sensitivity-alpha")

    @staticmethod
    def cases() -> list[Case]:
        return TestSensitivity.cases()


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


def test_more_effort_never_loosens() -> None:
    for norm in (2.0, math.inf):
        for case in (
            Case("block", Block(4, 2, 720), [tensor(721, 1, 3, 4)], [0], 0.1),
            Case("wide", Block(4, 1, 722), [tensor(723, 1, 3, 4)], [0], 0.5),
        ):
            c = tensor(724, 3, 3)
            quick = bounds(case, c, norm, "sensitivity")
            for method in ("sensitivity-crown", "sensitivity-alpha"):
                low, high = bounds(case, c, norm, method)
                assert (low >= quick[0] - 1e-12).all() and (high <= quick[1] + 1e-12).all()


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
