"""Upper bounds of `‖Σ_t P_t ⊗ W_tᵀ‖₂`, the norm of the linear map `E ↦ Σ_t P_t E W_t` on matrices.

This is the key-sensitivity of attention (theory.md, (2); Havens et al., ICML 2024): P are attention matrices,
W the value-output maps of the heads, and a skip connection is one more term. Up to some thousand rows the
matrix is formed. Beyond that four facts, each a proof by itself, are used:

1. *Factorisation.* For any invertible R, `Σ P_t ⊗ W_tᵀ = Σ_j P'_j ⊗ W'_jᵀ` with `P' = RᵀP, W' = R⁻¹W` (mixing
   the terms), and `Σ P'_j ⊗ W'_jᵀ = [P'_j ⊗ I]_j · [I ⊗ W'_jᵀ]_j`, so the norm is at most `‖Σ P'_j P'_jᵀ‖^½
   ‖Σ W'_j W'_jᵀ‖^½`. Diagonal R is the scaled stacked bound of theory.md, never above the naive sum; over all
   R the smallest is the Haagerup tensor norm, which does see terms cancel: equal P give `‖P‖ ‖ΣW‖`. With
   `A_ts = tr(ρ P_t P_sᵀ)`, `B_ts = tr(σ W_t W_sᵀ)` for density matrices ρ, σ the best `G = R Rᵀ` solves `G A
   G = B` (a geometric mean); the worst (ρ, σ) is found by Frank-Wolfe steps with top eigenvectors.
2. The same for the transposed map, another number.
3. *Deflation.* Rows of attention matrices sum to one, so a few token directions carry most of the norm. In
   bases [U U⊥], [V V⊥] of the tokens the map is a 2 × 2 block matrix; the three blocks that touch U or V are
   small enough for exact norms, the fourth gets 1 and 2, and the map is at most the norm of the 2 × 2 matrix
   of norms.
4. *Squaring.* `‖M‖² = ‖M Mᵀ‖`, and M Mᵀ is a sum of T² Kronecker products, to which 1 and 3 apply (2 adds
   nothing: it is symmetric). What 1 and 3 lose is a factor, of which the root remains; as eigenvalues square,
   they also part, and 3 nearly closes the gap. In place of 1 to 3 where T² products of d × d are cheap.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from .norms import round_up, safe_sqrt, spectral_norm_upper
from .term_stack import TermStack

CORE_SIZE = 1000  # up to this many rows a deflated block is
SQUARED_COST = 1.2e10  # operations that squaring may take
SEARCH_STEPS = 20
LARGE, LARGE_STEPS = 256, 8  # products with larger matrices are what the search costs: fewer steps
POWER_STEPS = 3  # of power iteration in each
HEAD_SEARCH = 5, 6  # both, where products are those of heads
MANY_TERMS, FEW_STEPS = 200, 3  # with more terms eigenvectors of T × T matrices are


def dense_size_for(terms: int) -> int:
    """Up to how many rows and columns the matrix is formed by default: as long as that is the faster way.

    Seconds with and without it: 0.1 to 0.35 and 0.1 (1024 rows, 5 terms), 0.7 and 0.5 (2048, 13), 4.3 and 6.0
    (3968, 33); the way without it lost less than a hundredth there.
    """
    return min(4000, max(1024, 160 * terms))


def forms_matrix(terms: int, rows: int, columns: int, dense_size: int | None) -> bool:
    """Whether the matrix of a map is formed; dense_size as in `kronecker_sum_norm_upper`."""
    return rows * columns <= (dense_size_for(terms) if dense_size is None else dense_size) ** 2


def squares(terms: int, features: int, cost: float) -> bool:
    """Whether fact 4 takes no more than so many operations: products of d × d matrices, and eigenvectors to
    mix T² terms."""
    return 2 * terms**2 * features**3 + 4 * terms**6 <= cost


def kronecker_sum_norm_upper(
    p: Tensor, w: Tensor, dense_size: int | None = None, squared_cost: float = SQUARED_COST
) -> Tensor:
    """`‖Σ_t P_t ⊗ W_tᵀ‖₂` from above. Differentiable in both arguments.

    Arguments:
        p: (…, T, n, m).
        w: (T, d, d'), or with leading dimensions that broadcast against those of p.
        dense_size: exact (up to rounding and 1e-3) while n·d' and m·d are on average not above it. By default
            `dense_size_for` the number of terms.
        squared_cost: operations that squaring (4) may take, where the matrix is not formed.

    Returns:
        (…) in the dtype of p; infinite where an entry is not finite.

    Raises:
        ValueError: the numbers of terms differ.

    Source: the module's docstring. Beyond `dense_size` samples go one by one, each about ten seconds on one
    core for n = 257, d = 768, T = 13.
    """
    if p.ndim < 3 or w.ndim < 3 or p.shape[-3] != w.shape[-3]:
        raise ValueError(
            f"p must be (…, T, n, m) and w (…, T, d, d'), one of each per term; got {tuple(p.shape)}, "
            f"{tuple(w.shape)}"
        )
    lead = torch.broadcast_shapes(p.shape[:-3], w.shape[:-3])
    finite = torch.isfinite(p).flatten(-3).all(-1) & torch.isfinite(w).flatten(-3).all(-1)
    ps, ws = p.double().expand(*lead, *p.shape[-3:]), w.double()
    terms, n, m, d_in, d_out = (*p.shape[-3:], *w.shape[-2:])
    if terms == 0 or 0 in (n, m, d_in, d_out):
        return p.new_zeros(lead)
    if terms == 1:
        value = spectral_norm_upper(ps[..., 0, :, :]) * spectral_norm_upper(ws[..., 0, :, :])
    elif forms_matrix(terms, n * d_out, m * d_in, dense_size):
        value = spectral_norm_upper(_dense(ps, ws))
    else:
        flat = ps.reshape(-1, terms, n, m)
        every = ws.expand(*lead, *ws.shape[-3:]).reshape(-1, terms, d_in, d_out) if ws.ndim > 3 else None
        clean = finite.expand(lead).reshape(-1).tolist()
        values = [
            _large(flat[i], ws if every is None else every[i], squared_cost)
            if clean[i]
            else flat.new_tensor(torch.inf)
            for i in range(len(flat))
        ]
        value = torch.stack(values).reshape(lead)
    return torch.where(finite, round_up(value, p.dtype), torch.inf)


def head_sum_norm_upper(p: Tensor, w: TermStack, whole: Tensor, skip: bool) -> Tensor:
    """`‖Σ_t P_t ⊗ W_tᵀ‖₂` from above for attention, `I ⊗ I` added with `skip`; at a fraction of the cost.

    Rows of P sum to one, so `v = 1/√n` is fact 3's direction on both sides: `P_t v_m = √(n/m) v_n`, so that
    the map is block triangular and its corner belongs to the weights alone. To the last block the identity is
    added by the triangle inequality. Norms of mixtures of W go through Gram matrices of the heads' factors.

    Arguments:
        p: (T, n, m), float64, rows with sum one. w: of heads; see `TermStack.of_heads`.
        whole: `‖√(n/m) Σ_t W_t‖₂`, or with the identity added if `skip`.
        skip: only for n = m.

    Returns:
        (), float64. Not differentiable in w.
    """
    n, m = p.shape[-2:]
    size, w = w.norm, replace(w)  # what the search keeps with w goes with this call
    z = _without_mean(_without_mean(p).mT).mT
    # what sums that are not exactly one leave below the corner, and in it, and rounding: of all products
    error = torch.linalg.vector_norm(z[:, 1:, 0], dim=-1) + (z[:, 0, 0] - (n / m) ** 0.5).abs()
    rounding = 8.0 * (n**2 + m**2 + max(w.shape) ** 2) * torch.finfo(p.dtype).eps
    error = error + rounding * torch.linalg.matrix_norm(p)
    zero = torch.zeros_like(whole)
    row = w.mT.mixture_norm(z[:, 0, 1:].mT) if m > 1 else zero
    rest = zero
    if n > 1 and m > 1:
        inner = TermStack.of(z[:, 1:, 1:])
        sides = [(inner, w), (inner.mT, w.mT)]
        mixings = [_best_mixing(*s, *HEAD_SEARCH) for s in sides]
        best = min((0, 1), key=lambda i: mixings[i].estimate)
        rest = _mixed(*sides[best], mixings[best].root)
    corner = torch.stack([torch.stack([whole, row]), torch.stack([zero, rest + float(skip)])])
    return spectral_norm_upper(corner) + (error * size).sum()


def _without_mean(p: Tensor) -> Tensor:
    """`p H` for the reflection H with `H e_1 = 1/√m`: (…, n, m)."""
    m = p.shape[-1]
    h = torch.full((m,), -(m**-0.5), dtype=p.dtype, device=p.device)
    h[0] += 1.0
    h = h / torch.linalg.vector_norm(h).clamp(min=1e-300)
    return p - 2.0 * (p @ h)[..., None] * h


def naive_sum_upper(p: Tensor, w: Tensor) -> Tensor:
    """`Σ_t ‖P_t‖ ‖W_t‖`: blind to heads that cancel. (…, T, n, m), (…, T, d, d') → (…)."""
    return (spectral_norm_upper(p) * spectral_norm_upper(w)).sum(-1) * (1.0 + 4.0 * torch.finfo(p.dtype).eps)


def stacked_upper(p: Tensor, w: Tensor) -> Tensor:
    """`‖[t_h P_h]‖ ‖[W_hᵀ / t_h]‖`, `t_h = √(‖W_h‖/‖P_h‖)`: at most the naive sum (theory.md, section 1)."""
    p_size, w_size = spectral_norm_upper(p), spectral_norm_upper(w)
    some = (p_size > 0) & (w_size > 0)  # of terms that vanish nothing is kept
    one = torch.ones_like(p_size)
    ratio = torch.where(some, w_size, one) / torch.where(some, p_size, one)
    t = ratio.detach().sqrt()[..., None, None]
    first = torch.where(some[..., None, None], t * p, 0.0).transpose(-3, -2).flatten(-2)
    second = torch.where(some[..., None, None], w / t, 0.0).transpose(-3, -2).flatten(-2)
    return spectral_norm_upper(first) * spectral_norm_upper(second) * (1.0 + 8.0 * torch.finfo(p.dtype).eps)


def kronecker_sum_norm_lower(p: Tensor, w: Tensor, steps: int = 60, seed: int = 0) -> Tensor:
    """A **lower** bound by power iteration on `E ↦ Σ P_t E W_t`: to measure gaps, never for a proof.

    Shape: (…, T, n, m), (…, T, d, d') → (…).
    """
    lead = torch.broadcast_shapes(p.shape[:-3], w.shape[:-3])
    generator = torch.Generator().manual_seed(seed)
    e = torch.randn((*lead, p.shape[-1], w.shape[-2]), generator=generator, dtype=torch.float64).to(p)
    size = torch.ones_like(e[..., :1, :1])
    for step in range(steps + 1):
        e = e / torch.linalg.matrix_norm(e)[..., None, None].clamp(min=torch.finfo(p.dtype).tiny)
        image = (p @ e.unsqueeze(-3) @ w).sum(-3)
        size = torch.linalg.matrix_norm(image)
        if step < steps:
            e = (p.mT @ image.unsqueeze(-3) @ w.mT).sum(-3)
    return size * (1.0 - 64.0 * (p.shape[-1] + w.shape[-2]) * torch.finfo(p.dtype).eps)


def _dense(p: Tensor, w: Tensor) -> Tensor:
    """(…, T, a, b), (…, T, d, d') → (…, a d', b d)."""
    matrix = torch.einsum("...tab,...tde->...aebd", p, w)
    return matrix.flatten(-4, -3).flatten(-2)


def _large(p: Tensor, w: Tensor, squared_cost: float) -> Tensor:
    """One sample, float64, without the matrix: the smallest of the module's bounds."""
    used = (torch.linalg.matrix_norm(w.detach()) > 0) & (torch.linalg.matrix_norm(p.detach()) > 0)
    if not bool(used.any()):
        return p.new_zeros(())
    p, w = p[used], w[used]
    if p.shape[-1] < p.shape[-2]:  # the shorter side is the one that is squared
        p, w = p.mT, w.mT
    terms, tokens, features = len(p), max(p.shape[-2:]), max(w.shape[-2:])
    tall, wide = TermStack.of(p), TermStack.of(w)
    naive = (tall.norm * wide.norm).sum()
    balance = (wide.norm / tall.norm).detach().sqrt()
    found = [naive, _mixed(tall, wide, torch.diag(balance))]
    # rounding of products of n × n and d × d matrices, and of mixing terms, relative to the terms themselves
    slack = 8.0 * (tokens**2 + features**2) * torch.finfo(p.dtype).eps
    if not squares(terms, features, squared_cost):
        found.append(_factorised(tall, wide, False) + slack * naive)
        if min(p.shape[-2:]) > 1:
            found.append(_deflated(p, wide, 1, False) + slack * naive)
        return torch.stack(found).amin()
    few = [k for k in (1, 2, 4, 8, 16) if k * features <= CORE_SIZE and k < min(p.shape[-2:])] or [0]
    left = torch.einsum("hij,klj->hkil", p, p).flatten(0, 1)
    right = torch.einsum("kji,hjl->hkil", w, w).flatten(0, 1)  # M Mᵀ: F ↦ Σ_hk P_h P_kᵀ F W_kᵀ W_h
    square = _deflated(left, TermStack.of(right), few[-1], True)
    return torch.stack([*found, safe_sqrt(square + slack * naive.square())]).amin()


def _deflated(p: Tensor, w: TermStack, k: int, symmetric: bool) -> Tensor:
    """Facts 1 to 3 with k token directions split off; 1 and 3 for a symmetric map."""
    if k == 0:
        return _factorised(TermStack.of(p), w, symmetric)
    u, v = _token_bases(p.detach(), w.size[w.order.argsort()])
    z = u.mT @ p @ v
    if k == 1:
        core = w.mixture_norm(z[:, :1, 0].mT)
        row = w.mT.mixture_norm(z[:, 0, 1:].mT)
        column = row if symmetric else w.mixture_norm(z[:, 1:, 0].mT)
    else:
        core = spectral_norm_upper(_dense(z[:, :k, :k], w.dense()))
        row = _block_norm(z[:, :k, k:], w.dense())
        column = row if symmetric else _block_norm(z[:, k:, :k].mT, w.dense().mT)
    rest = _factorised(TermStack.of(z[:, k:, k:]), w, symmetric)
    blocks = torch.stack([torch.stack([core, row]), torch.stack([column, rest])])
    # U and V are orthogonal up to rounding: ‖U⁻¹‖² ≤ 1 / (1 − ‖UᵀU − I‖)
    off = [torch.linalg.matrix_norm(q.mT @ q - torch.eye(len(q)).to(q)) for q in (u, v)]
    return spectral_norm_upper(blocks) * (1.0 + off[0] + off[1] + 8.0 * max(len(u), len(v)) * 2.3e-16)


def _token_bases(p: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Orthogonal (n, n) and (m, m), the directions that the terms amplify most in front."""
    scaled = p * (weight / weight.amax())[:, None, None]
    # a skip connection P = H amplifies all alike and only blurs the choice, harmlessly
    left = (scaled @ scaled.mT).sum(0)
    right = (scaled.mT @ scaled).sum(0)
    if p.shape[-1] == p.shape[-2]:
        left = right = left + right  # one basis for both: the identity of a skip stays block diagonal
    return torch.linalg.eigh(left).eigenvectors.flip(-1), torch.linalg.eigh(right).eigenvectors.flip(-1)


def _block_norm(z: Tensor, w: Tensor) -> Tensor:
    """Exact norm of a block with few rows: z (T, k, m), w (T, d, d').

    The k·m numbers per term are compressed to at most k·T columns, an orthogonal change that keeps the norm.
    """
    terms, k, m = z.shape
    if terms * k < m:
        z = torch.linalg.qr(z.flatten(0, 1).mT, mode="r").R.mT.reshape(terms, k, -1)
    return spectral_norm_upper(_dense(z, w))


def _factorised(p: TermStack, w: TermStack, symmetric: bool) -> Tensor:
    """Facts 1 and 2: the smaller of the two factorisation bounds, each with its best mixing."""
    first = _mixed(p, w, _best_mixing(p, w).root)
    if symmetric:
        return first
    return torch.minimum(first, _mixed(p.mT, w.mT, _best_mixing(p.mT, w.mT).root))


def _mixed(p: TermStack, w: TermStack, root: Tensor) -> Tensor:
    """`‖Σ P'P'ᵀ‖^½ ‖Σ W'W'ᵀ‖^½` for `P' = RᵀP, W' = R⁻¹W`, plus what R R⁻¹ − I leaves over."""
    inverse = torch.linalg.inv(root)
    eye = torch.eye(len(root)).to(root)
    left_over = (root @ inverse - eye).abs() + 4.0 * len(root) * 2.3e-16 * (root.abs() @ inverse.abs())
    size_p, size_w = p.size[p.order.argsort()], w.size[w.order.argsort()]
    return p.mixture_norm(root.mT) * w.mixture_norm(inverse) + size_p @ left_over @ size_w


def _roots(a: Tensor) -> tuple[Tensor, Tensor]:
    """`a^½` and `a^−½`."""
    values, vectors = torch.linalg.eigh(a)
    root = values.clamp(min=1e-12 * float(values[-1]) + 1e-300).sqrt()
    return (vectors * root) @ vectors.mT, (vectors / root) @ vectors.mT


class _Mixing(NamedTuple):
    """R, (T, T), and about what `_mixed` makes of it; from below, so that it is no bound."""

    root: Tensor
    estimate: float


@torch.no_grad()
def _best_mixing(p: TermStack, w: TermStack, most: int = SEARCH_STEPS, powers: int = POWER_STEPS) -> _Mixing:
    """An R that makes `_mixed` small. Any would be valid, so the search is in single precision."""
    # balanced terms of size one altogether, so that no term is lost to rounding
    tops = [float(x.units.amax()) for x in (p, w)]
    size_p, size_w = (x.units / top for x, top in zip((p, w), tops, strict=True))
    balance = (size_w / size_p).sqrt()
    size = (size_p * size_w).sqrt()
    total = float(size.square().sum()) * tops[0] * tops[1]
    size = size / torch.linalg.vector_norm(size)
    weight = size[:, None] * size
    a = weight * (p.inner / tops[0] ** 2) / (size_p[:, None] * size_p)
    b = weight * (w.inner / tops[1] ** 2) / (size_w[:, None] * size_w)
    if not bool(torch.isfinite(a).all() and torch.isfinite(b).all()):  # squares below or above all numbers
        return _Mixing(torch.diag(balance), total)
    x, y = p.start(), w.start()
    eye = torch.eye(len(a)).to(a)
    best = float("inf")
    best_g = None
    steps = min(most, LARGE_STEPS if max(p.rows, w.rows) > LARGE else SEARCH_STEPS)
    for step in range(steps if len(a) <= MANY_TERMS else FEW_STEPS):
        a_room, b_room = a + 1e-9 * a.trace() * eye, b + 1e-9 * b.trace() * eye
        half, back = _roots(a_room)
        middle, middle_inverse = _roots(half @ b_room @ half)
        g, g_inverse = back @ middle @ back, half @ middle_inverse @ half
        for _ in range(powers):  # power steps from where the last step ended
            x = p.power(x, g * weight)
            y = w.power(y, g_inverse * weight)
        a_new, b_new = weight * p.moments(x), weight * w.moments(y)
        value = float((g * a_new).sum() * (g_inverse * b_new).sum())  # of the bound's square, from below
        if value < best and step > 1:
            best, best_g = value, g
        pace = 2.0 / (step + 3.0)
        a, b = a + pace * (a_new - a), b + pace * (b_new - b)
    root = eye if best_g is None else _roots(best_g)[0]
    return _Mixing(root * balance[:, None], total * best**0.5)
