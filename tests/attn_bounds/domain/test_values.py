"""What moves of values do to functionals: exact where entries of V cancel, and sound in float32."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from attn_bounds.domain import sets, steps, values
from attn_bounds.domain.forms import AffineForm, Groups
from attn_bounds.domain.sets import AttentionRemainder, Ball, BoxInBall, ErrorSet
from attn_bounds.domain.values import Symbols, ValueMoves, distinct
from attn_bounds.module import BoundedModule

from ..contract import Case, Flat, bounded_inputs
from ..operators.test_attention import tensor
from .test_propagate import Block

GROWTH = 1.0 + 64 * torch.finfo(torch.float64).eps


def moves(error_set: ErrorSet, generators: Tensor) -> ValueMoves:
    """Of one group: generators (batch, heads, k, m, dv)."""
    w = generators.transpose(1, 2).flatten(2)
    low, high = error_set.range(w)
    support = torch.maximum(-low, high).reshape(*generators.shape[:2], *generators.shape[3:])
    worth = torch.ones(len(generators), dtype=torch.bool)
    return ValueMoves(support, symbols=Symbols(error_set, generators, GROWTH, worth))


@pytest.mark.parametrize("norm", [1.0, 2.0, math.inf])
def test_a_ball_is_exact(norm: float) -> None:
    g = tensor(1, 2, 3, 7, 4, 5)
    a = tensor(2, 2, 3, 6, 5)
    ball = Ball("input", 7, norm, 2, g)
    exact = torch.linalg.vector_norm(
        torch.einsum("bhfd,bhkmd->bhfkm", a, g), {1.0: math.inf, 2.0: 2.0}.get(norm, 1.0), dim=3
    )
    found = moves(ball, g).whole(a)
    assert (found >= exact).all() and torch.allclose(found, exact, rtol=1e-9)
    assert float((found / moves(ball, g)._replace(symbols=None).whole(a)).mean()) < 0.9  # entries cancel


def test_every_set_is_covered_by_what_it_can_do() -> None:
    """Points of the set, pushed in the direction of each functional, stay below the bound."""
    g = tensor(3, 1, 2, 6, 4, 5)
    a = tensor(4, 1, 2, 8, 5)
    box = BoxInBall(
        "relu", -tensor(5, 1, 6).abs(), tensor(6, 1, 6).abs(), torch.tensor([0.9], dtype=torch.float64)
    )
    found = moves(box, g).whole(a)
    direction = torch.einsum("bhfd,bhkmd->bhfmk", a, g)
    worst = torch.zeros_like(found)
    for sign in (1.0, -1.0):
        for mu in torch.logspace(-2, 2, 40):
            e = torch.minimum(torch.maximum(mu * sign * direction, box.lower), box.upper)
            size = torch.linalg.vector_norm(e, dim=-1, keepdim=True)
            e = e * (0.9 / size).clamp(max=1.0)
            worst = torch.maximum(worst, (e * direction).sum(-1).abs())
    assert (found >= worst - 1e-12).all() and float((worst / found).mean()) > 0.8


def test_float32_generators_that_cancel() -> None:
    """A functional that nearly cancels the generators must not fall below its value in real arithmetic."""
    g = tensor(7, 1, 1, 9, 3, 6)
    a = torch.cat([tensor(8, 1, 1, 50, 5), -torch.ones(1, 1, 50, 1)], 3).float()
    g = g.repeat(1, 1, 1, 50, 1)  # the functional f is zero on the keys 3f … 3f + 2, but for rounding
    keys = a.double()[0, 0, :, :-1].repeat_interleave(3, 0)
    g[..., -1] = (g[..., :-1] * keys).sum(-1)
    single = g.float()
    ball = Ball("input", 9, math.inf, 1, single)
    low, high = ball.range(single.transpose(1, 2).flatten(2))
    support = torch.maximum(-low, high).reshape(1, 1, 150, 6)
    growth = 1.0 + 64 * torch.finfo(torch.float32).eps
    found = ValueMoves(support, symbols=Symbols(ball, single, growth, torch.ones(1, dtype=torch.bool)))
    for true in (g, single.double()):
        exact = torch.einsum("bhfd,bhkmd->bhfkm", a.double(), true).abs().sum(3)
        assert (found.whole(a) >= exact).all()
    assert float((found.whole(a) / found._replace(symbols=None).whole(a)).amin()) < 1e-4


def test_distinct_functionals() -> None:
    a = tensor(8, 1, 2, 8, 40, 3)
    a[:, :, 1:] = a[:, :, :1]  # every row asks the same
    a.requires_grad_()
    once, where = distinct(a)
    assert once.shape[2] == 40
    assert torch.equal(once[:, :, where], a.flatten(2, 3))
    once.sum().backward()  # type: ignore[no-untyped-call]
    assert float(a.grad.sum()) == once.numel()  # type: ignore[union-attr]


def remainders() -> list[tuple[AttentionRemainder, int]]:
    """The attentions of a small network, under boxes."""
    case = Case("two", Block(4, 2, 41), [tensor(42, 1, 3, 4)], [0], 0.2)
    graph = BoundedModule(Flat(case.module, 3), tuple(case.inputs))
    found = graph.propagate(bounded_inputs(case, math.inf, torch.float64))
    return [(s, s.size) for s in found.groups.sets if isinstance(s, AttentionRemainder)]


def test_functionals_that_read_few_rows_are_bounded_as_others() -> None:
    for remainder, size in remainders():
        dv = remainder.exact.average.shape[-1]
        w = torch.zeros((1, size, 12), dtype=torch.float64)
        for f in range(12):  # each reads one row
            start = (f % (size // dv)) * dv
            w[0, start : start + dv, f] = tensor(50 + f, dv)
        together = remainder.range(w)
        for f in range(12):
            dense = torch.cat([w[..., f : f + 1], torch.zeros_like(w[..., :1])], 2)
            parts = remainder._parts(remainder._by_rows(dense, remainder.exact), remainder.exact, (0.0, 1.0))
            low = -(parts.down + parts.cross + parts.scores).sum((1, 2))[:, 0]
            assert torch.allclose(together[0][:, f], low, rtol=1e-12)


def test_no_functional_at_all() -> None:
    for remainder, size in remainders():
        low, high = remainder.range(torch.zeros((1, size, 3), dtype=torch.float64))
        assert not low.any() and not high.any()


@pytest.mark.parametrize(("linear", "bilinear"), [(0.6, 0.2), (1e-4, 0.01)])
def test_score_planes_against_attack(linear: float, bilinear: float) -> None:
    """Loss of the plane against the tangent, for scores anywhere in their ranges: minimised by descent."""
    batch, heads, n, m, functionals = 2, 2, 3, 5, 4
    d = linear * tensor(60, batch, 6, heads, n, m)
    centre, b = tensor(61, batch, heads, n, m), bilinear * tensor(62, batch, heads, n, m).abs()
    p = torch.softmax(centre, -1)
    d = d - (d * p.unsqueeze(1)).sum(-1, keepdim=True)
    reach = d.abs().sum(1)
    planes = steps.ScorePlanes(d, centre, -reach, reach, b, p, GROWTH, torch.ones(batch, dtype=torch.bool))
    y = tensor(63, batch, functionals, heads, n, m)
    y = y - (y * p.unsqueeze(1)).sum(-1, keepdim=True)
    loss, slope = planes.lose(y, torch.zeros(batch, functionals, heads, n, dtype=torch.float64))
    shape = (batch, functionals, heads, n, 6)
    e = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
    extra = torch.zeros(*shape[:-1], m, dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.Adam([e, extra], 0.1)
    worst = torch.full(loss.shape, math.inf, dtype=torch.float64)
    for _ in range(300):
        move = torch.einsum("bfhnk,bkhnm->bfhnm", e, d)
        moved = torch.softmax(centre.unsqueeze(1) + move + extra * b.unsqueeze(1), -1)
        tangent = (p.unsqueeze(1) * move * y).sum(-1)
        # what is lost beyond the tangent, minus what the linear part gives back
        gap = (moved * y).sum(-1) - tangent + loss - (slope * move).sum(-1)
        worst = torch.minimum(worst, gap.detach())
        optimiser.zero_grad()
        gap.sum().backward()
        optimiser.step()
        with torch.no_grad():
            e.clamp_(-1.0, 1.0)
            extra.clamp_(-1.0, 1.0)
    assert (worst >= -1e-12).all()
    if linear < bilinear:  # to first order they are exact
        assert (worst <= 0.05 * loss).all()


def test_planes_help_where_scores_move_far(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("wide", Block(4, 1, 722), [tensor(723, 1, 3, 4)], [0], 1.0)
    c = tensor(724, 1, 3, 3)

    def bound() -> Tensor:
        graph = BoundedModule(Flat(case.module, 3), tuple(case.inputs))
        found = graph.propagate(bounded_inputs(case, math.inf, torch.float64))
        return found.lower(c)[0]

    with_planes = bound()
    monkeypatch.setattr("attn_bounds.domain.attention.WIDE", math.inf)
    assert float((with_planes - bound()).amax()) > 0.01


def test_a_memory_limit_gives_up_the_generators() -> None:
    centre, g = tensor(70, 1, 1, 3, 4), tensor(71, 1, 5, 1, 3, 4)
    groups = Groups(GROWTH, limit=100, spare=10)
    groups.add(Ball("input", 5, math.inf, 1, centre))
    p = torch.softmax(tensor(72, 1, 1, 3, 3), -1)
    from attn_bounds.domain.attention import _value_moves

    (only,) = _value_moves(AffineForm(centre, g), p, groups)
    assert only.symbols is None
    groups.spare = 1000
    (only,) = _value_moves(AffineForm(centre, g), p, groups)
    assert only.symbols is not None and groups.spare == 1000 - g.numel()


def test_too_much_work_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    g, a = tensor(73, 1, 1, 5, 3, 4), tensor(74, 1, 1, 6, 4)
    found = moves(Ball("input", 5, math.inf, 1, g), g)
    monkeypatch.setattr(values, "WORK", 1.0)
    assert torch.equal(found.whole(a), found.boxes(a.unsqueeze(3)).squeeze(3))
    assert sets.WHOLE > 0
