"""What `key_sensitivity` and `layer_bound` cost, against tokens, width and heads, with fitted exponents.

    python benchmarks/layer_cost.py --plot        # about four minutes on one core; JSON, figure
    python benchmarks/layer_cost.py --quick       # small sizes, seconds, nothing is written
    python benchmarks/layer_cost.py --only-plot --docs   # figure and docs/bounds.md from the JSON

Random self-attention layers with a skip connection, float64, one thread; smallest of the repetitions. Up to
n · d = 1024, and further with many heads, key-sensitivity forms the (n d) × (n d) matrix, beyond that it does
not (kronecker.py): exponents are fitted on either side. The way without it is measured by itself as well: its
time, and how much larger its bound is.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from layer_tightness import OUT, write_into_docs
from layers import random_layer

from attn_bounds.kronecker import dense_size_for
from attn_bounds.report import progress
from attn_bounds.sensitivity.key import key_sensitivity, layer_bound
from attn_bounds.sensitivity.layer import PAPER, AttentionLayer

# what varies, the sizes it takes, and those of the rest
AXES: tuple[tuple[str, tuple[int, ...], dict[str, int]], ...] = (
    ("n", (4, 8, 16, 32, 64, 128, 256, 512), {"d": 64, "heads": 4}),
    ("d", (16, 32, 64, 128, 256, 384, 512, 768), {"n": 16, "heads": 4}),
    ("heads", (1, 2, 4, 8, 16, 32), {"n": 16, "d": 64}),
    ("heads", (2, 4, 8, 16, 32), {"n": 64, "d": 128}),
)
WORDS = {"n": "tokens n", "d": "width d", "heads": "heads"}
WITHOUT = "key_sensitivity, no matrix"
Row = dict[str, Any]
FUNCTIONS: dict[str, Callable[[torch.Tensor, AttentionLayer], torch.Tensor]] = {
    "key_sensitivity": lambda x, layer: key_sensitivity(x, layer),
    WITHOUT: lambda x, layer: key_sensitivity(x, layer, dense_size=0),
    "layer_bound, the paper's form": lambda x, layer: layer_bound(x, 0.1, layer, use=PAPER),
    "layer_bound": lambda x, layer: layer_bound(x, 0.1, layer),
}


def measure(n: int, d: int, heads: int, seed: int, budget: float = 2.0) -> Row:
    """Smallest time of each function, in up to five runs within the budget (one run at least)."""
    example = random_layer(heads, n, d, seed, skip=True)
    assert isinstance(example.layer, AttentionLayer)
    best: dict[str, float] = {}
    value: dict[str, float] = {}
    for name, f in FUNCTIONS.items():
        times: list[float] = []
        while not times or (len(times) < 5 and sum(times) + times[-1] < budget):
            start = time.perf_counter()
            value[name] = float(f(example.x, example.layer))
            times.append(time.perf_counter() - start)
        best[name] = min(times)
    return {"seconds": best, "gap_without_matrix": value[WITHOUT] / value["key_sensitivity"] - 1.0}


def exponents(rows: list[Row]) -> list[Row]:
    """Slope of log time over log size, by least squares, per axis, function and side of `dense_size_for`.

    Of the points of one side the larger half counts (three at least), where constant costs no longer do.
    """
    out: list[Row] = []
    for axis, _, others in AXES:
        for side in ("formed", "not formed"):
            mine = [r for r in select(rows, axis, others) if _formed(r) == (side == "formed")]
            mine = mine[-max(3, -(-len(mine) // 2)) :]
            if len(mine) < 3:
                continue
            x = [math.log(r[axis]) for r in mine]
            row: Row = {"axis": axis, "others": others, "matrix": side}
            row |= {
                "from": mine[0][axis],
                "to": mine[-1][axis],
                "largest": mine[-1]["seconds"],
                "exponent": {},
            }
            for name in FUNCTIONS:
                y = [math.log(r["seconds"][name]) for r in mine]
                mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
                slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
                row["exponent"][name] = slope / sum((a - mean_x) ** 2 for a in x)
            out.append(row)
    return out


def _formed(r: Row) -> bool:
    """Whether the matrix is formed by default; the skip connection is one more term."""
    return bool(r["n"] * r["d"] <= dense_size_for(r["heads"] + 1))


def select(rows: list[Row], axis: str, others: dict[str, int]) -> list[Row]:
    """The rows of one axis, in the order of its sizes."""
    mine = [r for r in rows if r["axis"] == axis and all(r[k] == v for k, v in others.items())]
    return sorted(mine, key=lambda r: int(r[axis]))


def table(rows: list[Row]) -> str:
    """Exponents and largest times as a Markdown table."""
    lines = [
        "| against | range | matrix | " + " | ".join(f"`{name}`" for name in FUNCTIONS) + " |",
        "|---|---|---|" + "---|" * len(FUNCTIONS),
    ]
    for e in exponents(rows):
        cells = [f"{e['exponent'][name]:.1f} ({e['largest'][name]:.2g} s)" for name in FUNCTIONS]
        others = ", ".join(f"{k} = {v}" for k, v in e["others"].items())
        span = f"{e['from']} to {e['to']}"
        lines.append(f"| {WORDS[e['axis']]}; {others} | {span} | {e['matrix']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plot(rows: list[Row], path: Path) -> None:
    """Seconds against each size, log-log."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = [(axis, others) for axis, _, others in AXES if select(rows, axis, others)]
    figure, axes = plt.subplots(
        1, len(shown), figsize=(4.2 * len(shown), 4.6), layout="constrained", sharey=True, squeeze=False
    )
    for ax, (axis, others) in zip(axes[0], shown, strict=True):
        mine = select(rows, axis, others)
        x = [r[axis] for r in mine]
        for name, style in zip(FUNCTIONS, ("-o", ":x", "--s", "-^"), strict=True):
            ax.loglog(x, [r["seconds"][name] for r in mine], style, label=name, alpha=0.8)
        if axis != "heads":
            size = dense_size_for(others["heads"] + 1)
            switch = size / (others["d"] if axis == "n" else others["n"])
            ax.axvline(switch, color="grey", linestyle=":", label=f"n · d = {size}: no matrix beyond")
        title = ", ".join(f"{WORDS[k]} = {v}" for k, v in others.items())
        ax.set(title=title, xlabel=WORDS[axis], ylabel="seconds, one core")
        ax.set_xticks(x, [str(v) for v in x], fontsize=8, rotation=45)
        ax.minorticks_off()
        ax.grid(alpha=0.3)
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.suptitle("Time of the bounds of one attention layer (random weights, float64)")
    figure.savefig(path, dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="n · d up to 1000; prints, writes nothing")
    parser.add_argument("--seed", type=int, default=0, help="of the layers (default 0)")
    parser.add_argument("--plot", action="store_true", help="figure too (needs matplotlib, extra `plot`)")
    parser.add_argument("--only-plot", action="store_true", help="from the JSON; nothing is measured")
    parser.add_argument("--docs", action="store_true", help="put the table into docs/bounds.md")
    args = parser.parse_args()
    torch.set_num_threads(1)
    path = OUT / "layer_cost.json"
    if args.only_plot:
        rows = json.loads(path.read_text())["rows"]
    else:
        jobs = [(axis, {**others, axis: size}) for axis, sizes, others in AXES for size in sizes]
        jobs = [(axis, s) for axis, s in jobs if not args.quick or s["n"] * s["d"] <= 1000]
        rows = []
        with progress(len(jobs)) as begin:
            for axis, size in jobs:
                begin(", ".join(f"{k} = {v}" for k, v in size.items()))
                rows.append({"axis": axis, **size, **measure(**size, seed=args.seed)})
                if not sys.stderr.isatty():
                    print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
        if not args.quick:
            command = " ".join(["python benchmarks/layer_cost.py", *sys.argv[1:]])
            result = {"command": command, "seed": args.seed, "exponents": exponents(rows), "rows": rows}
            path.write_text(json.dumps(result, indent=1))
    for e in exponents(rows):
        print(json.dumps(e))
    if (args.plot or args.only_plot) and not args.quick:
        plot(rows, OUT / "layer_cost.png")
    if args.docs:
        write_into_docs("table of benchmarks/layer_cost.py", table(rows))


if __name__ == "__main__":
    main()
