"""Certified l2 radii of the competition ViTs against stock CROWN: bisection to 1%, ten properties each.

    python benchmarks/l2_radius.py [--method sensitivity-alpha] [--models pgd,ibp]
    python benchmarks/l2_radius.py --keep-stock      # ours again, stock-crown's radii as recorded

Ratios are within one run on the same input. Finished rows are kept.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import sys
import time
from collections.abc import Callable
from typing import Any

from shared_vits import RESULTS, load, names

FACTOR = 1.25  # between probes while one end of the bisection is open


def bisect(certified: Callable[[float], bool], guess: float, tolerance: float = 1.01) -> tuple[float, int]:
    """Largest radius certified, up to a factor, from a guess; and the number of probes."""
    low, high, count = 0.0, math.inf, 0
    while low == 0.0 or high > tolerance * low:
        if low == 0.0:
            probe = guess if high == math.inf else high / FACTOR
        else:
            probe = low * FACTOR if high == math.inf else math.sqrt(low * high)
        count += 1
        low, high = (probe, high) if certified(probe) else (low, probe)
        if high < 1e-4:
            return 0.0, count
    return low, count


def radii(job: tuple[str, str, dict[str, Any] | None, int]) -> dict[str, Any]:
    """Radii of a method of ours and of `stock-crown` for one property, in a process of its own.

    The third of the job, if given, is a finished row, of which what `stock-crown` reached is kept.
    """
    name, method, known, threads = job
    import torch

    from attn_bounds import InputSet, lirpa

    torch.set_num_threads(threads)
    verifier, box, spec = load(name)

    def timed(method: str, guess: float) -> tuple[float, float, int]:
        def certified(radius: float) -> bool:
            ball = InputSet.ball(box.center, 2.0, radius)
            best = torch.full((len(spec.A),), -math.inf, dtype=torch.float64)
            for _, (rows,), _ in verifier.row_passes([ball], [spec], method):  # until one decides
                best = torch.fmax(best, rows)
                if float(spec.margin(best)) > 0:
                    return True
            return False

        start = time.perf_counter()
        radius, count = bisect(certified, guess)
        return radius, time.perf_counter() - start, count

    ours, our_seconds, our_count = timed(method, 0.4)
    if known is None:
        stock, stock_seconds, stock_count = timed("stock-crown", 0.6 * ours)
    else:
        stock, stock_seconds, stock_count = (
            known["stock-crown"],
            known["seconds"][1],
            known["evaluations"][1],
        )
    return {
        "property": name,
        "method": method,
        "radius": ours,
        "stock-crown": stock,
        "ratio": ours / stock if stock else None,
        "seconds": [our_seconds, stock_seconds],
        "evaluations": [our_count, stock_count],
        "lirpa": lirpa.version(),
    }


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Geometric means of the ratios to stock-crown per model and method."""
    out = []
    for model, method in sorted({(r["property"].rsplit("_", 1)[0], r["method"]) for r in rows}):
        mine = [r for r in rows if r["property"].startswith(model) and r["method"] == method]
        ratios = [r["ratio"] for r in mine if r["ratio"]]
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else None
        out.append(
            {
                "model": model,
                "method": method,
                "properties": len(mine),
                "geometric_mean_radius_ratio": mean,
            }
        )
    return out


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="pgd,ibp", help="by the first letters (default both)")
    parser.add_argument("--method", default="sensitivity-alpha")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--keep-stock", action="store_true", help="do not compute stock-crown's again")
    args = parser.parse_args()
    from attn_bounds import lirpa

    out = RESULTS / f"l2_radius-{lirpa.version()}.json"
    rows: list[dict[str, Any]] = json.loads(out.read_text())["rows"] if out.is_file() else []
    known = {r["property"]: r for r in rows} if args.keep_stock else {}
    wanted = names(args.models)
    if args.keep_stock:
        rows = [r for r in rows if r["method"] != args.method or r["property"] not in wanted]
    done = {(r["property"], r["method"]) for r in rows}
    todo = [n for n in wanted if (n, args.method) not in done]
    context = multiprocessing.get_context("spawn")
    for i, name in enumerate(todo):
        with context.Pool(1) as pool:
            rows.append(pool.apply(radii, ((name, args.method, known.get(name), args.threads),)))
        print(f"[{i + 1}/{len(todo)}] {json.dumps(rows[-1])}", file=sys.stderr, flush=True)
        command = "python benchmarks/l2_radius.py " + " ".join(sys.argv[1:])
        out.write_text(json.dumps({"command": command, "summary": summary(rows), "rows": rows}, indent=1))
    for s in summary(rows):
        print(json.dumps(s))


if __name__ == "__main__":
    main()
