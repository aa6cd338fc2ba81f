"""A seeded hundred of altered and damaged files; two thousand are recorded in benchmarks/results."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


def test_altered_files_are_refused_or_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setenv("PYTHONPATH", f"{FOLDER}:{FOLDER.parent}")
    import fuzz_onnx

    rows = fuzz_onnx.run(list(range(100)), workers=1)
    assert [r for r in rows if r["outcome"] not in fuzz_onnx.GOOD] == []
    counts = Counter(r["outcome"] for r in rows)
    assert counts["loaded"] >= 15 and counts["refused"] >= 50  # neither side is empty


def test_the_campaign_is_clean() -> None:
    record = json.loads((FOLDER / "results" / "fuzz_onnx.json").read_text())
    assert sum(record["outcomes"].values()) == 2000 and record["not_good"] == []
