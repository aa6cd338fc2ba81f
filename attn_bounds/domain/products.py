"""Rules of nodes with several perturbed inputs: products and quotients, differences, concatenation.

A product moves by `dx y₀ + x₀ dy + dx dy`: the first two terms are its linear part, the range of the last one
is centred (its midpoint moves into the centre) and its half width is the error.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .activations import RECIPROCAL, activation
from .attention import scores_remainder
from .boxes import with_errors
from .forms import AffineForm, Groups
from .sets import Ball

EXACT_SIZE = 2**26  # numbers in the Gram matrices of one matrix product; beyond, supports alone


def subtract(x: AffineForm, y: AffineForm) -> AffineForm:
    """`x − y`."""
    return x + AffineForm(-y.centre, -y.generators)


def concatenate(parts: list[AffineForm], axis: int) -> AffineForm:
    """Forms side by side; axis counts the batch dimension, which it may not be."""
    symbols = max(p.symbols for p in parts)
    generators = torch.cat([p.padded(symbols) for p in parts], axis + 1)
    return AffineForm(torch.cat([p.centre for p in parts], axis), generators)


def _expanded(x: AffineForm, shape: torch.Size) -> AffineForm:
    return x if x.centre.shape[1:] == shape else x.linear(lambda t: t.expand(len(t), *shape))


def _corners(x: tuple[Tensor, Tensor], y: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Range of a product of two intervals."""
    all_four = torch.stack([a * b for a in x for b in y])
    return all_four.amin(0), all_four.amax(0)


def _first_group(g: Tensor, h: Tensor, norm: float) -> tuple[Tensor, Tensor]:
    """Range of `(g·z)(h·z)` over the unit lp ball: exact for p = 2, (batch, K, F) → two of (batch, F)."""
    if norm == 2.0:
        # the eigenvalues of ½(g hᵀ + h gᵀ)
        dot = (g * h).sum(1)
        size = torch.linalg.vector_norm(g, dim=1) * torch.linalg.vector_norm(h, dim=1)
        return (dot - size).clamp(max=0.0) / 2, (dot + size).clamp(min=0.0) / 2
    if norm == math.inf:
        # z_k² lies in [0, 1], z_k z_l in [−1, 1]
        squares = g * h
        rest = g.abs().sum(1) * h.abs().sum(1) - squares.abs().sum(1)
        rest = rest.clamp(min=0.0)
        return squares.clamp(max=0.0).sum(1) - rest, squares.clamp(min=0.0).sum(1) + rest
    size = g.abs().amax(1) * h.abs().amax(1)
    return -size, size


def _finish(
    x: AffineForm,
    y: AffineForm,
    linear: Tensor,
    product: Tensor,
    low: Tensor,
    high: Tensor,
    norm_bound: Tensor,
    groups: Groups,
    label: str,
) -> AffineForm:
    """Centre and error box of a product.

    Arguments:
        linear: (batch, K, *out). product: (batch, *out) of the centres, float64.
        low, high: (batch, *out) range of dx dy. norm_bound: (batch,) of its l2 norm over all entries.
    """
    middle = (low + high) / 2
    exact = product + middle
    centre = exact.to(x.centre.dtype)
    offset = (exact - centre.double()).abs()
    half = (high - low) / 2 + offset

    def radius(index: Tensor) -> Tensor:
        shift = (middle.abs() + offset).flatten(1)[:, index]
        return norm_bound + torch.linalg.vector_norm(shift, dim=1)

    return with_errors(AffineForm(centre, linear), -half, half, radius, groups, label)


def _joint(x: AffineForm, groups: Groups, weight: Tensor, supports: list[Tensor]) -> Tensor:
    return groups.joint_norm(
        x.generators.flatten(2), (weight * groups.growth).to(x.centre.dtype), supports
    ).double()


def multiply(x: AffineForm, y: AffineForm, groups: Groups, label: str) -> AffineForm:
    """Elementwise product of two forms of the same rank, broadcasting.

    `dx dy` of the first group with itself is bounded by `_first_group`, all other pairs by their supports;
    the product of the two ranges is intersected with that.
    """
    shape = torch.broadcast_shapes(x.centre.shape[1:], y.centre.shape[1:])
    x, y = _expanded(x, shape), _expanded(y, shape)
    symbols = max(x.symbols, y.symbols)
    linear = x.padded(symbols) * y.centre.unsqueeze(1) + x.centre.unsqueeze(1) * y.padded(symbols)
    x_ranges = [(a.double(), b.double()) for a, b in groups.ranges(x.generators)]
    y_ranges = [(a.double(), b.double()) for a, b in groups.ranges(y.generators)]
    like = x.centre.double()
    x_total, y_total = groups.total(x_ranges, like), groups.total(y_ranges, like)
    low, high = _corners(x_total, y_total)

    first = groups.sets[0]
    assert isinstance(first, Ball)
    g, h = groups.parts(x.generators)[0][1].double(), groups.parts(y.generators)[0][1].double()
    own_low, own_high = (t.reshape(like.shape) for t in _first_group(g, h, first.norm))
    # the generators are rounded, and cancel in an end that is near 0
    rounding = 3 * (groups.growth - 1) * torch.maximum(-own_low, own_high)
    own_low, own_high = own_low - rounding, own_high + rounding
    x_rest, y_rest = groups.total(x_ranges[1:], like), groups.total(y_ranges[1:], like)
    # dx dy = dx₀ dy₀ + dx₀ dy_rest + dx_rest dy
    for pair in (_corners(x_ranges[0], y_rest), _corners(x_rest, y_total)):
        own_low, own_high = own_low + pair[0], own_high + pair[1]
    low, high = torch.maximum(low, own_low), torch.minimum(high, own_high)

    def size(total: tuple[Tensor, Tensor]) -> Tensor:
        return torch.maximum(-total[0], total[1]).flatten(1)

    def supports(ranges: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
        return [size(r).to(x.centre.dtype) for r in ranges]

    norm_bound = torch.minimum(
        _joint(x, groups, size(y_total), supports(x_ranges)),
        _joint(y, groups, size(x_total), supports(y_ranges)),
    )
    product = like * y.centre.double()
    return _finish(x, y, linear, product, low, high, norm_bound, groups, label)


def matmul(x: AffineForm, y: AffineForm, groups: Groups, label: str) -> AffineForm:
    """Matrix product of two forms of the same rank, (batch, …, n, k) and (batch, …, k, m).

    `dX dY` as in the scores of an attention; its Frobenius norm is at most the product of the joint norms.
    """
    lead = torch.broadcast_shapes(x.centre.shape[1:-2], y.centre.shape[1:-2])
    n, k = x.centre.shape[-2:]
    m = y.centre.shape[-1]
    x, y = _expanded(x, torch.Size((*lead, n, k))), _expanded(y, torch.Size((*lead, k, m)))
    symbols = max(x.symbols, y.symbols)
    linear = x.padded(symbols) @ y.centre.unsqueeze(1) + x.centre.unsqueeze(1) @ y.padded(symbols)
    x_supports, y_supports = groups.supports(x.generators), groups.supports(y.generators)
    x_size, y_size = (torch.stack(s).sum(0).double() for s in (x_supports, y_supports))
    high = x_size @ y_size
    low = -high
    count = x.centre.shape[0] * math.prod(lead) * n * m * k * k
    if count <= EXACT_SIZE:
        rows = x.linear(lambda t: t.reshape(len(t), -1, n, k))
        columns = y.linear(lambda t: t.reshape(len(t), -1, k, m).mT)
        own_low, own_high = (t.reshape(low.shape) for t in scores_remainder(rows, columns, 1.0, groups))
        low, high = torch.maximum(low, own_low), torch.minimum(high, own_high)

    def whole(form: AffineForm, supports: list[Tensor]) -> Tensor:
        flat = [s.flatten(1) for s in supports]
        return _joint(form, groups, torch.ones_like(flat[0], dtype=torch.float64), flat)

    norm_bound = whole(x, x_supports) * whole(y, y_supports)
    product = x.centre.double() @ y.centre.double()
    return _finish(x, y, linear, product, low, high, norm_bound, groups, label)


def divide(
    x: AffineForm, y: AffineForm, groups: Groups, label: str
) -> tuple[AffineForm, tuple[Tensor, Tensor]]:
    """`x / y` as the product with a reciprocal; also returns the bounds of y. NaN where y may be 0."""
    inverse, bounds = activation(y, RECIPROCAL, groups, f"{label}, reciprocal")
    return multiply(x, inverse, groups, label), bounds
