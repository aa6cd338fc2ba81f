"""Linear lower bounds of `⟨A, X Yᵀ⟩` when X and Y lie in boxes (McCormick planes, two per product)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Plane(NamedTuple):
    """`⟨x_coefficients, X⟩ + ⟨y_coefficients, Y⟩ + bias`, a lower bound per functional."""

    x: Tensor
    y: Tensor
    bias: Tensor


def product_lower_plane(
    a: Tensor, x_l: Tensor, x_u: Tensor, y_l: Tensor, y_u: Tensor, mix: Tensor | float = 0.5
) -> Plane:
    """Lower bound of `⟨a, X Yᵀ⟩`, linear in X and Y.

    Each product x·y has two lower and two upper McCormick planes; `mix` weighs the pair (any convex
    combination is valid). With `mix = ½` the plane is the bilinear form centred at the midpoints,
    `dX Y₀ᵀ + X₀ dYᵀ − |dX| |dY|ᵀ` (theory.md, section 5).

    Arguments:
        a: (spec, batch, …, n, m) coefficients of the functionals.
        x_l, x_u: (batch, …, n, k) box of X.
        y_l, y_u: (batch, …, m, k) box of Y.
        mix: in [0, 1]; a number or (spec, batch, …, n, m): weight of the plane through (l, l) where it is a
            lower plane and through (u, l) where it is an upper one.

    Returns:
        coefficients (spec, batch, …, n, k), (spec, batch, …, m, k) and bias (spec, batch).
    """
    positive, negative = a.clamp(min=0.0), a.clamp(max=0.0)
    if isinstance(mix, float) and mix == 1.0:
        const = positive * (x_l @ y_l.mT) + negative * (x_l @ y_u.mT)
        return Plane(positive @ y_l + negative @ y_u, a.mT @ x_l, -const.flatten(2).sum(-1))
    if isinstance(mix, float) and mix == 0.5:
        x_c, y_c = (x_l + x_u) / 2, (y_l + y_u) / 2
        spread = ((x_u - x_l) / 2) @ ((y_u - y_l) / 2).mT
        const = a * (x_c @ y_c.mT) + a.abs() * spread
        return Plane(a @ y_c, a.mT @ x_c, -const.flatten(2).sum(-1))
    p1, n1 = positive * mix, negative * mix
    p0, n0 = positive - p1, negative - n1
    x_coefficients = (p0 + n1) @ y_u + (p1 + n0) @ y_l
    y_coefficients = (p0 + n0).mT @ x_u + (p1 + n1).mT @ x_l
    const = p0 * (x_u @ y_u.mT) + p1 * (x_l @ y_l.mT) + n0 * (x_u @ y_l.mT) + n1 * (x_l @ y_u.mT)
    return Plane(x_coefficients, y_coefficients, -const.flatten(2).sum(-1))


def product_range(x_l: Tensor, x_u: Tensor, y_l: Tensor, y_u: Tensor) -> tuple[Tensor, Tensor]:
    """Exact range of each entry of `X Yᵀ` (every product takes its own extremes).

    Shape: (…, n, k) and (…, m, k) boxes → two of (…, n, m).
    """
    # The extremes of x·y over a box are among the four corners; the sign split of each operand turns
    # the choice into matrix products, except where both operands straddle zero.
    x = x_l.unsqueeze(-2), x_u.unsqueeze(-2)
    y = y_l.unsqueeze(-3), y_u.unsqueeze(-3)
    corners = [p * q for p in x for q in y]
    lower, upper = corners[0], corners[0]
    for c in corners[1:]:
        lower, upper = torch.minimum(lower, c), torch.maximum(upper, c)
    return lower.sum(-1), upper.sum(-1)
