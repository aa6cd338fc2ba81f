"""Second-order part of distance scores over affine forms, against maximising over the error sets."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from attn_bounds.domain.attention import distance_remainder
from attn_bounds.domain.forms import AffineForm, Groups, Rest
from attn_bounds.domain.sets import Ball, BoxInBall

from ..operators.test_attention import tensor


def groups_of(norm: float, boxes: bool) -> Groups:
    groups = Groups(1.0)
    groups.add(Ball("input", 4, norm, 1, tensor(0, 1)))
    if boxes:
        size = tensor(1, 1, 3).abs() + 0.1
        groups.add(BoxInBall("errors", -size, 0.5 * size, size.norm(dim=1) * 0.8))
    return groups


def farthest(d: Tensor, groups: Groups, steps: int = 60, starts: int = 200) -> Tensor:
    """Largest ‖Σ_k e_k d_k‖² over the sets: d (K, dk). A convex function: linear steps from many starts."""
    e = torch.randn(starts, d.shape[0], generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    for _ in range(steps):
        g = (e @ d) @ d.T
        parts, start = [], 0
        for s in groups.sets:
            w = g[:, start : start + s.size]
            start += s.size
            if isinstance(s, Ball) and s.norm == 2.0:
                parts.append(w / w.norm(dim=1, keepdim=True).clamp(min=1e-300))
            elif isinstance(s, Ball) and s.norm == 1.0:
                hot = torch.zeros_like(w).scatter(1, w.abs().argmax(1, keepdim=True), 1.0)
                parts.append(hot * w.sign())
            elif isinstance(s, Ball):
                parts.append(w.sign())
            else:
                assert isinstance(s, BoxInBall) and s.radius is not None
                point = torch.where(w > 0, s.upper, s.lower)
                parts.append(point * (s.radius / point.norm(dim=1)).clamp(max=1.0).unsqueeze(1))
        e = torch.cat(parts, 1)
    return (e @ d).square().sum(1).amax()


@pytest.mark.parametrize("boxes", [False, True])
@pytest.mark.parametrize("norm", [1.0, 2.0, math.inf])
def test_never_below_and_exact_where_it_should_be(norm: float, boxes: bool) -> None:
    groups = groups_of(norm, boxes)
    symbols = groups.offsets[-1]
    tightest = math.inf
    for seed in range(6):
        dk = 1 + seed % 3
        q = AffineForm(tensor(seed, 1, 1, 2, dk), tensor(seed + 10, 1, symbols, 1, 2, dk))
        k = AffineForm(tensor(seed + 20, 1, 1, 3, dk), tensor(seed + 30, 1, symbols, 1, 3, dk))
        for scale in (0.7, -0.7):
            low, high = distance_remainder(q, k, scale, groups)
            assert torch.equal(high if scale > 0 else low, torch.zeros_like(low))
            bound = (-low if scale > 0 else high) / 0.7
            for i in range(2):
                for j in range(3):
                    d = q.generators[0, :, 0, i] - k.generators[0, :, 0, j]
                    found = farthest(d, groups)
                    assert bound[0, 0, i, j] >= found * (1 - 1e-9)
                    tightest = min(tightest, float(bound[0, 0, i, j] / found))
                    if not boxes and (norm == 2.0 or dk == 1):
                        assert bound[0, 0, i, j] <= found * (1 + 1e-6)
    assert tightest <= 1.2


def test_tied_rows_do_not_move_apart() -> None:
    groups = groups_of(2.0, True)
    q = AffineForm(tensor(40, 1, 2, 3, 2), tensor(41, 1, groups.offsets[-1], 2, 3, 2))
    low, high = distance_remainder(q, q, 0.5, groups)
    diagonal = low.diagonal(dim1=-2, dim2=-1)
    assert diagonal.abs().max() < 1e-12 and (low.sum((-2, -1)) < -0.1).all() and (high == 0).all()


def test_errors_without_symbols_count() -> None:
    """They are free of each other, those of a token and itself included."""
    groups = groups_of(2.0, False)
    box = tensor(50, 1, 1, 3, 2).abs()
    q = AffineForm(tensor(51, 1, 1, 3, 2), torch.zeros(1, 4, 1, 3, 2).double(), Rest.boxed(box))
    low, _ = distance_remainder(q, q, 0.5, groups)
    expected = (box.unsqueeze(-2) + box.unsqueeze(-3)).square().sum(-1)
    assert torch.allclose(-low, 0.5 * expected)
