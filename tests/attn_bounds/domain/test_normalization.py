"""LayerNorm and RMSNorm: formula (10) of theory.md, the scalars, and the rule against ascent in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from attn_bounds.domain.forms import AffineForm, Groups
from attn_bounds.domain.normalization import NormalizationRemainder, layer_norm
from attn_bounds.domain.sets import Ball
from attn_bounds.sensitivity.normalization import difference_norm, linear_part, remainder_norm, scalars, scale

from ..contract import project
from ..operators.test_attention import tensor


def norm_of(x: Tensor, eps: float, center: bool) -> Tensor:
    z = x - x.mean(-1, keepdim=True) if center else x
    return z / scale(z, eps).unsqueeze(-1)


def test_is_layer_norm() -> None:
    x = tensor(0, 3, 5)
    expected = torch.nn.functional.layer_norm(x, (5,), eps=1e-3)
    assert torch.allclose(norm_of(x, 1e-3, True), expected, atol=1e-12)


def test_formula_ten_is_an_identity() -> None:
    z, h = tensor(1, 7, 5), 0.5 * tensor(2, 7, 5)
    d, eps = 5, 1e-3
    s, after = scale(z, eps), scale(z + h, eps)
    u = (2 * (z * h).sum(-1) + h.square().sum(-1)) / (d * s.square())
    assert torch.allclose(after, s * (1 + u).sqrt())
    q = ((1 + u) ** -0.5 - 1 + (z * h).sum(-1) / (d * s.square())) / s
    right = linear_part(h, z, s) + h * (1 / after - 1 / s).unsqueeze(-1) + z * q.unsqueeze(-1)
    assert torch.allclose((z + h) / after.unsqueeze(-1) - z / s.unsqueeze(-1), right, atol=1e-13)


@pytest.mark.parametrize("seed", range(12))
def test_scalars_hold(seed: int) -> None:
    """Moves of a ball, also those along z, where 1/s' is largest."""
    d, eps = [1, 2, 5][seed % 3], [1e-5, 1e-2][seed % 2]
    rho = 10.0 ** (seed % 4 - 2)
    reach = torch.tensor(rho, dtype=torch.float64)
    z = tensor(seed, d) * [0.1, 1.0][seed // 6]
    h = tensor(seed + 20, 4000, d)
    h = (
        rho
        * h
        / h.norm(dim=1, keepdim=True)
        * torch.linspace(0, 1, 4000, dtype=torch.float64).unsqueeze(1).sqrt()
    )
    along = torch.linspace(-rho, rho, 2001, dtype=torch.float64).unsqueeze(1) * z / z.norm()
    h = torch.cat([h, along])
    s, size = scale(z, eps), z.norm()
    t = (h * z).sum(1)
    values = scalars(size, s, d, eps, t.min(), t.max(), reach)
    after = scale(z + h, eps)
    assert ((1 / after - 1 / s).abs() <= values.change + 1e-15 / eps).all()
    u = (2 * t + h.square().sum(1)) / (d * s.square())
    q = ((1 + u) ** -0.5 - 1 + t / (d * s.square())) / s
    room = 1e-15 / eps
    assert (q >= values.q_low - room).all() and (q <= values.q_high + room).all()
    move = (z + h) / after.unsqueeze(1) - z / s - linear_part(h, z, s)
    far = ((z + h) / after.unsqueeze(1) - z / s).norm(dim=1)
    assert (far <= difference_norm(s, d, reach) + room).all()
    assert (move.norm(dim=1) <= remainder_norm(size, reach, values) + room).all()


def attack(form: AffineForm, functional: Tensor, norm: float, eps: float, center: bool) -> Tensor:
    """Largest value of each functional (F, tokens · d) of the normalised form over the unit lp ball."""
    g, count = form.generators[0], len(functional)
    rows = functional.repeat_interleave(16, 0)
    z = project(tensor(99, len(rows), g.shape[0]), norm, 1.0)
    best = torch.full((len(rows),), -math.inf, dtype=torch.float64)
    for step in range(200):
        z.requires_grad_()
        value = (norm_of(form.centre + torch.einsum("zk,ktd->ztd", z, g), eps, center).flatten(1) * rows).sum(
            1
        )
        best = torch.maximum(best, value.detach())
        (grad,) = torch.autograd.grad(value.sum(), z)
        z = z.detach()
        rate = 1 - step / 200
        if norm == math.inf:
            move = grad.sign()
        elif norm == 2.0:
            move = grad / grad.norm(dim=1, keepdim=True).clamp(min=1e-300)
        else:
            hot = torch.zeros_like(grad).scatter(1, grad.abs().argmax(1, keepdim=True), 1.0)
            move = hot * grad.sign()
        even = (torch.arange(len(z)) % 2 == 0).unsqueeze(1)
        z = torch.where(even, z + rate * (move - z), project(z + rate * move, norm, 1.0))
    return best.reshape(count, 16).amax(1)


def row_bounds(form: AffineForm, groups: Groups, functional: Tensor) -> tuple[Tensor, Tensor]:
    centre = functional @ form.centre.flatten()
    low, high = groups.total(groups.ranges(form.generators.flatten(2) @ functional.T), centre[None])
    return (centre + low)[0], (centre + high)[0]


@pytest.mark.parametrize("center", [True, False])
@pytest.mark.parametrize("norm", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("radius", [1e-4, 1e-2, 0.2, 1.0, 10.0])
def test_rule_is_never_exceeded(radius: float, norm: float, center: bool) -> None:
    for seed in range(3):
        eps = [1e-5, 1e-2, 1.0][seed]
        g = tensor(seed, 1, 5, 2, 4) * radius
        form = AffineForm(tensor(seed + 5, 1, 2, 4), g)
        groups = Groups(growth=1.0)
        groups.add(Ball("input", 5, norm, 1, g))
        out, _ = layer_norm(form, groups, "norm", eps, center)
        functional = torch.cat([tensor(seed + 9, 3, 8), torch.eye(8, dtype=torch.float64)[:2]])
        low, high = row_bounds(out, groups, functional)
        found_high = attack(form, functional, norm, eps, center)
        found_low = -attack(form, -functional, norm, eps, center)
        room = 1e-12 * (1 + functional.norm(dim=1))
        assert (low <= found_low + room).all() and (high >= found_high - room).all()
        if radius <= 1e-4 and seed:
            assert (high - low <= 1.01 * (found_high - found_low)).all(), "tight for small radii"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_errors_lie_in_the_ball(dtype: torch.dtype) -> None:
    """With a second error set behind the input, and in both precisions."""
    from attn_bounds.domain.rules import relu

    for radius in (0.01, 0.3, 3.0):
        g = (tensor(3, 1, 5, 2, 4) * radius).to(dtype)
        groups = Groups(growth=1.0 + 64 * torch.finfo(dtype).eps)
        groups.add(Ball("input", 5, 2.0, 1, g))
        x, _ = relu(AffineForm(tensor(4, 1, 2, 4).to(dtype), g), groups, "relu")
        before = len(groups.sets)
        out, squares = layer_norm(x, groups, "norm", 1e-3)
        z = tensor(5, 4000, 5)
        z = z / z.norm(dim=1, keepdim=True)
        entered = tensor(4, 1, 2, 4).to(dtype).double() + torch.einsum("zk,ktd->ztd", z, g[0].double())
        symbols = [z]
        if before == 2:  # what the relu's symbols are at these points
            k = x.generators.shape[1] - 5
            picked = x.generators[0, 5:].flatten(1).nonzero()[:, 1]
            assert len(picked) == k
            linear = torch.einsum("zk,ktd->ztd", z, x.generators[0, :5].double())
            error = torch.relu(entered) - x.centre.double() - linear
            symbols.append(error.flatten(1)[:, picked])
        e = torch.cat(symbols, 1)
        result = norm_of(torch.relu(entered), 1e-3, True)
        square = torch.relu(entered).var(-1, correction=0) + 1e-3
        assert (square >= squares[0].double()).all() and (square <= squares[1].double()).all()
        moved = torch.einsum("zk,ktd->ztd", e, out.generators[0, : e.shape[1]].double())
        rest = (result - out.centre.double() - moved).flatten(1)
        error_set = groups.sets[before]
        room = 1e-12 if dtype == torch.float64 else 1e-5
        assert error_set.radius is not None and (rest.norm(dim=1) <= error_set.radius.double() + room).all()
        w = tensor(6, 1, 8, 12).to(dtype)
        low, high = error_set.range(w)
        values = rest @ w[0].double()
        assert (values <= high.double() + room * 10).all() and (values >= low.double() - room * 10).all()


@pytest.mark.parametrize("center", [True, False])
def test_far_away_the_sphere_is_the_bound(center: bool) -> None:
    """However large the radius: the result lies on a sphere of radius √d, and all of it is reached."""
    g = torch.eye(4, dtype=torch.float64).reshape(1, 4, 1, 4) * 1e6
    form = AffineForm(tensor(8, 1, 1, 4), g)
    groups = Groups(growth=1.0)
    groups.add(Ball("input", 4, 2.0, 1, g))
    out, _ = layer_norm(form, groups, "norm", 1e-5, center)
    functional = tensor(9, 3, 4)
    low, high = row_bounds(out, groups, functional)
    free = functional - functional.mean(1, keepdim=True) if center else functional
    sphere = 2.0 * free.norm(dim=1)
    assert torch.allclose(high, sphere, rtol=1e-6) and torch.allclose(low, -sphere, rtol=1e-6)
    assert (high >= attack(form, functional, 2.0, 1e-5, center) - 1e-12).all()


def test_rule_knows_how_the_scale_moves() -> None:
    """Along z the scale and q reach the ends that the rule gives them."""
    z = tensor(12, 1, 1, 4)
    g = 0.3 * z.unsqueeze(1)
    groups = Groups(growth=1.0)
    groups.add(Ball("input", 1, 2.0, 1, g))
    layer_norm(AffineForm(z, g), groups, "norm", 1e-2, center=False)
    errors = groups.sets[1]
    assert isinstance(errors, NormalizationRemainder)
    s, after = scale(z, 1e-2), scale(0.7 * z, 1e-2)
    assert float(errors.values.change) == pytest.approx(float(1 / after - 1 / s), rel=1e-9)


def test_batch_equals_loop_and_nan_stays() -> None:
    g, c = tensor(10, 3, 4, 2, 4) * 0.1, tensor(11, 3, 2, 4)
    g[1, 0, 0, 0] = math.nan

    def run(rows: slice) -> tuple[Tensor, Tensor]:
        groups = Groups(growth=1.0)
        groups.add(Ball("input", 4, 2.0, len(c[rows]), g))
        out, _ = layer_norm(AffineForm(c[rows], g[rows]), groups, "norm", 1e-5)
        return groups.total(groups.ranges(out.generators), out.centre)

    low, high = run(slice(None))
    assert not torch.isfinite(low[1, 0]).any() and not torch.isfinite(high[1, 0]).any()
    for i in (0, 2):
        alone = run(slice(i, i + 1))
        assert torch.allclose(low[i : i + 1], alone[0]) and torch.allclose(high[i : i + 1], alone[1])
