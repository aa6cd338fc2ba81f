"""Matrices W_1 … W_T of which products with all and norms of mixtures `[Σ_t L_jt W_t]_j` are needed.

Value-output maps of attention heads have the rank of a head. Where that is small against their size they are
kept as `Q_t M_t`: what that leaves out is measured, not assumed (`left_over`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from .norms import gram_norm_upper, safe_sqrt, spectral_norm_upper

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
        norm: (T), spectral norms from above, in the given order. inner: (T, T), `tr(W_t W_sᵀ)`, too.
    """

    whole: Tensor
    left: Tensor
    right: Tensor
    order: Tensor
    size: Tensor
    left_over: Tensor
    norm: Tensor
    inner: Tensor

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
            return cls(w, *none, order, size, torch.zeros_like(size), spectral_norm_upper(w), inner)

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
        norm = torch.cat([spectral_norm_upper(w[~low]), spectral_norm_upper(right[low])])
        norm = torch.empty_like(norm).index_copy(0, order, norm) + 2.0 * rest
        return cls(w[~low], basis[low], right[low], order, size[order], rest[order], norm, inner)

    @cached_property
    def mT(self) -> TermStack:
        """The transposed matrices."""
        return replace(self, whole=self.whole.mT, left=self.right.mT, right=self.left.mT)

    def scaled(self, factor: Tensor) -> TermStack:
        """`factor_t W_t`, factor (T) in the given order and positive."""
        f = factor[self.order]
        return replace(
            self,
            whole=self.whole * f[: len(self.whole), None, None],
            right=self.right * f[len(self.whole) :, None, None],
            size=self.size * f,
            left_over=self.left_over * f,
            norm=self.norm * factor,
            inner=factor[:, None] * self.inner * factor,
        )

    @property
    def rows(self) -> int:
        """d."""
        return self.whole.shape[1]

    def dense(self) -> Tensor:
        """All matrices, (T, d, d'), without what is left out."""
        return self._given(torch.cat([self.whole, self.left @ self.right]))

    def single(self) -> TermStack:
        """In single precision: for searches."""
        return replace(self, whole=self.whole.float(), left=self.left.float(), right=self.right.float())

    def at(self, x: Tensor) -> Tensor:
        """`W_tᵀ x` for (d): (T, d')."""
        low = (self.right.mT @ (self.left.mT @ x).unsqueeze(-1)).squeeze(-1)
        return self._given(torch.cat([self.whole.mT @ x, low]))

    def sum(self, y: Tensor) -> Tensor:
        """`Σ_t W_t y_t` for (T, d'): (d)."""
        y = y[self.order].unsqueeze(-1)
        count = len(self.whole)
        return (self.whole @ y[:count]).sum((0, -1)) + (self.left @ (self.right @ y[count:])).sum((0, -1))

    def mixture_norm(self, mix: Tensor) -> Tensor:
        """`‖[Σ_t L_jt W_t]_j‖₂` from above, the matrices side by side; mix: L, (J, T)."""
        if mix.shape[0] > mix.shape[1]:
            mix = torch.linalg.qr(mix, mode="r").R  # only Lᵀ L counts
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
