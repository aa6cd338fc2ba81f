"""Boxes bounded by a second process: the same bounds, also when it dies."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from attn_bounds import InputSet
from attn_bounds.search import worker
from attn_bounds.search.answer import Job
from attn_bounds.search.boxes import InputBoxes
from attn_bounds.search.helpers import Helpers

from ..cli_tools import Files


def test_a_helper_gives_the_same_bounds_and_may_die(tmp_path: Path) -> None:
    files = Files(tmp_path)
    job = Job(str(files.model), str(files.vnnlib(1.0)), str(tmp_path))
    verifier, prop = worker.load(job)
    inputs, spec = prop.cases[0]
    helpers = Helpers(job, 0, 1)
    alone = InputBoxes(verifier, inputs, spec, ["crown"])
    shared = InputBoxes(verifier, inputs, spec, ["crown"], helpers)
    shared._begin = 0.0  # patience is over
    parts = alone.parts()
    for _ in range(5):
        parts = [half for halves in alone.cut(parts) for half in halves or []]
    expected = alone.bounds(parts)
    try:
        torch.testing.assert_close(shared.bounds(parts), expected)  # it is not there yet
        deadline = time.monotonic() + 60
        while not helpers.ready and time.monotonic() < deadline:
            time.sleep(0.1)
            shared.bounds(parts)
        assert len(helpers.ready) == 1
        # what it computes is used: the bounds of the second half do not come from here
        lower, upper = (torch.stack([p[side] for p in parts]) for side in (0, 1))
        seen: list[int] = []

        def own(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
            seen.append(len(low))
            boxes = [InputSet.box(a[None], b[None]) for a, b in zip(low, high, strict=True)]
            return verifier.row_bounds(boxes, [spec] * len(boxes), "crown")

        torch.testing.assert_close(helpers.bounds(lower, upper, "crown", own), expected)
        assert seen == [16]
        helpers.ready[0].process.kill()
        torch.testing.assert_close(helpers.bounds(lower, upper, "crown", own), expected)
        assert seen == [16, 16, 16] and not helpers.ready
        torch.testing.assert_close(shared.bounds(parts), expected)
    finally:
        helpers.close()
