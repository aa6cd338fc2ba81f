"""Guaranteed upper bounds of spectral norms.

Functions named `…_upper` move their result up by a slack for the rounding of its dtype. Power iteration
converges from below: it is here as `power_iteration_lower` only, to measure gaps with. Sums of Kronecker
products are in `kronecker.py`, convolutions in `convolutions.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

EXACT_SIZE = 128  # up to this many rows (or columns) the Gram matrix's eigenvalues are computed
LANCZOS_STEPS = 30
BULK_SIZE = 512  # up to this many rows batches in single precision are bounded by Gram iteration


def _grow(x: Tensor, size: int) -> Tensor:
    return x * (1.0 + 8.0 * size * torch.finfo(x.dtype).eps)


def gram_norm_upper(gram: Tensor) -> Tensor:
    """Largest eigenvalue of a positive semidefinite matrix, from above.

    Exact up to rounding below `EXACT_SIZE`, else proved by a Cholesky factor (as a rule within 1e-3), or by
    Gram iteration, rescaled, `‖G^(2^t)‖_F^(1/2^t) ≥ λ_max`, where that fails. Batches in
    single precision get Gram iteration at once: up to three times as fast, and as a rule within 2e-2.

    Shape: (…, r, r) → (…).
    """
    rows = gram.shape[-1]
    if rows == 0:
        return gram.new_zeros(gram.shape[:-2])
    if not bool(torch.isfinite(gram.detach().sum())):
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
    if _in_bulk(gram):
        unit = torch.where(size > 0, size, torch.ones_like(size))  # squares of large entries overflow
        return torch.minimum(unit * _by_gram_iteration(gram / unit[..., None, None]), _grow(size, rows))
    if gram.dtype != torch.float64:  # what rounding may do to a large factor is too much in single precision
        return round_up(gram_norm_upper(gram.double()), gram.dtype)
    top = _by_cholesky(gram)
    if not bool(torch.isfinite(top).all()):
        top = torch.minimum(top.nan_to_num(nan=torch.inf, posinf=torch.inf), _by_gram_iteration(gram))
    return torch.minimum(top, _grow(size, rows))


def _in_bulk(x: Tensor) -> bool:
    """Whether this is a batch of matrices, none too large, in single precision.

    A batch of one as well: a sample's bound must not depend on what else is in its batch.
    """
    few = min(x.shape[-2:]) <= BULK_SIZE and max(x.shape[-2:]) <= 2 * BULK_SIZE
    return few and x.dtype == torch.float32 and x.ndim > 2


def _by_gram_iteration(gram: Tensor) -> Tensor:
    log_scale = gram.new_zeros(gram.shape[:-2])
    power, g = 1.0, gram
    for _ in range(6):
        norm = torch.linalg.matrix_norm(g).clamp(min=torch.finfo(gram.dtype).tiny)
        g = g / norm[..., None, None]
        log_scale = log_scale + norm.log() / power
        g = g @ g
        power *= 2.0
    top = (log_scale + torch.linalg.matrix_norm(g).log() / power).exp()
    return _grow(top, 64 * gram.shape[-1])


def _by_cholesky(gram: Tensor) -> Tensor:
    """Lanczos proposes, a Cholesky factor proves: `τ ≥ λ_max` where `τI − G` has one. Infinite where not.

    A thirtieth of the work of Gram iteration, and as a rule within 1e-3. The gradient is that of the
    proposal, a Rayleigh quotient.
    """
    rows, eps = gram.shape[-1], torch.finfo(gram.dtype).eps
    tiny = torch.finfo(gram.dtype).tiny
    with torch.no_grad():
        ramp = torch.arange(1, rows + 1, dtype=gram.dtype, device=gram.device)
        v = torch.sin(12.9898 * ramp.square()).expand(gram.shape[:-1]).unsqueeze(-1)  # no symmetric pattern
        basis = v / torch.linalg.vector_norm(v, dim=-2, keepdim=True)
        for _ in range(LANCZOS_STEPS):
            v = gram @ basis[..., -1:]
            for _ in range(2):  # once more for what rounding leaves
                v = v - basis @ (basis.mT @ v)
            v = v / torch.linalg.vector_norm(v, dim=-2, keepdim=True).clamp(min=tiny)
            basis = torch.cat([basis, v], -1)
        ritz = torch.linalg.eigh(basis.mT @ (gram @ basis)).eigenvectors[..., -1:]
        v = basis @ ritz
        v = v / torch.linalg.vector_norm(v, dim=-2, keepdim=True).clamp(min=tiny)
    top = (v * (gram @ v)).sum((-2, -1))
    zero = gram.diagonal(dim1=-2, dim2=-1).sum(-1) <= 0
    bound = torch.where(zero, torch.zeros_like(top), torch.inf)
    eye = torch.eye(rows, dtype=gram.dtype, device=gram.device)
    for room in (1e-6, 1e-3, 4e-3, 2e-2, 1e-1):
        tau = top * (1.0 + room)
        with torch.no_grad():
            _, failed = torch.linalg.cholesky_ex(tau[..., None, None] * eye - gram)
        # Higham, Accuracy and Stability, Theorem 10.3: success proves it up to (rows + 1) eps · trace
        proved = tau * (1.0 + 4.0 * (rows + 1) * rows * eps)
        bound = torch.where((failed == 0) & (tau > 0) & bound.isinf(), proved, bound)
        if not bool(bound.isinf().any()):
            break
    return bound


def safe_sqrt(x: Tensor) -> Tensor:
    """Square root with gradient 0 where x ≤ 0 (a zero matrix is no reason for a NaN)."""
    positive = x > 0
    return torch.where(positive, torch.where(positive, x, torch.ones_like(x)).sqrt(), torch.zeros_like(x))


def spectral_norm_upper(matrix: Tensor) -> Tensor:
    """`‖M‖₂` from above, batched.

    Shape: (…, r, c) → (…); infinite where an entry is not finite. The Gram matrix of the shorter side is
    formed: r·c·min(r, c) operations. float32 beyond `EXACT_SIZE` goes through float64, as rounding adds up,
    but for batches: see `gram_norm_upper`.
    """
    single = matrix.dtype in (torch.float32, torch.float16, torch.bfloat16)
    if single and min(matrix.shape[-2:]) > EXACT_SIZE and not _in_bulk(matrix):
        return round_up(spectral_norm_upper(matrix.double()), matrix.dtype)
    m = matrix if matrix.shape[-2] <= matrix.shape[-1] else matrix.mT
    if m.numel() == 0:
        return m.new_zeros(m.shape[:-2])
    largest = m.detach().abs().amax((-2, -1))
    unit = binary_unit(largest)  # squares of tiny entries must not vanish
    m = m / unit[..., None, None]
    gram = m @ m.mT
    # forming the Gram matrix errs by at most c · eps times the product of row norms
    error = 4.0 * m.shape[-1] * torch.finfo(m.dtype).eps * gram.diagonal(dim1=-2, dim2=-1).sum(-1)
    bound = unit * safe_sqrt(gram_norm_upper(gram) + error)
    return torch.where(torch.isfinite(largest), bound, torch.inf)


def binary_unit(x: Tensor) -> Tensor:
    """Powers of two just above x ≥ 0, to divide by without rounding; 1 where there is none."""
    unit = torch.ldexp(torch.ones_like(x), torch.frexp(x).exponent)
    return torch.where((unit > 0) & torch.isfinite(unit), unit, torch.ones_like(unit))


def thin(left: Tensor) -> Tensor:
    """`Qᵀ L` with Q an orthonormal basis of L's columns: `‖Qᵀ L R‖ = ‖L R‖` for every R, and fewer rows.

    Shape: (…, r, c) → (…, min(r, c), c). Up to rounding, `8 (r + c) eps ‖L‖_F`. Differentiable: Q is held
    fixed, as what moves L out of its range changes such a norm in second order only.
    """
    if left.shape[-2] <= left.shape[-1]:
        return left
    return torch.linalg.qr(left.detach()).Q.mT @ left


def round_up(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A bound computed in float64, in another dtype and not below it."""
    if x.dtype == dtype:
        return x
    y = x.to(dtype)
    return y * (1.0 + 2.0 * torch.finfo(dtype).eps) + torch.finfo(dtype).tiny * (x > 0)


def power_iteration_lower(matrix: Tensor, steps: int = 100, seed: int = 0) -> Tensor:
    """A **lower** bound of `‖M‖₂`, usually close: for measuring gaps, never for a proof. (…, r, c) → (…)."""
    generator = torch.Generator().manual_seed(seed)
    v = torch.randn((*matrix.shape[:-2], matrix.shape[-1], 1), generator=generator, dtype=torch.float64)
    v = v.to(matrix)
    tiny = torch.finfo(matrix.dtype).tiny
    for _ in range(steps):
        v = matrix.mT @ (matrix @ v)
        v = v / torch.linalg.vector_norm(v, dim=-2, keepdim=True).clamp(min=tiny)
    v = v / torch.linalg.vector_norm(v, dim=-2, keepdim=True).clamp(min=tiny)
    length = torch.linalg.vector_norm(matrix @ v, dim=(-2, -1))
    return length * (1.0 - 4.0 * max(matrix.shape[-2:]) * torch.finfo(matrix.dtype).eps)
