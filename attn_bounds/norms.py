"""Guaranteed upper bounds of spectral norms. Power iteration converges from below and is not here.

All functions move their result up by a slack for the rounding of its dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

EXACT_SIZE = 128  # up to this many rows (or columns) the Gram matrix's eigenvalues are computed


def _grow(x: Tensor, size: int) -> Tensor:
    return x * (1.0 + 8.0 * size * torch.finfo(x.dtype).eps)


def gram_norm_upper(gram: Tensor) -> Tensor:
    """Largest eigenvalue of a positive semidefinite matrix, from above.

    Exact up to rounding below `EXACT_SIZE`, else Gram iteration, rescaled: `‖G^(2^t)‖_F^(1/2^t) ≥ λ_max`.

    Shape: (…, r, r) → (…).
    """
    rows = gram.shape[-1]
    if rows == 0:
        return gram.new_zeros(gram.shape[:-2])
    finite = torch.isfinite(gram).all(-1).all(-1)
    if not bool(finite.all()):  # LAPACK refuses them; such a matrix has no finite bound
        safe = torch.where(finite[..., None, None], gram, torch.zeros_like(gram))
        return torch.where(finite, gram_norm_upper(safe), torch.inf)
    size = gram.diagonal(dim1=-2, dim2=-1).sum(
        -1
    )  # the trace bounds every eigenvalue, and what rounding can do
    if rows <= EXACT_SIZE:
        top = torch.linalg.eigvalsh(gram)[..., -1].clamp(min=0.0)
        return torch.minimum(top + 8.0 * rows * torch.finfo(gram.dtype).eps * size, _grow(size, rows))
    log_scale = torch.zeros_like(size)
    power, g = 1.0, gram
    for _ in range(6):
        norm = torch.linalg.matrix_norm(g).clamp(min=torch.finfo(gram.dtype).tiny)
        g = g / norm[..., None, None]
        log_scale = log_scale + norm.log() / power
        g = g @ g
        power *= 2.0
    top = (log_scale + torch.linalg.matrix_norm(g).log() / power).exp()
    return torch.minimum(_grow(top, 64 * rows), _grow(size, rows))


def spectral_norm_upper(matrix: Tensor) -> Tensor:
    """`‖M‖₂` from above, batched.

    Shape: (…, r, c) → (…). The Gram matrix of the shorter side is formed, so the cost is r·c·min(r, c).
    """
    m = matrix if matrix.shape[-2] <= matrix.shape[-1] else matrix.mT
    gram = m @ m.mT
    # forming the Gram matrix errs by at most c · eps times the product of row norms
    error = 4.0 * m.shape[-1] * torch.finfo(m.dtype).eps * gram.diagonal(dim1=-2, dim2=-1).sum(-1)
    return (gram_norm_upper(gram) + error).sqrt()
