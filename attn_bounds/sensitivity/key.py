"""Local sensitivity of an attention layer by norms: key-sensitivity and what it leaves out.

The method is LoFAST (Havens, Araujo, Zhang, Hu, ICML 2024); theory.md, section 1, has its equations. With
queries from the tokens Y (n, d_q), keys and values from the context C (m, d_c), and H the skip connection's
map of tokens,

    F(Y, C) = H Y + Σ_h P_h(Y, C) C W_h + const,    P_h = softmax(S_h),    W_h = W_V W_O of head h.

For moves E of Y and G of C (self-attention: Y = C, E = G), exactly,

    F(Y+E, C+G) − F(Y, C) = [ H E + Σ_h P_h G W_h ] + Σ_h (P'_h − P_h) (C + G) W_h.                (1)

The bracket is linear, its norm is `key_sensitivity`. Value biases vanish, as rows of P' and P sum to one.
With `A = scale W_Q W_Kᵀ` and `B = scale (Y W_Q + 1 b_Qᵀ) W_Kᵀ` the scores move by

    Δ = E A Cᵀ + B Gᵀ + E A Gᵀ   up to a constant per row,                                             (2)

constants being all that the key bias adds, and softmax does not see them. Hence `‖Δ‖_F` is at most, with
`a = ‖A Cᵀ‖`, `b = ‖B‖`, `c = ‖A‖` and the radius ε of what moves,

    self-attention               ε (a + b) + ε² c        (E and G are the same)
    both, `‖E‖² + ‖G‖² ≤ ε²`     ε √(a² + b²) + ½ ε² c   (Cauchy-Schwarz; ‖E‖ ‖G‖ ≤ ½ ε²)
    queries only / context only  ε a  /  ε b             (the product vanishes)

and `‖P' − P‖_F ≤ min(L ‖Δ‖_F, √(2n))`, `‖(C+G) W‖₂ ≤ ‖C W‖₂ + ‖G‖ ‖W‖₂` bound the second part of (1) and with
it the layer (theory.md, (3)). `heads.py` bounds that part for all heads at once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..kronecker import kronecker_sum_norm_upper
from ..norms import round_up, safe_sqrt, spectral_norm_upper, thin
from .heads import Heads, Moves, score_move, stacked
from .layer import AttentionLayer, Improvements
from .softmax import FULLY_MASKED, jacobian_norm_upper, probability_box

EPS = torch.finfo(torch.float64).eps
ROW_GROUPS = 16  # at most so many sets of keys are told apart among masked rows


class _Heads(NamedTuple):
    """Weights per head, float64: (heads, d, dk) or (heads, dv, d_out)."""

    w_q: Tensor
    w_k: Tensor
    w_v: Tensor
    w_o: Tensor

    def size(self) -> tuple[Tensor, Tensor]:
        """`‖W_Q‖_F ‖W_K‖_F` and `‖W_V‖_F ‖W_O‖_F`, the units of rounding in their products: (heads) each."""
        q, k, v, o = (_length(w.detach().flatten(1)) for w in self)
        return q * k, v * o


def _length(x: Tensor) -> Tensor:
    return safe_sqrt(x.square().sum(-1))


def _heads(layer: AttentionLayer) -> _Heads:
    repeat = layer.heads // layer.groups

    def split(w: Tensor, count: int, times: int) -> Tensor:
        return w.double().unflatten(1, (count, -1)).transpose(0, 1).repeat_interleave(times, 0)

    w_o = layer.w_o.double().unflatten(0, (layer.heads, -1))
    return _Heads(
        split(layer.w_q, layer.heads, 1),
        split(layer.w_k, layer.groups, repeat),
        split(layer.w_v, layer.groups, repeat),
        w_o,
    )


class _State(NamedTuple):
    """The layer at its clean inputs, float64. Scores are −inf at masked keys in `allowed` only."""

    y: Tensor  # (…, n, d_q)
    c: Tensor  # (…, m, d_c)
    heads: _Heads
    q: Tensor  # (…, heads, n, dk), bias included, times the scale
    scores: Tensor  # (…, heads, n, m)
    allowed: Tensor  # the same, bool
    p: Tensor  # the same
    tied: bool
    scale: float  # its size
    rounding: float  # relative, of the products that are formed


def _state(x: Tensor, layer: AttentionLayer, context: Tensor | None) -> _State:
    tied = context is None
    other = x if context is None else context
    for name, value, width in (("x", x, layer.w_q.shape[0]), ("context", other, layer.w_k.shape[0])):
        if value.ndim < 2 or value.shape[-1] != width or value.shape[-2] == 0:
            raise ValueError(f"{name} must be (…, tokens, {width}), got {tuple(value.shape)}")
        if not bool(torch.isfinite(value).all()):
            raise ValueError(f"{name} has entries that are not finite")
    n, m = x.shape[-2], other.shape[-2]
    if isinstance(layer.skip, Tensor) and layer.skip.shape[0] != n:
        raise ValueError(f"skip is for {layer.skip.shape[0]} tokens, the input has {n}")
    y, c, heads = x.double(), other.double(), _heads(layer)
    q = y.unsqueeze(-3) @ heads.w_q
    if layer.b_q is not None:
        q = q + layer.b_q.double().unflatten(0, (layer.heads, 1, -1))
    q = q * layer.factor()
    scores = q @ (c.unsqueeze(-3) @ heads.w_k).mT  # the key bias only adds a constant to each row
    allowed = torch.ones_like(scores, dtype=torch.bool)
    if layer.mask is not None:
        try:
            mask = layer.mask.expand(scores.shape)
        except RuntimeError:
            raise ValueError(
                f"mask {tuple(layer.mask.shape)} does not fit scores {tuple(scores.shape)}"
            ) from None
        allowed = mask if mask.dtype == torch.bool else mask > -torch.inf
        seen = mask if mask.dtype == torch.bool else mask > FULLY_MASKED
        if not bool(seen.any(-1).all()):
            raise ValueError("the mask hides every key of some query: its attention is undefined")
        if mask.dtype != torch.bool:
            scores = scores + torch.where(allowed, mask.double(), 0.0)
    p = torch.softmax(torch.where(allowed, scores, -torch.inf), -1)
    rounding = 32.0 * (y.shape[-1] + c.shape[-1] + q.shape[-1] + heads.w_v.shape[-1] + m) * EPS
    return _State(y, c, heads, q, scores, allowed, p, tied, abs(layer.factor()), rounding)


def _check_moves(moves: Moves, tied: bool) -> None:
    if moves not in ("queries", "context", "both"):
        raise ValueError(f"moves is 'queries', 'context' or 'both', not {moves!r}")
    if tied and moves != "both":
        raise ValueError("in self-attention queries and context are one input: give a context to move one")


def key_sensitivity(
    x: Tensor,
    layer: AttentionLayer,
    context: Tensor | None = None,
    moves: Moves = "both",
    dense_size: int | None = None,
) -> Tensor:
    """`ξ(X) = ‖H ⊗ I + Σ_h P_h(X) ⊗ W_hᵀ‖₂` from above: the layer with its attention held fixed.

    Self-attention without `context`. Otherwise by what moves: the context alone `‖N‖`, `N = Σ_h P_h ⊗ W_hᵀ`;
    the queries alone `‖H‖`; both, in the joint l2 norm, at most `√(‖H‖² + ‖N‖²)`, exact for H = I, as
    `[H ⊗ I, N][H ⊗ I, N]ᵀ = H Hᵀ ⊗ I + N Nᵀ`.

    Arguments:
        x: (…, n, d_q). context: (…, m, d_c).
        dense_size: see `kronecker_sum_norm_upper`: how large a matrix may be formed.

    Returns:
        (…), output l2 per input l2, in the dtype of x and rounded up. Differentiable.

    Raises:
        ValueError: shapes do not fit, an entry is not finite, or the mask hides every key of a query.

    Source: Havens et al., ICML 2024, the key-sensitivity metric; theory.md, (2).
    """
    _check_moves(moves, context is None)
    return round_up(_sensitivity(_state(x, layer, context), layer, moves, dense_size), x.dtype)


def _sensitivity(s: _State, layer: AttentionLayer, moves: Moves, dense_size: int | None) -> Tensor:
    n = s.y.shape[-2]
    skip = None
    if isinstance(layer.skip, Tensor):
        skip = layer.skip.double()
    elif layer.skip:
        skip = torch.eye(n, dtype=torch.float64, device=s.y.device)
    w = s.heads.w_v @ s.heads.w_o
    slack = _linear_slack(s)
    if s.tied and skip is not None:
        eye = torch.eye(w.shape[-1], dtype=torch.float64, device=w.device)
        p = torch.cat([skip.expand(*s.p.shape[:-3], 1, n, n), s.p], -3)
        return kronecker_sum_norm_upper(p, torch.cat([eye.unsqueeze(0), w]), dense_size) + slack
    own = torch.zeros_like(slack) if skip is None else spectral_norm_upper(skip).expand(slack.shape)
    if moves == "queries":
        return own
    linear = kronecker_sum_norm_upper(s.p, w, dense_size) + slack
    return linear if s.tied or moves == "context" else safe_sqrt(own.square() + linear.square())


def layer_bound(
    x: Tensor,
    eps: float | Tensor,
    layer: AttentionLayer,
    context: Tensor | None = None,
    moves: Moves = "both",
    use: Improvements | None = None,
    dense_size: int | None = None,
) -> Tensor:
    """Bound of `‖F(X') − F(X)‖_F` over all `‖X' − X‖_F ≤ ε`, monotone in ε. Differentiable.

    With a context `moves` says what is perturbed: the queries' tokens, the context's, or both, and then ε is
    the radius of the joint ball `‖E‖² + ‖G‖² ≤ ε²`.

    Arguments:
        x: (…, n, d_q), tokens of the queries.
        context: (…, m, d_c), tokens of keys and values; None in self-attention.
        eps: number or (…), in the units of x.
        use: improvements on the paper; all of them by default, `PAPER` for none.
        dense_size: see `kronecker_sum_norm_upper`.

    Returns:
        (…) in the dtype of x and rounded up; infinite where numbers overflow.

    Raises:
        ValueError: as `key_sensitivity`, and for an ε that is negative or NaN.

    Source: Havens et al., ICML 2024, local bound of a layer; theory.md, (3) and what follows it.
    """
    use = Improvements() if use is None else use
    _check_moves(moves, context is None)
    s = _state(x, layer, context)
    radius = torch.as_tensor(eps, dtype=torch.float64, device=x.device)
    if not bool((radius >= 0).all()):
        raise ValueError(f"eps must be a radius, not negative: {eps}")
    try:
        radius = radius.expand(s.p.shape[:-3])
    except RuntimeError:
        raise ValueError(f"eps {tuple(radius.shape)} does not fit inputs {tuple(s.p.shape[:-3])}") from None
    first = radius * _sensitivity(s, layer, moves, dense_size)
    second = _second_part(s, radius.unsqueeze(-1), moves, use, layer.factor())
    total = (first + second) * (1.0 + 1e-13)
    # 0 · ∞ is a NaN; where ε = 0 nothing moves
    total = torch.where(
        radius > 0, total.nan_to_num(nan=torch.inf, posinf=torch.inf), torch.zeros_like(total)
    )
    return round_up(total, x.dtype)


class Parts(NamedTuple):
    """A self-attention layer's move, `Σ_h P_h E W_h + R` without its skip connection, float64.

    Attributes:
        p: (heads, n, n) at the clean input. w: (heads, d, d_out).
        rest: (heads), `‖R‖_F` is at most its sum; rounding of p and w is in it.
    """

    p: Tensor
    w: Tensor
    rest: Tensor


def layer_parts(x: Tensor, eps: float, layer: AttentionLayer, use: Improvements | None = None) -> Parts:
    """(1) term by term, for those who go on with the linear part: a network is more than one layer.

    Arguments:
        x: (n, d). eps, use: as in `layer_bound`; the layer's skip connection is left out.

    Raises:
        ValueError: as `layer_bound`.

    Source: as `layer_bound`.
    """
    s = _state(x, layer, None)
    radius = torch.as_tensor(eps, dtype=torch.float64, device=x.device)
    second = _second_part(
        s, radius.reshape(1), "both", Improvements() if use is None else use, layer.factor()
    )
    slack = _linear_slack(s) * radius / layer.heads
    rest = (second + slack) * (1.0 + 1e-13) if eps > 0 else torch.zeros_like(second)
    return Parts(s.p, s.heads.w_v @ s.heads.w_o, rest.nan_to_num(nan=torch.inf, posinf=torch.inf))


def _linear_slack(s: _State) -> Tensor:
    """What rounding of P and W adds to the norm of `E ↦ Σ P_h E W_h`: |δP| ≤ rounding · P (1 + |S|)."""
    spread = torch.where(s.allowed, s.p * s.scores.abs(), 0.0).detach().flatten(-3).amax(-1)
    return s.rounding * s.y.shape[-2] ** 0.5 * (1.0 + spread) * s.heads.size()[1].sum()


class _Sizes(NamedTuple):
    """Norms for one set of keys: `‖A Cᵀ‖`, `‖C W‖`, (…, heads) each."""

    keys: Tensor
    values: Tensor


def _sizes(s: _State, a: Tensor, w: Tensor, keys: Tensor, use: Improvements) -> _Sizes:
    """With keys (m), bool: which of them count. Centred is not above as it is, up to rounding."""
    c = s.c[..., keys, :]
    shifted = c - c.mean(-2, keepdim=True)

    def norm(right: Tensor, centred: bool) -> Tensor:
        plain = spectral_norm_upper(c.unsqueeze(-3) @ right)
        return torch.minimum(plain, spectral_norm_upper(shifted.unsqueeze(-3) @ right)) if centred else plain

    # rounding of each product
    unit = s.rounding * _length(c.detach().flatten(-2)).unsqueeze(-1)
    score_size, value_size = s.heads.size()
    score_size = score_size * s.scale
    return _Sizes(
        norm(a.mT, use.centre_keys) + unit * score_size,
        norm(w, use.centre_values) + unit * value_size,
    )


def _second_part(s: _State, eps: Tensor, moves: Moves, use: Improvements, scale: float) -> Tensor:
    """Bound of `‖Σ_h (P'_h − P_h)(C + G) W_h‖_F`: eps (…, 1) → (…)."""
    n, m = s.scores.shape[-2:]
    score_size, value_size = s.heads.size()
    score_size = score_size * s.scale
    # A, W, B up to a change of basis on the side that only norms see: (heads, dk, d_c), (heads, d_c, dv),
    # (…, heads, n, dk)
    a = scale * thin(s.heads.w_q) @ s.heads.w_k.mT
    w = s.heads.w_v @ thin(s.heads.w_o.mT).mT
    b = s.q @ thin(s.heads.w_k).mT
    a_size = spectral_norm_upper(a) + s.rounding * score_size
    w_size = spectral_norm_upper(w) + s.rounding * value_size
    b_rounding = s.rounding * _length(s.q.detach().flatten(-2)) * _length(s.heads.w_k.detach().flatten(1))
    moved_values = torch.zeros_like(eps) if moves == "queries" else eps

    limit = 0.5 if use.half else 1.0
    slope = torch.full_like(s.scores[..., 0], limit)  # L per row
    high = None
    if use.local:
        local, high = _local_slopes(s, a, b, eps, a_size, moves, use.centre_keys)
        slope = torch.minimum(slope, local)

    everything = torch.ones(m, dtype=torch.bool, device=s.c.device)
    sizes = _sizes(s, a, w, everything, use)
    b_size = spectral_norm_upper(b) + b_rounding
    move = score_move(eps, sizes.keys, b_size, a_size, moves, s.tied)
    value = sizes.values + moved_values * w_size
    moved = (slope.amax(-1) * move).clamp(max=(2.0 * n) ** 0.5)
    by_head = moved * value
    if not (use.per_row or use.stacked):
        return by_head.sum(-1)

    group, members = _row_groups(s.allowed)
    parts = [_sizes(s, a, w, keys, use) if not bool(keys.all()) else sizes for keys in members]
    keys = torch.minimum(torch.stack([q.keys for q in parts], -1), sizes.keys.unsqueeze(-1))[..., group]
    rows = _length(b) + b_rounding.unsqueeze(-1)
    # each row takes all of ε, but none moves its probabilities by more than √2
    alone = score_move(eps.unsqueeze(-1), keys, rows, a_size.unsqueeze(-1), moves, s.tied)
    alone = (slope * alone).clamp(max=2.0**0.5)
    if use.per_row:
        values = torch.stack([q.values for q in parts], -1)
        values = torch.minimum(values, sizes.values.unsqueeze(-1))[..., group]
        values = values + (moved_values * w_size).unsqueeze(-1)  # (…, heads, n), as keys
        # all rows share one ε: Minkowski over the three parts of (2), each row weighted by L_r v_r
        weight = slope * values
        shared = score_move(
            eps,
            (weight * keys).amax(-1),
            spectral_norm_upper(weight.unsqueeze(-1) * b) + weight.amax(-1) * b_rounding,
            weight.amax(-1) * a_size,
            moves,
            s.tied,
        )
        capped = _length(alone * values)
        shared = shared.nan_to_num(nan=torch.inf, posinf=torch.inf)
        by_head = torch.minimum(by_head, torch.minimum(shared, capped))
    total = by_head.sum(-1)
    if not use.stacked:
        return total
    together = Heads(
        c=s.c,
        p=s.p,
        q=s.q,
        w_q=scale * s.heads.w_q,
        w_k=s.heads.w_k,
        w_v=s.heads.w_v,
        w_o=s.heads.w_o,
        slope=slope,
        high=high,
        whole=moved,
        rows=alone,
        group=group,
        members=members,
        rounding=s.rounding,
        moves=moves,
        tied=s.tied,
        centre_values=use.centre_values,
        centre_keys=use.centre_keys,
    )
    at_once = stacked(together, eps.squeeze(-1), use.weighted)
    return torch.minimum(total, at_once.nan_to_num(nan=torch.inf, posinf=torch.inf))


def _row_groups(allowed: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Group of each row, (n), and per group the keys, (m) bool, that some of its rows sees.

    Rows that see as many keys go together until few groups are left: a larger set of keys is valid for a row.
    """
    seen = allowed.flatten(0, -3).any(0)  # (n, m)
    patterns, group = torch.unique(seen, dim=0, return_inverse=True)
    if len(patterns) > ROW_GROUPS:
        order = patterns.sum(-1).argsort()
        merged = torch.empty_like(order)
        merged[order] = torch.arange(len(order), device=order.device) * ROW_GROUPS // len(order)
        group = merged[group]
        return group, [patterns[merged == i].any(0) for i in range(ROW_GROUPS)]
    return group, list(patterns)


def _local_slopes(
    s: _State, a: Tensor, b: Tensor, eps: Tensor, a_size: Tensor, moves: Moves, centre: bool
) -> tuple[Tensor, Tensor]:
    """Bounds of the softmax Jacobian's norm, (…, heads, n), and of p on all segments from P to P'.

    Each score stays within what (2) allows it, `e_r A c_c + b_r g_c + e_r A g_c` with the rows' lengths. Two
    tokens of self-attention share ε, so that `e_r` and `g_c` have a joint ball as well unless r = c.
    """
    best, highest = torch.full_like(s.scores[..., 0], 0.5), torch.ones_like(s.scores)
    shifts = [torch.zeros_like(s.c[..., :1, :])] + ([s.c.mean(-2, keepdim=True)] if centre else [])
    rows = _length(b).unsqueeze(-1)
    for shift in shifts:
        columns = _length((s.c - shift).unsqueeze(-3) @ a.mT).unsqueeze(-2)
        e, size = eps[..., None, None], a_size[..., None, None]
        reach = score_move(e, columns, rows, size, moves, False)
        if s.tied:
            same = torch.eye(s.scores.shape[-1], dtype=torch.bool, device=s.scores.device)
            reach = torch.where(same, score_move(e, columns, rows, size, moves, True), reach)
        reach = reach * (1.0 + s.rounding) + s.rounding * (1.0 + s.scores.detach().abs())
        low, high = s.scores - reach, s.scores + reach
        # a masked key has no weight: e^-1000 of the least of the others is none in any dtype
        least = torch.where(s.allowed, low, torch.inf).amin(-1, keepdim=True).detach() - 1e3
        low, high = torch.where(s.allowed, low, least), torch.where(s.allowed, high, least)
        p_low, p_high = probability_box(low, high)
        best = torch.minimum(best, jacobian_norm_upper(p_low, p_high).nan_to_num(nan=0.5))
        highest = torch.minimum(highest, p_high.nan_to_num(nan=1.0))
    return best, highest
