"""Second order in one piece: quadratic bounds of activations, and the maximum of a quadratic over a ball.

Bounds of first order add up the worst cases of every node. Kept as quadratic forms of the input symbols,
errors of many nodes are maximised together: they do not all take their worst value at the same input.
"""

from __future__ import annotations

import torch
from torch import Tensor


def relu_quadratic(x: Tensor, low: Tensor, high: Tensor, offset: Tensor) -> Tensor:
    """Smallest c ≥ 0 with `relu(x + d) ≤ relu(x) + relu'(x) d + offset + c d²` for `low ≤ x + d ≤ high`.

    Beyond the kink the left side exceeds the tangent by |d| − |x|; `(|d| − |x| − offset) / d²` is largest at
    `|d| = 2 (|x| + offset)`, or at the far end of the range.

    Arguments:
        x, low, high: of the same shape, low < 0 < high.
        offset: ≥ 0; positive where x = 0.
    """
    far = torch.where(x > 0, x - low, high - x)
    level = x.abs() + offset
    inside = 0.25 / level.clamp(min=torch.finfo(x.dtype).tiny)
    at_end = (far - level).clamp(min=0.0) / far.square()
    return torch.where(2 * level <= far, inside, at_end)


def ball_maximum_upper(
    c: Tensor, m: Tensor, start: Tensor | None = None, tolerance: float = 1e-3
) -> tuple[Tensor, Tensor]:
    """Upper bound of `max c·z + zᵀMz` over `‖z‖₂ ≤ 1` (a trust-region problem), M symmetric.

    By duality `ν + ¼ cᵀ(νI − M)⁻¹c` is one for every ν ≥ 0 with νI − M positive definite, and the smallest is
    exact. ν comes from an ascent in z, then from Moré-Sorensen steps; that the matrix is positive definite is
    proved by its Cholesky factor, with room for rounding.

    Arguments:
        c: (rows, K) float64. m: (rows, K, K) float64.
        start: (rows, K) where the ascent starts; default c.
        tolerance: relative gap to the ascent's value that ends the search.

    Returns:
        the bound (rows), infinite where none was found, and a point z (rows, K) that nearly attains it.
    """
    size = c.shape[-1]
    finite = torch.isfinite(m).flatten(1).all(-1) & torch.isfinite(c).all(-1)
    m = torch.where(finite[:, None, None], m, torch.zeros_like(m))
    c = torch.where(finite[:, None], c, torch.zeros_like(c))
    tiny = torch.finfo(c.dtype).tiny

    def apply(z: Tensor) -> Tensor:
        return (m @ z.unsqueeze(-1)).squeeze(-1)

    def unit(v: Tensor) -> Tensor:
        return v / torch.linalg.vector_norm(v, dim=-1, keepdim=True).clamp(min=tiny)

    length_m = torch.linalg.matrix_norm(m)
    shift = 2.0 * length_m.unsqueeze(-1) / size**0.5 + tiny  # M may have negative eigenvalues
    entry = c.abs().amax(-1, keepdim=True).clamp(min=tiny)
    z = unit((c if start is None else start.to(c)) + 1e-9 * entry)
    for _ in range(10):
        last, z = z, unit(c + 2.0 * apply(z) + shift * z)
        if float((z - last).abs().amax()) < 1e-4 * float(z.abs().amax()):
            break
    scale = length_m + torch.linalg.vector_norm(c, dim=-1)
    room = 16.0 * size * torch.finfo(c.dtype).eps * scale + tiny
    attained = ((c * z).sum(-1) + (z * apply(z)).sum(-1)).clamp(min=0.0)
    nu = ((z * apply(z)).sum(-1) + 0.5 * (c * z).sum(-1)).clamp(min=0.0) + 4.0 * room
    best = torch.full_like(nu, torch.inf)
    # the last ν that failed, and the last that succeeded
    below, above = torch.zeros_like(nu), torch.full_like(nu, torch.inf)
    eye = torch.eye(size, dtype=c.dtype, device=c.device)
    for _ in range(20):
        todo = (best > attained * (1.0 + tolerance) + room).nonzero().squeeze(1)
        if len(todo) == 0:
            break
        v, r = nu[todo], room[todo]
        factor, info = torch.linalg.cholesky_ex((v - r)[:, None, None] * eye - m[todo])
        good = info == 0
        factor = torch.where(good[:, None, None], factor, eye)
        point = torch.cholesky_solve(0.5 * c[todo].unsqueeze(-1), factor).squeeze(-1)
        image = v.unsqueeze(-1) * point - (m[todo] @ point.unsqueeze(-1)).squeeze(-1)  # (νI − M) z
        residual = 0.5 * c[todo] - image
        # (νI − M) ⪰ room I: what the residual hides is at most ‖r‖² / room
        value = v + (point * (image + 2.0 * residual)).sum(-1) + residual.square().sum(-1) / r
        best[todo] = torch.where(good, torch.minimum(best[todo], value), best[todo])
        length = torch.linalg.vector_norm(point, dim=-1)
        inner = torch.linalg.solve_triangular(factor, point.unsqueeze(-1), upper=False).squeeze(-1)
        newton = (length - 1.0) * (length / torch.linalg.vector_norm(inner, dim=-1).clamp(min=tiny)).square()
        low = below[todo] = torch.where(good, below[todo], v)
        high = above[todo] = torch.where(good, v, above[todo])
        middle = torch.where(high.isfinite(), (low + high) / 2, 1.5 * v + 0.01 * scale[todo] / size**0.5)
        inside = good & (v + newton > low) & (newton.abs() > 1e-6 * v)  # c = 0 gives no step
        nu[todo] = torch.where(inside, v + newton, middle) + r
        closer = unit(point)
        found = (c[todo] * closer).sum(-1) + (closer * (m[todo] @ closer.unsqueeze(-1)).squeeze(-1)).sum(-1)
        better = good & (found > attained[todo])
        z[todo] = torch.where(better[:, None], closer, z[todo])
        attained[todo] = torch.where(better, found, attained[todo])
    return torch.where(finite, best, torch.inf), z


def factored_maximum_upper(c: Tensor, f: Tensor, box: bool = False) -> tuple[Tensor, Tensor]:
    """Upper bound of `max c·z + ‖fᵀz‖²` over the unit ball or the box [−1, 1]^K: as `ball_maximum_upper` for
    matrices M = f fᵀ of low rank.

    A box lies in every ellipsoid `Σ ν_i z_i² ≤ Σ ν_i`, which scaling turns into the ball. Tried are
    `ν_i = |c_i|/2 + t g_i` for a few t, g the row sums of |f| |f|ᵀ.

    Arguments:
        c: (K,) float64. f: (K, R) float64, R < K.

    Returns:
        the bound (), infinite if none was found, and a point z (K,).
    """
    if not (bool(torch.isfinite(c).all()) and bool(torch.isfinite(f).all())):
        return c.new_tensor(torch.inf), torch.zeros_like(c)
    if not box:
        return _factored(c, f)
    size = c.abs() / 2
    # diag(g) − M is positive semidefinite whatever the signs: |f| |f|ᵀ has row sums g
    g = f.abs() @ f.abs().sum(0) + torch.finfo(c.dtype).tiny
    best, point = c.new_tensor(torch.inf), torch.zeros_like(c)
    for part in (1.0, 0.5, 0.2):
        nu = size + part * g
        nu = nu + torch.finfo(c.dtype).eps * nu.amax()  # entries that move nothing
        shrink = (nu.sum() / nu).sqrt()
        value, scaled = _factored(c * shrink, f * shrink.unsqueeze(1))
        if not bool(value < best):
            break
        best, point = value, scaled * shrink
    return best, torch.where(point >= 0, 1.0, -1.0).to(c)


def _factored(c: Tensor, f: Tensor) -> tuple[Tensor, Tensor]:
    """`factored_maximum_upper` over the ball: the secular equation on the eigenvalues of fᵀf."""
    eps = torch.finfo(c.dtype).eps
    gram = f.T @ f
    if not bool(torch.isfinite(gram).all()):
        return c.new_tensor(torch.inf), torch.zeros_like(c)
    values, vectors = torch.linalg.eigh(gram)
    values = values.clamp(min=0.0)
    room = 32.0 * (len(c) + f.shape[1]) * eps * (values.sum() + torch.linalg.vector_norm(c))
    room = room + torch.finfo(c.dtype).tiny
    w = vectors.T @ (f.T @ c)
    square = c.square().sum()

    def length(nu: Tensor) -> Tensor:  # ‖z‖² at ν, z = (νI − M)⁻¹ c/2
        d = w / (2.0 * nu * (nu - values))
        return square / (4.0 * nu.square()) + (w * d / nu + values * d.square()).sum()

    low = values[-1] + 2.0 * room if len(values) else 2.0 * room
    high = low + 0.5 * square.sqrt() + room
    for _ in range(50):
        nu = (low + high) / 2
        low, high = (nu, high) if bool(length(nu) > 1.0) else (low, nu)
    z = c / (2.0 * high) + f @ (vectors @ (w / (2.0 * high * (high - values))))
    image = high * z - f @ (f.T @ z)
    residual = 0.5 * c - image
    # (νI − M) ⪰ room I, see `ball_maximum_upper`
    return high + (z * (image + 2.0 * residual)).sum() + residual.square().sum() / room, z
