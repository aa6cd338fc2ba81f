"""The loop over parts on functions that can be worked out, and boxes that must cover what they came from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from attn_bounds import InputSet, Specification, Verifier
from attn_bounds.search.boxes import Box, InputBoxes
from attn_bounds.search.branch import Search

from ..small_models import relu_model

POSITIVE = Specification(torch.eye(1), torch.zeros(1), ((0,),))
Interval = tuple[float, float]


class Parabola:
    """f(x) = (x - 1)^2 + height on [-2, 3], with a bound that is too low by the width of the interval.

    nan: parts that contain it have no bound but `nothing`. fixed: parts narrower than this stay whole.
    """

    name = "intervals"

    def __init__(
        self, height: float, nan: float = math.inf, fixed: float = 0.0, nothing: float = math.nan
    ) -> None:
        self.height, self.nan, self.fixed, self.nothing = height, nan, fixed, nothing
        self.seen: list[Interval] = []

    def parts(self) -> list[Interval]:
        return [(-2.0, 3.0)]

    def bounds(self, parts: Sequence[Interval]) -> Tensor:
        self.seen += parts
        rows = []
        for low, high in parts:
            nearest = min(max(1.0, low), high)
            value = (nearest - 1) ** 2 + self.height - (high - low)
            rows.append([self.nothing if low <= self.nan <= high else value])
        return torch.tensor(rows, dtype=torch.float64)

    def cut(self, parts: Sequence[Interval]) -> list[list[Interval] | None]:
        middles = [(low + high) / 2 for low, high in parts]
        return [
            None if high - low < self.fixed else [(low, m), (m, high)]
            for (low, high), m in zip(parts, middles, strict=True)
        ]

    def counterexample(self, parts: Sequence[Interval]) -> Tensor | None:
        for low, high in parts:
            x = (low + high) / 2
            if (x - 1) ** 2 + self.height < 0:
                return torch.tensor([[x]])
        return None


def test_verifies_with_a_bound_that_holds_everywhere() -> None:
    o = Search(Parabola(0.05), POSITIVE).run()
    assert o.open == 0 and o.counterexample is None and o.why == ""
    assert 0 < o.margin <= 0.05 and o.margins is not None and o.margins.tolist() == [o.margin]


def test_finds_the_counterexample() -> None:
    o = Search(Parabola(-0.01), POSITIVE).run()
    assert o.counterexample is not None and (float(o.counterexample) - 1) ** 2 < 0.01 and o.open > 0


@pytest.mark.parametrize(
    ("strategy", "options", "why"),
    [
        (Parabola(0.0), {"budget": 100}, "parts left"),  # the minimum is zero: no number of parts suffices
        (Parabola(0.0), {"deadline": 0.0}, "parts left"),
        (Parabola(0.05, fixed=0.2), {}, "cannot be cut further"),
        (Parabola(0.05, nan=2.7), {"budget": 200}, "parts left"),
        (Parabola(0.05, nan=2.7, nothing=math.inf), {"budget": 200}, "parts left"),
    ],
)
def test_ends_undecided_with_a_valid_bound(strategy: Parabola, options: dict[str, float], why: str) -> None:
    o = Search(strategy, POSITIVE, **options).run()  # type: ignore[arg-type]
    assert o.open > 0 and o.counterexample is None and why in o.why
    assert o.margin <= strategy.height and (o.margins is None) == math.isinf(o.margin)
    assert len(strategy.seen) == o.bounded


def test_ends_early_where_there_is_no_bound_at_all() -> None:
    class Nothing(Parabola):
        def bounds(self, parts: Sequence[Interval]) -> Tensor:
            return torch.full((len(parts), 1), math.nan)

    o = Search(Nothing(1.0), POSITIVE, budget=10**9).run()
    assert o.bounded < 1000 and "NaN or infinite" in o.why and o.margin == -math.inf and o.margins is None


def test_reports_what_is_known_on_the_way() -> None:
    seen: list[float] = []
    last = Search(Parabola(0.01), POSITIVE).run(lambda o: seen.append(o.margin))
    assert len(seen) > 3 and seen == sorted(seen) and seen[-1] == last.margin


def test_groups_need_one_row_above_zero_in_each_part_only() -> None:
    class Halves:
        """Row 0 holds on the left half, row 1 on the right one."""

        name = "halves"

        def parts(self) -> list[int]:
            return [0, 1]

        def bounds(self, parts: Sequence[int]) -> Tensor:
            return torch.tensor([[1.0, -5.0], [-5.0, 2.0]])[list(parts)].double()

        def cut(self, parts: Sequence[int]) -> list[list[int] | None]:
            return [None for _ in parts]

        def counterexample(self, parts: Sequence[int]) -> Tensor | None:
            return None

    together = Specification(torch.eye(2), torch.zeros(2), ((0, 1),))
    o = Search(Halves(), together).run()
    assert o.open == 0 and o.margin == 1 and o.margins is not None and o.margins.tolist() == [-5, -5]
    apart = Specification(torch.eye(2), torch.zeros(2), ((0,), (1,)))
    assert Search(Halves(), apart).run().open == 2


@pytest.mark.parametrize("norm", [2.0, math.inf])
def test_boxes_cover_the_set_at_every_depth(tmp_path: Path, norm: float) -> None:
    verifier = Verifier(relu_model(tmp_path / "m.onnx"))
    inputs = InputSet.ball(torch.tensor([[0.5, -0.2, 0.1, 1.0]]), norm, 0.7, (-0.4, 1.0))
    spec = verifier.specification(0)
    strategy = InputBoxes(verifier, inputs, spec, ["ibp"])
    points = inputs.sample(3000, torch.Generator().manual_seed(0)).double()
    parts = strategy.parts()
    for _ in range(6):
        covered = torch.stack([((points >= b.lower) & (points <= b.upper)).all(1) for b in parts]).any(0)
        assert covered.all()
        cut = strategy.cut(parts)
        parts = [half for halves in cut for half in halves or []]
        assert None not in cut and all((h.lower <= h.upper).all() for h in parts)
    assert 20 < len(parts) <= 64
    assert len(parts) < 64 or norm != 2  # boxes that miss the ball are left out
    # and each bound holds on its own box
    rows = strategy.bounds(parts)
    with torch.no_grad():
        true = spec.margins(verifier.module(points.float()).double())
    for box, bound in zip(parts, rows, strict=True):
        inside = ((points >= box.lower) & (points <= box.upper)).all(1)
        assert (true[inside] >= bound - 1e-6).all()


def test_a_box_that_is_a_point_cannot_be_cut(tmp_path: Path) -> None:
    verifier = Verifier(relu_model(tmp_path / "m.onnx"))
    low = torch.zeros(1, 4, dtype=torch.float64)
    high = torch.tensor([[0.0, 0.0, 1.0, 0.0]], dtype=torch.float64)
    inputs = InputSet.box(low, high)
    assert InputBoxes.applies(inputs) and InputBoxes.axes(inputs) == 1
    assert not InputBoxes.applies(InputSet.box(low, low))
    assert not InputBoxes.applies(InputSet.ball(torch.zeros(1, 100), math.inf, 1.0))
    strategy = InputBoxes(verifier, inputs, verifier.specification(0), ["ibp"])
    halves, nothing = strategy.cut([Box(low[0], high[0]), Box(low[0], low[0])])
    assert nothing is None and halves is not None and len(halves) == 2
    assert halves[0].upper[2] == halves[1].lower[2] == 0.5
