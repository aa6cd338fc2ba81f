"""LayerNorm and RMSNorm to second order around a centre (theory.md, section 6b).

Per token `f(z) = z/s`, `s = √(‖z‖²/d + ϵ)`, z centred for LayerNorm; gain and bias belong to the functional.
For a move h of z, exactly,

    f(z+h) − f(z) = J h + h (1/s' − 1/s) + z q,    J = (I − z zᵀ/(d s²))/s,                            (10)

with `s'² = s²(1+u)`, `u = (2 z·h + ‖h‖²)/(d s²)` and `q = ((1+u)^−½ − 1 + z·h/(d s²))/s`. Everything here
bounds the last two terms.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

ROUNDING = 32.0


def scale(z: Tensor, eps: float) -> Tensor:
    """`s = √(‖z‖²/d + ϵ)`: (…, d) → (…)."""
    return (z.square().mean(-1) + eps).sqrt()


def linear_part(h: Tensor, z: Tensor, s: Tensor) -> Tensor:
    """`J h`; J is symmetric. h: (…, d) broadcasts against z (…, d); s: (…)."""
    along = (h * z).sum(-1, keepdim=True) / (z.shape[-1] * s.square()).unsqueeze(-1)
    return (h - z * along) / s.unsqueeze(-1)


class Scalars(NamedTuple):
    """Per token, (…): `|1/s' − 1/s| ≤ change` and `q ∈ [q_low, q_high]`, `q_low ≤ 0 ≤ q_high`."""

    change: Tensor
    q_low: Tensor
    q_high: Tensor


def _q(t: Tensor, s: Tensor, d: int) -> Tensor:
    """q at `z·h = t`, ‖h‖ = 0: with ρ = √(1+u) it is `(ρ−1)²(ρ+2) / (2ρs)`, `ρ − 1 = u/(1+ρ)`."""
    u = (2.0 * t / (d * s.square())).clamp(min=-1.0)
    root = (1.0 + u).sqrt()
    return (u / (1.0 + root)).square() * (root + 2.0) / (2.0 * root * s)


def _u_range(
    z_size: Tensor, s: Tensor, d: int, eps: float, t_low: Tensor, t_high: Tensor, rho: Tensor
) -> tuple[Tensor, Tensor]:
    """Range of u, see `scalars`."""
    ds2 = d * s.square()
    ratio = eps / s.square() - 1.0  # 1 + u = s'²/s², and s'² ≥ ϵ
    u_low = torch.maximum(2.0 * t_low / ds2, ratio)
    u_low = torch.maximum(u_low, (z_size - rho).clamp(min=0.0).square() / ds2 + ratio)
    u_low = u_low.clamp(min=-1.0, max=0.0)
    u_high = ((2.0 * t_high + rho.square()) / ds2).clamp(min=0.0)
    return u_low, u_high


def square_range(
    z_size: Tensor, s: Tensor, d: int, eps: float, t_low: Tensor, t_high: Tensor, rho: Tensor
) -> tuple[Tensor, Tensor]:
    """Range of s'², rounded outwards; arguments as those of `scalars`, (…) each."""
    low, high = _u_range(z_size, s, d, eps, t_low, t_high, rho)
    room = ROUNDING * torch.finfo(s.dtype).eps
    return s.square() * (1.0 + low - room), s.square() * (1.0 + high) * (1.0 + room)


def scalars(
    z_size: Tensor, s: Tensor, d: int, eps: float, t_low: Tensor, t_high: Tensor, rho: Tensor
) -> Scalars:
    """Bounds of what the remainder needs, for all moves with `z·h ∈ [t_low, t_high]`, `‖h‖₂ ≤ ρ`.

    Arguments:
        z_size: ‖z‖₂ at the centre; s: its scale. (…) all.
        d: number of features.
    """
    u_low, u_high = _u_range(z_size, s, d, eps, t_low, t_high, rho)
    ds2 = d * s.square()
    # 1/√(1+u) − 1 = −u / (√(1+u) (1 + √(1+u)))
    up, down = (1.0 + u_low).sqrt(), (1.0 + u_high).sqrt()
    change = torch.maximum(-u_low / (up * (1.0 + up)), u_high / (down * (1.0 + down))) / s
    q_low = -rho.square() / (2.0 * ds2 * s)
    least = torch.maximum(t_low, u_low * ds2 / 2.0)
    q_high = torch.maximum(_q(t_high, s, d), _q(least, s, d))
    grow = 1.0 + ROUNDING * torch.finfo(s.dtype).eps
    # u itself is rounded to one unit of 1
    rounding = ROUNDING * torch.finfo(s.dtype).eps / s
    return Scalars(change * grow + rounding, q_low * grow - rounding, q_high * grow + rounding)


def remainder_range(az: Tensor, ah: Tensor, values: Scalars) -> tuple[Tensor, Tensor]:
    """Range of the remainder of functionals.

    Arguments:
        az: (…, F) `a·z`; ah: (…, F) bound of |a·h|.
        values: (…) each.

    Returns:
        two of (…, F).
    """
    change, q_low, q_high = (v.unsqueeze(-1) for v in values)
    first = ah * change
    return (
        -first + torch.minimum(az * q_low, az * q_high),
        first + torch.maximum(az * q_low, az * q_high),
    )


def difference_norm(s: Tensor, d: int, rho: Tensor) -> Tensor:
    """Bound of `‖f(z') − f(z)‖₂`, (…): `min(ρ/(s − ρ/√d)₊, 2√d)`."""
    gap = s - rho / d**0.5
    far = torch.where(gap > 0, rho / gap.clamp(min=1e-300), torch.inf).clamp(max=2.0 * d**0.5)
    return far * (1.0 + ROUNDING * torch.finfo(s.dtype).eps)


def remainder_norm(z_size: Tensor, rho: Tensor, values: Scalars) -> Tensor:
    """Bound of the remainder's l2 norm, (…): (10) term by term; may be infinite or NaN for large moves."""
    by_terms = rho * values.change + z_size * torch.maximum(-values.q_low, values.q_high)
    return by_terms * (1.0 + ROUNDING * torch.finfo(rho.dtype).eps)
