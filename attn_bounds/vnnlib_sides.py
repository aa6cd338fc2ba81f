"""Bounds of all inputs of a VNN-LIB file as arrays, strict ones remembered."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from .vnnlib_cases import Branch


class Sides(NamedTuple):
    """Bounds of all inputs as arrays, infinite where there is none; and which of them are strict."""

    lower: np.ndarray
    upper: np.ndarray
    open_lower: np.ndarray
    open_upper: np.ndarray

    @classmethod
    def of(cls, branch: Branch, inputs: int) -> Sides:
        nothing = np.zeros(inputs, dtype=bool)
        free = np.full(inputs, math.inf)
        return cls(-free, free, nothing, nothing).cut(branch)

    def cut(self, branch: Branch) -> Sides:
        """These bounds and those of the branch."""
        lower, upper, open_lower, open_upper = self
        if branch.lower:
            at, values = list(branch.lower), list(branch.lower.values())
            lower, open_lower = lower.copy(), open_lower.copy()
            open_lower[at] &= lower[at] >= values  # a tighter bound decides
            lower[at] = np.maximum(lower[at], values)
        if branch.upper:
            at, values = list(branch.upper), list(branch.upper.values())
            upper, open_upper = upper.copy(), open_upper.copy()
            open_upper[at] &= upper[at] <= values
            upper[at] = np.minimum(upper[at], values)
        for (i, is_upper), value in branch.open.items():  # their sides were copied above
            side, strict = (upper, open_upper) if is_upper else (lower, open_lower)
            strict[i] |= side[i] == value
        return Sides(lower, upper, open_lower, open_upper)

    def tensors(self, shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        low, high = (torch.from_numpy(side.copy()).reshape(1, *shape) for side in (self.lower, self.upper))
        return low, high

    def inner(self, shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Bounds that exclude the strict ones by one float32; None if no bound is strict."""
        if not (self.open_lower.any() or self.open_upper.any()):
            return None
        low, high = self.lower.copy(), self.upper.copy()
        for side, strict, away, step in (
            (low, self.open_lower, np.less_equal, math.inf),
            (high, self.open_upper, np.greater_equal, -math.inf),
        ):
            single = side.astype(np.float32)
            at_bound = strict & away(single.astype(np.float64), side)
            single[at_bound] = np.nextafter(single[at_bound], np.float32(step))
            side[strict] = single[strict]
        nothing_between = low > high
        low[nothing_between] = high[nothing_between] = (self.lower + self.upper)[nothing_between] / 2
        return Sides(low, high, self.open_lower, self.open_upper).tensors(shape)


def root_up(value: Fraction) -> float:
    """A float64 not below the square root, by a unit in the last place or two."""
    root = math.sqrt(value)
    while Fraction(root) ** 2 < value:
        root = math.nextafter(root, math.inf)
    return root
