"""Maximum of a quadratic over a ball, and quadratic bounds of ReLU, against brute force."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from attn_bounds.sensitivity.quadratic import ball_maximum_upper, relu_quadratic


def exact(c: Tensor, m: Tensor) -> float:
    """By the secular equation, bisected on the eigenvalues of one matrix."""
    values, vectors = torch.linalg.eigh(m)
    g = (vectors.T @ c).square() / 4
    low, high = max(0.0, float(values[-1])), max(0.0, float(values[-1])) + float(c.norm()) + 1e-9
    for _ in range(200):
        nu = (low + high) / 2
        low, high = (nu, high) if float((g / (nu - values).square()).sum()) > 1 else (low, nu)
    return high + float((g / (high - values).clamp(min=1e-300)).sum())


@pytest.mark.parametrize("size", [1, 2, 7, 40])
@pytest.mark.parametrize("scale", [1e-6, 0.1, 1.0, 100.0])
def test_ball_maximum_is_above_and_close(size: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(size)
    c = torch.randn((8, size), generator=generator, dtype=torch.float64)
    m = scale * torch.randn((8, size, size), generator=generator, dtype=torch.float64)
    m = (m + m.mT) / 2
    c[0] = 0.0  # no linear part
    m[1] = -m[1] @ m[1]  # concave
    m[2] = 0.0
    c[3, 1:] = 0.0  # the hard case: nothing along the top eigenvector
    m[3] = torch.diag(scale * torch.arange(size, dtype=torch.float64))
    upper, z = ball_maximum_upper(c, m)
    for i in range(8):
        best = exact(c[i], m[i])
        assert float(upper[i]) >= best * (1 - 1e-12), "below the maximum"
        assert float(upper[i]) <= best * 1.005 + 1e-9
        assert float(z[i].norm()) <= 1 + 1e-9


def test_ball_maximum_of_broken_numbers_is_infinite() -> None:
    c, m = torch.zeros(2, 3, dtype=torch.float64), torch.zeros(2, 3, 3, dtype=torch.float64)
    c[0, 1], m[1, 2, 2] = math.nan, math.inf
    assert ball_maximum_upper(c, m)[0].isinf().all()


def test_relu_quadratic_is_valid_and_touches() -> None:
    generator = torch.Generator().manual_seed(0)
    low = -torch.rand(200, generator=generator, dtype=torch.float64) - 1e-6
    high = torch.rand(200, generator=generator, dtype=torch.float64) + 1e-6
    x = low + (high - low) * torch.rand(200, generator=generator, dtype=torch.float64)
    x[:3] = 0.0
    offset = torch.where((torch.arange(200) % 2 == 0) & (x != 0), 0.0, 0.1) * (high - low)
    c = relu_quadratic(x, low, high, offset)
    t = torch.linspace(0, 1, 20001, dtype=torch.float64)
    d = (low - x) + t[:, None] * (high - low)
    tangent = x.clamp(min=0) + (x > 0) * d
    gap = tangent + offset + c * d.square() - (x + d).clamp(min=0)
    assert float(gap.min()) >= -1e-12, "below ReLU"
    assert float((gap[:, c > 0].amin(0) / high[c > 0]).max()) < 1e-3, "does not touch"
