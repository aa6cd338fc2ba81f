"""Ranges of LayerNorm and RMSNorm over boxes, and planes: attacked in float64, exact ends reached."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attn_bounds.sensitivity.normalization_box import (
    best_part,
    box,
    flat_planes,
    normalize,
    product_planes,
    value_range,
)

from ..operators.test_attention import tensor


def boxes(d: int, seed: int) -> tuple[Tensor, Tensor]:
    """Many boxes: narrow and wide, with points for sides, a large mean, tiny variance."""
    n = 24
    centre = tensor(seed, n, d)
    width = (
        10.0 ** torch.linspace(-5, 1.5, n, dtype=torch.float64).unsqueeze(1) * tensor(seed + 1, n, d).abs()
    )
    width[:, 0] = torch.where(torch.arange(n) % 3 == 0, 0.0, width[:, 0])
    centre[::5] = 1e-3 * centre[::5] + 7.0
    centre[1::5] = 3.0 * centre[1::5] + 1e3
    return centre - width, centre + width


def extremes(low: Tensor, high: Tensor, functional: Tensor, eps: float, centred: bool) -> Tensor:
    """Largest value of functionals (F, d) over boxes (n, d) that coordinate-wise ascent finds: (n, F)."""
    n, d = low.shape
    starts = 12
    lo, u = (t[:, None, None].expand(n, len(functional), starts, d) for t in (low, high))
    generator = torch.Generator().manual_seed(3)
    t = torch.rand(lo.shape, generator=generator, dtype=torch.float64)
    t[..., ::2, :] = (t[..., ::2, :] > 0.5).double()
    x = lo + t * (u - lo)
    width = (u - lo).amax(-1, keepdim=True)
    best = torch.full(x.shape[:-1], -torch.inf, dtype=torch.float64)
    for step in range(150):
        x.requires_grad_()
        value = (normalize(x, eps, centred) * functional[:, None]).sum(-1)
        best = torch.maximum(best, value.detach())
        (g,) = torch.autograd.grad(value.sum(), x)
        rate = 0.5 * 0.95**step
        scaled = g / g.abs().amax(-1, keepdim=True).clamp(min=1e-300)
        move = torch.where((torch.arange(starts) % 3 == 0).unsqueeze(-1), g.sign(), scaled)
        x = (x.detach() + rate * width * move).clamp(min=lo, max=u)
    return best.amax(-1)


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("d", [2, 3, 7])
@pytest.mark.parametrize("eps", [1e-12, 1e-5, 1.0])
def test_ranges_hold_and_are_reached(d: int, centred: bool, eps: float) -> None:
    for seed in (0, 10):
        low, high = boxes(d, seed)
        lower, upper = value_range(low, high, eps, centred)
        found = extremes(low, high, torch.eye(d, dtype=torch.float64), eps, centred)
        least = -extremes(low, high, -torch.eye(d, dtype=torch.float64), eps, centred)
        room = 1e-11  # of the evaluation itself, for entries near 1000
        assert (upper >= found - room).all() and (lower <= least + room).all()
        limit = (d - 1) ** 0.5 if centred else d**0.5
        assert (upper <= limit + 1e-9).all() and (lower >= -limit - 1e-9).all()
        exact = found > 1e-3 if centred else torch.ones_like(found, dtype=torch.bool)
        # ascent itself stops short in a box whose scale is tiny
        close = (upper - found) <= 2e-2 * (found - least) + 1e-6
        assert close[exact].double().mean() > 0.97, (upper - found)[exact & ~close]


@pytest.mark.parametrize("centred", [True, False])
def test_range_is_exact_to_first_order(centred: bool) -> None:
    """As the box shrinks the range over its width tends to that of the Jacobian, at both ends."""
    x, r = tensor(4, 1, 6), tensor(5, 1, 6).abs()
    jacobian = torch.autograd.functional.jacobian(lambda t: normalize(t, 1e-5, centred), x[0])
    reach = jacobian.abs() @ r[0]
    for size in (1e-3, 1e-5):
        lower, upper = value_range(x - size * r, x + size * r, 1e-5, centred)
        at = normalize(x, 1e-5, centred)
        for move in (upper - at, at - lower):
            assert ((move / size - reach).abs() <= 50 * size + 1e-6).all(), (move / size, reach)


def test_one_entry_is_constant() -> None:
    lower, upper = value_range(torch.tensor([[-3.0], [1.0]]), torch.tensor([[2.0], [1.0]]), 1e-5, True)
    assert (lower == 0).all() and (upper == 0).all()


def test_wide_vectors() -> None:
    """Rounding of sums over many entries leaves the range tight."""
    x = tensor(6, 2, 768) + 5.0
    r = 1e-3 * tensor(7, 2, 768).abs()
    lower, upper = value_range(x - r, x + r, 1e-5, True)
    at = normalize(x, 1e-5, True)
    assert (lower <= at).all() and (upper >= at).all()
    assert (
        (upper - lower)
        <= 2.2 * r / x.std(-1, keepdim=True) + 2.2 * r.mean() / x.std(-1, keepdim=True) * (1 + at.abs())
    ).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("centred", [True, False])
def test_planes_are_below(centred: bool, dtype: torch.dtype) -> None:
    d = 5
    for seed, eps in ((0, 1e-5), (10, 1e-2)):
        low, high = (t.to(dtype) for t in boxes(d, seed))
        a = tensor(seed + 2, 8, 1, d).expand(8, len(low), d).to(dtype)
        own = box(low, high, eps, centred)
        flat = flat_planes(a, own)
        best = best_part(a, own)
        for part in (best, torch.zeros_like(best), torch.ones_like(best), 0.3 + 0 * best):
            plane = product_planes(a, own, part)
            t = torch.rand(400, 1, d, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
            t[::2] = (t[::2] > 0.5).double()
            lo, u = low.double(), high.double()
            x = (lo + t * (u - lo)).clamp(min=lo, max=u)  # (points, boxes, d)
            value = torch.einsum("pbd,sbd->spb", normalize(x, eps, centred), a.double())
            below = torch.einsum(
                "pbd,sbd->spb", x - own.centre, plane.slope.double()
            ) + plane.value.double().unsqueeze(1)
            room = 1e-12 * (1 + value.abs())
            assert (below <= value + room).all()
            assert (flat.double().unsqueeze(1) <= value + room).all()


@pytest.mark.parametrize("centred", [True, False])
def test_planes_tend_to_the_jacobian(centred: bool) -> None:
    x, r = tensor(4, 1, 6), tensor(5, 1, 6).abs()
    a = tensor(8, 4, 1, 6)
    jacobian = torch.autograd.functional.jacobian(lambda t: normalize(t, 1e-5, centred), x[0])
    losses = []
    for size in (1e-2, 1e-3, 1e-4):
        own = box(x - size * r, x + size * r, 1e-5, centred)
        plane = product_planes(a, own, best_part(a, own))
        assert ((plane.slope[:, 0] - a[:, 0] @ jacobian).abs() <= 30 * size).all()
        losses.append(float(((a * normalize(x, 1e-5, centred)).sum(-1) - plane.value).max()) / size**2)
    assert max(losses) < 20 and min(losses) >= 0, losses


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("size", [1e-15, 1e15, 1e18])
def test_planes_in_single_precision_hold_for_inputs_of_any_size(centred: bool, size: float) -> None:
    """The cube of 1/s is out of the range of float32 long before the inputs are."""
    centre, half = size * tensor(5, 40, 1, 4), 0.1 * size * tensor(6, 40, 1, 4).abs()
    low, high = (centre - half).float(), (centre + half).float()
    eps, a = 1e-3 * size**2, tensor(7, 6, 1, 1, 4).float()
    own = box(low, high, eps, centred)
    planes = product_planes(a, own, best_part(a, own))
    x = torch.stack([low + (high - low) * k / 8 for k in range(9)]).double()
    moved = (planes.slope.double()[None] * (x - own.centre)[:, None]).sum(-1)
    true = (a.double() * normalize(x, eps, centred)[:, None]).sum(-1)
    assert bool((planes.value.double() + moved <= true + 1e-6).all())
    near = planes.value.double() - (a.double() * normalize(own.centre, eps, centred)).sum(-1)
    assert float(near.median()) > -0.5


@pytest.mark.parametrize("centred", [True, False])
def test_where_squares_overflow_the_length_is_what_is_known(centred: bool) -> None:
    x = torch.tensor([[1.0, -2.0, 3.0]], dtype=torch.float64)
    for size in (1e155, 1e300):
        low, high = value_range(
            size * x - 0.2 * size * x.abs(), size * x + 0.2 * size * x.abs(), 1e-5, centred
        )
        exact = normalize(x, 0.0, centred)
        assert (low <= exact).all() and (exact <= high).all()
        assert (high <= 3**0.5 * (1 + 1e-9)).all() and (low >= -(3**0.5) * (1 + 1e-9)).all()
