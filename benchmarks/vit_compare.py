"""Ours against auto_LiRPA's own operators on the two competition ViTs: margins, certified counts, cost.

    python benchmarks/vit_compare.py [--models pgd,ibp] [--methods crown,stock-crown] [--out FILE]

Every pair of methods runs on the same input in the same process, so seconds are comparable as ratios only.
Needs the shared competition files; says so and stops where they are absent. Finished rows are kept in FILE
and not computed again, so an interrupted run goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import resource
import sys
import time
from pathlib import Path
from typing import Any

from shared_vits import RESULTS, load, names

SETS = ("linf", "l2:0.2", "l2:0.5")


def one(job: tuple[str, str, str, str, int]) -> dict[str, Any]:
    """One method on one property and input set, in a process of its own for the sake of peak memory."""
    model, name, input_set, method, threads = job
    import torch

    from attn_bounds import InputSet, lirpa

    torch.set_num_threads(threads)
    verifier, inputs, spec = load(name)
    if input_set != "linf":
        inputs = InputSet.ball(inputs.center, 2.0, float(input_set.split(":")[1]))
    verifier.graph(method.startswith("stock-"))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    rows = verifier.row_bounds([inputs], [spec], method)[0]
    return {
        "model": model,
        "property": name,
        "set": input_set,
        "method": method,
        "margin": _finite(float(spec.margin(rows))),
        "margins": [_finite(round(float(r), 6)) for r in rows],
        "seconds": time.perf_counter() - start,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "before_mb": before / 1024,
        "lirpa": lirpa.version(),
        "options": verifier.describe(method),
    }


def _finite(value: float | None) -> float | None:
    """NaN and infinities are no JSON, and no bounds."""
    return value if value is not None and math.isfinite(value) else None


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per model, set and method: certified count, mean margin, seconds and their ratio to stock-crown."""
    out = []
    keys = sorted({(r["model"], r["set"], r["method"]) for r in rows})
    for model, input_set, method in keys:
        mine = {
            r["property"]: r
            for r in rows
            if (r["model"], r["set"], r["method"]) == (model, input_set, method)
        }
        stock = {
            r["property"]: r
            for r in rows
            if (r["model"], r["set"], r["method"]) == (model, input_set, "stock-crown")
        }
        both = [p for p in mine if p in stock]
        ratios = [mine[p]["seconds"] / stock[p]["seconds"] for p in both]
        out.append(
            {
                "model": model,
                "set": input_set,
                "method": method,
                "properties": len(mine),
                "certified": sum((r["margin"] or 0) > 0 for r in mine.values()),
                "mean_margin": None
                if any(r["margin"] is None for r in mine.values())
                else sum(r["margin"] for r in mine.values()) / len(mine),
                "worst_difference_to_stock_crown": min(
                    (
                        mine[p]["margin"] - stock[p]["margin"]
                        for p in both
                        if mine[p]["margin"] is not None and stock[p]["margin"] is not None
                    ),
                    default=None,
                ),
                "mean_seconds": sum(r["seconds"] for r in mine.values()) / len(mine),
                "time_ratio_to_stock_crown": sum(ratios) / len(ratios) if ratios else None,
                "peak_mb": max(r["peak_mb"] for r in mine.values()),
            }
        )
    return out


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models", default="pgd,ibp", help="which models, by the first letters (default both)"
    )
    parser.add_argument(
        "--methods", default="ibp,sensitivity,crown,alpha-crown,stock-ibp,stock-crown", help="comma separated"
    )
    parser.add_argument(
        "--sets", default=",".join(SETS), help="linf (the property) and l2:RADIUS, comma separated"
    )
    parser.add_argument("--count", type=int, default=10, help="properties per model (default 10)")
    parser.add_argument("--threads", type=int, default=2, help="torch threads (default 2)")
    parser.add_argument("--out", type=Path, help="JSON file (default results/vit_compare-VERSION.json)")
    args = parser.parse_args()
    every = names(args.models)
    from attn_bounds import lirpa

    out = args.out or RESULTS / f"vit_compare-{lirpa.version()}.json"
    before: dict[str, Any] = json.loads(out.read_text()) if out.is_file() else {"rows": [], "commands": []}
    rows: list[dict[str, Any]] = before["rows"]
    for r in rows:  # files of older runs
        r["margin"], r["margins"] = _finite(r["margin"]), [_finite(m) for m in r["margins"]]
    command = "python benchmarks/vit_compare.py " + " ".join(sys.argv[1:])
    commands = list(dict.fromkeys([*before.get("commands", []), command]))
    done = {(r["model"], r["property"], r["set"], r["method"]) for r in rows}
    jobs = [(n.rsplit("_", 1)[0], n) for n in every]
    kept = [j for m in dict(jobs) for j in [k for k in jobs if k[0] == m][: args.count]]
    todo = [
        (model, name, s, method, args.threads)
        for model, name in kept
        for s in args.sets.split(",")
        for method in args.methods.split(",")
        if (model, name, s, method) not in done
    ]
    context = multiprocessing.get_context("spawn")
    for i, job in enumerate(todo):
        with context.Pool(1) as pool:
            row = pool.apply(one, (job,))
        rows.append(row)
        print(
            f"[{i + 1}/{len(todo)}] {row['property']} {row['set']} {row['method']}: "
            f"margin {row['margin']}, {row['seconds']:.1f} s, {row['peak_mb']:.0f} MB",
            file=sys.stderr,
            flush=True,
        )
        out.parent.mkdir(exist_ok=True)
        out.write_text(json.dumps({"commands": commands, "summary": summary(rows), "rows": rows}, indent=1))
    for s in summary(rows):
        print(json.dumps(s))


if __name__ == "__main__":
    main()
