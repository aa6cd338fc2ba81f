"""Input sets as the first group of symbols."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .sets import Ball, ClippedBall


class Input:
    """An input set: which entries move, and how far.

    Attributes:
        alive: positions in the flattened input that move in some sample.
        shrinks: whether it is a whole l2 ball in those, the same for all samples.
    """

    def __init__(
        self,
        centre: Tensor,
        norm: float,
        radius: Tensor,
        limits: tuple[Tensor, Tensor] | None,
        reduce: bool,
    ) -> None:
        self.centre, self.norm, self.radius = centre, norm, radius
        if norm == math.inf:
            moves = radius.expand(centre.shape).flatten(1) != 0
        elif limits is not None:
            low, high = (t.flatten(1) for t in limits)
            moves = (low != 0) | (high != 0)
        else:
            moves = torch.ones_like(centre.flatten(1), dtype=torch.bool)
        self.alive = moves.any(0).nonzero().squeeze(1)
        if len(self.alive) == 0:  # a set of one point has one symbol, of size 0
            self.alive = torch.zeros(1, dtype=torch.int64)
        self.moves = moves[:, self.alive]
        self.shrinks = norm == 2.0 and reduce and bool(self.moves.all())
        self.limits = None
        if limits is not None and norm != math.inf and not reduce:
            unit = radius.reshape(-1, 1).clamp(min=torch.finfo(centre.dtype).tiny)
            grow = 1.0 + 4 * torch.finfo(centre.dtype).eps
            self.limits = tuple((t.flatten(1)[:, self.alive] / unit * grow) for t in limits)

    @property
    def symbols(self) -> int:
        return len(self.alive)

    def error_set(self) -> Ball:
        if self.limits is not None:
            return ClippedBall("input", self.norm, self.limits[0], self.limits[1])
        return Ball("input", self.symbols, self.norm, len(self.centre), self.centre)

    def sizes(self, ndim: int) -> Tensor:
        """Factor per sample and symbol on generators of rank ndim + 1."""
        if self.norm == math.inf:
            size = self.radius.expand(self.centre.shape).flatten(1)[:, self.alive]
        else:
            size = self.radius.reshape(-1, 1) * self.moves
        return size.reshape(len(size), -1, *[1] * (ndim - 1))
