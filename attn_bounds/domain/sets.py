"""Error sets: all that is ever asked of one is the range of linear functionals over it.

A set has k symbols e = (e_1 … e_k) per sample of a batch. Functionals come as columns of a tensor
(batch, k, F).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..sensitivity.remainder import (
    FEW_LEVELS,
    MANY_LEVELS,
    RowData,
    cross_bound,
    curvature_bound,
    score_bound,
    slope_bound,
)
from .values import ValueMoves, distinct, per_head

if TYPE_CHECKING:
    from .steps import Step

Range = tuple[Tensor, Tensor]
WHOLE = 4096  # functionals × query rows beyond which moves of values are bounded entry by entry
MANY = 2**27  # functionals × score entries beyond which an attention's remainder is bounded more simply


def intersection(first: Range, second: Range) -> Range:
    """Range that two valid ranges leave."""
    return torch.maximum(first[0], second[0]), torch.minimum(first[1], second[1])


class ErrorSet(ABC):
    """A set of error vectors that contains 0, one per sample.

    Attributes:
        label: where it comes from, for reports.
        size: number of symbols k.
        radius: (batch,) radius of an l2 ball around 0 that contains it, or None where none is known.
        step: how final functionals take it apart (steps.py), or None: by its support function only.
    """

    label: str
    size: int
    radius: Tensor | None = None
    step: Step | None = None

    @abstractmethod
    def range(self, w: Tensor) -> Range:
        """Smallest and largest `wᵀe`: (batch, k, F) → two of (batch, F)."""

    def tight_range(self, w: Tensor) -> Range:
        """As `range`, for few functionals: may cost more and be tighter."""
        return self.range(w)

    def entry_range(self, w: Tensor) -> Range:
        """As `range`, for very many functionals: may be looser, by what single errors can do."""
        return self.range(w)


class Ball(ErrorSet):
    """Unit lp ball; the radius is in the generators. p = inf is the box [−1, 1]^k."""

    def __init__(self, label: str, size: int, norm: float, batch: int, like: Tensor) -> None:
        self.label, self.size, self.norm = label, size, norm
        if norm in (1.0, 2.0):
            self.radius = torch.ones(batch, dtype=like.dtype)

    def range(self, w: Tensor) -> Range:
        dual = {1.0: math.inf, 2.0: 2.0, math.inf: 1.0}[self.norm]
        size = torch.linalg.vector_norm(w, dual, dim=1)
        return -size, size


class ClippedBall(Ball):
    """Unit l1 or l2 ball cut by a box `lower ≤ e ≤ upper`, (batch, size) each, 0 inside."""

    def __init__(self, label: str, norm: float, lower: Tensor, upper: Tensor) -> None:
        super().__init__(label, lower.shape[1], norm, len(lower), lower)
        unit = torch.ones(len(lower), dtype=lower.dtype)
        self.box = BoxInBall(label, lower.clamp(min=-1.0), upper.clamp(max=1.0), unit)  # an l1 ball is in one

    def range(self, w: Tensor) -> Range:
        return intersection(super().range(w), self.box.range(w))

    def tight_range(self, w: Tensor) -> Range:
        return intersection(super().range(w), self.box.tight_range(w))


class BoxInBall(ErrorSet):
    """`lower ≤ e ≤ upper` (with 0 inside) and `‖e‖₂ ≤ radius`: errors of an elementwise operation."""

    def __init__(self, label: str, lower: Tensor, upper: Tensor, radius: Tensor) -> None:
        self.label, self.size = label, lower.shape[1]
        self.lower, self.upper, self.radius = lower, upper, radius

    def range(self, w: Tensor) -> Range:
        assert self.radius is not None
        positive, negative = w.clamp(min=0.0), w.clamp(max=0.0)
        up, low = self.upper.unsqueeze(1).to(w), self.lower.unsqueeze(1).to(w)
        high = (up @ positive + low @ negative).squeeze(1)
        down = (low @ positive + up @ negative).squeeze(1)
        ball = self.radius.unsqueeze(1).to(w) * torch.linalg.vector_norm(w, 2, dim=1)
        return torch.maximum(down, -ball), torch.minimum(high, ball)

    def tight_range(self, w: Tensor) -> Range:
        """By duality `sup wᵀe ≤ μ radius + Σ box-support of (w − μ-part)`: minimised over a scan of μ."""
        low, high = self.range(w)
        return -self._scan(-w, -low), self._scan(w, high)

    def _scan(self, w: Tensor, best: Tensor) -> Tensor:
        # e = clamp(w / 2μ) maximises the Lagrangian wᵀe − μ‖e‖²; weak duality makes any μ > 0 a valid bound
        assert self.radius is not None
        dtype, w = w.dtype, w.double()
        up, low, radius = (
            self.upper.double().unsqueeze(2),
            self.lower.double().unsqueeze(2),
            self.radius.double(),
        )
        scale = torch.linalg.vector_norm(w, 2, dim=1) / radius.unsqueeze(1).clamp(min=1e-300)
        for factor in torch.logspace(-3, 0.5, 24, dtype=w.dtype):
            mu = (factor * scale / 2).clamp(min=1e-300).unsqueeze(1)
            e = torch.minimum(torch.maximum(w / (2 * mu), low), up)
            dual = (w * e - mu * e.square()).sum(1) + mu.squeeze(1) * radius.unsqueeze(1).square()
            # an empty ball or no symbol in use gives NaN here, and `best` is 0 already
            best = torch.minimum(best, dual.to(dtype).nan_to_num(nan=torch.inf))
        return best


class _RemainderData(NamedTuple):
    """What `AttentionRemainder` keeps, in one dtype."""

    values: Tensor
    average: Tensor
    rows: RowData
    groups: list[ValueMoves]

    def to(self, dtype: torch.dtype) -> _RemainderData:
        """Rounded; radii grow by more than that, so that they stay bounds."""
        grow = 1.0 + 8 * torch.finfo(dtype).eps
        rows = RowData(*((t if i == 0 else t * grow).to(dtype) for i, t in enumerate(self.rows)))
        groups = [g.to(dtype, grow) for g in self.groups]
        return _RemainderData(self.values.to(dtype), self.average.to(dtype), rows, groups)

    def at(self, index: Tensor) -> _RemainderData:
        """For some of the query rows."""
        rows = RowData(*(t[:, :, index] for t in self.rows))
        return _RemainderData(
            self.values, self.average[:, :, index], rows, [g.at(index) for g in self.groups]
        )


class RemainderParts(NamedTuple):
    """Bounds of the remainder of attention per row of it, (batch, heads, n, F) each but y.

    Attributes:
        y: (batch, heads, n, F, m) values of the functionals per key, centred.
        slope: of |ℓ|. down: of minus the curvature. scores, cross: of the other two terms, in absolute value.
        sd_u, sd_u_first: of `√(Σ p u²)`, by all groups and by the first.
        error: of the rounding in y.
    """

    y: Tensor
    slope: Tensor
    down: Tensor
    scores: Tensor
    cross: Tensor
    sd_u: Tensor
    sd_u_first: Tensor
    error: Tensor


class AttentionRemainder(ErrorSet):
    """Second-order remainder of one attention; symbols are its outputs, (heads, n, dv) flattened.

    Its support depends on a functional as a whole (theory.md, section 4).

    Arguments:
        values: (batch, heads, m, dv) at the centre. average: (batch, heads, n, dv) output at the centre.
        rows: `RowData`, (batch, heads, n, m).
        value_groups: per group of symbols that V depends on.
    """

    def __init__(
        self,
        label: str,
        values: Tensor,
        average: Tensor,
        rows: RowData,
        value_groups: list[ValueMoves],
    ) -> None:
        self.label, self.size = label, average[0].numel()
        # any row may be taken from values and average alike: small numbers lose less to rounding
        middle = values.mean(2, keepdim=True)
        self.exact = _RemainderData(values - middle, average - middle, rows, value_groups)
        self.single = self.exact.to(torch.float32)
        self._boxes: tuple[Tensor, Tensor] | None = None

    def _parts(
        self,
        a: Tensor,
        data: _RemainderData,
        levels: tuple[float, ...],
        smaller: list[Tensor] | None = None,
    ) -> RemainderParts:
        """smaller: factors on bounds of |u| by boxes that stand in for the bounds, (b, h, n, F, m) each."""
        values, average, rows, groups = data
        dv = average.shape[-1]
        y = per_head(a, values) - a @ average.unsqueeze(-1)
        size = a.abs()
        largest = torch.maximum(values.abs().amax((2, 3)), average.abs().amax((2, 3)))
        error = 4 * dv * torch.finfo(y.dtype).eps * largest[:, :, None, None] * size.sum(-1)
        sd_u, top_u, sd_u_first = torch.zeros_like(error), torch.zeros_like(error), torch.zeros_like(error)
        whole = smaller is None and bool(groups) and a.shape[2] * a.shape[3] <= WHOLE
        once, where = distinct(a) if whole else (a, None)
        for i, group in enumerate(groups):
            if whole:
                u = group.whole(once)[:, :, where].reshape(y.shape)
            else:
                u = group.boxes(a) if smaller is None else smaller[i] * group.boxes(a)
            best = group.deviation(a, u, rows.p)
            sd_u, top_u = sd_u + best, top_u + u.amax(-1)
            sd_u_first = best if i == 0 else sd_u_first
        slope = slope_bound(y, rows, error)
        down = curvature_bound(-y, slope, rows, levels)
        cross = cross_bound(sd_u, top_u, rows)
        return RemainderParts(y, slope, down, score_bound(y, rows, error), cross, sd_u, sd_u_first, error)

    def _range(self, w: Tensor, data: _RemainderData, levels: tuple[float, ...]) -> Range:
        a = self._by_rows(w, data)
        batch, _, n, functionals, _ = a.shape
        pairs = (a != 0).flatten(4).any(4).flatten(0, 1).any(0)  # query rows that a functional reads
        local = 0 < 2 * int(pairs.sum()) <= n * functionals
        if local:  # as neurons behind an attention read one token each
            row, column = pairs.nonzero(as_tuple=True)
            a, data = a[:, :, row, column].unsqueeze(3), data.at(row)
        parts = self._parts(a, data, levels)
        up = curvature_bound(parts.y, parts.slope, data.rows, levels)
        other = parts.cross + parts.scores
        low, high = -(parts.down + other).sum(1), (up + other).sum(1)  # (batch, rows, F)
        if not local:
            return low.sum(1).to(w.dtype), high.sum(1).to(w.dtype)
        out = low.new_zeros((2, batch, functionals))
        out.index_add_(2, column, torch.stack([low, high]).squeeze(3))
        return out[0].to(w.dtype), out[1].to(w.dtype)

    def shrinkage(self, w: Tensor) -> list[Tensor]:
        """What bounds of |u| by boxes shrink by where functionals are taken as a whole; see `parts`."""
        a = self._by_rows(w, self.exact)
        once, where = distinct(a)
        boxes = [group.boxes(a) for group in self.exact.groups]
        whole = [group.whole(once)[:, :, where] for group in self.exact.groups]
        return [u.reshape(box.shape) / box.clamp(min=1e-300) for u, box in zip(whole, boxes, strict=True)]

    def parts(self, w: Tensor, smaller: list[Tensor] | None = None) -> RemainderParts:
        """The bounds row by row, in float64.

        Arguments:
            smaller: `shrinkage` of functionals near these, for numbers that are quick, differentiable and
                near the bounds, but no bounds.
        """
        levels = MANY_LEVELS if smaller is None else FEW_LEVELS
        return self._parts(self._by_rows(w, self.exact), self.exact, levels, smaller)

    def boxes(self) -> tuple[Tensor, Tensor]:
        """Bounds of each error, (batch, heads, n, dv), and of the l2 norm of each row, (batch, heads, n)."""
        values, average, rows, groups = self.exact
        dv = average.shape[-1]
        unit = torch.eye(dv, dtype=average.dtype).expand(*average.shape, dv)
        parts = self._parts(unit, self.exact, FEW_LEVELS)
        up = curvature_bound(parts.y, parts.slope, rows, FEW_LEVELS)
        box = torch.maximum(parts.down, up) + parts.cross + parts.scores
        # for a unit vector a: |y_c| ≤ ‖v_c − o‖, |u_c| ≤ ‖dV_c‖, and the bounds grow with both
        offsets = values.unsqueeze(2) - average.unsqueeze(3)  # (batch, heads, n, m, dv)
        y = torch.linalg.vector_norm(offsets, dim=-1).unsqueeze(3) * (1.0 + 1e-12)
        sd_u, top_u = torch.zeros_like(y[..., 0]), torch.zeros_like(y[..., 0])
        for group in groups:
            size = torch.linalg.vector_norm(group.support, dim=-1).unsqueeze(2)
            best = (rows.p * size.square()).sum(-1, keepdim=True).sqrt()
            if group.rows is not None:
                best = torch.minimum(best, torch.linalg.matrix_norm(group.rows.matrix).unsqueeze(-1))
            sd_u, top_u = sd_u + best, top_u + size.amax(-1, keepdim=True)
        norm = curvature_bound(y, slope_bound(y, rows), rows) + score_bound(y, rows)
        return box, (norm + cross_bound(sd_u, top_u, rows)).squeeze(-1)

    @staticmethod
    def _by_rows(w: Tensor, data: _RemainderData) -> Tensor:
        """(batch, heads · n · dv, F) → (batch, heads, n, F, dv)."""
        return w.reshape(*data.average.shape, -1).mT.to(data.values.dtype)

    def range(self, w: Tensor) -> Range:
        if w.shape[0] * w.shape[2] * self.exact.rows.p[0].numel() > MANY:
            return self.quick_range(w)
        return self._range(w, self.single if w.dtype == torch.float32 else self.exact, FEW_LEVELS)

    def _errors(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """`boxes`, computed once, grown and rounded as w is."""
        if self._boxes is None:
            self._boxes = self.boxes()
        grow = 1.0 + 8 * torch.finfo(w.dtype).eps
        box, norm = self._boxes
        return (box * grow).to(w), (norm * grow).to(w)

    def entry_range(self, w: Tensor) -> Range:
        high = (self._errors(w)[0].flatten(1).unsqueeze(1) @ w.abs()).squeeze(1)
        return -high, high

    def quick_range(self, w: Tensor) -> Range:
        """For very many functionals: by the bounds of single errors and of rows, whatever the signs."""
        box, norm = self._errors(w)
        rows = w.reshape(len(w), -1, box.shape[-1], w.shape[2])  # (batch, heads · n, dv, F)
        by_box = (box.flatten(1, 2).unsqueeze(2) @ rows.abs()).squeeze(2)
        by_norm = norm.flatten(1).unsqueeze(2) * torch.linalg.vector_norm(rows, dim=2)
        high = torch.minimum(by_box, by_norm).sum(1)
        return -high, high

    def tight_range(self, w: Tensor) -> Range:
        return self._range(w, self.exact, MANY_LEVELS)
