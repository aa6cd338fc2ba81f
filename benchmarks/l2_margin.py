"""l2 certificates in one forward pass against stock CROWN: margins, seconds, memory, certified radii.

    python benchmarks/l2_margin.py margins [--plot F.png]      # rows of the reference table, and the curve
    python benchmarks/l2_margin.py radii [--models pgd,ibp]    # bisection to 1%, ten properties each
    python benchmarks/l2_margin.py radii --keep-stock          # ours again, stock-crown's radii as recorded

Ratios are within one run on the same input. Needs the shared competition files. Finished rows are kept.
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

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT.parent / "shared" / "data" / "vnncomp_vit"
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


def _load(name: str, threads: int) -> tuple[Any, Any, Any]:
    import torch

    from attn_bounds import Verifier, read_vnnlib

    torch.set_num_threads(threads)
    model = name.rsplit("_", 1)[0]
    verifier = Verifier(DATA / f"{model}.onnx")
    prop = read_vnnlib(DATA / "vnnlib" / f"{name}.vnnlib.gz", verifier.input_shape, verifier.outputs)
    inputs, spec = prop.cases[0]
    return verifier, inputs.center, spec


def margin(job: tuple[str, float, str, int]) -> dict[str, Any]:
    """One bound in a process of its own. The first call builds what is kept; the second counts."""
    name, radius, method, threads = job
    from attn_bounds import InputSet, lirpa

    verifier, center, spec = _load(name, threads)
    ball = InputSet.ball(center, 2.0, radius)
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


def radii(job: tuple[str, str, dict[str, Any] | None, int]) -> dict[str, Any]:
    """Certified radii of a method of ours and of `stock-crown` by bisection to 1%, near the first one's.

    The third of the job, if given, is a finished row, of which what `stock-crown` reached is kept.
    """
    name, method, known, threads = job
    from attn_bounds import InputSet, lirpa

    verifier, center, spec = _load(name, threads)

    def certified(radius: float, method: str) -> bool:
        ball = InputSet.ball(center, 2.0, radius)
        return float(spec.margin(verifier.row_bounds([ball], [spec], method)[0])) > 0

    def bisect(method: str, guess: float) -> tuple[float, float, int]:
        start, count = time.perf_counter(), 0
        low, high, factor = 0.0, math.inf, 1.25
        while low == 0.0 or high == math.inf or high > 1.01 * low:
            probe = (
                guess
                if low == 0.0 and high == math.inf
                else (
                    low * factor
                    if high == math.inf
                    else high / factor
                    if low == 0.0
                    else math.sqrt(low * high)
                )
            )
            count += 1
            if certified(probe, method):
                low = probe
            else:
                high = probe
            if high < 1e-4:
                return 0.0, time.perf_counter() - start, count
        return low, time.perf_counter() - start, count

    ours, our_seconds, our_count = bisect(method, 0.4)
    if known is None:
        stock, stock_seconds, stock_count = bisect("stock-crown", 0.6 * ours)
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


def _run(function: Any, jobs: list[Any], key: Any, out: Path, rows: list[dict[str, Any]]) -> None:
    done = [key(r) for r in rows]
    todo = [j for j in jobs if j[:-1] not in done]
    context = multiprocessing.get_context("spawn")
    for i, job in enumerate(todo):
        with context.Pool(1) as pool:
            rows.append(pool.apply(function, (job,)))
        print(f"[{i + 1}/{len(todo)}] {json.dumps(rows[-1])}", file=sys.stderr, flush=True)
        out.parent.mkdir(exist_ok=True)
        command = "python benchmarks/l2_margin.py " + " ".join(sys.argv[1:])
        out.write_text(json.dumps({"command": command, "summary": summary(rows), "rows": rows}, indent=1))


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Ratios to stock-crown per model."""
    out = []
    for model in dict.fromkeys(r["property"].rsplit("_", 1)[0] for r in rows):
        mine = [r for r in rows if r["property"].startswith(model)]
        if "ratio" in mine[0]:
            for method in dict.fromkeys(r["method"] for r in mine):
                ratios = [r["ratio"] for r in mine if r["ratio"] and r["method"] == method]
                mean = math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else None
                found = {"model": model, "method": method, "properties": len(ratios)}
                out.append({**found, "geometric_mean_radius_ratio": mean})
            continue
        by = {(r["property"], r["radius"], r["method"]): r for r in mine}
        pairs = [(r, by.get((p, e, "stock-crown"))) for (p, e, m), r in by.items() if m == "sensitivity"]
        times = [a["seconds"] / b["seconds"] for a, b in pairs if b]
        below = [a["margin"] - a["reference"] for a, _ in pairs if a["reference"] is not None]
        out.append(
            {
                "model": model,
                "time_ratio_to_stock_crown": sum(times) / len(times) if times else None,
                "smallest_gain_over_reference": min(below, default=None),
                "peak_mb": [max(p[k]["peak_mb"] for p in pairs if p[k]) for k in (0, 1)] if times else None,
            }
        )
    return out


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["margins", "radii"])
    parser.add_argument("--models", default="pgd,ibp", help="by the first letters (default both)")
    parser.add_argument("--methods", default="sensitivity,crown,stock-crown,attack", help="for margins")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--method", default="sensitivity", help="for radii (default sensitivity)")
    parser.add_argument("--keep-stock", action="store_true", help="for radii")
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    if not DATA.is_dir():
        sys.exit(f"the competition files are not there: {DATA}")
    from attn_bounds import lirpa

    out = ROOT / "benchmarks" / "results" / f"l2_{args.what}-{lirpa.version()}.json"
    rows: list[dict[str, Any]] = json.loads(out.read_text())["rows"] if out.is_file() else []
    wanted = tuple(args.models.split(","))
    if args.what == "margins":
        jobs: list[Any] = [
            (p, e, m, args.threads)
            for p, e in REFERENCE
            for m in args.methods.split(",")
            if p.startswith(wanted)
        ]
        _run(margin, jobs, lambda r: (r["property"], r["radius"], r["method"]), out, rows)
    else:
        names = [
            Path(line.split(",")[1]).name.split(".")[0]
            for line in (DATA / "instances.csv").read_text().split()
        ]
        known = {r["property"]: r for r in rows} if args.keep_stock else {}
        if args.keep_stock:
            rows = [r for r in rows if r["method"] != args.method or not r["property"].startswith(wanted)]
        jobs = [(n, args.method, known.get(n), args.threads) for n in names if n.startswith(wanted)]
        _run(radii, jobs, lambda r: (r["property"], r["method"], known.get(r["property"])), out, rows)
    if args.plot:
        plot(rows, args.plot)
    for s in summary(rows):
        print(json.dumps(s))


if __name__ == "__main__":
    main()
