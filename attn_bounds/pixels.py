"""Input sets in pixel units for a model that takes normalised inputs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .errors import InputError


class PixelUnits(nn.Module):
    """`model((x − mean) / std)`: lets an input set be given in pixel units.

    Arguments:
        mean, std: numbers, or one per channel (axis 1).
    """

    def __init__(self, model: nn.Module, mean: Sequence[float], std: Sequence[float], rank: int) -> None:
        super().__init__()
        if any(not math.isfinite(v) for v in (*mean, *std)) or any(v <= 0 for v in std):
            raise InputError(f"mean {list(mean)} and std {list(std)} must be finite and std positive")
        self.model = model
        self.scale: Tensor
        self.shift: Tensor
        self.std: Tensor
        self.mean: Tensor
        shape = (-1,) + (1,) * (rank - 1)
        m, s = (torch.tensor(list(v), dtype=torch.float64).reshape(shape) for v in (mean, std))
        self.register_buffer("scale", 1.0 / s)
        self.register_buffer("shift", -m / s)
        self.register_buffer("std", s)
        self.register_buffer("mean", m)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x * self.scale + self.shift)

    def to_pixels(self, x: Tensor) -> Tensor:
        """Model units → pixel units."""
        return (x.double() * self.std.double() + self.mean.double()).to(x.dtype)

    def to_model(self, x: Tensor) -> Tensor:
        """Pixel units → model units."""
        return ((x.double() - self.mean.double()) / self.std.double()).to(x.dtype)
