"""What moves of an attention's values do to functionals of its output: `u_c = Σ_j a_j dV_cj`, per key c."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .sets import ErrorSet

WORK = 2e9  # multiplications per sample up to which functionals are taken through the generators of V
FEW = 256  # functionals that are not looked through for repetitions
CHUNK = 2**22  # entries of their images that are held at once


def per_head(a: Tensor, values: Tensor) -> Tensor:
    """`Σ_j a_j v_cj`, a head's rows in one product: (b, h, n, F, dv), (b, h, m, dv) → (b, h, n, F, m)."""
    return (a.flatten(2, 3) @ values.mT).unflatten(2, a.shape[2:4])


def distinct(a: Tensor) -> tuple[Tensor, Tensor]:
    """Functionals (b, h, n, F, dv) without repetitions, (b, h, D, dv), and (n · F,) where each went.

    Layers that do the same to every token leave many of them.
    """
    a = a.flatten(2, 3)
    if a.shape[2] < FEW:
        return a, torch.arange(a.shape[2])
    rows = a.detach().transpose(1, 2).transpose(0, 1).flatten(1)
    found, where = torch.unique(rows, dim=0, return_inverse=True)
    # a gradient can follow a choice of rows, but not torch.unique
    every = torch.arange(len(rows))
    first = torch.full((len(found),), len(rows)).scatter_reduce(0, where, every, "amin")
    return a[:, :, first], where


class Symbols(NamedTuple):
    """One error set's part of V.

    Attributes:
        generators: (batch, heads, k, m, dv). growth: factor on their images' sizes for their rounding.
        worth: (batch,) the samples for which it is used, so that none depends on the others of its batch.
    """

    error_set: ErrorSet
    generators: Tensor
    growth: float
    worth: Tensor

    def moves(self, a: Tensor) -> Tensor:
        """Bound of |u|, rounding of the products left out: (b, h, N, dv) → (b, h, N, m)."""
        batch, heads, k, m, _ = self.generators.shape
        step = max(1, CHUNK // (batch * k * m))
        found = []
        for head in range(heads):
            rows = self.generators[:, head].flatten(1, 2)  # (batch, k · m, dv)
            parts = []
            for part in a[:, head].to(rows).split(step, 1):
                low, high = self.error_set.entry_range((rows @ part.mT).reshape(batch, k, -1))
                parts.append(torch.maximum(-low, high).reshape(batch, m, -1).mT)
            found.append(torch.cat(parts, 1))
        return torch.stack(found, 1).to(a) * self.growth


class Factor(NamedTuple):
    """`L` of `L Lᵀ`, (…, dv, dv), and the lengths of its rows, (…, dv), which its rounding goes with."""

    matrix: Tensor
    lengths: Tensor

    @classmethod
    def of(cls, matrix: Tensor) -> Factor:
        return cls(matrix, torch.linalg.vector_norm(matrix, dim=-1))

    def to(self, dtype: torch.dtype, grow: float) -> Factor:
        return Factor((self.matrix * grow).to(dtype), (self.lengths * grow).to(dtype))


class ValueMoves(NamedTuple):
    """What one group of symbols does to V.

    Attributes:
        support: (batch, heads, m, dv) bound of each |dV|.
        rows: (batch, heads, n, dv, dv) factor of `ρ² Σ_c p_c V_c V_cᵀ` where the group lies in a
            ball of radius ρ, else None.
        keys: (batch, heads, m, dv, dv) factor of `ρ² V_c V_cᵀ`, or None.
        symbols: the group itself, or None.
    """

    support: Tensor
    rows: Factor | None = None
    keys: Factor | None = None
    symbols: Symbols | None = None

    def to(self, dtype: torch.dtype, grow: float) -> ValueMoves:
        """Rounded, and grown by more than that."""
        rows, keys = (None if f is None else f.to(dtype, grow) for f in (self.rows, self.keys))
        return ValueMoves((self.support * grow).to(dtype), rows, keys, self.symbols)

    def deviation(self, a: Tensor, u: Tensor, p: Tensor) -> Tensor:
        """Bound of `√(Σ p_c u_c²)`: (b, h, n, F), given the bounds u, by them or by the row's factor."""
        best = (u.square() @ p.unsqueeze(-1)).squeeze(-1).sqrt()
        if self.rows is None:
            return best
        slack = 8.0 * a.shape[-1] * torch.finfo(a.dtype).eps
        rounding = slack * (a.abs() @ self.rows.lengths.unsqueeze(-1)).squeeze(-1)
        return torch.minimum(best, torch.linalg.vector_norm(a @ self.rows.matrix, dim=-1) + rounding)

    def at(self, index: Tensor) -> ValueMoves:
        """For some of the query rows."""
        if self.rows is None:
            return self
        return self._replace(rows=Factor(*(t[:, :, index] for t in self.rows)))

    def boxes(self, a: Tensor) -> Tensor:
        """Bound of |u| by the entries' supports: (b, h, n, F, dv) → (b, h, n, F, m)."""
        return per_head(a.abs(), self.support)

    def whole(self, a: Tensor) -> Tensor:
        """Bound of |u| by the functional as a whole where that is smaller, since entries of V cancel.

        a: (b, h, D, dv), from `distinct`. Returns (b, h, D, m).
        """
        dv, size = a.shape[-1], a.abs()
        box = size @ self.support.mT
        if self.keys is not None:
            m = self.keys.lengths.shape[2]
            flat = a @ self.keys.matrix.transpose(2, 3).flatten(3)  # (b, h, D, m · dv)
            by_ball = torch.linalg.vector_norm(flat.unflatten(-1, (m, dv)), dim=-1)
            rounding = 8.0 * dv * torch.finfo(a.dtype).eps
            by_ball = by_ball + rounding * (size @ self.keys.lengths.mT)
            box = torch.minimum(box, by_ball)
        if self.symbols is not None and float(self.symbols.generators[0].numel()) * a.shape[2] <= WORK:
            rounding = 8.0 * dv * torch.finfo(self.symbols.generators.dtype).eps
            rounding += self.symbols.growth - 1.0
            moves = torch.minimum(box, self.symbols.moves(a) + rounding * box)
            box = torch.where(self.symbols.worth[:, None, None, None], moves, box)
        return box
