"""Moves of tensors as sums of linear maps of earlier tensors' moves, each of which lies in an l2 ball.

A tensor without its batch dimension is a matrix X of tokens by features, its entries put in some order
(`Form.place`: transposes, reshapes and slices only change that). Its move is

    X' − X = Σ_anchors Σ_terms H E W,        ‖E‖_F ≤ radius of the anchor,

H mixes tokens (attention matrices, pooling) and W features (weights, BatchNorm). So branches that read one
tensor are added up before a norm is taken: `E + Σ_h P_h E W_h` of a residual attention block is bounded as
one map, by `kronecker_sum_norm_upper`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kronecker import kronecker_sum_norm_upper
from ..norms import spectral_norm_upper
from ..sensitivity.weights import LayerWeights
from .columns import Sloped

SELECTION = 20_000_000  # entries of the largest matrix that is formed to select or repeat rows
SQUARED_COST = 1e9  # operations; a norm of a whole layer should not cost much more than the layer itself
GROW = 1.0 + 1e-11  # rounding of a few sums and products in float64


@dataclass(eq=False)
class Anchor:
    """A tensor whose move is known by its size only.

    Attributes:
        radius: `‖E‖_F ≤ radius`.
        value: (n, d) at the centre, float64; None for an error, which is not a tensor of the network.
        name: of its node.
        balls: further bounds `‖E diag(g)‖_F ≤ r` as (g, r), g (d) without zeros. Where a BatchNorm of very
            different gains follows, E is small in the directions that it stretches, and these know.
    """

    radius: float
    value: Tensor | None
    name: str
    balls: list[tuple[Tensor, float]] = field(default_factory=list)

    def every(self) -> list[tuple[Tensor | None, float]]:
        """All bounds, the plain one first as (None, radius)."""
        return [(None, self.radius), *self.balls]


class HeadMap(NamedTuple):
    """The value-output map of one head of an attention layer, `W_V W_O`, as these two."""

    weights: LayerWeights
    head: int

    def dense(self) -> Tensor:
        """(d, d_out)."""
        return self.weights.w_v[self.head] @ self.weights.w_o[self.head]


Key = tuple[Any, ...]  # of names, indices as bytes, and for a sum of both parts' keys


class Term(NamedTuple):
    """`E ↦ H E W`; None is the identity.

    Attributes:
        w: (d, d'), or (d) of a diagonal matrix, or a product that is yet to be formed.
        key: the nodes that W is made of, in such a way that equal keys mean equal W, if nothing but constants
            of the model is in it; else None. () is the key of the identity.
    """

    h: Tensor | None
    w: Tensor | HeadMap | Sloped | None
    key: Key | None = None

    def diagonal(self) -> Tensor | None:
        """(d), if W is kept as that."""
        return self.w if isinstance(self.w, Tensor) and self.w.ndim == 1 else None

    def matrix(self) -> Tensor | None:
        """W, (d, d')."""
        diagonal = self.diagonal()
        return self._formed() if diagonal is None else torch.diag(diagonal)

    def _formed(self) -> Tensor | None:
        return self.w.dense() if isinstance(self.w, HeadMap | Sloped) else self.w

    def _key_with(self, key: str | bytes | None) -> Key | None:
        before = () if self.w is None else self.key
        return None if before is None or key is None else (*before, key)

    def then(self, h: Tensor | None = None, w: Tensor | None = None, key: str | None = None) -> Term:
        """The term followed by `h · w` from left and right; key: the node that w is the constant of."""
        left = self.h if h is None else h if self.h is None else h @ self.h
        if w is None:
            return Term(left, self.w, self.key)
        if (diagonal := self.diagonal()) is not None:
            return Term(left, diagonal[:, None] * w, self._key_with(key))
        if isinstance(self.w, Sloped):
            return Term(left, self.w.then(w, key))
        own = self.matrix()
        return Term(left, w if own is None else own @ w, self._key_with(key))

    def times(self, factor: Tensor, key: str | None = None) -> Term:
        """The term followed by a factor per feature, (d); key as in `then`."""
        own = self._formed()
        return Term(self.h, factor if own is None else own * factor, self._key_with(key))

    def columns(self, index: Tensor, size: int) -> Term:
        """Some of the columns, of size many; −1 for a column of zeros."""
        own = self.matrix()
        picked = _picked(None if own is None else own.mT, index, size).mT
        return Term(self.h, picked, self._key_with(index.numpy().tobytes()))

    def behind(self, g: Tensor | None) -> Term:
        """As a map of `E diag(g)`."""
        if g is None:
            return self
        if (diagonal := self.diagonal()) is not None:
            return Term(self.h, diagonal / g)
        own = self.matrix()
        return Term(self.h, 1.0 / g if own is None else own / g[:, None])


Terms = dict[Anchor, list[Term]]
Known = dict[Key, float]


@dataclass
class Form:
    """The move of one tensor.

    Attributes:
        terms: per anchor; every product is (n, d).
        n, d: size of the matrix.
        place: (*dims) of the tensor, int64: which entry of the matrix, row-major, stands where; −1 for a
            constant.
    """

    terms: Terms
    n: int
    d: int
    place: Tensor

    def with_terms(self, change: Iterable[tuple[Anchor, list[Term]]]) -> Form:
        """The same tensor of another move."""
        return Form(dict(change), self.n, self.d, self.place)

    def ordered(self) -> bool:
        """Whether the tensor is the matrix, row-major."""
        return self.place.numel() == self.n * self.d and torch.equal(
            self.place.flatten(), torch.arange(self.n * self.d)
        )

    def matrix(self, axis: int = -1) -> Form | None:
        """This tensor as the matrix (other axes, axis), entries in order; None if it is not of that kind.

        The result's `place` is that of the moved tensor, (…, axis)."""
        moved = self.place.movedim(axis, -1)
        found = _select(self, moved.reshape(-1, moved.shape[-1]))
        return None if found is None else Form(found.terms, found.n, found.d, _order(moved.shape))

    def along(self, axis: int, c: Tensor, key: str | None = None) -> Form | None:
        """The tensor times c (k, l) along an axis of k entries; None if that is no map of this kind.

        key: the node that c is the constant of."""
        moved = self.place.movedim(axis, -1)
        rest, k = moved.shape[:-1], moved.shape[-1]
        flat = moved.reshape(-1, k)
        if (x := _select(self, flat)) is not None:
            place = _order((*rest, c.shape[1])).movedim(-1, axis)
            terms = {a: merged(t.then(w=c, key=key) for t in ts) for a, ts in x.terms.items()}
            return Form(terms, x.n, c.shape[1], place)
        if (x := _select(self, flat.T)) is not None:
            axis = axis % self.place.ndim
            place = _order((c.shape[1], *rest)).movedim(0, axis)
            terms = {a: merged(t.then(h=c.T) for t in ts) for a, ts in x.terms.items()}
            return Form(terms, c.shape[1], x.d, place)
        return None

    def scaled(self, c: Tensor, key: str | None = None) -> Form | None:
        """The tensor times c (*dims), entry by entry; None if c depends on tokens and features."""
        known = self.place >= 0
        index, factor = self.place[known], c[known]
        for position, size, side in ((index % self.d, self.d, "w"), (index // self.d, self.n, "h")):
            diagonal = torch.ones(size, dtype=c.dtype).scatter(0, position, factor)
            if torch.equal(diagonal[position], factor):
                if bool((diagonal == 1.0).all()):
                    return self
                if size**2 > SELECTION:
                    continue
                if side == "w":
                    return self.times(diagonal, key)
                m = torch.diag(diagonal)
                return self.with_terms((a, merged(t.then(h=m) for t in ts)) for a, ts in self.terms.items())
        return None

    def times(self, factor: Tensor, key: str | None = None) -> Form:
        """The matrix times a factor per feature, (d)."""
        return self.with_terms((a, merged(t.times(factor, key) for t in ts)) for a, ts in self.terms.items())

    def negated(self) -> Form:
        """Minus the tensor."""
        return self.times(-torch.ones(self.d, dtype=torch.float64), "minus")

    def reach(self, known: Known | None = None) -> Reach:
        """How far the tensor moves in l2, for any radii of the anchors.

        known: norms of the model's constants."""
        x = self if self.ordered() else self.matrix() or self
        repeats = 1.0
        if not x.ordered() and bool((x.place >= 0).any()):
            repeats = math.sqrt(float(torch.bincount(x.place[x.place >= 0]).max()))
        return Reach(
            (a, [repeats * norm([t.behind(g) for t in ts], x.n, x.d, known) for g, _ in a.every()])
            for a, ts in x.terms.items()
        )

    def radius(self) -> float:
        """Bound of the tensor's move in l2."""
        return self.reach().radius()

    def entry_reach(self) -> EntryReach:
        """How far each entry moves, for any radii of the anchors."""
        sizes = []
        for a, ts in self.terms.items():
            balls = []
            for g, _ in a.every():
                own = []
                for t in (t.behind(g) for t in ts):
                    rows = torch.ones(self.n, dtype=torch.float64) if t.h is None else t.h.norm(dim=1)
                    if (diagonal := t.diagonal()) is not None:
                        columns = diagonal.abs()
                    else:
                        w = t.matrix()
                        columns = torch.ones(self.d).to(rows) if w is None else w.norm(dim=0)
                    own.append((rows, columns))
                balls.append(own)
            sizes.append((a, balls))
        return EntryReach(sizes, self.n, self.d, self.place)

    def functional_reach(self, c: Tensor) -> FunctionalReach:
        """How far functionals (rows, entries of the tensor) move, for any radii of the anchors."""
        known = self.place.flatten() >= 0
        rows = torch.zeros(len(c), self.n * self.d, dtype=torch.float64)
        rows.index_add_(1, self.place.flatten()[known], c[:, known])
        rows = rows.reshape(-1, self.n, self.d)
        found = FunctionalReach()
        for a, ts in self.terms.items():
            parts = [_pulled(rows, t) for t in ts]  # of the functional of the anchor
            sizes = []
            for g, _ in a.every():
                behind = [x if g is None else x / g for x in parts]
                own = [x.flatten(1).norm(dim=1) for x in behind]
                size = own[0] if len(own) == 1 else torch.stack(behind).sum(0).flatten(1).norm(dim=1)
                # rounding of the products, relative to their terms and not to a sum that may cancel
                sizes.append(size + 1e-12 * torch.stack(own).sum(0))
            found.append((a, sizes))
        return found


def _pulled(rows: Tensor, t: Term) -> Tensor:
    """`Hᵀ C Wᵀ` for each functional, (rows, n, d) → (rows, n', d'); the smaller product first."""
    w = t.matrix()
    if t.h is None:
        return rows if w is None else rows @ w.T
    if w is None:
        return t.h.T @ rows
    return t.h.T @ (rows @ w.T) if t.h.shape[0] <= t.h.shape[1] else (t.h.T @ rows) @ w.T


class FunctionalReach(list[tuple[Anchor, list[Tensor]]]):
    """Norms of functionals of anchors, (rows) for each of an anchor's bounds."""

    def losses(self) -> Tensor:
        """Bound of how far functionals move for the anchors' radii as they are now, (rows)."""
        loss = torch.zeros_like(self[0][1][0]) if self else torch.zeros((), dtype=torch.float64)
        for a, sizes in self:
            own = [torch.where(s > 0, r * s, s) for (_, r), s in zip(a.every(), sizes, strict=True)]  # ∞ · 0
            loss = loss + torch.stack(own).amin(0)
        return loss * GROW


class Reach(list[tuple[Anchor, list[float]]]):
    """Norms of the maps from anchors, one for each of an anchor's bounds."""

    def radius(self) -> float:
        """Bound of the move in l2 for the anchors' radii as they are now."""
        return GROW * sum(
            min(product(r, size) for (_, r), size in zip(a.every(), own, strict=True)) for a, own in self
        )


class EntryReach(NamedTuple):
    """Bounds of entries' moves as sums of `radius · rows · columns`, for each of an anchor's bounds."""

    sizes: list[tuple[Anchor, list[list[tuple[Tensor, Tensor]]]]]
    n: int
    d: int
    place: Tensor

    def bound(self) -> Tensor:
        """Of each entry for the anchors' radii as they are now, (*dims)."""
        bound = torch.zeros(self.n, self.d, dtype=torch.float64)
        for a, balls in self.sizes:
            best = torch.full_like(bound, torch.inf)
            for (_, r), pairs in zip(a.every(), balls, strict=True):
                own = torch.zeros_like(bound)
                for rows, columns in pairs:
                    own = own + rows[:, None] * columns
                best = torch.minimum(best, torch.where(own > 0, r * own, own))  # ∞ · 0
            bound = bound + best
        bound = (bound * GROW).flatten()[self.place.clamp(min=0)]
        return torch.where(self.place >= 0, bound, torch.zeros_like(bound))


def product(radius: float, size: float) -> float:
    """Radius times norm; 0 · ∞ is 0, as what does not move stays where it is."""
    return radius * size if radius > 0.0 and size > 0.0 else 0.0


def fresh(anchor: Anchor, dims: tuple[int, ...], axis: int = -1) -> Form:
    """The form of a tensor (*dims) that is an anchor itself, with the axis as features.

    The anchor's value, if it has one, must be the matrix (other axes, axis)."""
    d = dims[axis]
    n = math.prod(dims) // max(d, 1)
    others = list(dims)
    del others[axis]
    return Form({anchor: [Term(None, None)]}, n, d, _order((*others, d)).movedim(-1, axis))


def added(x: Form, y: Form) -> Form | None:
    """The sum of two tensors of the same shape; None if their entries are ordered too differently."""
    pairs = [(x, y)] if torch.equal(x.place, y.place) and (x.n, x.d) == (y.n, y.d) else []
    for left, right in pairs or _views(x, y):
        terms = {a: list(ts) for a, ts in left.terms.items()}
        for a, ts in right.terms.items():
            terms[a] = merged([*terms.get(a, []), *ts])
        return Form(terms, left.n, left.d, left.place)
    return None


def _views(x: Form, y: Form) -> Iterable[tuple[Form, Form]]:
    for axis in reversed(range(x.place.ndim)):
        left, right = x.matrix(axis), y.matrix(axis)
        if left is not None and right is not None:
            place = left.place.movedim(-1, axis)
            yield Form(left.terms, left.n, left.d, place), Form(right.terms, right.n, right.d, place)


def merged(terms: Iterable[Term]) -> list[Term]:
    """Terms with the same token map are one."""
    out: list[Term] = []
    for t in terms:
        # of two identities the size is not known here
        same = next((i for i, o in enumerate(out) if o.h is t.h and not (o.w is None and t.w is None)), None)
        if same is None:
            out.append(t)
            continue
        w = [x.matrix() for x in (out[same], t)]
        size = next(m.shape[0] for m in w if m is not None)
        left, right = (torch.eye(size, dtype=torch.float64) if m is None else m for m in w)
        keys = [() if x.w is None else x.key for x in (out[same], t)]
        out[same] = Term(t.h, left + right, None if None in keys else (tuple(keys),))
    return out


def norm(terms: list[Term], n: int, d: int, known: Known | None = None) -> float:
    """`‖Σ H ⊗ Wᵀ‖₂` from above; norms of the model's constants are looked up in `known`, and kept there."""
    if not terms:
        return 0.0
    if len(terms) == 1:
        (term,) = terms
        size = 1.0 if term.h is None else float(spectral_norm_upper(term.h))
        if term.w is None:
            return size * GROW
        if known is None or term.key is None:
            return size * _matrix_norm(term) * GROW
        if term.key not in known:
            known[term.key] = _matrix_norm(term)
        return size * known[term.key] * GROW
    if (found := _norm_of_heads(terms)) is not None:
        return found * GROW
    own = [t.matrix() for t in terms]
    tokens = next((t.h.shape[1] for t in terms if t.h is not None), n)
    features = next((w.shape[0] for w in own if w is not None), d)
    eye_n, eye_d = torch.eye(n, dtype=torch.float64), torch.eye(d, dtype=torch.float64)
    assert all(t.h is not None for t in terms) or tokens == n
    assert all(w is not None for w in own) or features == d
    p = torch.stack([eye_n if t.h is None else t.h for t in terms])
    w = torch.stack([eye_d if w is None else w for w in own])
    return float(kronecker_sum_norm_upper(p, w, squared_cost=SQUARED_COST)) * GROW


def _matrix_norm(term: Term) -> float:
    if (diagonal := term.diagonal()) is not None:
        return float(diagonal.abs().amax())
    w = term.matrix()
    assert w is not None
    return float(spectral_norm_upper(w))


def _norm_of_heads(terms: list[Term]) -> float | None:
    """The same for all heads of one layer, with or without the identity; None if terms are not these."""
    maps = {t.w.head: t for t in terms if isinstance(t.w, HeadMap)}
    others = [t for t in terms if not isinstance(t.w, HeadMap)]
    weights = {id(t.w.weights): t.w.weights for t in maps.values() if isinstance(t.w, HeadMap)}
    if len(weights) != 1 or len(maps) + len(others) != len(terms):
        return None
    (layer,) = weights.values()
    if (
        len(maps) != layer.layer.heads
        or any(t.h is not None or t.w is not None for t in others)
        or len(others) > 1
    ):
        return None
    h = [maps[i].h for i in range(len(maps))]
    if any(x is None for x in h):
        return None
    found = layer.sum_norm(
        torch.stack([x for x in h if x is not None]), bool(others), squared_cost=SQUARED_COST
    )
    return None if found is None else float(found)


def _order(shape: tuple[int, ...] | torch.Size) -> Tensor:
    return torch.arange(math.prod(shape)).reshape(shape)


def _select(x: Form, place: Tensor) -> Form | None:
    """The matrix with entries `place` (r, k) of x's, if they are some of its rows and columns."""
    if place.shape == (x.n, x.d) and torch.equal(place, _order(place.shape)):
        return Form(x.terms, x.n, x.d, place)
    known = place >= 0
    rows = torch.where(known, place // x.d, -1).amax(1)
    columns = torch.where(known, place % x.d, -1).amax(0)
    both = (rows >= 0)[:, None] & (columns >= 0)
    if not torch.equal(torch.where(both, rows[:, None] * x.d + columns, -1), place):
        return None
    if any(
        len(index) * size > SELECTION and not _is_all(index, size)
        for index, size in ((rows, x.n), (columns, x.d))
    ):
        return None
    terms = x.terms
    if not _is_all(rows, x.n):
        one = _picked(None, rows, x.n)  # the same for all, so that they can be merged
        terms = {
            a: [Term(one if t.h is None else _picked(t.h, rows, x.n), t.w, t.key) for t in ts]
            for a, ts in terms.items()
        }
    if not _is_all(columns, x.d):
        terms = {a: [t.columns(columns, x.d) for t in ts] for a, ts in terms.items()}
    terms = {a: merged(ts) for a, ts in terms.items()}
    return Form(terms, len(rows), len(columns), _order(place.shape))


def _is_all(index: Tensor, size: int) -> bool:
    return len(index) == size and torch.equal(index, torch.arange(size))


def _picked(m: Tensor | None, index: Tensor, size: int) -> Tensor:
    """Rows of m, or of the identity, in the order of the index; zero where that is −1."""
    known = index >= 0
    if m is not None:
        return torch.where(known[:, None], m[index.clamp(min=0)], 0.0)
    picked = torch.zeros(len(index), size, dtype=torch.float64)
    picked[known.nonzero().flatten(), index[known]] = 1.0
    return picked
