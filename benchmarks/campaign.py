"""No bound lies inside what an attack reaches: random transformers, five radii, every norm, float64.

    python benchmarks/campaign.py [--networks 120] [--seed 0]
    python benchmarks/campaign.py --shared       # the competition's ViTs and properties, every norm

Every network is attacked by projected gradient descent on the smallest margin; a bound above what it finds is
a violation, and the run fails. Recorded are the number of comparisons and how close they came.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from shared_vits import RESULTS, load, names
from torch import Tensor, nn

from attn_bounds import InputSet, Specification, Verifier, lirpa, pgd
from attn_bounds.report import progress
from onnx_export import attention

RADII = (1e-3, 1e-2, 0.1, 0.3, 1.0)
NORMS = (1.0, 2.0, math.inf)
METHODS = ("ibp", "sensitivity", "sensitivity-crown", "sensitivity-alpha", "crown")
ACTIVATIONS = {
    "relu": torch.relu,
    "leaky_relu": lambda x: nn.functional.leaky_relu(x, 0.1),
    "tanh": torch.tanh,
    "gelu": lambda x: 0.5 * x * (1.0 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x))),
    "silu": lambda x: x * torch.sigmoid(x),
}


class Transformer(nn.Module):
    """Residual attention and MLP blocks of random size with weights of random scale; three classes."""

    def __init__(self, rng: random.Random, seed: int) -> None:
        super().__init__()
        self.tokens, self.heads = rng.randint(1, 5), rng.randint(1, 3)
        self.width = self.heads * rng.randint(1, 3)
        self.activation = rng.choice(sorted(ACTIVATIONS))
        self.masked = rng.random() < 0.3
        scale = rng.choice([0.5, 1.0, 1.5])
        generator = torch.Generator().manual_seed(seed)

        def weight(rows: int, columns: int) -> Tensor:
            values = torch.randn((rows, columns), generator=generator, dtype=torch.float64)
            return nn.Parameter(scale * values / math.sqrt(rows), requires_grad=False)

        d = self.width
        self.layers = nn.ModuleList(
            nn.ParameterDict(
                {
                    "qkv": weight(d, 3 * d),
                    "out": weight(d, d),
                    "up": weight(d, 2 * d),
                    "down": weight(2 * d, d),
                }
            )
            for _ in range(rng.randint(1, 3))
        )
        self.head = weight(d, 3)
        self.register_buffer("mask", torch.triu(torch.full((self.tokens, self.tokens), -30.0).double(), 1))

    def forward(self, x: Tensor) -> Tensor:
        n, h, d = self.tokens, self.heads, self.width
        for layer in self.layers:
            qkv = torch.matmul(x, layer["qkv"])
            q, k, v = (t.reshape(-1, n, h, d // h).transpose(1, 2) for t in qkv.split(d, dim=2))
            mask = self.mask if self.masked else None
            o = attention(q, k, v, mask, scale=(d // h) ** -0.5).transpose(1, 2).reshape(-1, n, d)
            x = x + torch.matmul(o, layer["out"])
            x = x + torch.matmul(ACTIVATIONS[self.activation](torch.matmul(x, layer["up"])), layer["down"])
        return torch.matmul(x.mean(1), self.head)


Item = tuple[str, Verifier, InputSet, Specification]  # with a name


def random_networks(count: int, seed: int) -> Iterator[Item]:
    """Balls of every norm and radius around a point of each network."""
    rng = random.Random(seed)
    for i in range(count):
        model = Transformer(rng, seed * 10**6 + i).double()
        shape = (model.tokens, model.width)
        verifier = Verifier(model, input_shape=shape, dtype=torch.float64)
        x = torch.randn((1, *shape), generator=torch.Generator().manual_seed(i), dtype=torch.float64)
        spec = verifier.specification(int(model(x).argmax()))
        for norm, radius in itertools.product(NORMS, RADII):
            yield f"network {i}", verifier, InputSet.ball(x, norm, radius), spec


def shared_properties(models: str) -> Iterator[Item]:
    """The competition's properties, and l1 and l2 balls around their centres."""
    for name in names(models):
        verifier, box, spec = load(name, dtype=torch.float64)
        pgd_trained = name.startswith("pgd")
        yield name, verifier, box, spec
        yield name, verifier, InputSet.ball(box.center, 1.0, 2.0 if pgd_trained else 1.0), spec
        yield name, verifier, InputSet.ball(box.center, 2.0, 0.6 if pgd_trained else 0.3), spec


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--networks", type=int, default=120)
    parser.add_argument("--shared", action="store_true", help="the competition's properties instead")
    parser.add_argument("--models", default="pgd,ibp", help="for --shared, by the first letters")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--methods", default=",".join(METHODS))
    args = parser.parse_args()
    torch.set_num_threads(1)
    methods = args.methods.split(",")
    start = time.perf_counter()
    counts, unknown = dict.fromkeys(methods, 0), dict.fromkeys(methods, 0)
    closest: dict[str, float] = dict.fromkeys(methods, math.inf)
    violations: list[dict[str, Any]] = []
    items = shared_properties(args.models) if args.shared else random_networks(args.networks, args.seed)
    total = 3 * len(names(args.models)) if args.shared else args.networks * len(NORMS) * len(RADII)
    with progress(total) as begin:
        for name, verifier, ball, spec in items:
            begin(name)
            model = verifier.module
            found = pgd(
                model,
                ball,
                spec,
                restarts=10,
                steps=40,
                seed=args.seed,
                stop_early=False,
                dtype=torch.float64,
            )
            centre = float(spec.margin(spec.margins(model(ball.center.double()).flatten(1))))
            for method in methods:
                verifier.forget()
                bound = float(spec.margin(verifier.row_bounds([ball], [spec], method)[0]))
                counts[method] += 1
                if not math.isfinite(bound):
                    unknown[method] += 1
                    continue
                gap = (found.margin - bound) / max(1e-12, centre - bound)
                closest[method] = min(closest[method], gap)
                if bound > found.margin + 1e-10:
                    case = {"case": name, "norm": str(ball.norm), "eps": ball.eps}
                    violations.append({**case, "method": method, "bound": bound, "attack": found.margin})
    result = {
        "command": " ".join(["python benchmarks/campaign.py", *sys.argv[1:]]),
        "lirpa": lirpa.version(),
        "cases": total,
        "comparisons": counts,
        "bounds_not_finite": unknown,
        "smallest_gap_over_loss": closest,  # 0: the attack reaches the bound
        "violations": violations,
        "seconds": time.perf_counter() - start,
    }
    what = "campaign_shared" if args.shared else "campaign"
    (RESULTS / f"{what}-{lirpa.version()}.json").write_text(json.dumps(result, indent=1))
    print(json.dumps(result, indent=1))
    if violations:
        sys.exit("a bound was passed")


if __name__ == "__main__":
    main()
