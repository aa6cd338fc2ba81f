"""Matrices W_1 … W_T of which products with all and norms of mixtures `[Σ_t L_jt W_t]_j` are needed.

Value-output maps of attention heads have the rank of a head. Where that is small against their size they are
kept as `Q_t M_t`: what that leaves out is measured, not assumed (`left_over`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from .head_rows import HeadRows
from .norms import gram_norm_upper, safe_sqrt, spectral_norm_upper, thin

LOW_RANK_SIZE = 128  # smaller matrices are kept as they are
LOW_RANK = 5  # ranks up to a fifth of the size are looked for
NO_MORE = 1e-12  # of a term may be left over


@dataclass(frozen=True, eq=False)
class TermStack:
    """T matrices (d, d'), float64: first those kept as they are, then those of low rank.

    Attributes:
        whole: (F, d, d'). left, right: (L, d, r), (L, r, d').
        order: (T), which of the given terms stands where.
        size: (T), Frobenius norms. left_over: (T), of what is left out of each.
        inner: (T, T), `tr(W_t W_sᵀ)`, in the given order.
        rows_of: the factors, Lᵀ and R of all W_t = L_t R_t, where they are those of a layer's heads.
    """

    whole: Tensor
    left: Tensor
    right: Tensor
    order: Tensor
    size: Tensor
    left_over: Tensor
    inner: Tensor
    rows_of: tuple[HeadRows, HeadRows] | None = None

    @classmethod
    def of_heads(cls, left: HeadRows, right: HeadRows) -> TermStack:
        """`W_t = L_tᵀ R_t`, left (T, r, d), right (T, r, d'). Norms of mixtures are not differentiable."""
        terms, r = left.heads, left.k
        products = (left.gram * right.gram).unflatten(0, (terms, r)).unflatten(-1, (terms, r))
        inner = products.sum((1, 3))
        size = safe_sqrt(inner.diagonal())
        order = torch.arange(terms, device=size.device)
        none = size.new_zeros(0, left.d, right.d)
        zero = torch.zeros_like(size)
        return cls(none, left.w.mT, right.w, order, size, zero, inner, (left, right))

    @classmethod
    def of(cls, w: Tensor) -> TermStack:
        """(T, d, d'). Differentiable: the bases of terms of low rank are held fixed (`norms.thin`)."""
        terms, rows, columns = w.shape
        size = torch.linalg.matrix_norm(w.detach())
        flat = w.detach().flatten(1)
        inner = flat @ flat.mT
        order = torch.arange(terms, device=w.device)
        none = w.new_zeros(0, rows, 0), w.new_zeros(0, 0, columns)

        def plain() -> TermStack:
            return cls(w, *none, order, size, torch.zeros_like(size), inner)

        if min(rows, columns) < LOW_RANK_SIZE or terms < 3:
            return plain()
        # of a random matrix's image, the first columns span the range already
        sketch = torch.randn(
            columns, min(rows, columns) // LOW_RANK, generator=torch.Generator().manual_seed(0)
        )
        basis, r = torch.linalg.qr(w.detach() @ sketch.to(w))
        pivots = r.diagonal(dim1=-2, dim2=-1).abs()
        ranks = (pivots > 1e-10 * pivots[:, :1]).sum(-1)
        low = ranks < sketch.shape[1]
        if not bool(low.any()):
            return plain()
        basis = basis[..., : int(ranks[low].amax())]
        right = basis.mT @ w
        rest = torch.linalg.matrix_norm(w.detach() - basis @ right.detach())
        low &= rest <= NO_MORE * size
        order = torch.cat([order[~low], order[low]])
        rest = torch.where(low, rest, 0.0)
        return cls(w[~low], basis[low], right[low], order, size[order], rest[order], inner)

    @cached_property
    def mT(self) -> TermStack:
        """The transposed matrices."""
        rows = None if self.rows_of is None else self.rows_of[::-1]
        return replace(self, whole=self.whole.mT, left=self.right.mT, right=self.left.mT, rows_of=rows)

    @cached_property
    def norm(self) -> Tensor:
        """(T), spectral norms from above, in the given order."""
        low = spectral_norm_upper(thin(self.left) @ self.right)
        return self._given(torch.cat([spectral_norm_upper(self.whole), low]) + 2.0 * self.left_over)

    @property
    def shape(self) -> tuple[int, int]:
        """(d, d')."""
        return self.whole.shape[1], self.whole.shape[2]

    @property
    def rows(self) -> int:
        """d."""
        return self.whole.shape[1]

    def dense(self) -> Tensor:
        """All matrices, (T, d, d'), without what is left out."""
        return self._given(torch.cat([self.whole, self.left @ self.right]))

    @property
    def units(self) -> Tensor:
        """(T), sizes that searches divide terms by, in the given order; positive."""
        return self._given(self.size.clamp(min=1e-12 * float(self.size.amax()) + 1e-300))

    def start(self) -> Tensor:
        """A vector to begin `power` with, single precision like what follows from it: of no pattern."""
        size = self.rows if self.rows_of is None else self.rows_of[0].rows
        ramp = torch.arange(1, size + 1, dtype=torch.float32, device=self.size.device)
        return torch.sin(12.9898 * ramp.square())

    def power(self, x: Tensor, g: Tensor) -> Tensor:
        """One step of power iteration with `Σ_ts g_ts U_t U_sᵀ`, `U_t = W_t / units_t`, to length 1.

        Vectors are (d), but those of heads are `h = L x`, in which all is a product with a Gram matrix."""
        if self.rows_of is None:
            y = self._sum(g.float() @ self._at(x))
            return y / y.norm().clamp(min=1e-30)
        gram, other, unit = self._single
        y = _blockwise((g * unit).float(), self.rows_of[0].k, other) @ x
        h = gram @ y
        return h / (y @ h).clamp(min=1e-30).sqrt()

    def moments(self, x: Tensor) -> Tensor:
        """`xᵀ U_t U_sᵀ x`, (T, T), float64."""
        if self.rows_of is None:
            y = self._at(x).double()
            return y @ y.mT
        shape = (self.rows_of[0].heads, self.rows_of[0].k)
        products = x[:, None] * self._single[1] * x
        return self._single[2] * products.unflatten(0, shape).unflatten(-1, shape).sum((1, 3)).double()

    @cached_property
    def _single(self) -> tuple[Tensor, Tensor, Tensor]:
        """In single precision, for searches: of heads both Gram matrices and their units in U_t U_sᵀ; else
        transposes of the U_t that are kept as they are, below each other, and the factors of the others."""
        size = self.units[self.order]
        if self.rows_of is not None:
            grams = [r.gram for r in self.rows_of]
            tops = [g.abs().amax() for g in grams]
            left, right = ((g / top.clamp(min=1e-300)).float() for g, top in zip(grams, tops, strict=True))
            return left, right, (tops[0] / size)[:, None] * (tops[1] / size)
        count = len(self.whole)
        whole = self.whole / size[:count, None, None]
        right = self.right / size[count:, None, None]
        return whole.mT.float().flatten(0, 1), self.left.float(), right.float()

    def _at(self, x: Tensor) -> Tensor:
        """`U_tᵀ x` for (d): (T, d')."""
        whole, left, right = self._single
        low = (right.mT @ (left.mT @ x).unsqueeze(-1)).squeeze(-1)
        return self._given(torch.cat([(whole @ x).reshape(-1, self.whole.shape[-1]), low]))

    def _sum(self, y: Tensor) -> Tensor:
        """`Σ_t U_t y_t` for (T, d'): (d)."""
        whole, left, right = self._single
        y = y[self.order]
        count = len(self.whole)
        return whole.mT @ y[:count].flatten() + (left @ (right @ y[count:].unsqueeze(-1))).sum((0, -1))

    def mixture_norm(self, mix: Tensor) -> Tensor:
        """`‖[Σ_t L_jt W_t]_j‖₂` from above, the matrices side by side; mix: L, (J, T)."""
        if mix.shape[0] > mix.shape[1]:
            mix = torch.linalg.qr(mix, mode="r").R  # only Lᵀ L counts
        if self.rows_of is not None:
            rows, other = self.rows_of
            return rows.weighted(_blockwise(mix.mT @ mix, rows.k, other.gram), other.d)
        mix = mix[:, self.order]
        count = len(self.whole)
        own = mix[:, :count]
        own = torch.linalg.qr(own, mode="r").R if len(own) > count else own
        wide = torch.einsum("jt,tde->dje", own, self.whole).flatten(1)
        if not len(self.left):
            return spectral_norm_upper(wide)
        c = mix.mT @ mix
        which = torch.arange(count, len(self.order), device=c.device).repeat_interleave(self.left.shape[-1])
        inner, crossed = self._products
        left = self.left.transpose(0, 1).flatten(1)  # (d, L r)
        half = left @ (0.5 * c[which][:, which] * inner)
        if count:
            half = half + torch.einsum("fk,fdk->dk", c[:count, which], crossed)
        gram = half @ left.mT
        gram = gram + gram.mT + wide @ wide.mT
        sums = sum(self.whole.shape[-2:]) + left.shape[1] + len(c)
        error = 16.0 * sums * torch.finfo(c.dtype).eps * (self.size @ c.detach().abs() @ self.size)
        rest = self.left_over @ c.detach().abs() @ self.left_over
        return safe_sqrt(gram_norm_upper(gram) + error) + safe_sqrt(rest)

    @cached_property
    def _products(self) -> tuple[Tensor, Tensor]:
        """`M Mᵀ` of all right factors below each other, (L r, L r), and `W_f Mᵀ`, (F, d, L r)."""
        right = self.right.flatten(0, 1)
        return right @ right.mT, self.whole @ right.mT

    def _given(self, x: Tensor) -> Tensor:
        return torch.empty_like(x).index_copy(0, self.order, x)


def _blockwise(c: Tensor, k: int, gram: Tensor) -> Tensor:
    """Blocks (k, k) of a matrix times a number each."""
    blocks = gram.unflatten(0, (-1, k)).unflatten(-1, (-1, k))
    return (c[:, None, :, None] * blocks).flatten(-2).flatten(0, 1)
