"""Softmax over a box of scores: every bound against optimisation in float64, and known answers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from attn_bounds.sensitivity.bilinear import product_lower_plane, product_range
from attn_bounds.sensitivity.softmax import (
    average_range,
    best_row_shift,
    centred_probability_box,
    jacobian_norm_on_box,
    jacobian_norm_upper,
    key_lower_plane,
    largest_average,
    largest_simplex_average,
    log_sum_exp_of_others,
    probability_box,
    softmax_planes,
    weights_lower_plane,
)


def rand(seed: int, *shape: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def box(seed: int, *shape: int, scale: float, width: float) -> tuple[Tensor, Tensor]:
    centre = rand(seed, *shape, scale=scale)
    rad = width * torch.rand(shape, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
    return centre - rad, centre + rad


BOXES = [
    box(10 * i, 5, m, scale=scale, width=width)
    for i, (m, scale, width) in enumerate(
        [(1, 1, 1), (2, 1, 0.1), (3, 1, 1), (4, 5, 3), (6, 30, 1), (5, 0.1, 1e-4), (3, 1, 20)]
    )
]


def corners(lower: Tensor, upper: Tensor) -> Tensor:
    """All vertices of the boxes: (2^m, …, m)."""
    m = lower.shape[-1]
    bits = torch.tensor([[(k >> i) & 1 for i in range(m)] for k in range(2**m)], dtype=torch.bool)
    shape = (2**m,) + (1,) * (lower.ndim - 1) + (m,)
    return torch.where(bits.reshape(shape), upper, lower)


def descend(f, lower: Tensor, upper: Tensor, starts: int = 12, steps: int = 60) -> Tensor:  # type: ignore[no-untyped-def]
    """Smallest values of f (…, m) → (…) over the boxes, by projected descent from corners and inside."""
    t = torch.rand((starts, *lower.shape), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    s = torch.cat([lower + t * (upper - lower), corners(lower, upper)[:64]])
    best = f(s).amin(0)
    for step in range(steps):
        s.requires_grad_()
        (g,) = torch.autograd.grad(f(s).sum(), s)
        s = s.detach() - (1 - step / steps) * 0.5 * (upper - lower) * g.sign()
        s = torch.maximum(torch.minimum(s, upper), lower)
        best = torch.minimum(best, f(s).amin(0))
    return best


@pytest.mark.parametrize("lower, upper", BOXES)
def test_probability_box_is_exact(lower: Tensor, upper: Tensor) -> None:
    p = torch.softmax(corners(lower, upper), -1)
    low, high = probability_box(lower, upper)
    assert (low <= p.amin(0)).all() and (high >= p.amax(0)).all()
    assert torch.allclose(low, p.amin(0), rtol=1e-10, atol=1e-14)
    assert torch.allclose(high, p.amax(0), rtol=1e-10, atol=1e-14)


def test_interval_that_stock_0_7_1_gets_wrong() -> None:
    """For L = (−23, −18.5), U = (0, −18.4) it reports 0.990 as lower bound; the truth is 0.00995."""
    low, high = probability_box(torch.tensor([-23.0, -18.5]), torch.tensor([0.0, -18.4]))
    true_low = 1 / (1 + math.exp(-18.4 + 23.0))
    assert low[0] <= true_low and low[0] == pytest.approx(true_low, rel=1e-4)
    assert high[0] >= 1 / (1 + math.exp(-18.5)) - 1e-7


def test_masked_scores_have_probability_zero() -> None:
    s = torch.tensor([0.3, -1e9, -0.2, -1e9])
    for lower, upper in ((s, s), (s - 0.1, s + 0.1)):
        low, high = probability_box(lower, upper)
        assert (high[[1, 3]] == 0).all() and (low[[0, 2]] > 0.3).all()
        planes = softmax_planes(lower, upper)
        assert all(torch.isfinite(t).all() for t in planes)
    low, high = probability_box(s, s)
    assert torch.allclose(low, torch.softmax(s, -1), atol=1e-5) and torch.allclose(high, low, atol=1e-4)


def test_log_sum_exp_of_others() -> None:
    x = rand(0, 4, 5, scale=3.0)
    expected = torch.stack([torch.cat([x[:, :c], x[:, c + 1 :]], 1).logsumexp(1) for c in range(5)], 1)
    assert torch.allclose(log_sum_exp_of_others(x), expected, atol=1e-12)
    assert (log_sum_exp_of_others(x[:, :1]) == -math.inf).all()


@pytest.mark.parametrize("lower, upper", BOXES)
def test_planes_hold(lower: Tensor, upper: Tensor) -> None:
    for t in (0.0, 0.5, 0.9):
        p = softmax_planes(lower, upper, lower + t * (upper - lower))

        def below(s: Tensor, p=p) -> Tensor:  # type: ignore[no-untyped-def]
            d = s - p.centre
            plane = p.low + p.low_own * d - p.low_others * (p.chord * d).sum(-1, keepdim=True)
            return (torch.softmax(s, -1) - plane).amin(-1)

        def above(s: Tensor, p=p) -> Tensor:  # type: ignore[no-untyped-def]
            d = s - p.centre
            plane = p.high + p.high_own * (d - (p.weights * d).sum(-1, keepdim=True))
            return (plane - torch.softmax(s, -1)).amin(-1)

        assert (descend(below, lower, upper) >= 0).all()
        assert (descend(above, lower, upper) >= 0).all()


@pytest.mark.parametrize("size", [1e-4, 0.1, 1.0, 5.0])
def test_centred_probability_box(size: float) -> None:
    """Never violated by a descent over centred moves, and exact to first order."""
    scores = 2.0 * rand(90, 40, 5)
    p = torch.softmax(scores, -1)
    reach = size * (0.2 + rand(91, 40, 5).abs())
    x = torch.zeros((2, 5, 40, 5), requires_grad=True)  # one row per side and entry
    optimiser = torch.optim.Adam([x], 0.05)
    square = torch.zeros(40)

    def moves() -> Tensor:
        d = reach * torch.tanh(x)
        d = d - (p * d).sum(-1, keepdim=True)
        return d * (reach / d.abs().clamp(min=1e-300)).amin(-1, keepdim=True).clamp(max=1.0)

    smallest, largest = torch.full_like(p, math.inf), torch.zeros_like(p)
    eye = torch.eye(5).unsqueeze(1)
    for _ in range(200):
        d = moves()
        own = (torch.softmax(scores + d, -1) * eye).sum(-1)  # (2, entry, rows)
        ratio = torch.where(d.abs() > 1e-4, (d.exp() - 1.0 - d) / d.square().clamp(min=1e-30), 0.5 + d / 6)
        square = torch.maximum(square, (p * ratio * d.square()).sum(-1).detach().amax((0, 1)))
        smallest = torch.minimum(smallest, own[0].detach().T)
        largest = torch.maximum(largest, own[1].detach().T)
        optimiser.zero_grad()
        (own[0].log().sum() - own[1].log().sum()).backward()
        optimiser.step()
    low, high = centred_probability_box(p, -reach, reach, square * (1.0 + 1e-6))
    assert (low <= smallest).all() and (high >= largest).all()
    if size == 1e-4:
        assert torch.allclose(high - p, p * reach, rtol=1e-2) and torch.allclose(
            p - low, p * reach, rtol=1e-2
        )


def test_centred_probability_box_of_one_key() -> None:
    one = torch.ones(2, 1)
    low, high = centred_probability_box(one, 0.0 * one, 0.0 * one, torch.zeros(2))
    assert (low <= 1.0).all() and (high == 1.0).all()


def test_planes_touch_at_a_point() -> None:
    s = rand(3, 4, 5)
    p = softmax_planes(s, s)
    assert torch.allclose(p.low, torch.softmax(s, -1), rtol=1e-12)
    assert torch.allclose(p.high, p.low, rtol=1e-12)
    jacobian = torch.diag_embed(p.weights) - p.weights.unsqueeze(-1) * p.weights.unsqueeze(-2)
    mine = torch.diag_embed(p.low_own) - p.low_others.unsqueeze(-1) * p.chord.unsqueeze(-2)
    assert torch.allclose(mine, jacobian, atol=1e-9)


@pytest.mark.parametrize("lower, upper", BOXES)
@pytest.mark.parametrize("shift", [0.0, 0.5, -1.0])
def test_weights_lower_plane_holds(lower: Tensor, upper: Tensor, shift: float) -> None:
    a = rand(5, 2, 1, *lower.shape)  # (spec, batch, n, m)
    plane = weights_lower_plane(a, softmax_planes(lower[None], upper[None]), shift)

    def gap(s: Tensor) -> Tensor:  # s: (…, n, m); one functional
        value = (a[0, 0] * torch.softmax(s, -1)).sum(-1)
        return (value - (plane.scores[0, 0] * s).sum(-1)).sum(-1, keepdim=True).expand(value.shape)

    assert (descend(gap, lower, upper) >= plane.bias[0, 0] - 1e-12).all()


@pytest.mark.parametrize("lower, upper", BOXES)
def test_largest_average_is_exact(lower: Tensor, upper: Tensor) -> None:
    v = rand(7, *lower.shape)
    found = (torch.softmax(corners(lower, upper), -1) * v).sum(-1).amax(0)
    best = largest_average(lower, upper, v)
    assert (best >= found).all() and torch.allclose(best, found, rtol=1e-9, atol=1e-12)
    single = largest_average(lower.float(), upper.float(), v.float())
    assert (single.double() >= found - 1e-6 * v.abs().amax()).all()


def test_largest_average_survives_underflow() -> None:
    lower = torch.tensor([[-2000.0, -1000.0, -3000.0]])
    upper = torch.tensor([[-1990.0, 500.0, -10.0]])
    v = torch.tensor([[3.0, -1.0, 2.0]])
    assert float(largest_average(lower, upper, v)[0]) >= 2.0 - 1e-5
    assert torch.isfinite(largest_average(lower, upper, -v)).all()


def test_largest_simplex_average_is_exact() -> None:
    scipy = pytest.importorskip("scipy.optimize")
    for seed in range(5):
        lower, upper = box(100 + seed, 1, 5, scale=1.0, width=1.0)
        low, high = probability_box(lower, upper)
        v = rand(200 + seed, 1, 5)
        truth = -scipy.linprog(
            -v[0].numpy(), A_eq=[[1.0] * 5], b_eq=[1.0], bounds=list(zip(low[0], high[0], strict=True))
        ).fun
        best = float(largest_simplex_average(low, high, v)[0])
        assert best >= truth - 1e-12 and best == pytest.approx(truth, rel=1e-9)


def test_average_range_holds() -> None:
    for seed, (n, m, dv) in enumerate([(2, 3, 2), (1, 4, 3), (3, 1, 2)]):
        s_l, s_u = box(300 + seed, n, m, scale=2.0, width=1.0)
        v_l, v_u = box(400 + seed, m, dv, scale=1.0, width=0.3)
        low, high = average_range(s_l, s_u, v_l, v_u, probability_box(s_l, s_u))
        p = torch.softmax(corners(s_l, s_u), -1)  # each row of scores is a vertex
        worst, best = (p @ v_l).amin(0), (p @ v_u).amax(0)
        assert (low <= worst).all() and (high >= best).all()
        assert torch.allclose(low, worst, rtol=1e-9, atol=1e-12)
        assert torch.allclose(high, best, rtol=1e-9, atol=1e-12)


def test_key_plane_holds_and_is_exact_for_fixed_scores() -> None:
    s_l, s_u = box(500, 1, 3, 4, scale=1.0, width=1.0)
    v_l, v_u = box(501, 1, 4, 2, scale=1.0, width=0.5)
    a = rand(502, 3, 1, 3, 2)
    plane = key_lower_plane(a, s_l, s_u, v_l, v_u)
    generator = torch.Generator().manual_seed(0)
    for k in range(3):
        s = (s_l + s_u) / 2
        v = v_l + torch.rand(v_l.shape, generator=generator, dtype=torch.float64) * (v_u - v_l)
        best = math.inf
        for step in range(200):
            s.requires_grad_()
            v.requires_grad_()
            gap = (a[k] * (torch.softmax(s, -1) @ v)).sum() - (plane.values[k] * v).sum()
            best = min(best, float(gap.detach()))
            gs, gv = torch.autograd.grad(gap, (s, v))
            rate = 1 - step / 200
            s = torch.maximum(torch.minimum(s.detach() - rate * (s_u - s_l) * gs.sign(), s_u), s_l)
            v = torch.maximum(torch.minimum(v.detach() - rate * (v_u - v_l) * gv.sign(), v_u), v_l)
        assert best >= float(plane.bias[k, 0])
    fixed = key_lower_plane(a, s_l, s_l, v_l, v_u)
    exact = (a * (torch.softmax(s_l, -1) @ v_l)).flatten(2).sum(-1)
    assert torch.allclose((fixed.values * v_l).flatten(2).sum(-1) + fixed.bias, exact, atol=1e-10)


def test_key_term_sees_heads_cancel() -> None:
    """Two heads with equal P and W_V: W_O2 = −½ W_O1 leaves half of the sensitivity, +½ leaves 3/2."""
    s = rand(600, 1, 3, 3)
    v_l, v_u = box(601, 1, 3, 2, scale=1.0, width=0.5)
    a = rand(602, 1, 1, 3, 2)
    sizes = []
    for factor in (-0.5, 0.5):
        both = key_lower_plane(a, s, s, v_l, v_u).values + key_lower_plane(factor * a, s, s, v_l, v_u).values
        sizes.append(float(both.norm() / key_lower_plane(a, s, s, v_l, v_u).values.norm()))
    assert sizes == pytest.approx([0.5, 1.5], rel=1e-9)


@pytest.mark.parametrize("lower, upper", BOXES)
def test_jacobian_norm(lower: Tensor, upper: Tensor) -> None:
    bound = jacobian_norm_upper(*probability_box(lower, upper))

    def minus_norm(s: Tensor) -> Tensor:
        p = torch.softmax(s, -1)
        j = torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)
        return -torch.linalg.eigvalsh(j)[..., -1]

    found = -descend(minus_norm, lower, upper)
    assert (bound >= found - 1e-12).all() and (bound <= 0.5).all()


def test_jacobian_norm_on_a_box_is_that_of_its_probabilities() -> None:
    """Rows that are flat, steep, saturated, and with keys that a mask hides."""
    for i, (m, scale, width) in enumerate(
        [(1, 1, 1), (2, 3, 0.1), (9, 1, 1), (9, 30, 1e-6), (9, 300, 20), (9, 1, 300), (9, 1e3, 600)]
    ):
        lower, upper = box(900 + 10 * i, 40, m, scale=scale, width=width)
        if m > 2:
            lower[::3, -1] = upper[::3, -1] = -1e30
        p_low, p_high = probability_box(lower, upper)
        slope, highest = jacobian_norm_on_box(lower, upper)
        assert torch.allclose(highest, p_high, rtol=1e-9, atol=1e-100)
        assert torch.allclose(slope, jacobian_norm_upper(p_low, p_high), rtol=1e-6, atol=1e-9)


def test_jacobian_norm_of_uniform_rows() -> None:
    p = torch.full((1, 8), 1 / 8, dtype=torch.float64)
    assert float(jacobian_norm_upper(p, p)[0]) == pytest.approx(1 / 8, rel=1e-9)
    half = torch.tensor([[0.5, 0.5]], dtype=torch.float64)
    assert float(jacobian_norm_upper(half, half)[0]) == pytest.approx(0.5)


@pytest.mark.parametrize("mix", [0.5, 0.0, 1.0, 0.3, -1.0])
def test_product_plane_holds_at_all_vertices(mix: float) -> None:
    x_l, x_u = box(700, 1, 2, 2, scale=1.0, width=1.0)
    y_l, y_u = box(701, 1, 2, 2, scale=1.0, width=1.0)
    a = rand(702, 3, 1, 2, 2)
    weight = mix if mix == 0.5 else 1.0 if mix == -1.0 else torch.full_like(a, mix)  # the two short cuts
    plane = product_lower_plane(a, x_l, x_u, y_l, y_u, weight)
    # the gap is multilinear, so its minimum is at a vertex of the joint box
    joint_l, joint_u = (torch.cat([u.flatten(), w.flatten()]) for u, w in ((x_l, y_l), (x_u, y_u)))
    points = corners(joint_l, joint_u)
    x, y = points[:, :4].reshape(-1, 1, 2, 2), points[:, 4:].reshape(-1, 1, 2, 2)
    for k in range(3):
        gap = (a[k] * (x @ y.mT) - plane.x[k] * x - plane.y[k] * y).flatten(1).sum(1) - plane.bias[k, 0]
        assert gap.min() >= -1e-12
    low, high = product_range(x_l, x_u, y_l, y_u)
    s = x @ y.mT
    assert torch.allclose(low[0], s.amin(0)[0]) and torch.allclose(high[0], s.amax(0)[0])


def test_best_row_shift_minimises_the_loss_at_the_centre() -> None:
    lower, upper = box(800, 1, 3, 5, scale=1.0, width=1.0)
    planes = softmax_planes(lower, upper)
    a = rand(801, 2, 1, 3, 5)

    def value(t: Tensor) -> Tensor:  # bound at the centre, per row
        rest = a - t
        return (rest.clamp(min=0) * planes.low + rest.clamp(max=0) * planes.high).sum(-1, keepdim=True) + t

    best = value(best_row_shift(a, planes))
    for t in torch.linspace(-3, 3, 61, dtype=torch.float64):
        assert (best >= value(t.expand(2, 1, 3, 1)) - 1e-12).all()
