"""Norms of `W diag(f)` for one W and many f ≥ 0: weights in front of an activation, scaled by slopes."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from ..norms import gram_norm_upper, spectral_norm_upper

LARGE = 256  # up to this many rows the scaled matrix is formed
SAME = 1e-4  # factors that differ by less, relative to the largest, count as the largest


class Columns:
    """W, (d, k), float64."""

    def __init__(self, w: Tensor) -> None:
        self.w = w

    @cached_property
    def norm(self) -> float:
        """`‖W‖` from above."""
        return float(spectral_norm_upper(self.w))

    @cached_property
    def gram(self) -> Tensor:
        """`W Wᵀ`, (d, d)."""
        return self.w @ self.w.mT

    def scaled_norm(self, f: Tensor) -> float:
        """`‖W diag(f)‖` from above; f (k), not negative.

        Where many columns have the largest factor, `W diag(f²) Wᵀ` is its square times `W Wᵀ` but for the others.
        """
        most = float(f.amax())
        if not most > 0.0 or f.isinf().any():
            return 0.0 if most == 0.0 else float("inf")
        others = f < most * (1.0 - SAME)
        count = int(others.sum())
        if count == 0:
            return most * self.norm
        rows, columns = self.w.shape
        if rows <= LARGE or columns < rows or 2 * count > columns:
            return float(spectral_norm_upper(self.w * f))
        left = self.w[:, others]
        gram = most**2 * self.gram - (left * (most**2 - f[others].square())) @ left.mT
        error = 16.0 * columns * torch.finfo(gram.dtype).eps * most**2 * float(self.gram.diagonal().sum())
        # a Gram matrix up to this error, so that what is added makes it positive
        total = gram_norm_upper(gram + error * torch.eye(rows).to(gram))
        return float(total) ** 0.5
