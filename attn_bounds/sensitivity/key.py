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

from functools import cached_property

import torch
from torch import Tensor

from ..kronecker import kronecker_sum_norm_upper
from ..norms import round_up, safe_sqrt, spectral_norm_upper
from .heads import Heads, Moved, Moves, score_move, stacked
from .layer import AttentionLayer, Improvements
from .softmax import FULLY_MASKED, jacobian_norm_on_box
from .weights import LayerWeights, length

ROW_GROUPS = 16  # at most so many sets of keys are told apart among masked rows


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
    at = LayerAt(x, LayerWeights(layer), context, moves)
    return round_up(at.sensitivity(dense_size), x.dtype)


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
    the radius of the joint ball `‖E‖² + ‖G‖² ≤ ε²`. For many radii around one input, or many inputs of one
    layer: `LayerAt`.

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
    return round_up(LayerAt(x, LayerWeights(layer), context, moves, use).bound(eps, dense_size), x.dtype)


def _at_most(total: Tensor, radius: Tensor) -> Tensor:
    """A bound of a move, rounded up; 0 · ∞ is a NaN, and where ε = 0 nothing moves."""
    total = (total * (1.0 + 1e-13)).nan_to_num(nan=torch.inf, posinf=torch.inf)
    return torch.where(radius > 0, total, torch.zeros_like(total))


class LayerAt:
    """A layer at its clean inputs, float64; bounds for radii around them share what does not depend on ε.

    So do their gradients: several are differentiated in one go, or with `retain_graph`.

    Arguments:
        x, context, moves, use: as in `layer_bound`.
        q: (…, H, n, dk), the queries if they are known, bias included.

    Attributes:
        y: (…, n, d_q). c: (…, m, d_c). q: (…, H, n, dk), bias included, times the scale.
        scores, p, allowed: (…, H, n, m). Scores are −inf at masked keys in `allowed` only.
        rounding: relative, of the products that are formed. tied: whether queries and context are one input.
        heads: what `heads.py` has.

    Raises:
        ValueError: as `key_sensitivity`.
    """

    def __init__(
        self,
        x: Tensor,
        weights: LayerWeights,
        context: Tensor | None = None,
        moves: Moves = "both",
        use: Improvements | None = None,
        q: Tensor | None = None,
    ) -> None:
        self.weights, self.moves = weights, moves
        self.use = Improvements() if use is None else use
        self.tied = context is None
        _check_moves(moves, self.tied)
        layer = weights.layer
        other = x if context is None else context
        for name, value, width in (("x", x, layer.w_q.shape[0]), ("context", other, layer.w_k.shape[0])):
            if value.ndim < 2 or value.shape[-1] != width or value.shape[-2] == 0:
                raise ValueError(f"{name} must be (…, tokens, {width}), got {tuple(value.shape)}")
            if not bool(torch.isfinite(value).all()):
                raise ValueError(f"{name} has entries that are not finite")
        n, m = x.shape[-2], other.shape[-2]
        if isinstance(layer.skip, Tensor) and layer.skip.shape[0] != n:
            raise ValueError(f"skip is for {layer.skip.shape[0]} tokens, the input has {n}")
        self.y, self.c = x.double(), other.double()
        if q is None:
            q = self.y.unsqueeze(-3) @ weights.w_q
            if layer.b_q is not None:
                q = q + layer.b_q.double().unflatten(0, (layer.heads, 1, -1))
        self.q = q * layer.factor()
        # the key bias only adds a constant to each row
        scores = self.q @ (self.c.unsqueeze(-3) @ weights.w_k).mT
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
        self.scores, self.allowed = scores, allowed
        self.p = torch.softmax(torch.where(allowed, scores, -torch.inf), -1)
        self.rounding = weights.rounding(m)
        self._sensitivities: dict[int | None, Tensor] = {}

    def radius(self, eps: float | Tensor) -> Tensor:
        """ε for each input, float64."""
        radius = torch.as_tensor(eps, dtype=torch.float64, device=self.p.device)
        if not bool((radius >= 0).all()):
            raise ValueError(f"eps must be a radius, not negative: {eps}")
        lead = self.p.shape[:-3]
        try:
            return radius.expand(lead)
        except RuntimeError:
            raise ValueError(f"eps {tuple(radius.shape)} does not fit inputs {tuple(lead)}") from None

    def bound(self, eps: float | Tensor, dense_size: int | None = None) -> Tensor:
        """`layer_bound`, float64."""
        radius = self.radius(eps)
        if dense_size not in self._sensitivities:
            self._sensitivities[dense_size] = self.sensitivity(dense_size)
        return _at_most(radius * self._sensitivities[dense_size] + self.second_part(radius), radius)

    # -- the linear part -----------------------------------------------------------------------------------

    def sensitivity(self, dense_size: int | None = None) -> Tensor:
        """`key_sensitivity`, float64."""
        layer, n = self.weights.layer, self.y.shape[-2]
        skip = None
        if isinstance(layer.skip, Tensor):
            skip = layer.skip.double()
        elif layer.skip:
            skip = torch.eye(n, dtype=torch.float64, device=self.y.device)
        slack, weights = self.linear_slack, self.weights
        if self.tied and skip is not None:
            found = weights.sum_norm(self.p, True, dense_size) if layer.skip is True else None
            if found is None:
                w = weights.w_v @ weights.w_o
                eye = torch.eye(w.shape[-1], dtype=torch.float64, device=w.device)
                p = torch.cat([skip.expand(*self.p.shape[:-3], 1, n, n), self.p], -3)
                found = kronecker_sum_norm_upper(p, torch.cat([eye.unsqueeze(0), w]), dense_size)
            return found + slack
        own = torch.zeros_like(slack) if skip is None else spectral_norm_upper(skip).expand(slack.shape)
        if self.moves == "queries":
            return own
        linear = weights.sum_norm(self.p, False, dense_size)
        if linear is None:
            linear = kronecker_sum_norm_upper(self.p, weights.w_v @ weights.w_o, dense_size)
        linear = linear + slack
        return linear if self.tied or self.moves == "context" else safe_sqrt(own.square() + linear.square())

    @cached_property
    def linear_slack(self) -> Tensor:
        """What rounding of P and W adds to the norm of `E ↦ Σ P_h E W_h`: |δP| ≤ rounding · P (1 + |S|)."""
        spread = torch.where(self.allowed, self.p * self.scores.abs(), 0.0).detach().flatten(-3).amax(-1)
        tokens = self.y.shape[-2] ** 0.5
        return self.rounding * tokens * (1.0 + spread) * self.weights.value_size.sum()

    # -- the second part -----------------------------------------------------------------------------------

    def rest(self, eps: float) -> Tensor:
        """Bound of `‖F(X') − F(X) − Σ_h P_h E W_h‖_F`, rounding of P and W included; the skip left out."""
        radius = self.radius(eps)
        return _at_most(self.second_part(radius) + self.linear_slack * radius, radius)

    def second_part(self, eps: Tensor) -> Tensor:
        """Bound of `‖Σ_h (P'_h − P_h)(C + G) W_h‖_F`: (…) → (…)."""
        use, n, everything = self.use, self.p.shape[-2], self._everything
        eps = eps.unsqueeze(-1)
        moved_values = torch.zeros_like(eps) if self.moves == "queries" else eps
        limit = 0.5 if use.half else 1.0
        slope = torch.full_like(self.scores[..., 0], limit)  # L per row
        high = None
        if use.local:
            local, high = self._local_slopes(eps)
            slope = torch.minimum(slope, local)

        def move(keys: Tensor, rows: Tensor, both: Tensor) -> Tensor:
            radius = eps if keys.ndim == eps.ndim else eps.unsqueeze(-1)
            return score_move(radius, keys, rows, both, self.moves, self.tied)

        keys, values = everything
        value = values + moved_values * self._value_size
        moved = (slope.amax(-1) * move(keys, self._row_norm, self._score_size)).clamp(max=(2.0 * n) ** 0.5)
        by_head = moved * value
        if not (use.per_row or use.stacked):
            return by_head.sum(-1)

        row_keys, row_values = self._by_row
        # each row takes all of ε, but none moves its probabilities by more than √2
        alone = move(row_keys, self._row_lengths, self._score_size.unsqueeze(-1))
        alone = (slope * alone).clamp(max=2.0**0.5)
        if use.per_row:
            row_values = row_values + (moved_values * self._value_size).unsqueeze(-1)  # (…, H, n), as keys
            # all rows share one ε: Minkowski over the three parts of (2), each row weighted by L_r v_r
            weight = slope * row_values
            shared = move(
                (weight * row_keys).amax(-1),
                spectral_norm_upper(weight.unsqueeze(-1) * self._b) + weight.amax(-1) * self._b_rounding,
                weight.amax(-1) * self._score_size,
            )
            capped = length(alone * row_values)
            shared = shared.nan_to_num(nan=torch.inf, posinf=torch.inf)
            by_head = torch.minimum(by_head, torch.minimum(shared, capped))
        total = by_head.sum(-1)
        if not use.stacked:
            return total
        at_once = stacked(self.heads, Moved(slope, high, moved, alone), eps.squeeze(-1), use.weighted)
        return torch.minimum(total, at_once.nan_to_num(nan=torch.inf, posinf=torch.inf))

    # A, W, B up to a change of basis on the side that only norms see, and their norms

    @property
    def _a(self) -> Tensor:
        """(H, dk, d_c)."""
        return self.weights.layer.factor() * self.weights.thin_q @ self.weights.w_k.mT

    @property
    def _w(self) -> Tensor:
        """(H, d_c, dv)."""
        return self.weights.w_v @ self.weights.thin_o.mT

    @cached_property
    def _b(self) -> Tensor:
        """(…, H, n, dk)."""
        return self.q @ self.weights.thin_k.mT

    @property
    def _b_rounding(self) -> Tensor:
        return self.heads.errors[2]

    @cached_property
    def _score_size(self) -> Tensor:
        """`‖A‖`, (H)."""
        return self.weights.score_norm + self.rounding * self.weights.score_size

    @cached_property
    def _value_size(self) -> Tensor:
        """`‖W‖`, (H)."""
        return self.weights.value_norm + self.rounding * self.weights.value_size

    @cached_property
    def _row_norm(self) -> Tensor:
        """`‖B‖`, (…, H)."""
        return spectral_norm_upper(self._b) + self._b_rounding

    @cached_property
    def _row_lengths(self) -> Tensor:
        """`‖B_r‖`, (…, H, n)."""
        return length(self._b) + self._b_rounding.unsqueeze(-1)

    @cached_property
    def _everything(self) -> tuple[Tensor, Tensor]:
        return self._sizes(torch.ones_like(self.allowed[..., 0, :].flatten(0, -2)[0]))

    def _sizes(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """`‖A Cᵀ‖`, `‖C W‖`, (…, H) each, of the keys (m), bool, that count.

        Centred is not above as it is, up to rounding."""
        c = self.c[..., keys, :]
        shifted = c - c.mean(-2, keepdim=True)

        def norm(right: Tensor, centred: bool) -> Tensor:
            if centred and self.weights.large:  # where each product counts
                return spectral_norm_upper(shifted.unsqueeze(-3) @ right)
            plain = spectral_norm_upper(c.unsqueeze(-3) @ right)
            if not centred:
                return plain
            return torch.minimum(plain, spectral_norm_upper(shifted.unsqueeze(-3) @ right))

        unit = self.rounding * length(c.detach().flatten(-2)).unsqueeze(-1)  # rounding of each product
        return (
            norm(self._a.mT, self.use.centre_keys) + unit * self.weights.score_size,
            norm(self._w, self.use.centre_values) + unit * self.weights.value_size,
        )

    @cached_property
    def _by_row(self) -> tuple[Tensor, Tensor]:
        """`_sizes` of the keys that each row sees, (…, H, n) each."""
        group, members = self._row_groups
        whole = self._everything
        parts = [whole if bool(keys.all()) else self._sizes(keys) for keys in members]
        keys, values = (torch.stack(own, -1) for own in zip(*parts, strict=True))
        return (
            torch.minimum(keys, whole[0].unsqueeze(-1))[..., group],
            torch.minimum(values, whole[1].unsqueeze(-1))[..., group],
        )

    @cached_property
    def _row_groups(self) -> tuple[Tensor, list[Tensor]]:
        return _row_groups(self.allowed)

    @cached_property
    def heads(self) -> Heads:
        """All heads at once."""
        group, members = self._row_groups
        return Heads(
            weights=self.weights,
            c=self.c,
            p=self.p,
            q=self.q,
            group=group,
            members=members,
            rounding=self.rounding,
            moves=self.moves,
            tied=self.tied,
            centre_values=self.use.centre_values,
            centre_keys=self.use.centre_keys,
        )

    def _local_slopes(self, eps: Tensor) -> tuple[Tensor, Tensor]:
        """Bounds of the softmax Jacobian's norm, (…, H, n), and of p on all segments from P to P'.

        Each score stays within what (2) allows it, `e_r A c_c + b_r g_c + e_r A g_c` with the rows' lengths.
        Two tokens of self-attention share ε, so that `e_r` and `g_c` have a joint ball as well unless r = c.
        """
        best, highest = torch.full_like(self.scores[..., 0], 0.5), torch.ones_like(self.scores)
        e, size = eps[..., None, None], self._score_size[..., None, None]
        rows = length(self._b).unsqueeze(-1)
        for columns in self._column_lengths:
            reach = score_move(e, columns, rows, size, self.moves, False)
            if self.tied:
                own = score_move(e, columns.mT, rows, size, self.moves, True)
                reach.diagonal(dim1=-2, dim2=-1).copy_(own.squeeze(-1))
            reach = reach * (1.0 + self.rounding) + self.rounding * (1.0 + self.scores.detach().abs())
            low, high = self.scores - reach, self.scores + reach
            if not self._unmasked:
                # a masked key has no weight: e^-1000 of the least of the others is none in any dtype
                least = torch.where(self.allowed, low, torch.inf).amin(-1, keepdim=True).detach() - 1e3
                low, high = torch.where(self.allowed, low, least), torch.where(self.allowed, high, least)
            slope, p_high = jacobian_norm_on_box(low, high)
            best = torch.minimum(best, slope.nan_to_num(nan=0.5))
            highest = torch.minimum(highest, p_high.nan_to_num(nan=1.0))
        return best, highest

    @cached_property
    def _unmasked(self) -> bool:
        return bool(self.allowed.all())

    @cached_property
    def _column_lengths(self) -> list[Tensor]:
        """`‖A c_c‖`, (…, H, 1, m), of the keys as they are and centred; of large layers the shorter alone."""
        shifts = [torch.zeros_like(self.c[..., :1, :])]
        if self.use.centre_keys:
            shifts.append(self.c.mean(-2, keepdim=True))
        found = [length((self.c - s).unsqueeze(-3) @ self._a.mT).unsqueeze(-2) for s in shifts]
        if self.weights.large and len(found) == 2:
            total = [x.detach().sum((-3, -2, -1), keepdim=True) for x in found]
            return [torch.where(total[0] < total[1], found[0], found[1])]
        return found


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
