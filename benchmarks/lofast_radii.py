"""Certified l2 radii of lofast and lofast-paper beside sensitivity and crown, and what one bound costs.

    python benchmarks/lofast_radii.py radii [--models pgd,ibp,digits] [--methods lofast,lofast-paper,…]
    python benchmarks/lofast_radii.py large [--activation gelu --tokens 197 --width 768 --heads 12 …]

Radii are found by bisection to 2%, of ten properties for each of the competition's Vision Transformers (where
they are there) and of ten inputs for the bundled model; the attack does not limit them. `large` bounds a
Transformer with random weights. Finished rows are kept.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import sys
import time
from typing import Any

from shared_vits import DATA, RESULTS, ROOT, load, names

METHODS = "lofast,lofast-paper,sensitivity,crown"


def _cases(models: list[str], count: int) -> list[str]:
    cases = [f"digits_{i}" for i in range(count)] if "digits" in models else []
    if DATA.is_dir():
        for m in models:
            cases += names(m)[:count]
    return cases


def _open(name: str) -> tuple[Any, Any, Any]:
    import numpy as np
    import torch

    from attn_bounds import Verifier

    torch.set_num_threads(1)
    if not name.startswith("digits"):
        verifier, inputs, spec = load(name)
        return verifier, inputs.center, spec
    verifier = Verifier(ROOT / "examples" / "digits_vit.onnx")
    with np.load(ROOT / "examples" / "digits_test.npz") as data:
        i = int(name.split("_")[1])
        return verifier, torch.from_numpy(data["x"][i : i + 1]), verifier.specification(int(data["y"][i]))


def radius(name: str, method: str) -> dict[str, Any]:
    """Bisection from below to 2%, and the seconds that one bound takes: the first, and later ones."""
    from attn_bounds import InputSet, lirpa

    verifier, center, spec = _open(name)
    center = verifier.input(center)  # else the ball grows by what rounding moves its centre
    verifier.prepare(method)
    seconds: list[float] = []

    def certified(eps: float) -> bool:
        start = time.perf_counter()
        rows = verifier.row_bounds([InputSet.ball(center, 2.0, eps)], [spec], method)[0]
        seconds.append(time.perf_counter() - start)
        return float(spec.margin(rows)) > 0

    low, high = 0.0, math.inf
    probe = 0.3 if method in ("sensitivity", "crown") else 1e-5
    while (low == 0.0 or high == math.inf or high > 1.02 * low) and probe > 1e-10:
        if certified(probe):
            low = probe
        else:
            high = probe
        probe = 4.0 * low if high == math.inf else high / 4.0 if low == 0.0 else math.sqrt(low * high)
    return {
        "case": name,
        "method": method,
        "radius": low,
        "seconds": [seconds[0], sum(seconds[1:]) / max(1, len(seconds) - 1)],
        "evaluations": len(seconds),
        "lirpa": lirpa.version(),
    }


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per model and method: geometric mean of the radius, and of its ratio to crown's."""
    out = []
    by = {(r["case"], r["method"]): r for r in rows if "case" in r}
    for model in dict.fromkeys(c.rsplit("_", 1)[0] for c, _ in by):
        for method in dict.fromkeys(m for _, m in by):
            mine = [r for (c, m), r in by.items() if m == method and c.rsplit("_", 1)[0] == model]
            known = [r for r in mine if r["radius"] > 0]
            crown = [
                (r["radius"], by[r["case"], "crown"]["radius"]) for r in known if (r["case"], "crown") in by
            ]
            ratios = [a / b for a, b in crown if b > 0]
            out.append(
                {
                    "model": model,
                    "method": method,
                    "cases": len(mine),
                    "radius": _mean([r["radius"] for r in known]),
                    "ratio_to_crown": _mean(ratios),
                    "seconds_first": sum(r["seconds"][0] for r in mine) / max(1, len(mine)),
                    "seconds_later": sum(r["seconds"][1] for r in mine) / max(1, len(mine)),
                }
            )
    return out


def _mean(values: list[float]) -> float | None:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else None


def large(
    tokens: int, width: int, heads: int, layers: int, activation: str = "relu", classes: int = 1000
) -> dict[str, Any]:
    """What bounds of each method cost on a pre-norm Transformer of random weights: with the first input, for
    another input, and for another radius; the last two in forward passes, too."""
    import torch
    from torch import Tensor, nn

    from attn_bounds import lirpa
    from attn_bounds.module import BoundedModule
    from onnx_export import attention

    torch.set_num_threads(1)
    torch.manual_seed(0)

    class Norm(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            z = x - x.mean(-1, keepdim=True)
            return z * (1.0 / torch.sqrt((z * z).mean(-1, keepdim=True) + 1e-6))

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.act = Norm(), {"relu": nn.ReLU, "gelu": nn.GELU}[activation]()
            self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(x)
            q, k, v = (
                f(y).reshape(-1, tokens, heads, width // heads).permute(0, 2, 1, 3)
                for f in (self.q, self.k, self.v)
            )
            o = attention(q, k, v, scale=(width // heads) ** -0.5).permute(0, 2, 1, 3)
            x = x + self.o(o.reshape(-1, tokens, width))
            return x + self.down(self.act(self.up(self.norm(x))))

    class Transformer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.head = (
                nn.Sequential(*(Layer() for _ in range(layers))),
                nn.Linear(width, classes),
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.layers(x).mean(1))

    model, inputs = Transformer().eval(), torch.randn(3, 1, tokens, width)
    with torch.no_grad():
        model(inputs[0])
        start = time.perf_counter()
        for x in inputs:
            model(x)
    forward = (time.perf_counter() - start) / len(inputs)
    start = time.perf_counter()
    graph = BoundedModule(model, inputs[0])
    found: dict[str, Any] = {
        "large": [tokens, width, heads, layers, activation],
        "forward_seconds": forward,
        "graph_seconds": time.perf_counter() - start,
    }
    c = torch.zeros(1, 9, classes)
    c[:, :, 0], c[0, range(9), range(1, 10)] = 1.0, -1.0
    for method in ("lofast-paper", "lofast"):
        seconds, widths = [], []
        for x in inputs:
            for eps in (1e-10, 2e-10, 4e-10):  # where margins may hold
                ball = lirpa.BoundedTensor(x, lirpa.perturbation(2.0, eps))
                start = time.perf_counter()
                low, high = graph.compute_bounds(x=(ball,), C=c, method=method)
                seconds.append(time.perf_counter() - start)
                widths.append(float((high - low).max()) / 2 / eps)
        # the first input pays for what belongs to the weights
        first, later = seconds[3::3], [t for i, t in enumerate(seconds) if i % 3]
        found[method] = {
            "seconds_model_and_input": seconds[0],
            "seconds_input": min(first),
            "seconds_radius": min(later),
            "forwards_input": min(first) / forward,
            "forwards_radius": min(later) / forward,
            "width_over_eps": widths[1],
        }
        found["peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps(found), file=sys.stderr, flush=True)
    return {**found, "lirpa": lirpa.version()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["radii", "large"])
    parser.add_argument("--models", default="pgd,ibp,digits")
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--count", type=int, default=10, help="cases per model")
    for name, size in (("tokens", 197), ("width", 768), ("heads", 12), ("layers", 12)):
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--activation", default="relu", choices=["relu", "gelu"])
    args = parser.parse_args()
    from attn_bounds import lirpa

    out = RESULTS / f"lofast_radii-{lirpa.version()}.json"
    known: dict[str, Any] = json.loads(out.read_text()) if out.is_file() else {"commands": [], "rows": []}
    rows = known["rows"]
    command = "python benchmarks/lofast_radii.py " + " ".join(sys.argv[1:])
    known["commands"] = list(dict.fromkeys([*known["commands"], command]))

    def keep(row: dict[str, Any]) -> None:
        rows.append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)
        out.write_text(json.dumps({**known, "summary": summary(rows), "rows": rows}, indent=1))

    if args.what == "large":
        keep(large(args.tokens, args.width, args.heads, args.layers, args.activation))
        return
    done = {(r.get("case"), r.get("method")) for r in rows}
    for method in args.methods.split(","):
        for name in _cases(args.models.split(","), args.count):
            if (name, method) not in done:
                keep(radius(name, method))
    for s in summary(rows):
        print(json.dumps(s))


if __name__ == "__main__":
    main()
