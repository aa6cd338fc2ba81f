"""Second-order expansion of attention around a centre, and what its remainder is worth to a functional.

theory.md, sections 3 and 4. One attention head has scores `s` (m of them per query row), probabilities
p = softmax(s), values v. For a move Δ of a score row and w of the values,

    o' − o = Σ p_c w_c + Cov_p(Δ, v)  +  [Σ (p'_c − p_c) v_c − Cov_p(Δ, v)]  +  Σ (p'_c − p_c) w_c,

the first two terms being linear. Everything here bounds the other two, curvature and cross term, for a whole
functional `Σ_j a_j o_j` at once: signs cancel inside `y_c = Σ_j a_j (v_cj − o_j)` before absolute values are
taken. The closed form of the curvature in `curvature_bound` is tighter than the integral form of theory.md,
(5) and (7): it needs the probabilities at the centre only, not their largest values on the segment.

Shapes: (…, n, m) for scores and probabilities; F functionals of each query row stand before the keys,
(…, n, F, m).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..norms import gram_norm_upper


def bilinear_range_of_ball(gram_q: Tensor, gram_k: Tensor, cross: Tensor) -> tuple[Tensor, Tensor]:
    """Range of `dq · dk` for `dq = G_q z, dk = G_k z, ‖z‖₂ ≤ 1` (theory.md, section 3, "Scores").

    The extremes are the extreme eigenvalues of `½ (G_qᵀG_k + G_kᵀG_q)`, which are those of the small matrix
    `½ Γ^½ J Γ^½`, Γ the Gram matrix of [G_q; G_k] and J the swap of its halves.

    Arguments:
        gram_q: (…, dk, dk) `G_q G_qᵀ`; gram_k: the same for keys; cross: (…, dk, dk) `G_q G_kᵀ`.

    Returns:
        lower (≤ 0) and upper (≥ 0), (…) each, moved outwards by the rounding slack.
    """
    top = torch.cat([gram_q, cross], -1)
    bottom = torch.cat([cross.mT, gram_k], -1)
    gamma = torch.cat([top, bottom], -2)
    finite = torch.isfinite(gamma).all(-1).all(-1)
    gamma = torch.where(finite[..., None, None], gamma, torch.zeros_like(gamma))
    dk = gram_q.shape[-1]
    size = gamma.diagonal(dim1=-2, dim2=-1).sum(-1)
    # Γ + δI stands for a larger set, and has a Cholesky factor
    room = 1e-12 * size + torch.finfo(gamma.dtype).tiny
    half, failed = torch.linalg.cholesky_ex(gamma + room[..., None, None] * torch.eye(2 * dk).to(gamma))
    finite &= failed == 0
    half = torch.where(finite[..., None, None], half, torch.zeros_like(half))
    swapped = torch.cat([half[..., dk:, :], half[..., :dk, :]], -2)
    form = 0.5 * (half.mT @ swapped)
    extremes = torch.linalg.eigvalsh((form + form.mT) / 2)
    slack = 64.0 * dk * torch.finfo(gamma.dtype).eps * size
    low, high = extremes[..., 0].clamp(max=0.0) - slack, extremes[..., -1].clamp(min=0.0) + slack
    return torch.where(finite, low, -torch.inf), torch.where(finite, high, torch.inf)


def psi(r: Tensor) -> Tensor:
    """`(e^r − 1 − r) / r²` for r ≥ 0: the factor in `e^x − 1 − x ≤ ψ(r) x²`, |x| ≤ r. ½ at 0, increasing."""
    small = r < 0.1
    series = 0.5 + r / 6 + r.square() / 24 + r**3 / 60  # the last term covers all that follow
    safe = torch.where(small, torch.ones_like(r), r)
    return torch.where(small, series, (torch.expm1(safe) - safe) / safe.square() * (1.0 + 1e-13))


def chi(r: Tensor) -> Tensor:
    """`(e^r − 1) / r` for r ≥ 0: the factor in `|e^x − 1| ≤ χ(r) |x|`, |x| ≤ r."""
    safe = r.clamp(min=1e-12)
    return torch.expm1(safe) / safe * (1.0 + 1e-12)


class RowData(NamedTuple):
    """What the remainder of one attention needs of its score rows. With `Δ' = Δ − Σ_k p_k Δ_k`:

    Attributes:
        p: (…, n, m) probabilities at the centre.
        r: (…, n, m) bound of |Δ'_c|.
        b: (…, n, m) bound of the bilinear part of the score, |b_c|.
        sd: (…, n) bound of `√(Σ p_c Δ'_c²)`.
        sd_psi: (…, n) bound of `√(Σ p_c ψ(r_c) Δ'_c²)`.
        sd_chi: (…, n) bound of `√(Σ p_c χ(r_c)² Δ'_c²)`.
        charge: (…, n, m) `p_c ψ(r_c) r_c²`, at least p_c φ(Δ'_c).
    """

    p: Tensor
    r: Tensor
    b: Tensor
    sd: Tensor
    sd_psi: Tensor
    sd_chi: Tensor
    charge: Tensor


FEW_LEVELS, MANY_LEVELS = (0.0, 1.0), (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)


def slope_bound(y: Tensor, rows: RowData, error: Tensor | float = 0.0) -> Tensor:
    """Bound of |ℓ|, `ℓ = Σ p_c Δ'_c y_c`, and of the rounding error in y: (…, n, F, m) → (…, n, F)."""
    p = rows.p.unsqueeze(-1)
    sd_y = (y.square() @ p).squeeze(-1).sqrt()
    slope = torch.minimum(rows.sd.unsqueeze(-1) * sd_y, (y.abs() @ (p * rows.r.unsqueeze(-1))).squeeze(-1))
    return slope + error * (1.0 + rows.sd.unsqueeze(-1))


def curvature_bound(
    y: Tensor, slope: Tensor, rows: RowData, levels: tuple[float, ...] = MANY_LEVELS
) -> Tensor:
    """Upper bound κ⁺ of the curvature `Σ (p'_c − p_c) y_c − Σ p_c Δ_c y_c`; of minus it, given −y.

    With φ(x) = e^x − 1 − x, Z = Σ p e^Δ' ≥ 1 and ℓ = Σ p_c Δ'_c y_c it is exactly
    `(1/Z) Σ p_c φ(Δ'_c) (y_c − ℓ)`. So `κ⁺ = Σ p_c φ(Δ'_c) g_c` with `g = (y + sup|ℓ|)⁺`, where a part of g
    up to any level τ is charged to the row's joint norm and the rest to the entries' ranges:
    `κ⁺ ≤ τ sd_ψ² + Σ p_c φ(r_c) (g_c − τ)⁺`. Never more than `max y + sup|ℓ|`.

    Arguments:
        y: (…, n, F, m), values of the functionals per key, centred at the average: `Σ_c p_c y_c = 0`.
        slope: (…, n, F), `slope_bound` of y.
        levels: the τ to try, as parts of the largest g; each is valid.

    Returns:
        (…, n, F).
    """
    charge = rows.charge.unsqueeze(-1)
    norm = rows.sd_psi.square().unsqueeze(-1)
    g = (y + slope.unsqueeze(-1)).clamp(min=0.0)
    top = g.amax(-1)
    best = top  # max y + sup|ℓ|
    for level in levels:
        tau = level * top
        value = tau * norm
        if level < 1.0:
            excess = g if level == 0.0 else (g - tau.unsqueeze(-1)).clamp(min=0.0)
            value = value + (excess @ charge).squeeze(-1)
        best = torch.minimum(best, value.nan_to_num(nan=torch.inf))  # 0 · ∞ for huge ranges
    return best


def cross_bound(sd_u: Tensor, top_u: Tensor, rows: RowData) -> Tensor:
    """Bound of the cross term `|Σ (p'_c − p_c) u_c|`, `u_c = Σ_j a_j dV_cj`: (…, n, F).

    `sd_χ sd(u)`, because p' − p = p (e^Δ'/Z − 1) has the deviation of e^Δ'/Z at most; never more than
    `2 max|u|`.

    Arguments:
        sd_u: (…, n, F) bound of `√(Σ p_c u_c²)`. top_u: (…, n, F) bound of `max |u_c|`.
    """
    return torch.minimum((rows.sd_chi.unsqueeze(-1) * sd_u).nan_to_num(nan=torch.inf), 2.0 * top_u)


def score_bound(y: Tensor, rows: RowData, error: Tensor | float = 0.0) -> Tensor:
    """Bound of the bilinear part of the scores, to first order: `Σ p_c |y_c| |b_c|` (theory.md, (9))."""
    pb = (rows.p * rows.b).unsqueeze(-1)
    return (y.abs() @ pb).squeeze(-1) + error * pb.sum(-2)


def weighted_deviation(grams: list[Tensor | None], supports: Tensor, weight: Tensor) -> Tensor:
    """Bound of `√(Σ_c weight_c Δ_c²)` for a linear family Δ, a joint norm as in theory.md, (6).

    Per ball-like group the smaller of its spectral norm and of the norm of its supports; groups add up.

    Arguments:
        grams: per group (…, n, m, m), `ρ² D Dᵀ`, D the group's rows (m × symbols); None if it is no ball.
        supports: (groups, …, n, m) bound of |D e| per entry and group.
        weight: (…, n, m), not negative.

    Returns:
        per group (groups, …, n): what all of them move has at most the sum.
    """
    root = weight.sqrt()  # infinite where ψ or χ overflow: the sum then is, too
    parts = []
    for gram, support in zip(grams, supports, strict=True):
        best = (root * support).square().sum(-1).sqrt()
        if gram is not None:
            scaled = gram * root.unsqueeze(-1) * root.unsqueeze(-2)
            best = torch.minimum(best, gram_norm_upper(scaled).sqrt())
        parts.append(best)
    return torch.stack(parts)
