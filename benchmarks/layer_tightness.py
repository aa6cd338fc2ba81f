"""How tight bounds of one attention layer are, beside what ascent finds: the studies of the LoFAST paper.

    python benchmarks/layer_tightness.py --plot             # all studies (four minutes), then figures
    python benchmarks/layer_tightness.py --study eps        # one of them
    python benchmarks/layer_tightness.py --quick            # a tiny layer, seconds, nothing is written
    python benchmarks/layer_tightness.py --study none --plot --docs   # figures, docs/bounds.md, from the JSON

Studies, each a file benchmarks/results/layer_STUDY.json and figures of the same name:

    eps        every bound of ‖F(X') − F(X)‖_F over the ball ‖X' − X‖_F ≤ ε, against ε
    input      the same at two ε / ‖X‖_F, with the clean input X multiplied by factors
    weights    change of the bound when W_Q, W_K, W_V, W_O or X is perturbed, along its gradient and at random
    two-heads  two equal heads but for W_O2 = c W_O1: what key-sensitivity sees of heads that cancel

Layers: random ones with 1, 3 and 8 heads, those of the bundled digits model, and those of the two shared
Vision Transformers if their files are there. The ascent is a lower bound of the truth: bound / ascent is how
loose a bound is, at most. float64 throughout. A bound below what ascent finds ends the run with an error.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from layers import (
    Example,
    causal_layer,
    cross_layer,
    function,
    largest_moves,
    model_layers,
    per_head,
    random_l2_layer,
    random_layer,
)
from torch import Tensor

from attn_bounds.kronecker import naive_sum_upper
from attn_bounds.report import progress
from attn_bounds.sensitivity import baselines
from attn_bounds.sensitivity.key import key_sensitivity, layer_bound
from attn_bounds.sensitivity.l2_attention import L2SelfAttention
from attn_bounds.sensitivity.layer import PAPER, AttentionLayer

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "benchmarks" / "results"
DOCS = ROOT / "docs" / "bounds.md"
RELATIVE_EPS = [10 ** (k / 4) for k in range(-16, 1)]  # ε over ‖X‖_F
SMALL, LARGE = 1e-3, 0.1  # of them: those of the page and of the input study
FACTORS = [2.0**k for k in range(-4, 5)]
SIZES = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5]  # of perturbations, over the Frobenius norm of what is perturbed
RANDOM_DRAWS = 8
WEIGHTS = ("random, 3 heads", "digits, layer 2", "pgd_2_3_16, layer 1", "ibp_3_3_8, layer 1")  # of that study
Row = dict[str, Any]
Bound = Callable[[Tensor, Tensor, AttentionLayer], Tensor]


def _constant(f: Callable[..., Tensor]) -> Bound:
    """A Lipschitz constant over the ball, as a bound of the move."""
    return lambda x, eps, layer: eps * f(x, eps, **per_head(layer))


# (…, n, d), (…), layer → (…): bounds of the move, in the order of the plots
BOUNDS: dict[str, Bound] = {
    "ours": lambda x, eps, layer: layer_bound(x, eps, layer),
    "LoFAST": lambda x, eps, layer: layer_bound(x, eps, layer, use=PAPER),
    "LoFAST, naive": lambda x, eps, layer: baselines.lofast_naive(x, eps, **per_head(layer)),
    "Yudin": _constant(baselines.yudin),
    "Castin": _constant(baselines.castin),
    "SpecFormer": _constant(baselines.specformer),
}
COLOURS = dict(zip([*BOUNDS, "Kim"], ["C0", "C1", "C2", "C4", "C5", "C3", "C6"], strict=True))


def bounds(example: Example, radii: list[float]) -> dict[str, list[float]]:
    """Every bound that applies to the layer, for each radius."""
    x, layer = example.x, example.layer
    if isinstance(layer, L2SelfAttention):
        constant = float(layer.lipschitz(len(x)))
        return {"Kim": [constant * e for e in radii]}
    eps = torch.tensor(radii, dtype=torch.float64)
    many = x.expand(len(radii), *x.shape)
    if layer.mask is not None or example.queries is not None:  # beyond what the others are stated for
        tokens = many if example.queries is None else many[:, : example.queries]
        context = None if example.queries is None else many[:, example.queries :]
        return {
            name: layer_bound(tokens, eps, layer, context, use=use).tolist()
            for name, use in (("ours", None), ("LoFAST", PAPER))
        }
    return {name: f(many, eps, layer).tolist() for name, f in BOUNDS.items()}


def measure(example: Example, radii: list[float], **ascent: int) -> list[Row]:
    """Bounds and ascent, one row a radius."""
    start = time.perf_counter()
    found = largest_moves(function(example.layer, example.queries), example.x, radii, **ascent)
    every = bounds(example, radii)
    n, d = example.x.shape
    dot = example.layer if isinstance(example.layer, AttentionLayer) else None
    fixed = None
    if dot is not None:
        n_q = example.queries
        context = None if n_q is None else example.x[n_q:]
        fixed = float(key_sensitivity(example.x[:n_q], dot, context))
    rows: list[Row] = []
    for i, eps in enumerate(radii):
        row: Row = {
            "layer": example.name,
            "group": example.group,
            "heads": example.layer.heads,
            "n": n,
            "d": d,
        }
        row |= {"input_norm": float(example.x.norm()), "eps": eps, "ascent": found[i]}
        row |= {"key_sensitivity": fixed, "bounds": {name: values[i] for name, values in every.items()}}
        rows.append(row)
    rows[0]["seconds"] = time.perf_counter() - start
    return rows


def violations(rows: list[Row]) -> list[str]:
    """Bounds below what ascent found: none, or something is wrong."""
    return [
        f"{name} of {r['layer']} at ε = {r['eps']:g}: {bound:g} < {r['ascent']:g}"
        for r in rows
        for name, bound in r.get("bounds", {}).items()
        if bound < r["ascent"] * (1 - 1e-9)
    ]


def examples(quick: bool, seed: int) -> list[Example]:
    """All layers, or a tiny one with two heads."""
    if quick:
        return [random_layer(2, 4, 4, seed, skip=True)]
    found = [random_layer(heads, seed=seed) for heads in (1, 3, 8)]
    found += [random_layer(3, seed=seed, skip=True), causal_layer(3, seed), cross_layer(3, seed)]
    found.append(random_l2_layer(3, seed=seed))
    return found + model_layers()


def study_eps(layers: list[Example], quick: bool, seed: int, begin: Callable[[str], None]) -> list[Row]:
    rows = []
    for e in layers:
        begin(f"eps: {e.name}")
        size = float(e.x.norm())
        rows += measure(e, [size * r for r in (RELATIVE_EPS[::4] if quick else RELATIVE_EPS)], seed=seed)
    return rows


def study_input(layers: list[Example], quick: bool, seed: int, begin: Callable[[str], None]) -> list[Row]:
    rows = []
    for e in layers:
        begin(f"input: {e.name}")
        for factor in FACTORS[::4] if quick else FACTORS:
            scaled = e._replace(x=factor * e.x)
            size = float(scaled.x.norm())
            for relative in (SMALL, LARGE):
                (row,) = measure(scaled, [relative * size], seed=seed)
                rows.append({**row, "factor": factor, "relative_eps": relative})
    return rows


def study_weights(layers: list[Example], quick: bool, seed: int, begin: Callable[[str], None]) -> list[Row]:
    """Bound after a perturbation over the bound before, at ε = LARGE · ‖X‖_F (of the X before)."""
    rows: list[Row] = []
    for e in layers:
        begin(f"weights: {e.name}")
        if not isinstance(e.layer, AttentionLayer) or not (quick or e.name in WEIGHTS):
            continue
        layer, eps = e.layer, LARGE * float(e.x.norm())
        g = torch.Generator().manual_seed(seed)
        parts = {"W_Q": layer.w_q, "W_K": layer.w_k, "W_V": layer.w_v, "W_O": layer.w_o, "X": e.x}

        def value(name: str, part: Tensor, use: str, e: Example = e, eps: float = eps) -> Tensor:
            assert isinstance(e.layer, AttentionLayer)
            if name == "X":
                return BOUNDS[use](part, torch.tensor(eps, dtype=torch.float64), e.layer)
            changed = replace(e.layer, **{name.lower(): part})  # type: ignore[arg-type]
            return BOUNDS[use](e.x, torch.tensor(eps, dtype=torch.float64), changed)

        for use in ("ours", "LoFAST"):
            for name, part in parts.items():
                leaf = part.clone().requires_grad_()
                before = value(name, leaf, use)
                (slope,) = torch.autograd.grad(before, leaf)
                size, base = float(part.norm()), float(before.detach())
                draws = torch.randn((RANDOM_DRAWS, *part.shape), generator=g, dtype=torch.float64)
                row: Row = {"layer": e.name, "bound": use, "part": name, "before": base, "eps": eps}
                row |= {"elasticity": float(slope.norm()) * size / base, "sizes": SIZES}

                def after(
                    direction: Tensor,
                    name: str = name,
                    part: Tensor = part,
                    use: str = use,
                    size: float = size,
                    base: float = base,
                ) -> list[float]:
                    step = size * direction / direction.norm()
                    return [float(value(name, part + t * step, use)) / base for t in SIZES]

                draws = draws[: 2 if quick else RANDOM_DRAWS]
                random = torch.tensor([after(d) for d in draws], dtype=torch.float64)
                row |= {"up": after(slope), "down": after(-slope)}
                row |= {"random_mean": random.mean(0).tolist(), "random_std": random.std(0).tolist()}
                rows.append(row)
    return rows


def two_heads(one: AttentionLayer, c: float) -> AttentionLayer:
    """The layer's only head twice, the second with c times its W_O."""
    w_q, w_k, w_v = (torch.cat([w, w], 1) for w in (one.w_q, one.w_k, one.w_v))
    return AttentionLayer(w_q, w_k, w_v, torch.cat([one.w_o, c * one.w_o]), 2)


def study_two_heads(layers: list[Example], quick: bool, seed: int, begin: Callable[[str], None]) -> list[Row]:
    one = random_layer(1, *((4, 4) if quick else (16, 24)), seed=seed)
    assert isinstance(one.layer, AttentionLayer)
    single = float(key_sensitivity(one.x, one.layer))
    size, rows = float(one.x.norm()), []
    for c in (-0.5, 0.5) if quick else [k / 4 for k in range(-6, 7)]:
        begin(f"two-heads: c = {c:g}")
        layer = two_heads(one.layer, c)
        radii = [size * r for r in ([LARGE] if abs(c) != 0.5 or quick else RELATIVE_EPS)]
        weights = per_head(layer)
        scores = layer.factor() * (one.x @ weights["w_q"]) @ (one.x @ weights["w_k"]).mT
        naive = naive_sum_upper(torch.softmax(scores, -1), weights["w_v"] @ weights["w_o"])
        for row in measure(Example("two heads", "random", layer, one.x), radii, seed=seed):
            more = {"c": c, "relative_eps": row["eps"] / size, "single": single, "naive": float(naive)}
            rows.append({**row, **more})
    return rows


STUDIES = {"eps": study_eps, "input": study_input, "weights": study_weights, "two-heads": study_two_heads}


def load(study: str, folder: Path = OUT) -> list[Row]:
    """Rows of a study that was run."""
    rows: list[Row] = json.loads((folder / f"layer_{study}.json").read_text())["rows"]
    return rows


def table(rows: list[Row]) -> str:
    """Bound over ascent at two radii per layer, as a Markdown table; from the rows of the study eps."""
    names = list(BOUNDS)
    relative = "ε / ‖X‖_F"
    lines = [
        "| layer | " + relative + " | largest move found / ε | " + " | ".join(names) + " |",
        "|---|---|---|" + "---|" * len(names),
    ]
    for layer in dict.fromkeys(r["layer"] for r in rows if "ours" in r["bounds"]):
        mine = [r for r in rows if r["layer"] == layer]
        for ratio in (SMALL, LARGE):
            r = min(mine, key=lambda r: abs(math.log(r["eps"] / r["input_norm"] / ratio)))
            cells = [_short(r["bounds"][n] / r["ascent"]) if n in r["bounds"] else "–" for n in names]
            lines.append(
                f"| {layer} | {ratio:g} | {_short(r['ascent'] / r['eps'])} | " + " | ".join(cells) + " |"
            )
    return "\n".join(lines)


def _short(x: float) -> str:
    """Three digits; powers of ten from 10⁴ on."""
    if x >= 1e4:
        mantissa, exponent = f"{x:.0e}".split("e")
        return f"{mantissa}·10^{int(exponent)}"
    return f"{x:.{max(0, 2 - math.floor(math.log10(x)))}f}"


def between(text: str, name: str) -> tuple[str, str, str]:
    """A page before, between and after the marks `<!-- name -->` and `<!-- end -->`."""
    mark, end = f"<!-- {name} -->\n", "\n<!-- end -->"
    before, rest = text.split(mark)
    middle, after = rest.split(end, 1)
    return before + mark, middle, end + after


def write_into_docs(name: str, content: str, page: Path = DOCS) -> None:
    """Put a table between its marks in the page."""
    before, _, after = between(page.read_text(), name)
    page.write_text(before + content + after)


# ---------------------------------------------------------------------------------------------------------
# figures


def _grid(count: int, columns: int, width: float = 4.6, height: float = 3.6) -> tuple[Any, list[Any]]:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = -(-count // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(width * columns, height * rows), layout="constrained", squeeze=False
    )
    flat = list(axes.flat)
    for ax in flat[count:]:
        ax.axis("off")
    return figure, flat


def _legend(figure: Any, axes: list[Any], columns: int = 4, styles: dict[str, Any] | None = None) -> None:
    """One legend below for what occurs in any panel; in grey, what line styles mean."""
    from matplotlib.lines import Line2D

    found: dict[str, Any] = {}
    for ax in axes:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    found |= {label: Line2D([], [], color="grey", linestyle=style) for label, style in (styles or {}).items()}
    figure.legend(found.values(), found.keys(), loc="outside lower center", ncols=columns, fontsize=10)


def plot_eps(rows: list[Row], path: Path, group: str) -> None:
    rows = [r for r in rows if r["group"] == group]
    names = list(dict.fromkeys(r["layer"] for r in rows))
    figure, axes = _grid(len(names), 4 if len(names) > 5 else 3)
    for ax, name in zip(axes, names, strict=False):
        mine = [r for r in rows if r["layer"] == name]
        x = [r["eps"] for r in mine]
        for bound in mine[0]["bounds"]:
            y = [r["bounds"][bound] / r["eps"] for r in mine]
            style = "--" if bound == "LoFAST, naive" else "-"  # it often lies on the other
            ax.loglog(x, y, style, color=COLOURS[bound], label=f"upper bound: {bound}")
        if mine[0]["key_sensitivity"] is not None:
            ax.axhline(
                mine[0]["key_sensitivity"],
                color="grey",
                linestyle=":",
                label="attention held fixed (no bound)",
            )
        y = [r["ascent"] / r["eps"] for r in mine]
        ax.loglog(x, y, color="black", marker=".", label="lower bound: gradient ascent")
        r = mine[0]
        ax.set_title(f"{name}\n{r['n']} tokens × {r['d']}, {r['heads']} head(s), ‖X‖ = {r['input_norm']:.3g}")
        ax.set_xlabel("radius ε of the ball, l2 (units of X)")
        ax.set_ylabel("output move / ε")
        ax.grid(alpha=0.3)
    figure.suptitle(
        "How far the output of one attention layer can move, per unit of ε: upper bounds (lower is tighter)"
    )
    _legend(figure, axes)
    figure.savefig(path, dpi=80)


def plot_input(rows: list[Row], path: Path) -> None:
    names = list(dict.fromkeys(r["layer"] for r in rows))
    names = [
        n for n in ("random, 3 heads", "random L2 attention, 3 heads", "digits, layer 2") if n in names
    ] + [n for n in names if n.startswith(("pgd", "ibp"))]
    figure, axes = _grid(len(names), 4)
    for ax, name in zip(axes, names, strict=False):
        mine = [r for r in rows if r["layer"] == name]
        for relative, style in ((SMALL, "-"), (LARGE, "--")):
            some = [r for r in mine if r["relative_eps"] == relative]
            for bound in some[0]["bounds"]:
                y = [r["bounds"][bound] / r["ascent"] for r in some]
                label = f"upper bound: {bound}" if style == "-" else None
                ax.loglog([r["input_norm"] for r in some], y, style, color=COLOURS[bound], label=label)
        ax.axhline(1.0, color="black", label="1: ascent reaches the bound")
        ax.axvline(next(r["input_norm"] for r in mine if r["factor"] == 1.0), color="grey", linewidth=0.7)
        ax.set(title=name, xlabel="‖X‖_F (grey line: the layer's own input)", ylabel="bound / ascent")
        ax.grid(alpha=0.3)
    figure.suptitle(
        "Tightness at inputs of several norms, X times 1/16 to 16 "
        "(ascent is below the truth: a ratio of 10 means at most ten times too large)"
    )
    _legend(figure, axes, 5, {"ε = 0.001 ‖X‖_F": "-", "ε = 0.1 ‖X‖_F": "--"})
    figure.savefig(path, dpi=80)


def plot_weights(rows: list[Row], path: Path) -> None:
    names = list(dict.fromkeys(r["layer"] for r in rows))
    uses = ["ours", "LoFAST"]
    figure, axes = _grid(len(names) * 2, len(names))
    for k, use in enumerate(uses):
        for ax, name in zip(axes[k * len(names) :], names, strict=False):
            for i, r in enumerate(r for r in rows if (r["layer"], r["bound"]) == (name, use)):
                colour, sizes = f"C{i}", r["sizes"]
                ax.plot(sizes, r["up"], color=colour, marker=".", label=f"perturbed: {r['part']}")
                ax.plot(sizes, r["down"], color=colour, linestyle="--")
                ax.errorbar(sizes, r["random_mean"], r["random_std"], color=colour, linestyle=":", capsize=2)
            ax.set(title=f"{name}: bound “{use}”", xscale="log")
            ax.set(xlabel="relative size of the perturbation (Frobenius)")
            ax.set_ylabel("bound after / bound before")
            ax.grid(alpha=0.3, which="both")
    figure.suptitle(
        f"What perturbing one weight matrix or the input does to the bound, at ε = {LARGE:g} ‖X‖_F"
    )
    styles = {"along the bound's gradient": "-", "against it": "--", "random: mean ± deviation": ":"}
    _legend(figure, axes, 4, styles)
    figure.savefig(path, dpi=80)


def plot_two_heads(rows: list[Row], path: Path) -> None:
    figure, axes = _grid(2, 2, 6.0, 4.6)
    sweep = [min((r for r in rows if r["c"] == c), key=lambda r: abs(r["relative_eps"] - LARGE)) for c in
             dict.fromkeys(r["c"] for r in rows)]  # fmt: skip
    x = [r["c"] for r in sweep]
    ax = axes[0]
    ax.plot(x, [r["naive"] / r["single"] for r in sweep], color="C2", label="sum of norms (naive): 1 + |c|")
    ax.plot(
        x, [r["key_sensitivity"] / r["single"] for r in sweep], color="C0", label="key-sensitivity: |1 + c|"
    )
    for r in sweep:
        if abs(r["c"]) == 0.5:
            y = r["key_sensitivity"] / r["single"]
            ax.plot(r["c"], y, "o", color="black")
            ax.annotate(f"c = {r['c']:+g}: {y:.3f}", (r["c"], y), (10, -12), textcoords="offset points")
    ax.set(xlabel="c, where W_O2 = c · W_O1", ylabel="sensitivity / that of the first head alone")
    ax.set_title("Attention held fixed: norms see no sign")
    ax.legend()
    ax = axes[1]
    for c, style in ((-0.5, "-"), (0.5, "--")):
        mine = [r for r in rows if r["c"] == c]
        eps = [r["eps"] for r in mine]
        for bound in ("ours", "LoFAST", "LoFAST, naive"):
            y = [r["bounds"][bound] / r["eps"] for r in mine]
            ax.loglog(eps, y, style, color=COLOURS[bound], label=f"{bound}, c = {c:+g}")
        y = [r["ascent"] / r["eps"] for r in mine]
        ax.loglog(eps, y, style, color="black", label=f"gradient ascent, c = {c:+g}")
    ax.set(xlabel="radius ε of the ball, l2 (units of X)", ylabel="output move / ε")
    ax.set_title("The whole layer: moves of P are summed over heads")
    ax.set_ylim(1.0, 600.0)
    ax.legend(fontsize=8, ncols=2, loc="upper left")
    for ax in axes[:2]:
        ax.grid(alpha=0.3)
    figure.suptitle("Two equal heads but for the sign of the second one's output weights (random layer)")
    figure.savefig(path, dpi=90)


def plot(study: str, rows: list[Row], folder: Path) -> None:
    """Write the study's figures."""
    if study == "eps":
        for group in dict.fromkeys(r["group"] for r in rows):
            plot_eps(rows, folder / f"layer_eps-{group}.png", group)
    else:
        draw = {"input": plot_input, "weights": plot_weights, "two-heads": plot_two_heads}[study]
        draw(rows, folder / f"layer_{study}.png")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--study", choices=[*STUDIES, "all", "none"], default="all", help="default all")
    parser.add_argument("--quick", action="store_true", help="one tiny random layer; written only with --out")
    parser.add_argument("--seed", type=int, default=0, help="of layers, starts and directions (default 0)")
    parser.add_argument("--plot", action="store_true", help="figures too (needs matplotlib, extra `plot`)")
    parser.add_argument("--docs", action="store_true", help="put the table into docs/bounds.md")
    parser.add_argument("--out", type=Path, help="folder of JSON and figures (default benchmarks/results)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    folder = args.out or OUT
    wanted = [s for s in STUDIES if args.study in (s, "all")]
    layers = examples(args.quick, args.seed) if wanted else []
    failed: list[str] = []
    with progress(sum(13 if s == "two-heads" else len(layers) for s in wanted)) as begin:
        for study in wanted:
            rows = STUDIES[study](layers, args.quick, args.seed, begin)
            failed += violations(rows)
            if args.quick and args.out is None:
                print("\n".join(json.dumps(r) for r in rows))
                continue
            folder.mkdir(parents=True, exist_ok=True)
            command = " ".join(["python benchmarks/layer_tightness.py", *sys.argv[1:]])
            result = {"command": command, "seed": args.seed, "violations": failed, "rows": rows}
            (folder / f"layer_{study}.json").write_text(json.dumps(result, indent=1))
    if args.plot:
        for study in wanted or STUDIES:
            if (folder / f"layer_{study}.json").is_file():
                plot(study, load(study, folder), folder)
    if args.docs:
        write_into_docs("table of benchmarks/layer_tightness.py", table(load("eps")))
    if failed:
        sys.exit("bounds below what ascent found:\n" + "\n".join(failed))


if __name__ == "__main__":
    main()
