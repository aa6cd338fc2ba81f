"""The outcome of the conformance suite `vnnlib-satisfactory` by category; and a campaign of random queries.

    pip install vnnlib-satisfactory==1.0.1      # best into an environment of its own
    vnnlib-satisfactory run --solver attn-bounds-vnnlib
    python benchmarks/conformance.py .vnnlib-satisfactory/report.json
    python benchmarks/conformance.py --random 500 --first 1000

The suite builds its models and queries in the folder where it runs and writes its report there. A campaign
compares verdicts on random small networks with what hundreds of points of each query say; the generator is
the one of the tests, so it needs the repository.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "benchmarks" / "results"
OUTCOMES = ("right", "unknown", "refused", "wrong")


def outcome(row: dict[str, Any]) -> str:
    """Of one test of the suite's report: refused if the solver gave no verdict, late ones are unknown."""
    if row["outcome"] == "pass":
        return "right"
    if row["outcome"] == "fail":
        return "wrong"
    return "refused" if row["returncode"] not in (0, -1) else "unknown"


def table(report: dict[str, Any]) -> dict[str, dict[str, int]]:
    """Counts by category and outcome; tests that the suite skipped are refused."""
    found: dict[str, dict[str, int]] = {}
    rows = [(r["category"], outcome(r)) for r in report["results"]]
    rows += [(r["category"], "refused") for r in report["skipped"]]
    for category, what in sorted(rows):
        found.setdefault(category, dict.fromkeys(OUTCOMES, 0))[what] += 1
    found["all"] = {what: sum(counts[what] for counts in found.values()) for what in OUTCOMES}
    return found


def campaign(count: int, first: int, seconds: float) -> dict[str, Any]:
    """Verdicts on random queries, by what points say."""
    sys.path.insert(0, str(ROOT))
    from tests.attn_bounds.intervals.test_random import verdict

    found: Counter[str] = Counter()
    wrong = []
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(first, first + count):
            try:
                found[", points ".join(verdict(seed, Path(folder), seconds))] += 1
            except AssertionError as error:
                wrong.append({"seed": seed, "what": str(error)})
    return {
        "queries": count,
        "first seed": first,
        "seconds each": seconds,
        "seconds": round(time.monotonic() - begin, 1),
        "verdicts": dict(sorted(found.items())),
        "wrong": wrong,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("report", nargs="?", type=Path, help="report.json of the suite")
    parser.add_argument("--random", type=int, default=0, metavar="N", help="random queries instead")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each random query")
    arguments = parser.parse_args()
    if arguments.random:
        result = campaign(arguments.random, arguments.first, arguments.seconds)
        print(json.dumps(result, indent=1))
        (OUT / "conformance_random.json").write_text(json.dumps(result, indent=1) + "\n")
        return
    if arguments.report is None:
        parser.error("give the suite's report, or --random N")
    counts = table(json.loads(arguments.report.read_text()))
    print("| category | " + " | ".join(OUTCOMES) + " |\n|---|" + "---|" * len(OUTCOMES))
    for category, row in counts.items():
        print(f"| {category} | " + " | ".join(str(row[what] or "") for what in OUTCOMES) + " |")
    result = {
        "suite": "vnnlib-satisfactory 1.0.1",
        "command": "vnnlib-satisfactory run --solver attn-bounds-vnnlib",
        "categories": counts,
    }
    (OUT / "conformance.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
