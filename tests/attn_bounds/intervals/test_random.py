"""Random small networks and queries: no verdict may contradict what many points say."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import numpy as np
import onnxruntime

from attn_bounds.intervals.query import Query
from attn_bounds.intervals.solve import Solver

from .random_queries import example, holds

SEEDS = range(50)
CLEARLY = 1e-5  # beyond what float32 may round


def verdict(seed: int, folder: Path, seconds: float = 1.0) -> tuple[str, str]:
    """The solver's verdict, and what points say: reached, missed or close; asserts that both fit."""
    made = example(seed, folder)
    outcome = Solver(Query("q", made.text, {"N": made.path}), time.monotonic() + seconds).run()
    known = "reached" if made.margin > CLEARLY else "missed" if made.margin < -CLEARLY else "close"
    assert not (outcome.status == "unsat" and known == "reached"), (seed, made)
    if outcome.witness is not None:
        x, y = outcome.witness.values
        session = onnxruntime.InferenceSession(str(made.path), providers=["CPUExecutionProvider"])
        again = session.run(None, {"x": x.astype(np.float32)})[0]
        assert np.allclose(again, y, rtol=1e-5, atol=1e-6), seed
        if "float32" in made.text:  # real numbers may be met where float32 just misses
            values = {"X": x, "Y": y}
            as_typed = holds(made.text, values, lambda n: float(np.float32(n)))  # the standard's reading
            assert holds(made.text, values) or as_typed, (seed, made, x, y)
    return outcome.status, known


def test_no_verdict_contradicts_the_points(tmp_path: Path) -> None:
    found = Counter(verdict(seed, tmp_path) for seed in SEEDS)
    decided = sum(n for (status, _), n in found.items() if status in ("sat", "unsat"))
    assert found["unsat", "missed"] >= 10 and found["sat", "reached"] >= 10
    assert decided >= 0.8 * len(SEEDS)
