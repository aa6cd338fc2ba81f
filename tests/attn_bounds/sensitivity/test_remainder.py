"""The second-order remainder of attention: identities, and every bound against ascent in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from attn_bounds.norms import gram_norm_upper, spectral_norm_upper
from attn_bounds.sensitivity.remainder import (
    RowData,
    bilinear_range_of_ball,
    chi,
    cross_bound,
    curvature_bound,
    psi,
    score_bound,
    slope_bound,
    weighted_deviation,
)


def rand(seed: int, *shape: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_curvature_identity() -> None:
    """Σ(p'−p)y − Σ pΔ'y = (1/Z) Σ p φ(Δ')(y − ℓ), and equals ∫(1−t) E_t[(Δ−E_tΔ)²(y−E_t y)] dt."""
    p, move, y = torch.softmax(rand(0, 5), 0), rand(1, 5, scale=0.7), rand(2, 5)
    y = y - (p * y).sum()
    centred = move - (p * move).sum()
    after = torch.softmax(p.log() + move, 0)
    slope = (p * centred * y).sum()
    left = (after * y).sum() - slope
    z = (p * centred.exp()).sum()
    right = (p * (torch.expm1(centred) - centred) * (y - slope)).sum() / z
    assert float(left) == pytest.approx(float(right), abs=1e-13)

    t = torch.linspace(0, 1, 2001, dtype=torch.float64).unsqueeze(1)
    q = torch.softmax(p.log() + t * move, 1)
    d = move - (q * move).sum(1, keepdim=True)
    integrand = (1 - t.squeeze(1)) * (q * d.square() * (y - (q * y).sum(1, keepdim=True))).sum(1)
    simpson = torch.ones(2001, dtype=torch.float64)
    simpson[1:-1:2], simpson[2:-1:2] = 4.0, 2.0
    assert float((simpson * integrand).sum() / 6000) == pytest.approx(float(left), abs=1e-10)


@pytest.mark.parametrize("size", [0.1, 1.0, 3.0])
def test_attention_is_its_tangent_and_two_integrals(size: float) -> None:
    """theory.md, (5), values moving as well: o' − o = E_0[w] + Cov_0(Δ,v) + ∫(1−t) E_t[…] + ∫ Cov_t(Δ,w)."""
    nodes, weights = np.polynomial.legendre.leggauss(60)
    t, weight = torch.from_numpy(nodes + 1.0)[:, None, None] / 2, torch.from_numpy(weights) / 2
    s, move = rand(3, 4, 6), rand(4, 4, 6, scale=size)
    v, w = rand(5, 4, 6), rand(6, 4, 6, scale=size)
    p = torch.softmax(s, -1)

    def cov(q: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return (q * (a - (q * a).sum(-1, keepdim=True)) * b).sum(-1)

    left = (torch.softmax(s + move, -1) * (v + w)).sum(-1) - (p * v).sum(-1)
    q = torch.softmax(s + t * move, -1)  # (nodes, 4, 6)
    square = (move - (q * move).sum(-1, keepdim=True)).square()
    curvature = (1.0 - t[..., 0]) * cov(q, v.expand_as(q), square)
    integrals = ((curvature + cov(q, move.expand_as(q), w)) * weight[:, None]).sum(0)
    right = (p * w).sum(-1) + cov(p, move, v) + integrals
    assert float((left - right).abs().max()) < 1e-10


def test_psi_and_chi_dominate() -> None:
    for r in (0.0, 1e-9, 1e-3, 0.0999, 0.1, 0.5, 3.0, 20.0):
        bound = torch.tensor(r, dtype=torch.float64)
        x = torch.linspace(-r, r, 1001, dtype=torch.float64)
        x = x[x != 0]
        assert (torch.expm1(x) - x <= psi(bound) * x.square() * (1 + 1e-9) + 1e-18).all()
        assert (torch.expm1(x).abs() <= chi(bound) * x.abs() * (1 + 1e-12)).all()
    assert float(psi(torch.tensor(0.0, dtype=torch.float64))) == 0.5


def ascend(value, start: Tensor, radius: float, steps: int = 150) -> float:  # type: ignore[no-untyped-def]
    """Largest value(z) (rows,) over the l2 ball of this radius, from all rows of `start`."""
    z = start * radius / start.norm(dim=1, keepdim=True)
    best = -math.inf
    for step in range(steps):
        z.requires_grad_()
        v = value(z)
        best = max(best, float(v.max().detach()))
        (g,) = torch.autograd.grad(v.sum(), z)
        z = z.detach() + 0.5 * radius * (1 - step / steps) * g / g.norm(dim=1, keepdim=True).clamp(min=1e-30)
        z = z * (radius / z.norm(dim=1, keepdim=True).clamp(min=1e-30)).clamp(max=1.0)
    return best


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("radius", [1e-4, 1e-2, 0.3, 1.0, 4.0])
def test_remainder_is_never_exceeded(seed: int, radius: float) -> None:
    """Scores and values move linearly with z in a ball; one query row, several functionals."""
    m, dv, k = [(1, 2, 3), (3, 2, 4), (4, 3, 6), (5, 1, 2)][seed]
    scores, d, values, dv_map = (
        rand(seed, m),
        rand(seed + 10, m, k),
        rand(seed + 20, m, dv),
        rand(seed + 30, m, dv, k),
    )
    d, dv_map = d * 0.7, dv_map * 0.3
    p = torch.softmax(scores, 0)
    d = d - (p.unsqueeze(1) * d).sum(0)  # centred
    average = p @ values
    supports = radius * d.norm(dim=1)
    gram = radius**2 * d @ d.T

    def deviation(weight: Tensor) -> Tensor:
        return weighted_deviation([gram[None]], supports[None, None], weight[None]).sum(0)

    zero = torch.zeros(1, m, dtype=torch.float64)
    rows = RowData(
        p[None],
        supports[None],
        zero,
        deviation(p),
        deviation(p * psi(supports)),
        deviation(p * chi(supports).square()),
        (p * psi(supports) * supports.square())[None],
    )
    a = rand(seed + 40, 3, dv)
    y = a @ values.T - (a @ average).unsqueeze(1)  # (F, m)
    u_map = torch.einsum("fj,cjk->fck", a, dv_map)
    sd_u = radius * torch.stack([spectral_norm_upper(p.sqrt().unsqueeze(1) * u) for u in u_map])
    top_u = radius * u_map.norm(dim=2).amax(1)
    slope = slope_bound(y[None], rows)
    down, up = curvature_bound(-y[None], slope, rows), curvature_bound(y[None], slope, rows)
    other = cross_bound(sd_u[None], top_u[None], rows) + score_bound(y[None], rows)
    low, high = -(down + other), up + other
    start = rand(seed + 50, 24, k)
    for f in range(3):

        def whole(z: Tensor, f: int = f, sign: float = 1.0) -> Tensor:
            moved = torch.softmax(scores + z @ d.T, 1)
            v = values + torch.einsum("cjk,zk->zcj", dv_map, z)
            output = torch.einsum("zc,zcj->zj", moved, v) @ a[f] - average @ a[f]
            linear = z @ (torch.einsum("c,ck->k", p * y[f], d) + torch.einsum("c,ck->k", p, u_map[f]))
            return sign * (output - linear)

        def curved(z: Tensor, f: int = f, sign: float = 1.0) -> Tensor:
            moved = torch.softmax(scores + z @ d.T, 1)
            return sign * (moved @ y[f] - z @ torch.einsum("c,ck->k", p * y[f], d))

        room = 1e-12 * (1 + radius)
        assert ascend(whole, start, radius) <= float(high[0, f]) + room
        assert ascend(lambda z: whole(z, sign=-1.0), start, radius) <= -float(low[0, f]) + room
        assert ascend(curved, start, radius) <= float(up[0, f]) + room
        assert ascend(lambda z: curved(z, sign=-1.0), start, radius) <= float(down[0, f]) + room


def test_remainder_is_second_order() -> None:
    """Over ε² it stays bounded as ε → 0."""
    p = torch.softmax(rand(60, 1, 4), 1)
    y = rand(61, 1, 2, 4)
    y = y - (p.unsqueeze(1) * y).sum(-1, keepdim=True)
    ratios = []
    for eps in (1e-1, 1e-3, 1e-5):
        r = eps * torch.ones(1, 4, dtype=torch.float64)
        sd = (p * r.square()).sum(-1).sqrt()
        sd_psi = sd * psi(r).amax(-1).sqrt()
        rows = RowData(p, r, eps * r, sd, sd_psi, sd * chi(r).amax(-1), p * psi(r) * r.square())
        size = eps * torch.ones(1, 2, dtype=torch.float64)
        curvature = curvature_bound(y, slope_bound(y, rows), rows)
        whole = curvature + cross_bound(size, size, rows) + score_bound(y, rows)
        ratios.append(float(whole.max()) / eps**2)
    assert ratios[2] == pytest.approx(ratios[1], rel=0.01) and ratios[0] < 2 * ratios[2]


@pytest.mark.parametrize("seed", range(5))
def test_bilinear_range(seed: int) -> None:
    dk, k = 3, [2, 3, 5, 8, 1][seed]
    gq, gk = rand(seed, dk, k), rand(seed + 5, dk, k)
    form = 0.5 * (gq.T @ gk + gk.T @ gq)
    values = torch.linalg.eigvalsh(form)
    low, high = bilinear_range_of_ball(gq @ gq.T, gk @ gk.T, gq @ gk.T)
    assert float(high) >= max(0.0, float(values[-1])) and float(low) <= min(0.0, float(values[0]))
    assert float(high) == pytest.approx(max(0.0, float(values[-1])), abs=1e-9)
    assert float(low) == pytest.approx(min(0.0, float(values[0])), abs=1e-9)


@pytest.mark.parametrize("shape", [(1, 1), (5, 3), (3, 200), (300, 150), (200, 200)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_spectral_norm_is_an_upper_bound(shape: tuple[int, int], dtype: torch.dtype) -> None:
    m = rand(sum(shape), *shape)
    true = float(torch.linalg.matrix_norm(m, 2))
    bound = float(spectral_norm_upper(m.to(dtype)))
    assert true * (1 - 1e-15) <= bound <= true * 1.02
    flat = torch.ones(2, *shape, dtype=dtype)  # rank one: the iteration's hardest scaling
    assert (spectral_norm_upper(flat) >= math.sqrt(shape[0] * shape[1]) * (1 - 1e-7)).all()
    assert float(gram_norm_upper(torch.zeros(150, 150, dtype=dtype))) < 1e-6
