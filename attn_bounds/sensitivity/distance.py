"""Squared distances `D_ij = ‖x_i − y_j‖²` when X and Y lie in boxes: exact ranges and planes.

With mid and rad the midpoint and half width of the box of `d = x_i − y_j`, entry by entry,
`2 mid · d − ‖mid‖² ≤ D_ij ≤ 2 mid · d − ‖mid‖² + ‖rad‖²`: the tangent at mid and the chord of each square
have the same slope. Where X and Y are the same tensor, as in self-attention with tied weights, `D_ii = 0`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .bilinear import Plane


def squared_distances(x: Tensor, y: Tensor) -> Tensor:
    """`‖x_i − y_j‖²` without cancellation, so 0 for equal rows: (…, n, d), (…, m, d) → (…, n, m)."""
    return (x.unsqueeze(-2) - y.unsqueeze(-3)).square().sum(-1)


def _off_diagonal(t: Tensor, same: bool) -> Tensor:
    return t * (1.0 - torch.eye(t.shape[-2], dtype=t.dtype, device=t.device)) if same else t


def distance_range(
    x_l: Tensor, x_u: Tensor, y_l: Tensor, y_u: Tensor, same: bool = False
) -> tuple[Tensor, Tensor]:
    """Exact range of each entry of D.

    Arguments:
        x_l, x_u: (…, n, d) box of X. y_l, y_u: (…, m, d) box of Y.
        same: whether X and Y are the same tensor, and not only in the same box.

    Returns:
        lower and upper, (…, n, m).
    """
    low, high = x_l.unsqueeze(-2) - y_u.unsqueeze(-3), x_u.unsqueeze(-2) - y_l.unsqueeze(-3)
    lower = torch.maximum(low, -high).clamp(min=0.0).square().sum(-1)
    upper = torch.maximum(-low, high).square().sum(-1)
    return _off_diagonal(lower, same), _off_diagonal(upper, same)


def distance_slack(x_r: Tensor, y_r: Tensor, same: bool = False) -> Tensor:
    """`‖rad‖²` for half widths x_r (…, n, d) and y_r (…, m, d) of the boxes: (…, n, m)."""
    return _off_diagonal(squared_distances(x_r, -y_r), same)


def distance_lower_plane(
    a: Tensor,
    x_l: Tensor,
    x_u: Tensor,
    y_l: Tensor,
    y_u: Tensor,
    tangent: Tensor | float = 0.0,
    same: bool = False,
) -> Plane:
    """Lower bound of `⟨a, D⟩`, linear in X and Y.

    Arguments:
        a: (spec, batch, …, n, m) coefficients of the functionals.
        x_l, x_u: (batch, …, n, d) box of X. y_l, y_u: (batch, …, m, d) box of Y.
        tangent: t of the points `mid + t rad` where the tangents touch; any number is valid. A number or
            (spec, batch, …, n, m).
        same: as in `distance_range`.

    Returns:
        coefficients (spec, batch, …, n, d), (spec, batch, …, m, d) and bias (spec, batch).
    """
    x_c, x_r, y_c, y_r = (x_l + x_u) / 2, (x_u - x_l) / 2, (y_l + y_u) / 2, (y_u - y_l) / 2
    slack = distance_slack(x_r, y_r, same)
    on_x, on_y = slope(a, x_c, y_c)
    const = a.clamp(max=0.0) * slack - a * squared_distances(x_c, y_c)
    if isinstance(tangent, Tensor) or tangent != 0.0:
        # at mid + t rad the slope grows by 2 t rad, which is 2 t (x_r + y_r)
        t = 2.0 * tangent * _off_diagonal(a.clamp(min=0.0), same)
        more_x, more_y = slope(t / 2.0, x_r, -y_r)
        along = ((x_c.unsqueeze(-2) - y_c.unsqueeze(-3)) * (x_r.unsqueeze(-2) + y_r.unsqueeze(-3))).sum(-1)
        on_x, on_y = on_x + more_x, on_y + more_y
        const = const - t * (along + 0.5 * tangent * slack)
    return Plane(on_x, on_y, const.flatten(2).sum(-1))


def slope(a: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient of `⟨a, D⟩` at (x, y): on X and on Y."""
    return 2.0 * (a.sum(-1, keepdim=True) * x - a @ y), 2.0 * (a.sum(-2).unsqueeze(-1) * y - a.mT @ x)
