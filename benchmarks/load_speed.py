"""Time and memory of loading a ViT of 12 layers, 768 wide (330 MB), compared with onnxruntime on the way.

    python benchmarks/load_speed.py                   # into benchmarks/results/load_speed.json
    python benchmarks/load_speed.py --layers 2 --no-save --profile

The file is exported once from random weights. Each way of loading runs in a process of its own; its memory is
the peak of that process, less what the imports alone take.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import multiprocessing
import os
import pstats
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
LIMIT_SECONDS, LIMIT_TIMES = 20.0, 4.0


class Block(nn.Module):
    """Pre-norm transformer block with one projection for queries, keys and values."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, n, width = x.shape
        parts = self.qkv(self.norm1(x)).reshape(batch, n, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4).unbind(0)
        o = F.scaled_dot_product_attention(q, k, v)
        x = x + self.out(o.transpose(1, 2).reshape(batch, n, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class ViT(nn.Module):
    """Patch embedding, class token, positions, blocks, head."""

    def __init__(self, layers: int, width: int, heads: int, image: int, patch: int, classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.places = nn.Parameter(torch.randn(1, (image // patch) ** 2 + 1, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.places
        return self.head(self.norm(self.blocks(x))[:, 0])


def write(path: Path, layers: int, width: int, heads: int, exporter: str) -> None:
    """Export the model."""
    torch.manual_seed(0)
    model = ViT(layers, width, heads, 224, 16, 1000).eval()
    example = torch.randn(2, 3, 224, 224)
    if exporter == "dynamo":
        batch = torch.export.Dim("batch")
        torch.onnx.export(
            model, (example,), str(path), dynamo=True, dynamic_shapes=({0: batch},), external_data=False
        )
    else:
        torch.onnx.export(
            model, (example,), str(path), dynamo=False, opset_version=17, input_names=["x"],
            dynamic_axes={"x": {0: "batch"}},
        )  # fmt: skip


def _peak() -> int:
    """Largest resident memory so far; `getrusage` would start with that of the parent."""
    line = next(t for t in Path("/proc/self/status").read_text().splitlines() if t.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def _measure(path: str, options: dict[str, Any], profile: bool, results: Any) -> None:
    """Body of a process that loads the file once."""
    import onnxruntime  # noqa: F401

    import onnx_export

    torch.set_num_threads(1)
    before = _peak()
    profiler = cProfile.Profile()
    begin = time.perf_counter()
    if profile:
        profiler.enable()
    module = onnx_export.load(path, **options)
    profiler.disable()
    seconds = time.perf_counter() - begin
    if profile:
        pstats.Stats(profiler).sort_stats("cumulative").print_stats(35)
    results.put(
        {
            "seconds": round(seconds, 2),
            "peak_mb": round((_peak() - before) / 1e6),
            "imports_mb": round(before / 1e6),
            "attention": len(module.info.attention),
            "steps": len(module.steps),
        }
    )


def measure(path: Path, options: dict[str, Any], profile: bool = False) -> dict[str, Any]:
    """Seconds and peak memory of one way of loading."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=_measure, args=(str(path), options, profile, results))
    process.start()
    process.join(600)
    if process.exitcode != 0:
        process.kill()
        raise SystemExit(f"loading {path} failed")
    found = results.get()
    size = os.path.getsize(path) / 1e6
    return {**found, "times_the_file": round(found["peak_mb"] / size, 2)}


def main() -> None:
    """Entry point of the script."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--exporter", action="append", choices=["torchscript", "dynamo"])
    parser.add_argument("--file", type=Path, help="keep the exported file there, or take it from there")
    parser.add_argument("--profile", action="store_true", help="print where the time goes")
    parser.add_argument("--no-save", action="store_true", help="print, record nothing")
    given = parser.parse_args()
    record: dict[str, Any] = {"layers": given.layers, "width": given.width, "torch": torch.__version__}
    good = True
    for exporter in given.exporter or ["torchscript", "dynamo"]:
        with tempfile.TemporaryDirectory() as folder:
            path = given.file or Path(folder) / "vit.onnx"
            if not path.exists():
                write(path, given.layers, given.width, given.heads, exporter)
            rows = {"file_mb": round(os.path.getsize(path) / 1e6)}
            for name, options in (("checked", {}), ("unchecked", {"check": False})):
                rows[name] = measure(path, options, given.profile and name == "checked")
                print(exporter, name, rows[name], flush=True)
            record[exporter] = rows
            worst = rows["checked"]
            good &= worst["seconds"] < LIMIT_SECONDS and worst["times_the_file"] <= LIMIT_TIMES
    if not given.no_save:
        (ROOT / "benchmarks" / "results" / "load_speed.json").write_text(json.dumps(record, indent=1) + "\n")
    print("within the limits" if good else f"above {LIMIT_SECONDS:g} s or {LIMIT_TIMES:g} times the file")
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
