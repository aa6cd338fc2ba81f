"""Rule of an attention unit: exactly to first order, with the second-order remainder as an error set."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..norms import gram_norm_upper, spectral_norm_upper
from ..sensitivity.distance import squared_distances
from ..sensitivity.remainder import RowData, bilinear_range_of_ball, chi, psi, weighted_deviation
from ..sensitivity.softmax import centred_probability_box, probability_box
from .forms import AffineForm, Groups, Rest
from .rules import append_identity
from .sets import AttentionRemainder, Ball, intersection
from .steps import AttentionStep, ScorePlanes
from .values import Factor, Symbols, ValueMoves

EXACT_WORK = 2**31  # eigenvalue problems of an attention's scores: beyond, (pairs · dk³), by Frobenius norms
SMALL = 0.05  # part of the moves of V from which on a group is worth more than its supports
# deviation of scores from which on log-sum-exp planes may beat the second-order remainder: over a box, and
# over a ball, where the remainder is a quadratic form
WIDE, WIDE_BALL = 0.1, 0.5
BLOCK = 2**26  # entries of the generators of scores that are held at once


def scores_remainder(q: AffineForm, k: AffineForm, scale: float, groups: Groups) -> tuple[Tensor, Tensor]:
    """Range of `scale · dq · dk`, (batch, heads, n, m).

    Both moves driven by group 0, an l2 ball: exactly. All other pairs: the sum over the features of products
    of supports, or the norm of the product of two ellipsoids, whichever is smaller. Where there are very many
    pairs, Frobenius norms stand in for spectral ones.
    """
    first = groups.sets[0]
    q_supports = [s.double() for s in groups.supports(q.generators, q.rest)]
    k_supports = [s.double() for s in groups.supports(k.generators, k.rest)]
    zero_q, zero_k = q_supports[0], k_supports[0]
    rest_q, rest_k = (sum(s[1:], torch.zeros_like(s[0])) for s in (q_supports, k_supports))
    size = abs(scale)
    q_grams, k_grams = _ellipsoids(q, q_supports, groups), _ellipsoids(k, k_supports, groups)
    batch, heads, n, dk = q.centre.shape
    exact = batch * heads * n * k.centre.shape[2] * dk**3 <= EXACT_WORK

    def pair(x: int, y: int, least: float) -> Tensor:
        """Σ_i |dq_i| |dk_i| for the first group (0) or the others (1), small ones as they are."""
        by_entries = (zero_q, rest_q)[x] @ (zero_k, rest_k)[y].mT
        if float(by_entries.amax()) <= least:
            return by_entries
        if not exact:  # Σ_de (Γ_q)_de (Γ_k)_de is the square of the product's Frobenius norm
            square = q_grams[x].flatten(3) @ k_grams[y].flatten(3).mT
            return torch.minimum(by_entries, (square.clamp(min=0.0) * (1.0 + 1e-9)).sqrt())
        product = gram_factor(q_grams[x]).mT.unsqueeze(3) @ gram_factor(k_grams[y]).unsqueeze(2)
        return torch.minimum(by_entries, spectral_norm_upper(product))

    if exact and isinstance(first, Ball) and first.norm == 2.0:
        gq = groups.parts(q.generators)[0][1].reshape(q.centre.shape[0], -1, *q.centre.shape[1:]).double()
        gk = groups.parts(k.generators)[0][1].reshape(k.centre.shape[0], -1, *k.centre.shape[1:]).double()
        cross = torch.einsum("bzhnd,bzhme->bhnmde", gq, gk)
        shape = cross.shape
        gram_q, gram_k = q_grams[0].unsqueeze(3).expand(shape), k_grams[0].unsqueeze(2).expand(shape)
        # the Gram matrices hold the growth for rounding already
        low, high = bilinear_range_of_ball(gram_q, gram_k, cross * groups.growth**2)
        low, high = (scale * low, scale * high) if scale >= 0 else (scale * high, scale * low)
    else:
        high = size * pair(0, 0, 0.0)
        low = -high
    # what is small beside the first group's own part is not worth eigenvalues
    least = 0.02 * float((high - low).amax()) / max(size, 1e-30)
    entry = pair(0, 1, least) + pair(1, 0, least) + pair(1, 1, least)
    # the generators of q and k are rounded relative to themselves, and may cancel in those of the scores
    q_moves, k_moves = torch.stack(q_supports).sum(0), torch.stack(k_supports).sum(0)
    cancelled = q.centre.double().abs() @ k_moves.mT + q_moves @ k.centre.double().abs().mT
    entry = entry + (groups.growth - 1.0) * cancelled
    return low - size * entry, high + size * entry


def distance_remainder(q: AffineForm, k: AffineForm, scale: float, groups: Groups) -> tuple[Tensor, Tensor]:
    """Range of `−scale · ‖dq_i − dk_j‖²`, the second-order part of L2 scores: (batch, heads, n, m), float64.

    The differences are formed symbol by symbol, so that what moves both rows moves neither; with one tensor
    as queries and keys a token's score with itself has none. Per group the length is at most the root of the
    sum of squared supports; for group 0, an l1 or l2 ball, also the spectral norm of its generators.
    """
    first = groups.sets[0]
    symbols = max(q.symbols, k.symbols)
    q_g, k_g = q.padded(symbols), k.padded(symbols)
    batch, heads, n, dk = q.centre.shape
    shape = (batch, heads, n, k.centre.shape[2])
    whole = torch.zeros(shape, dtype=torch.float64)  # Σ over features of the squared range of d
    own, rest = whole.clone(), whole.clone()  # of the supports of group 0, and of all the others
    # the generators are rounded relative to themselves, and may cancel in the differences
    q_moves, k_moves = _moves(q, groups), _moves(k, groups)
    room = (groups.growth - 1.0) * (q_moves.unsqueeze(-2) + k_moves.unsqueeze(-3))
    for i in range(dk):
        d = q_g[..., i].unsqueeze(-1) - k_g[..., i].unsqueeze(-2)
        supports = [s.double() for s in groups.supports(d)]
        others = sum(supports[1:], torch.zeros_like(whole)) + room[..., i]
        for part, turn in ((q.rest, -1), (k.rest, -2)):
            if part is not None:
                others = others + groups.growth * part.box[..., i].double().unsqueeze(turn)
        whole += (supports[0] + others).square()
        own += supports[0].square()
        rest += others.square()
    if isinstance(first, Ball) and first.radius is not None and whole.numel() * dk**3 <= EXACT_WORK:
        g_q, g_k = (
            groups.parts(x.generators)[0][1].reshape(batch, -1, *x.centre.shape[1:]).double() for x in (q, k)
        )
        cross = torch.einsum("bzhnd,bzhme->bhnmde", g_q, g_k)
        gram_q, gram_k = (torch.einsum("bzhnd,bzhne->bhnde", g, g) for g in (g_q, g_k))
        gram = gram_q.unsqueeze(3) + gram_k.unsqueeze(2) - cross - cross.mT
        lost = (
            64.0 * torch.finfo(gram.dtype).eps * (_trace(gram_q).unsqueeze(3) + _trace(gram_k).unsqueeze(2))
        )
        own = torch.minimum(own, groups.growth**2 * (gram_norm_upper(gram) + lost))
    far = -scale * torch.minimum(whole, (own.sqrt() + rest.sqrt()).square()) * (1.0 + 1e-12)
    # as in the scores' own generators, which `_rows` sums up from these
    middle = k.centre.double().mean(-2, keepdim=True)
    q_size, k_size = (q.centre.double() - middle).abs(), (k.centre.double() - middle).abs()
    cancelled = (q_size * q_moves).sum(-1, keepdim=True) + (k_size * k_moves).sum(-1).unsqueeze(-2)
    cancelled = cancelled + q_size @ k_moves.mT + q_moves @ k_size.mT
    slack = 2.0 * abs(scale) * (groups.growth - 1.0) * cancelled
    return far.clamp(max=0.0) - slack, far.clamp(min=0.0) + slack


def _moves(x: AffineForm, groups: Groups) -> Tensor:
    """Bound of what all groups together move each entry by, float64."""
    return torch.stack([s.double() for s in groups.supports(x.generators)]).sum(0)


def _ellipsoids(x: AffineForm, supports: list[Tensor], groups: Groups) -> list[Tensor]:
    """Ellipsoids `{y : yᵀΓ⁻¹y ≤ 1}` around what each token moves by group 0 and by all the others: their Γ.

    A ball's image has Γ = ρ² G Gᵀ; a box with half widths s lies in the one with Γ = diag(s_i Σ_j s_j); a sum
    of sets with Γ_g lies in the one with `Γ = Σ_g Γ_g / t_g`, Σ t_g = 1, here t_g ∝ √trace Γ_g.

    Shape: x (batch, heads, n, d) → two of (batch, heads, n, d, d), float64.
    """
    grams: list[Tensor] = []
    for gram, support in zip(groups.grams(x.generators), supports, strict=False):
        box = torch.diag_embed(support * support.sum(-1, keepdim=True))
        if gram is not None:
            smaller = _trace(gram) <= 1.01 * _trace(box)  # one feature: the same up to rounding
            box = torch.where(smaller[..., None, None], gram, box)
        grams.append(box)
    if x.rest is not None:
        d = x.centre.shape[-1]
        ball = (groups.growth * x.rest.norm.double()).square()[..., None, None] * torch.eye(
            d, dtype=torch.float64
        )
        box = torch.diag_embed(supports[-1] * supports[-1].sum(-1, keepdim=True))
        grams.append(torch.where((_trace(ball) <= _trace(box))[..., None, None], ball, box))
    rest = torch.zeros_like(grams[0])
    sizes = [_trace(g).sqrt() for g in grams[1:]]
    total = sum(sizes, torch.zeros_like(_trace(rest)))
    for gram, size in zip(grams[1:], sizes, strict=True):
        part = torch.where(size > 0, total / size.clamp(min=1e-300), torch.zeros_like(size))
        rest = rest + gram * part[..., None, None]
    return [grams[0], rest]


def _trace(gram: Tensor) -> Tensor:
    return gram.diagonal(dim1=-2, dim2=-1).sum(-1)


def gram_factor(gram: Tensor) -> Tensor:
    """L with L Lᵀ ≥ gram for positive semidefinite matrices, (…, d, d): no cancellation in ‖aL‖."""
    finite = torch.isfinite(gram).all(-1).all(-1)[..., None, None]
    values, vectors = torch.linalg.eigh(torch.where(finite, gram, torch.zeros_like(gram)))
    error = 16 * gram.shape[-1] * torch.finfo(gram.dtype).eps * values[..., -1:].clamp(min=0.0)
    factor = vectors * (values.clamp(min=0.0) + error).sqrt().unsqueeze(-2)
    return torch.where(finite, factor, torch.inf)


def _value_moves(v: AffineForm, p: Tensor, groups: Groups) -> list[ValueMoves]:
    """What each group and a rest do to values (batch, heads, m, dv); p (batch, heads, n, m)."""
    supports = [s.double() for s in groups.supports(v.generators, v.rest)]
    total = torch.stack(supports).sum(0).flatten(1).sum(1)
    out = []
    for (s, w), gram, support in zip(
        groups.parts(v.generators), groups.grams(v.generators), supports, strict=False
    ):
        rows = keys = symbols = None
        if gram is not None:
            rows = Factor.of(gram_factor(torch.einsum("bhnc,bhcde->bhnde", p, gram)))
        if type(s) is Ball and s.norm == 2.0:
            assert gram is not None
            keys = Factor.of(gram_factor(gram))
        worth = support.flatten(1).sum(1) >= SMALL * total
        if keys is None and bool(worth.any()) and groups.keep(w.numel()):
            generators = w.reshape(*w.shape[:2], *v.centre.shape[1:]).transpose(1, 2).contiguous()
            symbols = Symbols(s, generators, groups.growth, worth)
        out.append(ValueMoves(support, rows, keys, symbols))
    if v.rest is not None:
        lengths = (p @ v.rest.norm.double().square().unsqueeze(-1)).sqrt() * groups.growth
        rows = Factor.of(lengths.unsqueeze(-1) * torch.eye(v.centre.shape[-1], dtype=p.dtype))
        out.append(ValueMoves(supports[-1], rows))
    return out


class _Rows(NamedTuple):
    """A block of query rows of an attention, (batch, …, n, …) each; see `attention`."""

    average: Tensor  # (batch, heads, n, dv), float64
    own: Tensor  # (batch, K, heads, n, dv), generators of the linear part
    first: Tensor | None  # (batch, K0, heads, n, m), scores of group 0
    wide: (
        tuple[Tensor, ...] | None
    )  # where scores move far: generators, centre, low and high moves, which samples
    rows: RowData
    other_sd: Tensor
    other_sd_psi: Tensor
    other_r: Tensor
    low: Tensor  # probabilities
    high: Tensor
    scores: tuple[Tensor, Tensor, Tensor] | None  # centre, lower and upper bound, float64
    bilinear: tuple[Tensor, Tensor]  # range of scale · dq · dk
    spread: Tensor  # (batch, heads, n) √(Σ p ‖v − o‖²)
    score_rest: Tensor  # (batch, heads, n, m) part of the scores without symbols
    rest_box: Tensor  # (batch, heads, n, dv), of the linear part without symbols


@dataclass
class Local:
    """What backward relaxations of an attention want to know of it, besides its Jacobian at the centre.

    Attributes:
        queries, keys, values: centres, (batch, heads, n, dk), (batch, heads, m, dk), (batch, heads, m, dv).
        scores: (batch, heads, n, m) centre that the probabilities belong to, and bounds of the scores.
        bilinear: range of `scale · dq · dk`, (batch, heads, n, m) each.
        remainder: second-order remainder of the outputs around `scores[0]`.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    scores: tuple[Tensor, Tensor, Tensor]
    bilinear: tuple[Tensor, Tensor]
    remainder: AttentionRemainder

    @property
    def average(self) -> Tensor:
        """Output at the centre, (batch, heads, n, dv), float64: the set keeps it relative to the values."""
        return self.remainder.exact.average + self.values.double().mean(-2, keepdim=True)


def attention(
    q: AffineForm,
    k: AffineForm,
    v: AffineForm,
    scale: float,
    mask: Tensor | None,
    groups: Groups,
    label: str,
    distance: bool = False,
) -> tuple[AffineForm, tuple[Tensor, Tensor], Local | None]:
    """Attention exactly to first order, with the second-order remainder as a new error set.

    Arguments:
        q, k, v: (batch, heads, n, dk), (batch, heads, m, dk), (batch, heads, m, dv).
        mask: additive constant or None.
        distance: scores are `−scale ‖q_i − k_j‖²`, and not `scale · q_i · k_j`.

    Returns:
        form of the output (batch, heads, n, dv); (lower, upper) probabilities, (batch, heads, n, m); and
        under `groups.backward` what backward relaxations need.
    """
    dtype = q.centre.dtype
    batch, heads, n, _ = q.centre.shape
    m, dv = v.centre.shape[2:]
    symbols = max(q.symbols, k.symbols, v.symbols)
    keep = groups.keep(groups.sets[0].size * batch * heads * m * (n + dv))
    step = max(1, min(n, BLOCK // (symbols * batch * heads * m)))
    blocks = []
    for start in range(0, n, step):
        part = slice(start, start + step)
        q_rest = None if q.rest is None else Rest(q.rest.box[:, :, part], q.rest.norm[:, :, part])
        rows = AffineForm(q.centre[:, :, part], q.generators[:, :, :, part], q_rest)
        own_mask = mask if mask is None or mask.ndim < 2 or mask.shape[-2] == 1 else mask[..., part, :]
        blocks.append(_rows(rows, k, v, scale, own_mask, groups, keep, distance))

    def whole(pieces: list[Tensor], axis: int = 2) -> Tensor:
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, axis)

    average = whole([b.average for b in blocks])
    row_data = RowData(*(whole(list(t)) for t in zip(*(b.rows for b in blocks), strict=True)))
    own = whole([b.own for b in blocks], 3)
    p = row_data.p

    value_groups = _value_moves(v, p, groups)
    remainder = AttentionRemainder(label, v.centre.double(), average, row_data, value_groups)
    if keep:
        first = groups.sets[0].size
        planes, wide = None, [b.wide for b in blocks if b.wide is not None]
        if len(wide) == len(blocks):
            moves, centre, low, high, far = zip(*wide, strict=True)
            planes = ScorePlanes(
                whole(list(moves), 3),
                whole(list(centre)),
                whole(list(low)),
                whole(list(high)),
                row_data.b,
                p,
                groups.growth,
                torch.stack(far).any(0),
            )
        remainder.step = AttentionStep(
            remainder,
            whole([b.first for b in blocks if b.first is not None], 3),
            v.generators[:, :first].clone() if bool(v.generators.any()) else None,
            whole([b.other_sd for b in blocks]),
            whole([b.other_sd_psi for b in blocks]),
            whole([b.other_r for b in blocks]),
            groups.growth,
            planes,
        )
    rest: Rest | None = None
    if q.rest is not None or k.rest is not None or v.rest is not None:
        score_rest = whole([b.score_rest for b in blocks])
        norm = (p * score_rest.square()).sum(-1).sqrt() * whole([b.spread for b in blocks])
        if v.rest is not None:
            norm = norm + (p @ v.rest.norm.double().unsqueeze(-1)).squeeze(-1)
        rest = Rest(whole([b.rest_box for b in blocks]).to(dtype), norm.to(dtype))
    if groups.room(remainder.size) < remainder.size:
        groups.folded.append((label, remainder.size))
        box, norm = remainder.boxes()
        rest = Rest(box.to(dtype) * groups.growth, norm.to(dtype) * groups.growth) + rest
        generators = own
    else:
        generators = append_identity(own, groups.add(remainder), torch.arange(remainder.size))
    box_of_p = whole([b.low for b in blocks]), whole([b.high for b in blocks])
    local = None
    if groups.backward:
        scores = [b.scores for b in blocks if b.scores is not None]
        local = Local(
            q.centre,
            k.centre,
            v.centre,
            (whole([t[0] for t in scores]), whole([t[1] for t in scores]), whole([t[2] for t in scores])),
            (whole([b.bilinear[0] for b in blocks]), whole([b.bilinear[1] for b in blocks])),
            remainder,
        )
    return AffineForm(average.to(dtype), generators, rest), box_of_p, local


def _rows(
    q: AffineForm,
    k: AffineForm,
    v: AffineForm,
    scale: float,
    mask: Tensor | None,
    groups: Groups,
    keep: bool,
    distance: bool,
) -> _Rows:
    """What a block of query rows needs: the scores' generators are given up with it."""
    dtype = q.centre.dtype
    symbols = max(q.symbols, k.symbols)
    # scores: linear part, and the bilinear remainder with its midpoint moved into the centre
    # what all keys share moves no probability, and would only be rounded
    middle = k.centre.mean(-2, keepdim=True)
    keys, queries = k.centre - middle, q.centre
    moves = k.padded(symbols)
    shared = moves.mean(-2, keepdim=True)
    moves = moves - shared
    factor = scale
    if distance:  # −‖q−k‖² is 2 q·k − ‖k‖² up to row constants, and does not change when both are shifted
        factor, queries = 2.0 * scale, queries - middle
    linear = factor * (q.padded(symbols) @ keys.unsqueeze(1).mT + queries.unsqueeze(1) @ moves.mT)
    if distance:
        linear = linear - factor * (keys.unsqueeze(1) * k.padded(symbols)).sum(-1).unsqueeze(-2)
        b_low, b_high = distance_remainder(q, k, scale, groups)
        exact = -scale * squared_distances(q.centre.double(), k.centre.double())
    else:
        b_low, b_high = scores_remainder(q, k, scale, groups)
        exact = scale * (q.centre.double() @ k.centre.double().mT)
    centre = exact + (b_low + b_high) / 2
    if mask is not None:
        centre = centre + mask.double()
    b = (b_high - b_low) / 2
    p = torch.softmax(centre, -1)

    def centred(t: Tensor) -> Tensor:
        """Bound of |t_c − Σ_k p_k t_k| given one of |t_c|."""
        return (t * (1.0 - 2.0 * p) + (p * t).sum(-1, keepdim=True)).clamp(min=0.0)

    uncentred = linear
    if groups.backward and distance:  # what all keys share counts for the scores themselves
        row = queries.unsqueeze(1) * (shared - q.padded(symbols))
        uncentred = linear + factor * row.sum(-1, keepdim=True)
    elif groups.backward:
        uncentred = linear + scale * (
            q.padded(symbols) @ (k.centre - keys).unsqueeze(1).mT
            + q.centre.unsqueeze(1) @ (k.padded(symbols) - moves).mT
        )
    # a constant per row does not change the softmax: centre D at its average
    linear = linear - (linear * p.to(dtype).unsqueeze(1)).sum(-1, keepdim=True)
    ranges = groups.ranges(linear)
    first_order = _distances_rest if distance else _scores_rest
    score_rest = centred(first_order(q, k, keys, scale, groups))
    if q.rest is not None or k.rest is not None:
        ranges.append((-score_rest, score_rest))
    supports = [torch.maximum(-down, up).double() for down, up in ranges]
    d_low, d_high = groups.total(ranges, linear[:, 0])
    low, high = probability_box(centre + d_low.double() - b, centre + d_high.double() + b)
    scores = None
    if groups.backward:
        whole_low, whole_high = groups.total(groups.ranges(uncentred), uncentred[:, 0])
        extra = first_order(q, k, k.centre, scale, groups)
        scores = centre, centre + whole_low.double() - b - extra, centre + whole_high.double() + b + extra
    grams = groups.grams(linear)
    grams += [None] * (len(supports) - len(grams))
    # b is centred too
    r = torch.stack(supports).sum(0) + centred(b)
    # Var_p(b) ≤ Σ p b², and ≤ 2 Σ p (1 − p) b² since it is a sum over pairs
    b_norm = ((p * b.square()).sum(-1)).minimum(2.0 * (p * (1.0 - p) * b.square()).sum(-1)).sqrt()
    stacked = torch.stack(supports)
    rest_r = r - supports[0]

    def deviation(factor: Tensor) -> tuple[Tensor, Tensor]:
        """Bounds of `√(Σ p factor Δ'²)`: of all of Δ', and without the part of group 0."""
        weight = torch.where(p > 0, p * factor, torch.zeros_like(p))
        by_group = weighted_deviation(grams, stacked, weight)
        rest = by_group[1:].sum(0) + factor.amax(-1).sqrt() * b_norm
        rest = torch.minimum(rest, (weight * rest_r.square()).sum(-1).sqrt())
        return torch.minimum(by_group[0] + rest, (weight * r.square()).sum(-1).sqrt()), rest

    sd, other_sd = deviation(torch.ones_like(r))
    psi_r = psi(r)
    sd_psi, other_sd_psi = deviation(psi_r)
    b_centred = centred(b)
    box = d_low.double() - b_centred, d_high.double() + b_centred
    low, high = intersection((low, high), centred_probability_box(p, *box, sd_psi.square()))
    row_data = RowData(p, r, b, sd, sd_psi, deviation(chi(r).square())[0], p * psi_r * r.square())

    # output: P dV + Cov_P(D, v)
    v_c = v.centre.double()
    average = p @ v_c
    p_g, v_g = p.to(dtype).unsqueeze(1), v.centre.unsqueeze(1)
    own = p_g @ v.padded(max(symbols, v.symbols))
    weighted = linear * p_g
    middle = v.centre.mean(-2, keepdim=True)
    moved = weighted @ (v_g - middle.unsqueeze(1))
    moved = moved - weighted.sum(-1, keepdim=True) * (average.to(dtype) - middle).unsqueeze(1)
    own[:, : moved.shape[1]] += moved
    first = linear[:, : groups.sets[0].size].clone() if keep else None
    wide = None
    wide_from = WIDE if groups.sets[0].radius is None else WIDE_BALL
    far = (sd > wide_from).flatten(1).any(1)
    if keep and bool(far.any()) and q.rest is None and k.rest is None and groups.keep(linear.numel()):
        wide = linear, centre, d_low.double(), d_high.double(), far

    offsets = v_c.unsqueeze(2) - average.unsqueeze(3)  # (batch, heads, n, m, dv)
    spread = (p * offsets.square().sum(-1)).sum(-1).sqrt()
    rest_box = ((p * score_rest).unsqueeze(-2) @ offsets.abs()).squeeze(-2)
    if v.rest is not None:
        rest_box = rest_box + p @ v.rest.box.double()
    return _Rows(
        average,
        own,
        first,
        wide,
        row_data,
        other_sd,
        other_sd_psi,
        rest_r,
        low,
        high,
        scores,
        (b_low, b_high),
        spread,
        score_rest,
        rest_box,
    )


def _scores_rest(q: AffineForm, k: AffineForm, keys: Tensor, scale: float, groups: Groups) -> Tensor:
    """What errors without symbols move each score by, to first order: (batch, heads, n, m), float64."""
    total = torch.zeros((*q.centre.shape[:3], k.centre.shape[2]), dtype=torch.float64)
    for rest, other, turn in ((q.rest, keys, False), (k.rest, q.centre, True)):
        if rest is None:
            continue
        by_box = rest.box.double() @ other.double().abs().mT
        by_norm = rest.norm.double().unsqueeze(-1) * torch.linalg.vector_norm(
            other.double(), dim=-1
        ).unsqueeze(-2)
        bound = torch.minimum(by_box, by_norm) * (abs(scale) * groups.growth)
        total = total + (bound.mT if turn else bound)
    return total


def _distances_rest(q: AffineForm, k: AffineForm, keys: Tensor, scale: float, groups: Groups) -> Tensor:
    """As `_scores_rest`, for L2 scores: `2 |scale| |(q_i − k_j) · (dq_i − dk_j)|`. keys is not read."""
    total = torch.zeros((*q.centre.shape[:3], k.centre.shape[2]), dtype=torch.float64)
    if q.rest is None and k.rest is None:
        return total
    apart = (q.centre.double().unsqueeze(-2) - k.centre.double().unsqueeze(-3)).abs()
    length = torch.linalg.vector_norm(apart, dim=-1)
    for rest, turn in ((q.rest, -2), (k.rest, -3)):
        if rest is not None:
            by_box = (apart * rest.box.double().unsqueeze(turn)).sum(-1)
            by_norm = length * rest.norm.double().unsqueeze(turn + 1)
            total = total + torch.minimum(by_box, by_norm) * (2.0 * abs(scale) * groups.growth)
    return total
