"""Norms of heads' weights below each other by proofs in their Gram matrix: against singular values."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from attn_bounds import head_rows
from attn_bounds.head_rows import HeadRows

F64 = torch.float64


def rand(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=F64)


def make(seed: int, heads: int, k: int, d: int) -> tuple[Tensor, Tensor]:
    """Weights and F: plain, of low rank, of decaying and of equal singular values, with heads that vanish."""
    g = torch.Generator().manual_seed(seed)
    w = rand(g, heads, k, d)
    kind = seed % 5
    if kind == 1:
        w = rand(g, heads, k, 2) @ rand(g, 2, d)
    if kind == 2:
        w = w * torch.logspace(0, -9, d, dtype=F64)
    if kind == 3:
        w = torch.linalg.qr(rand(g, max(heads * k, d), min(heads * k, d))).Q.reshape(-1)[: w.numel()]
        w = w.reshape(heads, k, d)
    if kind == 4:
        w[-1] = 0.0
    f = rand(g, heads, 1 + seed % 4, k) * torch.rand(heads, 1, 1, generator=g, dtype=F64) ** (seed % 7)
    return w * 10.0 ** (seed % 9 - 4), f * 10.0 ** (seed % 11 - 5)


def true_norm(f: Tensor, w: Tensor) -> float:
    return float(torch.linalg.svdvals((f @ w).flatten(0, 1))[0])


def test_never_below_the_norm_and_close(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_rows, "LARGE", 0)  # small matrices as if they were large
    ratios = []
    for seed in range(300):
        heads, k, d = 1 + seed % 4, 1 + seed % 6, 2 + seed % 13
        w, f = make(seed, heads, k, d)
        rows = HeadRows(w)
        true, bound = true_norm(f, w), float(rows.norm(f))
        assert bound >= true * (1 - 1e-13), (seed, bound, true)
        if true > 1e-3 * float(torch.linalg.norm(f) * torch.linalg.norm(w)):
            ratios.append(bound / true)
    assert sorted(ratios)[len(ratios) // 2] < 1.0002 and max(ratios) < 1.006


@pytest.mark.parametrize("kind", range(5))
def test_large_matrices(kind: int) -> None:
    w, f = make(kind, 5, 60, 280)
    rows = HeadRows(w)
    assert rows.large
    true = true_norm(f, w)
    assert true * (1 - 1e-13) <= float(rows.norm(f)) <= true * 1.0003


def test_any_positive_semidefinite_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """`λ_max(D G)^½` with D that mixes heads."""
    monkeypatch.setattr(head_rows, "LARGE", 0)
    for seed in range(60):
        g = torch.Generator().manual_seed(seed)
        w, _ = make(seed, 3, 2, 7)
        root = rand(g, 6, 1 + seed % 6)
        true = float(torch.linalg.svdvals(root.mT @ w.flatten(0, 1))[0])
        bound = float(HeadRows(w).weighted(root @ root.mT, 6))
        assert true * (1 - 1e-13) <= bound
        assert bound <= 1.001 * true + 1e-7 * float(torch.linalg.norm(root) * torch.linalg.norm(w))


def test_batches_gradients_and_broken_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    w, _ = make(0, 3, 2, 7)
    f = torch.stack([make(20 * i, 3, 2, 7)[1] for i in range(4)]).reshape(2, 2, 3, 1, 2)
    plain = HeadRows(w.clone().requires_grad_())
    monkeypatch.setattr(head_rows, "LARGE", 0)
    rows = HeadRows(w.clone().requires_grad_())
    assert rows.large and not plain.large
    free = f.clone().requires_grad_()
    bound = rows.norm(free)
    assert bound.shape == (2, 2)
    for i in range(4):
        assert float(rows.norm(f[i // 2, i % 2])) == float(bound[i // 2, i % 2])
    slopes = torch.autograd.grad(bound.sum(), (free, rows.w))
    expected = torch.autograd.grad(plain.norm(free).sum(), (free, plain.w))
    for slope, other in zip(slopes, expected, strict=True):
        assert torch.allclose(slope, other, rtol=1e-2, atol=1e-2 * float(other.abs().max()))
    with torch.no_grad():
        assert float(rows.norm(0 * f[0, 0])) == 0.0
        assert float(rows.norm(f[0, 0] * math.inf)) == math.inf
        assert not math.isfinite(float(rows.norm(f[0, 0] * math.nan)))
        for size in (1e-290, 1e-140, 1e140, 1e290):
            assert float(rows.norm(size * f[0, 0])) == pytest.approx(size * float(bound[0, 0]), rel=1e-3)
        for size in (1e-160, 1e-100, 1e-60, 1e60, 1e100, 1e140):
            for other in (1.0, 1.0 / size):
                found = float(HeadRows(size * w).norm(other * f[0, 0]))
                assert found == pytest.approx(size * other * float(bound[0, 0]), rel=1e-3)
        steep = w * torch.logspace(0, -12, 3, dtype=F64)[:, None, None]
        even = f[0, 0] * torch.logspace(0, 12, 3, dtype=F64)[:, None, None]
        assert float(HeadRows(steep).norm(even)) == pytest.approx(float(bound[0, 0]), rel=1e-3)
