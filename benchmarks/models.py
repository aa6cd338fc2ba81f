"""What becomes of real models: exported, optimised, loaded, compared with onnxruntime, bounded, attacked.

    python benchmarks/models.py                            # everything, into benchmarks/results and docs
    python benchmarks/models.py --only bert --only gpt2    # by the beginning of the name, printed only
    python benchmarks/models.py --keep tests/onnx_export/models   # and copy there the files that CI loads

Needs the extra `models`. A bound above what the attack finds, or a module that differs from onnxruntime, is
a wrong result, and the run fails.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from dressings import DRESSINGS, EXPORTS, OPTIMISED, NotWritten, export, optimise
from zoo import HEADS, WIDTH, ZOO

from attn_bounds import AttnBoundsError, InputSet, Verifier, pgd
from attn_bounds.report import progress

ROOT = Path(__file__).resolve().parent.parent
METHODS = ("ibp", "crown", "sensitivity")
NORM, EPS = 2.0, 0.05
TOLERANCE = 1e-5  # from onnxruntime, relative to the outputs


def write(name: str, folder: Path) -> dict[str, Path | str]:
    """Every dressing of a model: its file, or why there is none."""
    entry = ZOO[name]
    model, example = entry.make()
    found: dict[str, Path | str] = {}
    for dressing in DRESSINGS:
        path = folder / f"{name}.{dressing}.onnx"
        try:
            if dressing in EXPORTS:
                export(model, example, path, dressing)
            else:
                base, how = OPTIMISED[dressing]
                source = found[base]
                if isinstance(source, str):
                    raise NotWritten(f"{base}: {source}")
                optimise(source, path, how, entry.optimiser, HEADS, WIDTH)
            found[dressing] = path
        except NotWritten as e:
            found[dressing] = str(e)
    return found


def operators(path: Path) -> str:
    """Operators outside the standard, for the table."""
    nodes = onnx.load(path).graph.node
    return ", ".join(sorted({n.op_type for n in nodes if n.domain not in ("", "ai.onnx")}))


def judge(path: Path, seconds_for: dict[str, float] | None = None) -> dict[str, Any]:
    """What becomes of a file."""
    row: dict[str, Any] = {"bytes": path.stat().st_size, "fused": operators(path)}
    begin = time.perf_counter()
    try:
        verifier = Verifier(path, dtype=torch.float64)
    except AttnBoundsError as e:
        return {
            **row,
            "loads": False,
            "reason": str(e).replace(f"{path}: ", "").replace(str(path), path.name),
        }
    info = verifier.module.info
    row |= {"loads": True, "load_seconds": time.perf_counter() - begin, "attention": len(info.attention)}
    row["masked"] = sum(u.masked for u in info.attention)
    row["notes"] = list(info.notes)
    row["difference"] = difference(path, verifier)
    x = torch.randn(
        (1, *verifier.input_shape), generator=torch.Generator().manual_seed(3), dtype=torch.float64
    )
    with torch.no_grad():
        label = int(verifier.module(x).argmax())
    spec, ball = verifier.specification(label), InputSet.ball(x, NORM, EPS)
    attack = pgd(verifier.module, ball, spec, restarts=6, steps=30, stop_early=False, dtype=torch.float64)
    row["attack"] = attack.margin
    for method in METHODS:
        verifier.forget()
        begin = time.perf_counter()
        try:
            bound = float(spec.margin(verifier.row_bounds([ball], [spec], method)[0]))
            row[method] = {"margin": bound, "seconds": time.perf_counter() - begin}
            row[method]["sound"] = not bound > attack.margin + 1e-9
        except (AttnBoundsError, NotImplementedError) as e:
            row[method] = {"reason": str(e)}
        except Exception as e:
            row[method] = {"error": f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"}
    return row


def difference(path: Path, verifier: Verifier) -> float | None:
    """Largest difference from onnxruntime at batch 1 and 3, relative to the outputs; None for integers."""
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    wanted = session.get_inputs()[0]
    if "int" in wanted.type:
        return None
    worst = 0.0
    for batch in (1, 3):
        x = np.random.default_rng(batch).standard_normal((batch, *verifier.input_shape)).astype(np.float32)
        theirs = session.run(None, {wanted.name: x})[0]
        with torch.no_grad():
            mine = verifier.module(torch.from_numpy(x).double()).numpy()
        worst = max(worst, float(np.abs(mine - theirs).max() / max(1.0, np.abs(theirs).max())))
    return worst


def wrong(row: dict[str, Any]) -> list[str]:
    """What is wrong with an outcome; refusals are not."""
    if not row.get("loads"):
        return []
    found = [m for m in METHODS if row[m].get("sound") is False or "error" in row[m]]
    if row["difference"] is not None and not row["difference"] <= TOLERANCE:
        found.append("differs from onnxruntime")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", default=[], metavar="NAME")
    parser.add_argument("--dressing", action="append", default=[], choices=DRESSINGS)
    parser.add_argument("--folder", type=Path, help="where the files go (default: nowhere for good)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    names = [n for n in ZOO if not args.only or n.startswith(tuple(args.only))]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary, progress(len(names)) as begin:
        folder = args.folder or Path(temporary)
        folder.mkdir(exist_ok=True)
        for name in names:
            begin(name)
            for dressing, path in write(name, folder).items():
                if args.dressing and dressing not in args.dressing:
                    continue
                row = {"model": name, "library": ZOO[name].library, "dressing": dressing}
                row |= {"written": False, "reason": path} if isinstance(path, str) else judge(path)
                rows.append(row)
                print(json.dumps(row), file=sys.stderr)


if __name__ == "__main__":
    main()
