"""Parts of the input set: boxes cut in two along one axis, for inputs with few entries that move."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..properties import InputSet, Specification
from .branch import usable

if TYPE_CHECKING:
    from ..verifier import Verifier
    from .helpers import Helpers

MAX_AXES = 64  # entries that move; with more, halving one at a time leads nowhere
SMALLEST = 1e-7  # part of an axis' first width below which it is not cut again
EVEN = 0.1  # how much the width of an axis alone counts beside its influence on the margin
PATIENCE = 2.0  # seconds after which other processes are started: each takes a few to load the model
WORTH = 4  # boxes for each process that make it worth while to share a batch
TRIALS = 32  # batches after which the methods are compared again


class Box(NamedTuple):
    """One part: lower and upper (n,) float64 of the flattened input."""

    lower: Tensor
    upper: Tensor


class InputBoxes:
    """The strategy of cutting the input set into boxes; a `branch.Strategy`.

    An l2 ball is covered by its bounding box, and boxes that miss it are left out. The bound method is
    the one that is best on a batch of boxes at hand, compared now and then; of two that are about as
    good the cheaper one.

    Arguments:
        verifier, inputs, spec: what is to be shown.
        methods: of bounds that are tried, cheap ones first.
        helpers: other processes that may bound boxes, once the search takes longer.
    """

    name = "input boxes"

    def __init__(
        self,
        verifier: Verifier,
        inputs: InputSet,
        spec: Specification,
        methods: Sequence[str],
        helpers: Helpers | None = None,
    ) -> None:
        self.verifier, self.inputs, self.spec, self.methods = verifier, inputs, spec, tuple(methods)
        lower, upper = _bounding_box(inputs)
        self.shape, self.whole = inputs.center.shape[1:], Box(lower, upper)
        self.width = upper - lower
        self.method, self._calls = self.methods[0], 0
        self.helpers, self._begin = helpers, time.perf_counter()
        self._last: tuple[Sequence[Box], Tensor] | None = None

    @staticmethod
    def applies(inputs: InputSet) -> bool:
        """Whether few enough entries move."""
        return inputs.norm in (2, math.inf) and 0 < InputBoxes.axes(inputs) <= MAX_AXES

    @staticmethod
    def axes(inputs: InputSet) -> int:
        """Number of entries that move."""
        lower, upper = _bounding_box(inputs)
        return int((upper > lower).sum())

    def parts(self) -> list[Box]:
        return [self.whole]

    def bounds(self, parts: Sequence[Box]) -> Tensor:
        lower, upper = (torch.stack([b[side] for b in parts]) for side in (0, 1))
        compare = self._calls % TRIALS == 1 and len(self.methods) > 1  # not on the whole set
        self._calls += 1
        if not compare:
            return self._shared(lower, upper)
        best, scores = None, []
        for method in self.methods:
            begin = time.perf_counter()
            rows = usable(self._rows(lower, upper, method))
            seconds = time.perf_counter() - begin
            scores.append((float(self.spec.margin(rows).clamp(min=-1e6).mean()), seconds, method))
            best = rows if best is None else torch.maximum(best, rows)
        assert best is not None
        top, worst = max(s[0] for s in scores), min(s[0] for s in scores)
        good = [s for s in scores if s[0] >= top - 0.02 * (top - worst)]
        self.method = min(good, key=lambda s: s[1])[2]
        return best

    def _rows(self, lower: Tensor, upper: Tensor, method: str) -> Tensor:
        boxes = [
            InputSet.box(low.reshape(1, *self.shape), high.reshape(1, *self.shape))
            for low, high in zip(lower, upper, strict=True)
        ]
        return self.verifier.row_bounds(boxes, [self.spec] * len(boxes), method)

    def _shared(self, lower: Tensor, upper: Tensor) -> Tensor:
        """Bounds by the chosen method, by several processes where that pays."""

        def own(low: Tensor, high: Tensor) -> Tensor:
            return self._rows(low, high, self.method)

        if self.helpers is None or len(lower) < WORTH * (self.helpers.count + 1):
            return own(lower, upper)
        if time.perf_counter() - self._begin > PATIENCE:
            self.helpers.start()
        return self.helpers.bounds(lower, upper, self.method, own)

    def cut(self, parts: Sequence[Box]) -> list[list[Box] | None]:
        effect = self._gradients(parts).abs().nan_to_num(0.0, 0.0, 0.0) * self.width
        effect /= effect.amax(1, keepdim=True).clamp(min=1e-300)
        return [self._halves(box, row) for box, row in zip(parts, effect, strict=True)]

    def _halves(self, box: Box, effect: Tensor) -> list[Box] | None:
        """The box in two, across the axis that counts most; effect: of each axis on the margin, at most 1."""
        width = (box.upper - box.lower) / self.width.clamp(min=1e-300)
        score = torch.where(width > SMALLEST, width * (EVEN + effect), 0.0)
        axis = int(score.argmax())
        if not float(score[axis]) > 0:
            return None
        low, high = box.upper.clone(), box.lower.clone()
        low[axis] = high[axis] = box.lower[axis] / 2 + box.upper[axis] / 2
        return [half for half in (Box(box.lower, low), Box(high, box.upper)) if self._meets(half)]

    def counterexample(self, parts: Sequence[Box]) -> Tensor | None:
        """Tries the centre of each box and the corner to which the gradient points there."""
        centres = torch.stack([(b.lower + b.upper) / 2 for b in parts])
        lower, upper = (torch.stack([b[side] for b in parts]) for side in (0, 1))
        gradient = self._gradients(parts)
        corners = torch.where(gradient > 0, lower, torch.where(gradient < 0, upper, centres))
        searched = self.inputs.inner or self.inputs
        points = torch.cat([centres, corners]).reshape(-1, *self.shape)
        points = searched.project(points.to(self.verifier.dtype))
        with torch.no_grad():
            y = self.verifier.module(points.to(self.verifier.device)).flatten(1)
            margins = self.spec.margin(self.spec.margins(y)).nan_to_num(nan=math.inf)
        for i in margins.argsort()[:2].tolist():
            if float(margins[i]) <= 0 and self.verifier.confirms(points[i : i + 1], searched, self.spec):
                return points[i : i + 1]
        return None

    def _gradients(self, parts: Sequence[Box]) -> Tensor:
        """Of the margin at the centres, (parts, n) float64; the last ones are kept."""
        if self._last is None or self._last[0] is not parts:
            points = torch.stack([(b.lower + b.upper) / 2 for b in parts]).reshape(-1, *self.shape)
            x = points.to(self.verifier.device, self.verifier.dtype).requires_grad_()
            with torch.enable_grad():
                margins = self.spec.margin(self.spec.margins(self.verifier.module(x).flatten(1)))
                gradient = torch.zeros_like(x)
                if margins.requires_grad:
                    (gradient,) = torch.autograd.grad(margins.sum(), x)
            self._last = (parts, gradient.flatten(1).double().cpu())
        return self._last[1]

    def _meets(self, box: Box) -> bool:
        """Whether the box has points of the set; True in doubt."""
        if self.inputs.norm == math.inf or self.inputs.eps is None:
            return True
        center = self.inputs.center.double().flatten()
        nearest = center.clamp(box.lower, box.upper)
        return float((nearest - center).norm()) <= self.inputs.eps * (1 + 1e-9)


def _bounding_box(inputs: InputSet) -> tuple[Tensor, Tensor]:
    center = inputs.center.double().flatten()
    lower, upper = torch.full_like(center, -math.inf), torch.full_like(center, math.inf)
    if inputs.lower is not None and inputs.upper is not None:
        lower, upper = inputs.lower.double().flatten(), inputs.upper.double().flatten()
    if inputs.norm != math.inf and inputs.eps is not None:
        radius = inputs.eps * (1 + 1e-12)
        lower, upper = torch.maximum(lower, center - radius), torch.minimum(upper, center + radius)
    return lower, upper
