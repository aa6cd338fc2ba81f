"""All heads' moves of attention at once: what `key.layer_bound` has beside a sum over heads.

Notation of `key.py`. To bound is `R = Σ_h ΔP_h C' W_h` with `ΔP_h = P'_h − P_h`, `C' = C + G`, where
`‖ΔP_h,r‖ ≤ L_hr ‖ΔS_h,r‖` for each row r and `ΔS_h = E A_h Cᵀ + B_h Gᵀ + E A_h Gᵀ`.

**Stacked.** For any weights t_h > 0, `R = [t_h ΔP_h]_h · [C' W_h / t_h]_h`, heads side by side on the left,
below each other on the right. Hence, row by row, `‖R_r‖ ≤ ‖[t_h ΔP_h,r]_h‖ V` with

    V = ‖[C W_h / t_h]_h‖₂ + ‖G‖ ‖[W_h / t_h]_h‖₂                     (blockdiag(G) · [W_h / t_h]_h)

and `‖[t_h ΔP_h,r]_h‖ ≤ ‖[t_h L_hr ΔS_h,r]_h‖`. With `ω_hr = t_h L_hr V` the three parts of `[ω_hr ΔS_h,r]`,
over all rows and heads, are in Frobenius norm at most

    ‖E‖ ‖[ω_h A_h Cᵀ]_h‖₂ (side by side, ω_h = max_r ω_hr),    ‖G‖ ‖[ω_hr B_h,r]_hr‖₂ (below each other),
    ‖E‖ ‖G‖ ‖[ω_h A_h]_h‖₂ (side by side),

the a, b, c of the table in `key.py`. As `‖ΔP_h,r‖ ≤ √2`, `‖R‖² ≤ V² Σ_hr t_h² min(L_hr ‖ΔS_h,r‖, √2)²` too,
and the same with whole heads and √(2n). Where masks hide keys, C keeps the rows' own, and V and ω are theirs.
With `t_h² = v_h / p_h`, v_h a bound of `‖C' W_h‖` and p_h of `‖ΔP_h‖`, both factors are at most the root of
`Σ p_h v_h`: not above the sum over heads. Over all t the bound is log-convex.

**Weighted.** `d p_t / dt = ΔS_r (diag p_t − p_t p_tᵀ)` along the segment of scores, so for every output
direction u, with covariances under p_t,

    R_r u = ∫ Σ_h Cov_t(ΔS_h,r, C' W_h u) dt ≤ max_t (Σ_h t_h² Var_t ΔS_h,r)^½ (Σ_h Var_t(C' W_h u) / t_h²)^½

(Cauchy-Schwarz, twice), and `Var_t(y) ≤ min_k Σ_c p̄_c (y_c − k)²` where p̄ bounds p_t, `Var_t(y) ≤ L ‖y‖²` as
well. No key counts for more than its probability, in neither factor: in place of `L ‖C̃‖ ‖C̃‖` there is
`‖√p̄ C̃‖ ‖√p̄ C̃‖`. Per row,

    V_r = ‖[√p̄_h,r (C − 1k) W_h / t_h]_h‖₂ + ‖G‖ ‖[√L_hr W_h / t_h]_h‖₂
    a_r = ‖[t_h A_h (C − 1k')ᵀ √p̄_h,r]_h‖₂,    c_r = ‖[t_h √L_hr A_h]_h‖₂,
    b² = max_c λ_max(Σ_hr V_r² t_h² p̄_h,rc B_h,rᵀ B_h,r), or with L_hr in place of p̄_h,rc and no maximum,

and R is at most what the table makes of `max_r V_r a_r`, b and `max_r V_r c_r`; a row alone, of `V_r a_r`,
`V_r ‖[t_h √L_hr B_h,r]_h‖` and `V_r c_r`. Where rows are too many they go in groups with the largest p̄.

t is taken from X alone, neither from ε nor from what is switched on, so that the bound is monotone in both.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..norms import gram_norm_upper, safe_sqrt, spectral_norm_upper, thin
from .weights import LayerWeights, length

Moves = Literal["queries", "context", "both"]
GROUP_WORK = 2e9  # multiplications that matrices per row may take, their eigenvalues counted thirty-fold
GROUP_MEMORY = 4e7  # numbers
NEAR, ALIKE = 1.5, 1.25  # of weightings of heads in large layers; see `_promising`


def score_move(eps: Tensor, a: Tensor, b: Tensor, c: Tensor, moves: Moves, tied: bool) -> Tensor:
    """Bound of the scores' move: the table in the docstring of `key.py`."""
    if moves == "queries":
        return eps * a
    if moves == "context":
        return eps * b
    if tied:
        return eps * (a + b) + eps.square() * c
    return eps * safe_sqrt(a.square() + b.square()) + 0.5 * eps.square() * c


class Moved(NamedTuple):
    """What is known of each head for one ε.

    Attributes:
        slope: (…, H, n), L per row. high: (…, H, n, m), p̄; None if not known.
        whole: (…, H), bound of `‖ΔP_h‖_F`. rows: (…, H, n), of `‖ΔP_h,r‖`.
    """

    slope: Tensor
    high: Tensor | None
    whole: Tensor
    rows: Tensor


class _Fixed(NamedTuple):
    """Of head weights t, what does not depend on ε.

    Attributes:
        growth: `‖[W_h / t_h]‖`. values: `‖[C W_h / t_h]‖` per set of keys. both: `‖[t_h A_h]‖`. (…) each.
    """

    growth: Tensor
    values: list[Tensor]
    both: Tensor


@dataclass
class Heads:
    """A layer at its clean input, float64; what depends on it alone is computed once.

    Attributes:
        weights: those of the layer.
        c: (…, m, d_c). p: (…, H, n, m). q: (…, H, n, dk), bias included, times the scale.
        group, members: sets of keys that rows see; see `key._row_groups`.
        rounding: relative, of products. moves, tied: what is perturbed.
        centre_values, centre_keys: as `layer.Improvements`.
    """

    weights: LayerWeights
    c: Tensor
    p: Tensor
    q: Tensor
    group: Tensor
    members: list[Tensor]
    rounding: float
    moves: Moves
    tied: bool
    centre_values: bool
    centre_keys: bool

    @cached_property
    def errors(self) -> tuple[Tensor, Tensor, Tensor]:
        """What rounding may do to `A_h`, `W_h` and `B_h`, in Frobenius norm: (H), (H), (…, H)."""
        w = self.weights
        scores, values = self.rounding * w.score_size, self.rounding * w.value_size
        return scores, values, self.rounding * w.key_size * length(self.q.detach().flatten(-2))

    @cached_property
    def c_size(self) -> Tensor:
        """`‖C‖_F`, (…)."""
        return length(self.c.detach().flatten(-2))

    @cached_property
    def value_size(self) -> Tensor:
        """`‖(C − 1cᵀ) W_h‖`, (…, H), but for rounding."""
        shifted = (self.c - self.c.mean(-2, keepdim=True)).unsqueeze(-3)
        return spectral_norm_upper(shifted @ self.weights.w_v @ self.weights.thin_o.mT)

    @cached_property
    def weightings(self) -> list[Tensor]:
        """Three choices of t, (…, H) each; the second balances heads for small ε, the third for large."""
        w = self.weights
        shifted = (self.c - self.c.mean(-2, keepdim=True)).unsqueeze(-3)
        own_move = spectral_norm_upper(w.scale * shifted @ w.w_k @ w.thin_q.mT)
        own_move = own_move + spectral_norm_upper(self.q @ w.thin_k.mT)
        size = self.value_size
        steep = _steepness(self.p).amax(-1)
        balanced = _balance(size.unsqueeze(-1), (steep * own_move).unsqueeze(-1)).squeeze(-1)
        at_limit = _balance(size.unsqueeze(-1), torch.ones_like(size).unsqueeze(-1)).squeeze(-1)
        return [torch.ones_like(balanced), balanced, at_limit]

    @cached_property
    def keys(self) -> list[Tensor]:
        """`C W_K` per set of keys, in a basis of its own: (…, H, dk, dk)."""
        factor = self.weights.layer.factor()
        return [factor * k for k in self._seen(self.weights.w_k, self.centre_keys)]

    @cached_property
    def values(self) -> list[Tensor]:
        """`C W_V` per set of keys, in a basis of its own: (…, H, dv, dv)."""
        return self._seen(self.weights.w_v, self.centre_values)

    def _seen(self, w: Tensor, centre: bool) -> list[Tensor]:
        """`C W` per set of keys, in a basis of its own: (…, H, k, k)."""
        found = []
        for seen in self.members:
            c = self.c[..., seen, :]
            c = c - c.mean(-2, keepdim=True) if centre else c
            found.append(thin(c.unsqueeze(-3) @ w))
        return found

    def fixed(self, which: int) -> _Fixed:
        """For one of `weightings`."""
        if which not in self._known:
            t, w = self.weightings[which][..., None, None], self.weights
            self._known[which] = _Fixed(
                w.o_rows.norm(w.thin_v / t),
                [w.o_rows.norm(v / t) for v in self.values],
                w.q_rows.norm(t * w.layer.factor() * w.thin_k),
            )
        return self._known[which]

    @cached_property
    def _known(self) -> dict[int, _Fixed]:
        return {}

    def apart(self, count: int) -> _Apart:
        """Rows in so many groups, and a choice of t by Frobenius norms at P(X), centred."""
        if count not in self._known_apart:
            w = self.weights
            group = _row_order(self.p, count)
            at_x = _largest(self.p, group, count)
            shifted = (self.c - self.c.mean(-2, keepdim=True)).unsqueeze(-3)
            w_q = w.layer.factor() * w.w_q
            v_size = _gram(shifted @ w.w_v, at_x, True)
            v_size = (v_size * (w.w_o @ w.w_o.mT).unsqueeze(-3)).sum((-2, -1))
            k_size = _gram(shifted @ w.w_k, at_x, True)
            k_size = (k_size * (w_q.mT @ w_q).unsqueeze(-3)).sum((-2, -1))
            own = length(self.q @ w.thin_k.mT)
            b_size = _steepness(self.p) * own.square()
            b_size = _largest(b_size.unsqueeze(-1), group, count).squeeze(-1)
            weights = _balance(safe_sqrt(v_size), safe_sqrt(k_size) + safe_sqrt(b_size))
            self._known_apart[count] = _Apart(group, own, weights)
        return self._known_apart[count]

    @cached_property
    def _known_apart(self) -> dict[int, _Apart]:
        return {}


class _Apart(NamedTuple):
    """Rows in groups with head weights of their own.

    Attributes:
        group: (n), of each row. own: (…, H, n), `‖B_h,r‖`. weights: (…, H, groups), t, from X alone.
    """

    group: Tensor
    own: Tensor
    weights: Tensor


def _below(x: Tensor) -> Tensor:
    """Norm of heads below each other: (…, H, r, c) → (…)."""
    return spectral_norm_upper(x.flatten(-3, -2))


def _balance(value: Tensor, move: Tensor) -> Tensor:
    """√(value / move), the weights of heads, within six powers of ten. Shape: (…, H, k) each."""
    least_value = 1e-6 * value.amax(-2, keepdim=True)
    least_move = 1e-6 * move.amax(-2, keepdim=True)
    some = (least_value > 0) & (least_move > 0)
    one = torch.ones_like(value)
    value = torch.where(some, torch.maximum(value, least_value), one)
    move = torch.where(some, torch.maximum(move, least_move), one)
    return (value / move).sqrt()


def _steepness(p: Tensor) -> Tensor:
    """`p₁ (1 − p₁ + p₂)` of the two largest entries, at least the norm of the softmax Jacobian at p."""
    top = p.topk(min(2, p.shape[-1]), -1).values
    return top[..., 0] * (1.0 - top[..., 0] + top[..., -1])


def stacked(h: Heads, moved: Moved, eps: Tensor, weighted: bool) -> Tensor:
    """Bound of `‖R‖_F`; see the module's docstring. eps (…) → (…)."""
    best = torch.full_like(eps, torch.inf)
    alone: list[Tensor] = []
    promising = _promising(h, moved) if h.weights.large else None  # all are valid: one is enough
    for i in range(len(h.weightings)):
        if promising is not None and not bool(promising[i].any()):
            continue
        whole, rows = _stacked(h, moved, eps, i)
        if promising is not None:  # a sample's bound must not depend on what else is in its batch
            whole = torch.where(promising[i], whole, torch.inf)
            rows = torch.where(promising[i].unsqueeze(-1), rows, torch.inf)
        best = torch.minimum(best, whole)
        alone.append(rows)
    if weighted and moved.high is not None:
        for whole, rows in _weighted(h, moved.high, moved.slope, eps):
            best = torch.minimum(best, whole)
            alone.append(rows)
    return torch.minimum(best, length(torch.stack(alone).amin(0)))


def _promising(h: Heads, moved: Moved) -> Tensor:
    """Which of the weightings to try: those for which `Σ t² p² · Σ v² / t²`, sums that bound both factors, is
    not much above the least, and of those that are nearly multiples of each other the best.

    Shape: (weightings, …), bool; for each sample one at least."""
    t = torch.stack([t.detach() for t in h.weightings])
    p, v = moved.whole.detach(), h.value_size.detach()
    sums = ((t * p).square().sum(-1) * (v / t).square().sum(-1)).nan_to_num(nan=torch.inf)
    ratio = t.unsqueeze(1) / t
    alike = ratio.amax(-1) <= ALIKE * ratio.amin(-1)
    order = torch.arange(len(t), device=t.device).reshape(-1, *[1] * (sums.ndim - 1))
    ahead = (sums < sums.unsqueeze(1)) | ((sums == sums.unsqueeze(1)) & (order < order.unsqueeze(1)))
    return (sums <= NEAR * sums.amin(0)) & ~(alike & ahead).any(1)


def _stacked(h: Heads, moved: Moved, eps: Tensor, which: int) -> tuple[Tensor, Tensor]:
    """For one choice of head weights: the bound (…), and of each row alone (…, n)."""
    w, t, fixed = h.weights, h.weightings[which], h.fixed(which)
    a_error, w_error, b_error = h.errors
    moved_values = torch.zeros_like(eps) if h.moves == "queries" else eps
    w_error = length(w_error / t)
    value = torch.stack(fixed.values, -1)[..., h.group] + (h.c_size * w_error).unsqueeze(-1)
    value = value + (moved_values * (fixed.growth + w_error)).unsqueeze(-1)  # V, (…, n)
    weight = t.unsqueeze(-1) * moved.slope * value.unsqueeze(-2)  # ω, (…, H, n)
    parts = []
    for i, k in enumerate(h.keys):
        most = weight[..., h.group == i].amax(-1)  # (…, H)
        parts.append(w.q_rows.norm(most[..., None, None] * k) + h.c_size * length(most * a_error))
    most = weight.amax(-1)
    if w.large:  # in all heads at most as many times as in one
        both = (most / t).amax(-1) * fixed.both
    else:
        both = w.q_rows.norm(most[..., None, None] * w.layer.factor() * w.thin_k)
    shared = score_move(
        eps,
        torch.stack(parts).amax(0),
        w.k_rows.norm(thin(weight.unsqueeze(-1) * h.q)) + length(most * b_error),
        both + length(most * a_error),
        h.moves,
        h.tied,
    ).nan_to_num(nan=torch.inf, posinf=torch.inf)
    rows = length((t.unsqueeze(-1) * moved.rows).transpose(-2, -1)) * value
    heads = length(t * moved.whole) * value.amax(-1)
    return torch.minimum(shared, heads), rows


def _row_order(p: Tensor, count: int) -> Tensor:
    """Group of each row, (n), count of them, of rows that attend to much the same keys in all heads."""
    n = p.shape[-2]
    if count >= n:
        return torch.arange(n, device=p.device)
    together = p.detach().movedim(-2, 0).flatten(1)
    together = together - together.mean(0)
    first = torch.linalg.eigh(together @ together.mT).eigenvectors[:, -1]
    group = torch.empty(n, dtype=torch.long, device=p.device)
    group[first.argsort()] = torch.arange(n, device=p.device) * count // n
    return group


def _largest(x: Tensor, group: Tensor, count: int) -> Tensor:
    """(…, n, k) → (…, count, k), the largest of each group of rows."""
    if count == x.shape[-2]:
        return x
    return torch.stack([x[..., group == i, :].amax(-2) for i in range(count)], -2)


def _weighted(h: Heads, high: Tensor, slope: Tensor, eps: Tensor) -> list[tuple[Tensor, Tensor]]:
    """For two choices of t, which may differ by row: the bound (…), and of each row alone (…, n)."""
    n, m = high.shape[-2:]
    lead = max(eps.numel(), 1)
    w_q, w_k, w_v, w_o = h.weights.w_q, h.weights.w_k, h.weights.w_v, h.weights.w_o
    (heads, d_q, dk), (dv, d_out), d_c = w_q.shape, w_o.shape[1:], w_k.shape[1]
    work = heads * (m * (dk**2 + dv**2) + dk * d_q**2 + dv * d_out**2) + 60.0 * (d_q**3 + d_out**3)
    memory = heads * (m * (dk + dv) + d_q**2 + d_out**2)
    count = int(min(n, GROUP_WORK / work, GROUP_MEMORY / (lead * memory)))
    if count < 1:
        return []
    w_q = h.weights.layer.factor() * w_q
    balanced = h.weightings[1]
    # A and W up to a change of basis of what heads do not share
    a, w = w_q @ h.weights.thin_k.mT, h.weights.thin_v @ w_o
    row_slope = slope
    group, own, by_row = h.apart(count)
    heavy, slope = _largest(high, group, count), _largest(slope.unsqueeze(-1), group, count).squeeze(-1)
    a_error, w_error, b_error = h.errors
    moved_values = torch.zeros_like(eps) if h.moves == "queries" else eps
    c_size = h.c_size

    mean = h.c.mean(-2, keepdim=True)
    values = _gram((h.c - mean if h.centre_values else h.c).unsqueeze(-3) @ w_v, heavy, h.centre_values)
    values = w_o.mT.unsqueeze(-3) @ values @ w_o.unsqueeze(-3)  # (…, H, G, d_out, d_out)
    keys = _gram((h.c - mean if h.centre_keys else h.c).unsqueeze(-3) @ w_k, heavy, h.centre_keys)
    keys = w_q.unsqueeze(-3) @ keys @ w_q.mT.unsqueeze(-3)  # (…, H, G, d_q, d_q)

    columns = _columns(
        high, count, heads * n * dk**2 + heads * dk * d_c**2 + 60.0 * d_c**3, lead * heads * d_c**2
    )
    found = []
    for t in (balanced.unsqueeze(-1).expand_as(by_row), by_row):  # (…, H, G)
        t_value = safe_sqrt(_top(values, 1.0 / t.square(), h.rounding))
        t_value = t_value + c_size.unsqueeze(-1) * length((w_error.unsqueeze(-1) / t).mT)
        root = safe_sqrt(slope)
        # [x_h W_h / t_h] is at most max_h x_h times [W_h / t_h], for x_h the ratio of the weights
        ratio = (root / t * balanced.unsqueeze(-1)).amax(-2)
        growth = _below(w / balanced[..., None, None]) + length(w_error / balanced)
        value = t_value + ratio * (moved_values * growth).unsqueeze(-1)  # V_r, (…, G)
        side = safe_sqrt(_top(keys, t.square(), h.rounding))
        side = side + c_size.unsqueeze(-1) * length((a_error.unsqueeze(-1) * t).mT)
        ratio = (t * root / balanced.unsqueeze(-1)).amax(-2)
        both = ratio * (_below((balanced[..., None, None] * a).mT) + length(balanced * a_error)).unsqueeze(-1)
        weight = (t * value.unsqueeze(-2))[..., group]  # (…, H, n)
        row_root = safe_sqrt(row_slope)
        context = _below(thin((weight * row_root).unsqueeze(-1) * h.q) @ w_k.mT)
        if columns is not None:
            context = torch.minimum(context, _by_column(h, columns, weight.square()))
        context = context + length((weight * row_root).amax(-1) * b_error)
        whole = score_move(
            eps, (value * side).amax(-1), context, (value * both).amax(-1), h.moves, h.tied
        ).nan_to_num(nan=torch.inf, posinf=torch.inf)
        context = length((t[..., group] * row_root * (own + b_error.unsqueeze(-1))).mT)  # (…, n)
        rows = score_move(eps.unsqueeze(-1), side[..., group], context, both[..., group], h.moves, h.tied)
        rows = (rows * value[..., group]).nan_to_num(nan=torch.inf, posinf=torch.inf)
        found.append((whole, rows))
    return found


def _gram(x: Tensor, p: Tensor, centre: bool) -> Tensor:
    """`Σ_c p_c (x_c − k)ᵀ (x_c − k)`, k the mean under p or 0: (…, m, d), (…, G, m) → (…, G, d, d)."""
    rows = x.unsqueeze(-3)
    if centre:
        mean = p @ x / p.sum(-1, keepdim=True).clamp(min=1e-300)
        rows = rows - mean.unsqueeze(-2)
    scaled = safe_sqrt(p).unsqueeze(-1) * rows
    return scaled.mT @ scaled


def _top(grams: Tensor, weights: Tensor, rounding: float) -> Tensor:
    """`λ_max(Σ_h weight_hg G_hg)`: (…, H, G, d, d), (…, H, G) → (…, G)."""
    total = (weights[..., None, None] * grams).sum(-4)
    return gram_norm_upper(total) + rounding * total.diagonal(dim1=-2, dim2=-1).sum(-1)


def _columns(high: Tensor, count: int, work: float, memory: float) -> Tensor | None:
    """p̄ with the largest of groups of keys, (…, H, n, groups); None where even one takes too much."""
    most = int(min(high.shape[-1], GROUP_WORK / work, GROUP_MEMORY / memory))
    if most < 2:
        return None
    if most >= high.shape[-1]:
        return high
    group = _row_order(high.mT, most)
    return _largest(high.mT, group, most).mT


def _by_column(h: Heads, columns: Tensor, weight: Tensor) -> Tensor:
    """`max_c λ_max(Σ_hr weight_hr p̄_h,rc B_h,rᵀ B_h,r)^½`, (…, H, n) → (…)."""
    inner = torch.einsum("...hnc,...hnk,...hnl->...hckl", columns * weight.unsqueeze(-1), h.q, h.q)
    w_k = h.weights.w_k.unsqueeze(-3)
    outer = w_k @ inner @ w_k.mT  # (…, H, columns, d_c, d_c)
    return safe_sqrt(_top(outer, torch.ones_like(outer[..., 0, 0]), h.rounding).amax(-1))
