"""l2 certificates of the competition ViTs against stock CROWN: margins, seconds, memory.

    python benchmarks/l2_margin.py [--methods sensitivity,crown,stock-crown,attack] [--plot F.png]

The rows of the reference table, and the curve. Ratios are within one run on the same input. Finished rows are
kept.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import sys
import time
from pathlib import Path
from typing import Any

from shared_vits import RESULTS, load, names

# margin bounds of the prototype that the theory was first tried with: property, radius, bound
REFERENCE = {
    ("pgd_2_3_16_4021", 0.2): 1.221,
    ("pgd_2_3_16_4021", 0.4): 0.919,
    ("pgd_2_3_16_4021", 0.6): 0.020,
    ("pgd_2_3_16_4021", 0.8): -3.45,
    ("pgd_2_3_16_1159", 0.2): 0.649,
    ("pgd_2_3_16_1159", 0.4): 0.427,
    ("pgd_2_3_16_1159", 0.6): -0.112,
    ("pgd_2_3_16_1159", 0.8): -1.87,
    ("ibp_3_3_8_9119", 0.1): 0.270,
    ("ibp_3_3_8_9119", 0.2): 0.145,
    ("ibp_3_3_8_9119", 0.4): -0.272,
}


def margin(job: tuple[str, float, str, int]) -> dict[str, Any]:
    """One bound in a process of its own. The first call builds what is kept; the second counts."""
    name, radius, method, threads = job
    import torch

    from attn_bounds import InputSet, lirpa

    torch.set_num_threads(threads)
    verifier, box, spec = load(name)
    ball = InputSet.ball(box.center, 2.0, radius)
    if method == "attack":
        from attn_bounds import pgd

        found = pgd(
            verifier.module, ball, spec, stop_early=False, restarts=20, steps=100, dtype=verifier.dtype
        )
        return {"property": name, "radius": radius, "method": method, "margin": found.margin}
    start = time.perf_counter()
    verifier.row_bounds([ball], [spec], method)
    first = time.perf_counter() - start
    verifier.forget()
    start = time.perf_counter()
    rows = verifier.row_bounds([ball], [spec], method)[0]
    return {
        "property": name,
        "radius": radius,
        "method": method,
        "margin": float(spec.margin(rows)),
        "seconds": time.perf_counter() - start,
        "first_seconds": first,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "lirpa": lirpa.version(),
        "reference": REFERENCE.get((name, radius)),
    }


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Margin bound against radius, the attack on top."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(r["property"] for r in rows))
    figure, axes = plt.subplots(
        1, len(names), figsize=(4.5 * len(names), 4), layout="constrained", squeeze=False
    )
    for ax, name in zip(axes[0], names, strict=True):
        for method in dict.fromkeys(r["method"] for r in rows):
            points = sorted(
                (r["radius"], r["margin"]) for r in rows if (r["property"], r["method"]) == (name, method)
            )
            label = "smallest found by attack" if method == "attack" else f"{method} (lower bound)"
            ax.plot(*zip(*points, strict=True), marker="o", label=label)
        ax.axhline(0, color="black", linewidth=0.8)
        ax.set(title=name, xlabel="l2 radius (normalised units)", ylabel="smallest margin (logits)")
        ax.set_ylim(bottom=-2.0)
        ax.legend()
    figure.savefig(path, dpi=150)


def _run(jobs: list[tuple[str, float, str, int]], out: Path, rows: list[dict[str, Any]]) -> None:
    done = {(r["property"], r["radius"], r["method"]) for r in rows}
    todo = [j for j in jobs if j[:-1] not in done]
    context = multiprocessing.get_context("spawn")
    for i, job in enumerate(todo):
        with context.Pool(1) as pool:
            rows.append(pool.apply(margin, (job,)))
        print(f"[{i + 1}/{len(todo)}] {json.dumps(rows[-1])}", file=sys.stderr, flush=True)
        command = "python benchmarks/l2_margin.py " + " ".join(sys.argv[1:])
        out.write_text(json.dumps({"command": command, "summary": summary(rows), "rows": rows}, indent=1))


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Ratios to stock-crown per model."""
    out = []
    for model in dict.fromkeys(r["property"].rsplit("_", 1)[0] for r in rows):
        mine = [r for r in rows if r["property"].startswith(model)]
        by = {(r["property"], r["radius"], r["method"]): r for r in mine}
        pairs = [(r, by.get((p, e, "stock-crown"))) for (p, e, m), r in by.items() if m == "sensitivity"]
        times = [a["seconds"] / b["seconds"] for a, b in pairs if b]
        own = [m for m in dict.fromkeys(r["method"] for r in mine) if m.startswith("sensitivity")]
        ratios = {
            m: [
                r["seconds"] / by[p, e, "stock-crown"]["seconds"]
                for (p, e, k), r in by.items()
                if k == m and (p, e, "stock-crown") in by
            ]
            for m in own
            if times
        }
        below = [a["margin"] - a["reference"] for a, _ in pairs if a["reference"] is not None]
        out.append(
            {
                "model": model,
                "time_ratio_to_stock_crown": {m: sum(t) / len(t) for m, t in ratios.items()},
                "smallest_gain_over_reference": min(below, default=None),
                "peak_mb": [max(p[k]["peak_mb"] for p in pairs if p[k]) for k in (0, 1)] if times else None,
            }
        )
    return out


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="pgd,ibp", help="by the first letters (default both)")
    parser.add_argument("--methods", default="sensitivity,crown,stock-crown,attack")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    names(args.models)  # whether the files are there
    from attn_bounds import lirpa

    out = RESULTS / f"l2_margins-{lirpa.version()}.json"
    rows: list[dict[str, Any]] = json.loads(out.read_text())["rows"] if out.is_file() else []
    wanted = tuple(args.models.split(","))
    every = ((p, e, m, args.threads) for p, e in REFERENCE for m in args.methods.split(","))
    _run([job for job in every if job[0].startswith(wanted)], out, rows)
    if args.plot:
        plot(rows, args.plot)
    for s in summary(rows):
        print(json.dumps(s))


if __name__ == "__main__":
    main()
