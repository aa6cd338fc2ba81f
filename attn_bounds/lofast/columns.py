"""Norms of `W diag(f)` for one W and many f ≥ 0: weights in front of an activation, scaled by slopes."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ..norms import gram_norm_upper, spectral_norm_upper

LARGE = 256  # up to this many rows the scaled matrix is formed
SAME = 1e-4  # factors that differ by less, relative to the largest, count as the largest


class Columns:
    """W, (d, k), float64."""

    def __init__(self, w: Tensor) -> None:
        self.w = w
        self.large = w.shape[0] > LARGE and w.shape[1] >= w.shape[0]
        self.products: dict[str, Tensor] = {}  # W V for the constants V of nodes

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

        Where many columns have the largest factor, `W diag(f²) Wᵀ` is its square times `W Wᵀ`, less what the
        others lack.
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
        left = self.w[:, others]
        gram = self.gram - (left * (1.0 - (f[others] / most).square())) @ left.mT
        error = 16.0 * len(f) * torch.finfo(gram.dtype).eps * float(self.gram.diagonal().sum())
        # a Gram matrix up to this error, so that what is added makes it positive
        return most * float(gram_norm_upper(gram + error * torch.eye(len(gram)).to(gram))) ** 0.5

    def scaled_norm_roughly(self, f: Tensor) -> float:
        """The same from above, of large W by the largest factor alone."""
        return float(f.amax()) * self.norm if self.large else self.scaled_norm(f)


class Sloped(NamedTuple):
    """`W diag(λ)`, of large W."""

    columns: Columns
    slope: Tensor

    def dense(self) -> Tensor:
        """(d, k)."""
        return self.columns.w * self.slope

    def then(self, v: Tensor, key: str | None) -> Tensor:
        """`W diag(λ) V`; key: the node that V, (k, d'), is the constant of.

        Slopes of a ReLU are ½ for most features; for these W V is enough, and known for all inputs."""
        usual = self.slope.median()
        others = self.slope != usual
        if key is None or 2 * int(others.sum()) > len(v):
            return self.dense() @ v
        if key not in self.columns.products:
            self.columns.products[key] = self.columns.w @ v
        left = self.columns.w[:, others] * (self.slope[others] - usual)
        return usual * self.columns.products[key] + left @ v[others]
