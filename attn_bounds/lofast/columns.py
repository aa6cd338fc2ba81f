"""Norms of `W diag(f)` for one W and many f ≥ 0: weights in front of an activation, scaled by slopes."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from ..norms import gram_norm_upper, spectral_norm_upper

LARGE = 256  # up to this many rows the scaled matrix is formed
SAME = 1e-4  # factors that differ by less, relative to the largest, count as the largest
POWER_STEPS = 60
CLOSE = 2e-3  # relative, of a square's bounds from above and below, so that the former is enough


class Columns:
    """W, (d, k), float64."""

    def __init__(self, w: Tensor) -> None:
        self.w = w
        self.large = w.shape[0] > LARGE and w.shape[1] >= w.shape[0]

    @cached_property
    def norm(self) -> float:
        """`‖W‖` from above."""
        return float(spectral_norm_upper(self.w))

    @cached_property
    def gram(self) -> Tensor:
        """`W Wᵀ`, (d, d)."""
        return self.w @ self.w.mT

    @cached_property
    def size(self) -> float:
        """`‖W‖_F²`."""
        return float(self.w.square().sum())

    def scaled_norm(self, f: Tensor) -> float:
        """`‖W diag(f)‖` from above; f (k), not negative.

        Where many columns have the largest factor, `W diag(f²) Wᵀ` is its square times `W Wᵀ` but for the others.
        """
        most = float(f.amax())
        if not 0.0 < most < float("inf"):
            return 0.0 if most == 0.0 else float("inf")
        others = f < most * (1.0 - SAME)
        count = int(others.sum())
        if count == 0:
            return most * self.norm
        if not self.large or 2 * count > len(f):
            return float(spectral_norm_upper(self.w * f))
        return self.bound(self.scaled_gram(f), most)

    def scaled_gram(self, f: Tensor) -> Tensor:
        """`W diag(f²) Wᵀ`, up to rounding relative to `max f² W Wᵀ`."""
        most = float(f.amax())
        others = f < most * (1.0 - SAME)
        if 2 * int(others.sum()) > len(f):
            scaled = self.w * f
            return scaled @ scaled.mT
        left = self.w[:, others]
        return most**2 * self.gram - (left * (most**2 - f[others].square())) @ left.mT

    def bound(self, gram: Tensor, most: float) -> float:
        """`‖W diag(f)‖` from above, given `scaled_gram(f)` and the largest of f."""
        error = 16.0 * self.w.shape[1] * torch.finfo(gram.dtype).eps * most**2 * self.size
        # a Gram matrix up to this error, so that what is added makes it positive
        return float(gram_norm_upper(gram + error * torch.eye(len(gram)).to(gram))) ** 0.5

    def scaled_norm_roughly(self, f: Tensor) -> float:
        """The same from above, of large W by the largest factor alone."""
        return float(f.amax()) * self.norm if self.large else self.scaled_norm(f)


class Reference:
    """`‖W diag(f)‖` for f not below some f₀, of which the norm is known.

    With `f² = f₀² + Δ` it is at most the root of `‖W diag(f₀)‖² + max Δ ‖W‖²`, and at least that of `Σ f² (Wᵀ u)²`
    for any unit u. Where these are close, as they are for smooth activations and small radii, the first is used.
    """

    def __init__(self, columns: Columns, f: Tensor) -> None:
        self.columns, self.f = columns, f

    @cached_property
    def _known(self) -> tuple[float, Tensor]:
        """`‖W diag(f₀)‖²` from above, and `(Wᵀ u)²` for nearly the left singular vector u."""
        gram = self.columns.scaled_gram(self.f)
        v = torch.sin(12.9898 * torch.arange(1, len(gram) + 1, dtype=gram.dtype).square())
        for _ in range(POWER_STEPS):
            v = gram @ v
            v = v / torch.linalg.vector_norm(v).clamp(min=1e-300)
        known = self.columns.bound(gram, float(self.f.amax())) ** 2
        return known, (self.columns.w.mT @ v).square()

    def scaled_norm(self, f: Tensor) -> float:
        """`‖W diag(f)‖` from above."""
        if not self.columns.large or not bool((f >= self.f).all()) or not bool(self.f.any()):
            return self.columns.scaled_norm(f)
        known, weights = self._known
        square = f.square()
        above = known + float((square - self.f.square()).amax()) * self.columns.norm**2
        if above <= (1.0 + CLOSE) * float(square @ weights):
            return above**0.5 * (1.0 + 1e-12)
        return self.columns.scaled_norm(f)
