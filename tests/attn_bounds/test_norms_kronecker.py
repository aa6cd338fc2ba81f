"""Norms of sums of Kronecker products: the matrix, power iteration, and heads that cancel."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from attn_bounds import head_rows
from attn_bounds.head_rows import HeadRows
from attn_bounds.kronecker import (
    head_sum_norm_upper,
    kronecker_sum_norm_lower,
    kronecker_sum_norm_upper,
    naive_sum_upper,
    stacked_upper,
)
from attn_bounds.term_stack import TermStack

F64 = torch.float64


def rand(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=F64)


def attention(seed: int, n: int, d: int, heads: int, sharp: float, skip: bool) -> tuple[Tensor, Tensor]:
    """Random queries, keys and value-output maps of low rank; the tokens have a mean."""
    g = torch.Generator().manual_seed(seed)
    x = rand(g, n, d) + rand(g, 1, d)
    dk = max(d // heads, 1)
    q, k = rand(g, heads, d, dk) / d**0.5, rand(g, heads, d, dk) / d**0.5
    p = torch.softmax(sharp * (x @ q) @ (x @ k).mT / dk**0.5, -1)
    w = rand(g, heads, d, dk) @ rand(g, heads, dk, d) / d
    if skip:
        p = torch.cat([torch.eye(n, dtype=F64)[None], p])
        w = torch.cat([torch.eye(d, dtype=F64)[None], w])
    return p, w


def matrix_norm(p: Tensor, w: Tensor) -> float:
    m = torch.einsum("tab,tde->aebd", p, w).flatten(2).flatten(0, 1)
    return float(torch.linalg.svdvals(m)[0])


@pytest.mark.parametrize("dense_size", [0, 4000])
def test_never_below_the_norm_of_the_matrix(dense_size: int) -> None:
    """Shapes, ranks, scales, equal and vanishing terms; and how tight the bound is without the matrix."""
    ratios = []
    for seed in range(200):
        g = torch.Generator().manual_seed(seed)
        n, m, d, d_out, terms = (int(i) for i in torch.randint(1, 9, (5,), generator=g))
        if seed % 2:
            p, w = attention(seed, n + 2, d, terms, [0.3, 1.0, 4.0][seed % 3], seed % 4 == 1)
        else:
            p, w = rand(g, terms, n, m), rand(g, terms, d, d_out)
        if seed % 5 == 0:
            p[terms // 2 :] = p[:1]  # equal attention: only the sum of W counts
        if seed % 7 == 0:
            w[-1] = 0.0
        if seed % 11 == 0 and terms > 1:
            w[1] = -w[0]
        p = p * 10.0 ** float(torch.randint(-8, 9, (1,), generator=g))
        true = matrix_norm(p, w)
        bound = float(kronecker_sum_norm_upper(p, w, dense_size))
        assert bound >= true * (1 - 1e-12), "below the norm"
        assert bound <= float(stacked_upper(p, w)) * (1 + 1e-12) + 1e-300
        assert float(stacked_upper(p, w)) <= float(naive_sum_upper(p, w)) * (1 + 1e-9) + 1e-300
        assert float(kronecker_sum_norm_lower(p, w, 20)) <= true * (1 + 1e-12)
        ratios.append(bound / true if true else 1.0)
    ordered = sorted(ratios)
    assert ordered[100] < (1.001 if dense_size else 1.1) and ordered[-1] < (1.002 if dense_size else 1.5)


def test_the_bound_without_the_matrix_sees_heads_cancel() -> None:
    p, w = attention(0, 9, 8, 1, 1.0, skip=False)
    single = float(kronecker_sum_norm_upper(p, w))
    for factor, value in ((-0.5, 0.5), (0.5, 1.5), (-1.0, 0.0)):
        pair = torch.cat([p, p]), torch.cat([w, factor * w])
        assert float(kronecker_sum_norm_upper(*pair)) == pytest.approx(value * single, rel=1e-5, abs=1e-7)
        # a third head elsewhere, so that the cancelling pair is not all
        bound = float(kronecker_sum_norm_upper(*pair, dense_size=0))
        assert bound == pytest.approx(value * single, rel=1e-3, abs=1e-3 * single)
        assert float(naive_sum_upper(*pair)) == pytest.approx((1 + abs(factor)) * single)


@pytest.mark.parametrize("sharp,limit", [(0.3, 1.02), (1.0, 1.05), (3.0, 1.1)])
@pytest.mark.parametrize("skip", [False, True])
def test_gap_to_power_iteration_on_attention(sharp: float, limit: float, skip: bool) -> None:
    """A Vision Transformer's shapes at a quarter of its size."""
    p, w = attention(3, 65, 96, 6, sharp, skip)
    low = float(kronecker_sum_norm_lower(p, w, 100))
    bound = float(kronecker_sum_norm_upper(p, w))
    assert low <= bound <= limit * low
    assert bound < 0.6 * float(stacked_upper(p, w))


def heads(seed: int, n: int, m: int, d: int, count: int, sharp: float) -> tuple[Tensor, Tensor, Tensor]:
    """Attention of n queries to m keys, and both factors of the heads' maps."""
    g = torch.Generator().manual_seed(seed)
    x, c = (rand(g, k, d) + rand(g, 1, d) for k in (n, m))
    dk = max(d // count, 1)
    q, k = rand(g, count, d, dk) / d**0.5, rand(g, count, d, dk) / d**0.5
    p = torch.softmax(sharp * (x @ q) @ (c @ k).mT / dk**0.5, -1)
    return p, rand(g, count, dk, d) / d**0.5, rand(g, count, dk, d) / d**0.5


def by_factors(p: Tensor, left: Tensor, right: Tensor, skip: bool) -> float:
    whole = torch.linalg.svdvals(torch.einsum("hkd,hke->de", left, right) + skip * torch.eye(left.shape[-1]))[
        0
    ]
    whole = whole * (p.shape[-2] / p.shape[-1]) ** 0.5
    return float(head_sum_norm_upper(p, TermStack.of_heads(HeadRows(left), HeadRows(right)), whole, skip))


def test_heads_by_their_factors_are_never_below_the_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without a skip, queries as many as keys or not, rows whose sums are not quite one."""
    monkeypatch.setattr(head_rows, "LARGE", 0)
    ratios = []
    for seed in range(200):
        skip = seed % 3 == 0
        n, m = 1 + seed % 5, 1 + seed % 5 if skip else 1 + seed % 7
        d, count = 2 + seed % 6, 1 + seed % 4
        p, left, right = heads(seed, n, m, d, count, [0.1, 1.0, 5.0][seed % 3])
        if seed % 4 == 1:
            p[-1] = p[0]
        if seed % 5 == 1:
            left[0] = 0.0
        if seed % 7 == 1:
            p = p * (1.0 + 1e-3 * rand(torch.Generator().manual_seed(seed), *p.shape))
        w = left.mT @ right
        eyes = torch.eye(n, dtype=F64)[None], torch.eye(d, dtype=F64)[None]
        true = matrix_norm(*(torch.cat(pair) for pair in zip(eyes, (p, w), strict=True)) if skip else (p, w))
        bound = by_factors(p, left, right, skip)
        assert bound >= true * (1 - 1e-12), (seed, bound, true)
        ratios.append(bound / max(true, 1e-300))
    ordered = sorted(ratios)
    assert ordered[100] < 1.05 and ordered[-10] < 1.5, (ordered[100], ordered[-10:])


@pytest.mark.parametrize("sharp", [0.3, 1.0, 3.0])
def test_heads_by_their_factors_are_as_tight_as_terms(sharp: float) -> None:
    p, left, right = heads(5, 65, 65, 300, 5, sharp)
    w = left.mT @ right
    bound = by_factors(p, left, right, True)
    terms = torch.cat([torch.eye(65, dtype=F64)[None], p]), torch.cat([torch.eye(300, dtype=F64)[None], w])
    assert bound >= float(kronecker_sum_norm_lower(*terms, 60))
    assert bound <= 1.06 * float(kronecker_sum_norm_upper(*terms, dense_size=0, squared_cost=0.0))


def test_heads_that_see_different_keys_and_nothing_else() -> None:
    """Inner products of terms that vanish, on the way with squares."""
    g = torch.Generator().manual_seed(0)
    p = torch.zeros(3, 8, 8, dtype=F64)
    p[0, :, 0] = p[1, :, 1] = 1.0
    p[2] = torch.softmax(rand(g, 8, 8), -1)
    w = rand(g, 3, 6, 6)
    true = matrix_norm(p, w)
    assert true <= float(kronecker_sum_norm_upper(p, w, dense_size=0)) <= 1.01 * true


def test_batches_dtypes_and_gradients() -> None:
    pairs = [attention(seed, 6, 5, 3, 1.0, True) for seed in range(4)]
    p, w = torch.stack([a for a, _ in pairs]).reshape(2, 2, 4, 6, 6), pairs[0][1]
    for dense_size in (0, 4000):
        whole = kronecker_sum_norm_upper(p, w, dense_size)
        assert whole.shape == (2, 2)
        for i in range(4):
            one = kronecker_sum_norm_upper(p[i // 2, i % 2], w, dense_size)
            assert float(one) == pytest.approx(float(whole[i // 2, i % 2]), rel=1e-9)
        single = kronecker_sum_norm_upper(p.float(), w.float(), dense_size)
        assert single.dtype == torch.float32
        exact = kronecker_sum_norm_upper(p.float().double(), w.float().double(), 4000)
        assert (single.double() >= exact * (1 - 1e-12)).all()
        free = w.clone().requires_grad_()
        bound = kronecker_sum_norm_upper(p[0, 0], free, dense_size)
        (slope,) = torch.autograd.grad(bound, free)
        with torch.no_grad():
            less = float(kronecker_sum_norm_upper(p[0, 0], w - 0.05 * slope, dense_size))
        assert torch.isfinite(slope).all() and less < float(bound.detach()), (
            "a step down the gradient must help"
        )


def test_broken_numbers_are_infinite_and_wrong_shapes_are_refused() -> None:
    p, w = attention(0, 6, 5, 3, 1.0, True)
    p = torch.stack([p, p * math.nan])
    for dense_size in (0, 4000):
        bound = kronecker_sum_norm_upper(p, w, dense_size)
        assert torch.isfinite(bound[0]) and bound[1] == math.inf
        assert kronecker_sum_norm_upper(p[0], w * math.inf, dense_size) == math.inf
    with pytest.raises(ValueError, match="term"):
        kronecker_sum_norm_upper(p[0], w[:2])
    with pytest.raises(ValueError, match="term"):
        kronecker_sum_norm_upper(p[0, 0], w)
    assert float(kronecker_sum_norm_upper(p[0, :0], w[:0])) == 0.0
