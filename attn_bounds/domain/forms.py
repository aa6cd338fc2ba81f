"""`AffineForm`: a tensor as centre + linear images of error sets; `Groups`: the sets, oldest first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..norms import spectral_norm_upper
from .sets import ErrorSet, Range

SPECTRAL_SIZE = 1024  # a larger block is not worth its Gram matrix


@dataclass
class AffineForm:
    """`x(e) = centre + Σ_k e_k · generators[:, k]`.

    Attributes:
        centre: (batch, *shape).
        generators: (batch, K, *shape). Symbols are numbered over all groups in order of creation; a form
            that depends on the first K symbols only stores those.
    """

    centre: Tensor
    generators: Tensor

    def __post_init__(self) -> None:
        # a constant may have broadcast the centre to a larger shape; the generators follow
        if self.generators.shape[2:] != self.centre.shape[1:]:
            self.generators = self.generators.expand(*self.generators.shape[:2], *self.centre.shape[1:])

    @property
    def symbols(self) -> int:
        return self.generators.shape[1]

    def padded(self, symbols: int) -> Tensor:
        """Generators with zeros for symbols that came later."""
        missing = symbols - self.symbols
        if missing == 0:
            return self.generators
        zeros = self.generators.new_zeros((self.generators.shape[0], missing, *self.centre.shape[1:]))
        return torch.cat([self.generators, zeros], 1)

    def linear(
        self, f: Callable[[Tensor], Tensor], homogeneous: Callable[[Tensor], Tensor] | None = None
    ) -> AffineForm:
        """Image under an affine map (rows, *shape) → (rows, *out), of all generators at once.

        homogeneous: the map without its constant; default f itself. `f(g) − f(0)` would not do: a small
        generator is lost in a large constant.
        """
        batch, symbols = self.generators.shape[:2]
        out = f(self.centre)
        generators = (homogeneous or f)(self.generators.flatten(0, 1))
        return AffineForm(out, generators.reshape(batch, symbols, *out.shape[1:]))

    def __add__(self, other: AffineForm) -> AffineForm:
        symbols = max(self.symbols, other.symbols)
        return AffineForm(self.centre + other.centre, self.padded(symbols) + other.padded(symbols))


@dataclass
class Groups:
    """The error sets of one pass.

    Attributes:
        growth: factor (≥ 1) on every radius for the rounding of the generators.
    """

    growth: float
    sets: list[ErrorSet] = field(default_factory=list)
    offsets: list[int] = field(default_factory=lambda: [0])

    def add(self, error_set: ErrorSet) -> int:
        """Register a set; returns the number of its first symbol."""
        self.sets.append(error_set)
        self.offsets.append(self.offsets[-1] + error_set.size)
        return self.offsets[-2]

    def parts(self, generators: Tensor) -> list[tuple[ErrorSet, Tensor]]:
        """The sets that generators (batch, K, …) depend on, each with its (batch, k, F) columns."""
        flat = generators.flatten(2)
        return [
            (s, flat[:, start : start + s.size])
            for s, start in zip(self.sets, self.offsets, strict=False)
            if start < generators.shape[1]
        ]

    def ranges(self, generators: Tensor, tight: bool = False) -> list[Range]:
        """Range of the image per group: list of two of (batch, *shape)."""
        shape = generators.shape[:1] + generators.shape[2:]
        out = []
        for s, w in self.parts(generators):
            low, high = s.tight_range(w) if tight else s.range(w)
            out.append(((low * self.growth).reshape(shape), (high * self.growth).reshape(shape)))
        return out

    def supports(self, generators: Tensor) -> list[Tensor]:
        """Bound of |image| per group: list of (batch, *shape)."""
        return [torch.maximum(-low, high) for low, high in self.ranges(generators)]

    @staticmethod
    def total(ranges: list[Range], like: Tensor) -> Range:
        """Sum of the groups' ranges; zeros like `like` (batch, *shape) where there are none."""
        low, high = torch.zeros_like(like), torch.zeros_like(like)
        for down, up in ranges:
            low, high = low + down, high + up
        return low, high

    def joint_norm(self, generators: Tensor, weight: Tensor, supports: list[Tensor]) -> Tensor:
        """Bound of the l2 norm of a whole block, weighted entrywise.

        Per group the smaller of radius · spectral norm and the norm of the entries' supports (theory.md, 2).

        Arguments:
            generators: (batch, K, F). weight: (batch, F).
            supports: per group (batch, F), as `supports` returns them.

        Returns:
            (batch,).
        """
        total = generators.new_zeros(generators.shape[0])
        for (s, w), support in zip(self.parts(generators), supports, strict=True):
            best = torch.linalg.vector_norm(support * weight, dim=1)
            if s.radius is not None and min(w.shape[1:]) <= SPECTRAL_SIZE:
                norm = spectral_norm_upper(w * weight.unsqueeze(1))
                best = torch.minimum(best, self.growth * s.radius * norm)
            total = total + best
        return total
