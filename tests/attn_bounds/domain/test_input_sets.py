"""Balls cut by limits, and balls in chosen entries only."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from attn_bounds import InputError, InputSet, Verifier, lirpa, pgd
from attn_bounds.domain.sets import ClippedBall
from attn_bounds.module import BoundedModule

from ..contract import project
from ..operators.test_attention import tensor
from .test_propagate import Block


class Patches(nn.Module):
    """A first linear layer of lower rank, so that a ball shrinks; then a block."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("embed", tensor(801, 6, 4))
        self.block = Block(4, 1, 802)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(torch.matmul(x, self.embed))


@pytest.fixture(scope="module")
def verifier() -> Verifier:
    return Verifier(Patches(), input_shape=(3, 6), dtype=torch.float64)


X = tensor(803, 1, 3, 6)


def attacked(verifier: Verifier, ball: InputSet) -> tuple[float, float]:
    """Bound and smallest margin found."""
    spec = verifier.specification(int(verifier.module(ball.center).argmax()))
    bound = float(spec.margin(verifier.row_bounds([ball], [spec], "sensitivity")[0]))
    found = pgd(verifier.module, ball, spec, restarts=20, steps=60, stop_early=False, dtype=torch.float64)
    assert found.margin >= bound, "the attack got below the bound"
    return bound, found.margin


@pytest.mark.parametrize("norm", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("eps", [0.05, 0.3])
def test_clipped_balls(verifier: Verifier, norm: float, eps: float) -> None:
    clip = (float(X.min()), float(X.max()) * 0.2 + float(X.min()) * 0.8)
    x = X.clamp(*clip)
    cut, _ = attacked(verifier, InputSet.ball(x, norm, eps, clip))
    whole, _ = attacked(verifier, InputSet.ball(x, norm, eps))
    assert cut >= whole - 1e-9, "limits must not loosen a bound"
    if norm != math.inf and eps == 0.3:
        assert cut > whole + 1e-3


@pytest.mark.parametrize("norm", [1.0, 2.0, math.inf])
def test_chosen_tokens(verifier: Verifier, norm: float) -> None:
    mask = torch.zeros(1, 3, 1, dtype=torch.bool)
    mask[0, 1] = True
    some, found = attacked(verifier, InputSet.ball(X, norm, 0.2, mask=mask))
    everything, _ = attacked(verifier, InputSet.ball(X, norm, 0.2))
    assert some > everything
    nothing, centre = attacked(verifier, InputSet.ball(X, norm, 0.2, mask=mask & False))
    assert nothing == pytest.approx(centre, abs=1e-9)
    assert found <= centre


def test_batch_of_different_masks(verifier: Verifier) -> None:
    balls = []
    for token in range(2):
        mask = torch.zeros(1, 3, 1, dtype=torch.bool)
        mask[0, token] = True
        balls.append(InputSet.ball(X, 2.0, 0.2, mask=mask))
    spec = verifier.specification(0)
    together = verifier.row_bounds(balls, [spec, spec], "sensitivity")
    for i, ball in enumerate(balls):
        # not to the last digit: alone, the ball shrinks to the rank of the first layer
        alone = verifier.row_bounds([ball], [spec], "sensitivity")[0]
        assert torch.allclose(together[i], alone, atol=0.02)


def test_few_entries_have_few_symbols() -> None:
    graph = BoundedModule(Patches(), X)
    given = InputSet.ball(X, math.inf, 0.1, mask=torch.arange(6) < 2)
    verifier = Verifier(Patches(), input_shape=(3, 6), dtype=torch.float64)
    bounded, _ = verifier._bounded([given])
    assert graph.propagate((bounded,)).groups.sets[0].size == 6


def test_mask_of_wrong_shape() -> None:
    with pytest.raises(InputError, match="mask has shape"):
        InputSet.ball(X, 2.0, 0.1, mask=torch.ones(5, dtype=torch.bool))


@pytest.mark.parametrize("norm", [1.0, 2.0])
def test_clipped_ball_support_against_ascent(norm: float) -> None:
    lower, upper = -tensor(810, 1, 5).abs() * 0.5, tensor(811, 1, 5).abs() * 0.5
    s, w = ClippedBall("c", norm, lower, upper), tensor(812, 1, 5, 4)
    loose, tight = s.range(w), s.tight_range(w)
    for f in range(4):
        e = torch.zeros(1, 5, dtype=torch.float64)
        for step in range(800):
            e = e + 0.05 * (1 - step / 800) * w[:, :, f]
            for _ in range(20):
                e = project(torch.maximum(torch.minimum(e, upper), lower), norm, 1.0)
        e = torch.maximum(torch.minimum(e, upper), lower)
        e = e / max(1.0, float(torch.linalg.vector_norm(e, norm)))
        best = float((w[:, :, f] * e).sum())
        assert best <= float(tight[1][0, f]) + 1e-9 <= float(loose[1][0, f]) + 2e-9


def test_a_ball_shrinks_also_where_a_shape_is_read() -> None:
    """`x.shape` in a torch module is one more reader of the input, but not of its values."""

    class Shaped(Patches):
        def forward(self, x: Tensor) -> Tensor:
            batch, tokens, _ = x.shape
            return self.block(torch.matmul(x, self.embed).reshape(batch, tokens, 4))

    graph = BoundedModule(Shaped(), X)
    verifier = Verifier(Shaped(), input_shape=(3, 6), dtype=torch.float64)
    bounded, _ = verifier._bounded([InputSet.ball(X, 2.0, 0.1)])
    assert graph.propagate((bounded,)).groups.sets[0].size == 12
    if lirpa.is_old():  # the batch size is a constant of its graph
        with pytest.raises(InputError, match="write -1 for the batch"):
            verifier.graph(stock=False)
        return
    spec = verifier.specification(0)
    both = verifier.row_bounds([InputSet.ball(X, 2.0, 0.1)] * 2, [spec, spec], "sensitivity")
    alone = verifier.row_bounds([InputSet.ball(X, 2.0, 0.1)], [spec], "sensitivity")
    assert torch.allclose(both, alone.expand(2, -1)), "whatever batch the example had"
