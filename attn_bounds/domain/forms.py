"""`AffineForm`: a tensor as centre + linear images of error sets; `Groups`: the sets, oldest first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..norms import gram_norm_upper
from .sets import ErrorSet, Range


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

    def linear(self, f: Callable[[Tensor], Tensor]) -> AffineForm:
        """Image under an affine map (rows, *shape) → (rows, *out), of all generators at once."""
        batch, symbols = self.generators.shape[:2]
        out, offset = f(torch.cat([self.centre, torch.zeros_like(self.centre[:1])])).split([batch, 1])
        generators = f(self.generators.flatten(0, 1))
        if bool((offset != 0).any()):
            generators = generators - offset
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

    def supports(self, generators: Tensor) -> list[Tensor]:
        """Bound of |image| per group: list of (batch, *shape)."""
        shape = generators.shape[:1] + generators.shape[2:]
        return [s.support(w).reshape(shape) * self.growth for s, w in self.parts(generators)]

    def deviation(self, generators: Tensor, tight: bool = False) -> Range:
        """Range of the image around the centre: two of (batch, *shape)."""
        shape = generators.shape[:1] + generators.shape[2:]
        low = generators.new_zeros(shape[0], generators.flatten(2).shape[2])
        high = low.clone()
        for s, w in self.parts(generators):
            down, up = s.tight_range(w) if tight else s.range(w)
            low, high = low + down, high + up
        return (low * self.growth).reshape(shape), (high * self.growth).reshape(shape)

    def joint_norm(self, generators: Tensor, weight: Tensor | None = None) -> Tensor:
        """Bound of the l2 norm of the whole block (weighted entrywise): (batch, K, …) → (batch,).

        Per group the smaller of radius · spectral norm and the norm of the entries' supports (theory.md, 2).
        """
        total = generators.new_zeros(generators.shape[0])
        scale = 1.0 if weight is None else weight.flatten(1).unsqueeze(1)
        for s, w in self.parts(generators):
            w = w * scale
            best = torch.linalg.vector_norm(s.support(w), dim=1)
            if s.radius is not None and min(w.shape[1:]) <= 1024:
                m = w if w.shape[1] <= w.shape[2] else w.mT
                best = torch.minimum(best, s.radius * gram_norm_upper(m @ m.mT).sqrt())
            total = total + best
        return total * self.growth
