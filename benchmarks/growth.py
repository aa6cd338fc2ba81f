"""How time and memory of method `sensitivity` grow with tokens, width and depth; and a memory limit at work.

    python benchmarks/growth.py             # one dimension at a time, random weights, fitted exponents
    python benchmarks/growth.py --limit     # 6 layers, 192 wide, 65 tokens within 4 GB

Transformers with random weights (residual attention and ReLU blocks, mean over the tokens); an l2 ball around
a random image. Every row runs in a process of its own.
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

OUT = Path(__file__).resolve().parent / "results"
BASE = {"tokens": 16, "width": 48, "depth": 2}
AXES = {"tokens": (16, 64, 196), "width": (48, 192, 384), "depth": (2, 6, 12)}


def random_vit(tokens: int, width: int, depth: int, class_token: bool, seed: int = 0) -> Any:
    """A ViT on (3, 4√tokens, 4√tokens) images: patches of 4, heads 16 or 64 wide, MLP 4 times wider."""
    import torch
    from torch import nn

    from onnx_export import attention

    torch.manual_seed(seed)
    heads = max(1, width // 64) if width > 48 else 3

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(width, 3 * width)
            self.out = nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            b, n, d = x.shape
            q, k, v = (
                t.reshape(b, n, heads, d // heads).transpose(1, 2) for t in self.qkv(x).split(width, dim=2)
            )
            o = attention(q, k, v, scale=(d // heads) ** -0.5).transpose(1, 2).reshape(b, n, d)
            x = x + self.out(o)
            return x + self.down(torch.relu(self.up(x)))

    class ViT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patch = nn.Conv2d(3, width, 4, 4)
            self.token = nn.Parameter(0.02 * torch.randn(1, width)) if class_token else None
            self.place = nn.Parameter(0.02 * torch.randn(tokens + class_token, width))
            self.layers = nn.ModuleList(Layer() for _ in range(depth))
            self.head = nn.Linear(width, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.patch(x).flatten(2).transpose(1, 2)
            if self.token is not None:
                x = torch.cat([self.token.unsqueeze(0).expand(x.shape[0], 1, width), x], 1)
            x = x + self.place
            for layer in self.layers:
                x = layer(x)
            return self.head(x.mean(1))

    return ViT().eval()


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """One pass, nine margins; the graph is built before the clock starts."""
    import torch

    from attn_bounds import InputSet, Verifier, lirpa

    torch.set_num_threads(job["threads"])
    side = 4 * math.isqrt(job["tokens"])
    model = random_vit(job["tokens"], job["width"], job["depth"], job["class_token"])
    verifier = Verifier(model, input_shape=(3, side, side), memory=job["memory"])
    x = torch.rand((1, 3, side, side), generator=torch.Generator().manual_seed(1))
    label = int(model(x).argmax())
    spec = verifier.specification(label)
    ball = InputSet.ball(x, 2.0, job["eps"])
    verifier.prepare("sensitivity")
    start = time.perf_counter()
    found = verifier.certify_set(ball, spec, method="sensitivity", attack=False)
    tried = found.tried[-1]
    return {
        **job,
        "seconds": time.perf_counter() - start,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "margin": found.margin,
        "margin_at_centre": float(spec.margin(spec.margins(model(x).double()))),
        "errors_without_symbols": tried.get("errors_without_symbols"),
        "margin_they_take": tried.get("margin_they_take"),
        "lirpa": lirpa.version(),
    }


def exponents(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Slope of log time over log size, by least squares, per axis."""
    out = {}
    for axis in AXES:
        others = {k: v for k, v in BASE.items() if k != axis}
        points = [
            (math.log(r[axis]), math.log(r["seconds"]))
            for r in rows
            if all(r[k] == v for k, v in others.items())
        ]
        if len(points) > 1:
            mean_x, mean_y = (sum(p[i] for p in points) / len(points) for i in (0, 1))
            out[axis] = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum(
                (x - mean_x) ** 2 for x, _ in points
            )
    return out


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--limit", action="store_true", help="the model that must fit into a limit")
    parser.add_argument("--memory", help="limit (default 12GB; 4GB with --limit)")
    parser.add_argument("--eps", type=float, default=0.01)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    memory = args.memory or ("4GB" if args.limit else "12GB")
    if args.limit:
        jobs = [{"tokens": 64, "width": 192, "depth": 6, "class_token": True}]
    else:
        sizes = [{**BASE, axis: value} for axis, values in AXES.items() for value in values]
        jobs = [{**s, "class_token": False} for i, s in enumerate(sizes) if s not in sizes[:i]]
    out = OUT / ("memory_limit.json" if args.limit else "growth.json")
    rows: list[dict[str, Any]] = []
    context = multiprocessing.get_context("spawn")
    for job in jobs:
        with context.Pool(1) as pool:
            rows.append(
                pool.apply(measure, ({**job, "memory": memory, "eps": args.eps, "threads": args.threads},))
            )
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
        result = {"command": " ".join(["python benchmarks/growth.py", *sys.argv[1:]]), "rows": rows}
        if not args.limit:
            result["time_exponents"] = exponents(rows)
        out.parent.mkdir(exist_ok=True)
        out.write_text(json.dumps(result, indent=1))
    if not args.limit:
        print(json.dumps(exponents(rows)))


if __name__ == "__main__":
    main()
