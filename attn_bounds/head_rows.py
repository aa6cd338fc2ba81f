"""Norms of `[F_1 W_1; …; F_H W_H]` for one set of weights W_h and many F: what heads scale and mix.

With the weights below each other, W (r, d), and `D = blockdiag(F_hᵀ F_h)`, or any other positive semidefinite
D (r, r), the square of the norm is `λ_max(D G)`, `G = W Wᵀ`, the largest eigenvalue of `G^½ D G^½`. G belongs
to the weights alone, and so does `K ≈ (G + δ I)⁻¹`; for any τ

    τ K ⪰ D   ⟹   λ_max(D G) ≤ λ_max(D (G + δ I)) ≤ τ λ_max(K (G + δ I)),

which one Cholesky factor of `K − D / τ` proves. Lanczos' method in the inner product of G proposes τ.
So a norm takes no product of (r, d) matrices and no Gram matrix, but r³/3 multiplications. Before that,
rows of W are scaled to lengths of about one, S⁻¹ W, and D becomes S D S.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from .norms import binary_unit, gram_norm_upper, safe_sqrt, spectral_norm_upper

LARGE = 256  # up to this many rows or columns the matrix is formed
RIDGE = 1e-6  # δ, of the largest eigenvalue of G
STEPS = 40  # of Lanczos' method at most
ENOUGH = 1e-5  # relative change of its value in four steps
ROOMS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 1e1)  # above its value, until a proof succeeds


class _Inverse(NamedTuple):
    """K; a bound of `λ_max(K (G + δ I))`; one of `λ_max(G + δ I)`."""

    k: Tensor
    excess: Tensor
    top: Tensor


class HeadRows:
    """Weights of heads below each other; what norms need of them is computed once.

    Arguments:
        w: (H, k, d), float64, finite.
    """

    def __init__(self, w: Tensor) -> None:
        self.w = w.contiguous()
        self.heads, self.k, self.d = w.shape
        # products of other numbers are too small or too large
        usual = 1e-70 < float(self.w.detach().abs().amax()) < 1e70 if self.w.numel() else False
        self.large = usual and min(self.rows, self.d) > LARGE

    @cached_property
    def _scale(self) -> Tensor:
        """S, (H k): powers of two, which round nothing, above the rows' lengths; 0 for rows of zeros."""
        length = torch.linalg.vector_norm(self.w.detach(), dim=-1).flatten()
        return torch.where(length > 0, binary_unit(length), torch.zeros_like(length))

    @cached_property
    def _inverse_scale(self) -> Tensor:
        scale = self._scale
        return torch.where(scale > 0, 1.0 / scale, torch.zeros_like(scale))

    @cached_property
    def _unit_gram(self) -> Tensor:
        """`S⁻¹ G S⁻¹`."""
        rows = self.w.detach().flatten(0, 1) * self._inverse_scale[:, None]
        return rows @ rows.mT

    @property
    def gram(self) -> Tensor:
        """G, (H k, H k). Not differentiable."""
        return self._scaled(self._unit_gram)

    @property
    def rows(self) -> int:
        """Of all heads, H k."""
        return self.heads * self.k

    def _scaled(self, m: Tensor) -> Tensor:
        """`S M S`."""
        return self._scale[:, None] * m * self._scale

    def norm(self, f: Tensor) -> Tensor:
        """`‖[F_h W_h]_h‖₂` from above, differentiable: (…, H, q, k) → (…)."""
        if not self.large:
            return spectral_norm_upper((f @ self.w).flatten(-3, -2))
        unit = binary_unit(f.detach().abs().amax((-3, -2, -1)))  # squares of tiny entries must not vanish
        return unit * self.weighted(self._blocks(f / unit[..., None, None, None]), f.shape[-2])

    def _blocks(self, f: Tensor) -> Tensor:
        """`blockdiag(F_hᵀ F_h)`: (…, H, q, k) → (…, H k, H k)."""
        blocks = f.mT @ f  # (…, H, k, k)
        d = f.new_zeros(*blocks.shape[:-3], self.heads, self.k, self.heads, self.k)
        d.diagonal(dim1=-4, dim2=-2).copy_(blocks.movedim(-3, -1))
        return d.flatten(-4, -3).flatten(-2)

    def weighted(self, d: Tensor, terms: int) -> Tensor:
        """`λ_max(D G)^½` from above for positive semidefinite D: (…, H k, H k) → (…).

        Arguments:
            terms: how many products each entry of D sums up; its rounding is allowed for.
        """
        lead = d.shape[:-2]
        found = [self._weighted(self._scaled(x), terms) for x in d.reshape(-1, *d.shape[-2:])]
        return torch.stack(found).reshape(lead)

    def _weighted(self, d: Tensor, terms: int) -> Tensor:
        """For S D S."""
        trace = d.detach().diagonal().sum()
        if not bool(torch.isfinite(d.detach().sum())):
            return d.new_tensor(torch.inf)
        if not bool(trace > 0) or not bool(self.w.any()):
            return d.new_zeros(())
        d = d / trace
        inverse = self._inverse
        rows, eps = len(d), torch.finfo(d.dtype).eps
        with torch.no_grad():
            z = _top_vector(d, self._unit_gram)
        w = self.w.flatten(0, 1)
        image = (w @ (w.mT @ (z * self._inverse_scale))) * self._inverse_scale
        value = image @ d @ image / (z @ image)  # Rayleigh's quotient, the gradient's source
        top = value.detach()
        proved = None
        for room in ROOMS if bool(top > 0) else ():
            tau = top * (1.0 + room)
            left = torch.sub(inverse.k, d.detach(), alpha=1.0 / float(tau))
            if int(torch.linalg.cholesky_ex(left).info) == 0:
                # Higham, Accuracy and Stability, Theorem 10.3, and the rounding of D and of the difference
                error = 2.0 * (rows + 4) * eps * (tau * inverse.k.diagonal().sum() + 1.0)
                proved = tau * inverse.excess + error * inverse.top
                break
        if proved is None:  # the trace of D G
            proved = torch.minimum((d.detach() * self._unit_gram).sum(), inverse.top)
        square = proved + 4.0 * (terms + rows + self.d) * eps * inverse.top
        if bool(square.isnan()):
            return d.new_tensor(torch.inf)
        return safe_sqrt(trace) * safe_sqrt(square * (value / top) if bool(top > 0) else square)

    @cached_property
    def _inverse(self) -> _Inverse:
        gram, rows = self._unit_gram, self.rows
        eps = torch.finfo(gram.dtype).eps
        top = gram_norm_upper(gram)
        delta = RIDGE * top + 8.0 * self.d * eps * gram.diagonal().sum()
        eye = torch.eye(rows).to(gram)
        g = gram + delta * eye
        k = torch.linalg.inv(g)
        k = (k + k.mT) / 2
        rest = k @ g - eye
        rounding = 2.0 * rows * eps * torch.linalg.matrix_norm(k) * torch.linalg.matrix_norm(g)
        return _Inverse(k, 1.0 + torch.linalg.matrix_norm(rest) + rounding, top + delta)


def _top_vector(d: Tensor, g: Tensor) -> Tensor:
    """z for which `(G z)ᵀ D (G z) / zᵀ G z` is nearly `λ_max(D G)`; (r)."""
    rows = len(d)
    steps = min(STEPS, rows)
    basis, image = d.new_empty(steps, rows), d.new_empty(steps, rows)  # q_j, orthonormal in G, and G q_j
    moved = d.new_empty(steps, rows)  # D G q_j
    v = torch.sin(12.9898 * torch.arange(1, rows + 1, dtype=d.dtype, device=d.device).square())
    last = known = 0.0
    for j in range(steps):
        for i in range(2 if j else 0):  # once more for what rounding leaves
            part = image[:j] @ v
            v = torch.addmv(v, basis[:j].mT, part, alpha=-1.0)
            known = float(part @ part) if i == 0 else known
        s = g @ v
        square = float(v @ s)
        if not square > 1e-20 * known:  # but for rounding, all of it lies in what is known
            steps = j
            break
        length = square**0.5
        torch.div(v, length, out=basis[j])
        torch.div(s, length, out=image[j])
        v = torch.mv(d, image[j], out=moved[j])
        if j % 4 == 3 or j == steps - 1:
            value = float(torch.linalg.eigvalsh(image[: j + 1] @ moved[: j + 1].mT)[-1])
            if value - last <= ENOUGH * value:
                steps = j + 1
                break
            last = value
    if steps == 0:
        return v
    vectors = torch.linalg.eigh(image[:steps] @ moved[:steps].mT).eigenvectors
    return basis[:steps].mT @ vectors[:, -1]
