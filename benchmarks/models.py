"""What becomes of real models: exported, optimised, loaded, compared with onnxruntime, bounded, attacked.

    python benchmarks/models.py                # everything; benchmarks/results/models-*.json, docs/models.md
    python benchmarks/models.py --only bert --only gpt2     # by the beginning of the name; printed only
    python benchmarks/models.py --keep tests/onnx_export/models    # only the files that the tests load

Needs the libraries of the extra `models` (see pyproject.toml). A bound above what the attack finds, or a
module that differs from onnxruntime, is a wrong result, and the run fails.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from dressings import DRESSINGS, EXPORTS, PROCESSED, NotWritten, export, process
from models_page import page
from zoo import HEADS, WIDTH, ZOO

from attn_bounds import AttnBoundsError, InputSet, Verifier, lirpa, pgd
from attn_bounds.report import json_line, norm_name, progress

ROOT = Path(__file__).resolve().parent.parent
METHODS = ("ibp", "crown", "sensitivity")
BALLS = ((2.0, 0.05), (math.inf, 0.01))
AGREEMENT = 1e-5  # with onnxruntime, relative to the outputs
VERSIONS = ("torch", "onnx", "onnxruntime", "timm", "transformers", "vit-pytorch")


def write(name: str, folder: Path, dressings: Sequence[str]) -> dict[str, Path | str]:
    """Dressings of a model: the file, or why there is none."""
    entry = ZOO[name]
    model, example = entry.make()
    found: dict[str, Path | str] = {}
    for dressing in DRESSINGS:
        if dressing not in dressings and not any(PROCESSED.get(d, ("",))[0] == dressing for d in dressings):
            continue
        path = folder / f"{name}.{dressing}.onnx"
        try:
            if dressing in EXPORTS:
                export(model, example, path, dressing)
            else:
                base, how = PROCESSED[dressing]
                source = found[base]
                if isinstance(source, str):
                    raise NotWritten(f"{base}: {source}")
                process(source, path, how, entry.optimiser, HEADS, WIDTH)
            found[dressing] = path
        except NotWritten as e:
            found[dressing] = str(e)
    return {d: p for d, p in found.items() if d in dressings}


def judge(path: Path, balls: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """What becomes of a file, and of balls (norm, eps) around one input."""
    nodes = onnx.load(path).graph.node
    fused = sorted({n.op_type for n in nodes if n.domain not in ("", "ai.onnx")})
    row: dict[str, Any] = {"bytes": path.stat().st_size, "fused": fused}
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
    row |= {"loads": True, "load_seconds": time.perf_counter() - begin}
    row |= {"attention": len(info.attention), "masked": sum(u.masked for u in info.attention)}
    row |= {"notes": info.notes, "chosen": info.chosen, "difference": difference(path, verifier), "balls": []}
    g = torch.Generator().manual_seed(3)
    x = torch.randn((1, *verifier.input_shape), generator=g, dtype=torch.float64)
    with torch.no_grad():
        spec = verifier.specification(int(verifier.module(x).argmax()))
    for norm, eps in balls:
        ball = InputSet.ball(x, norm, eps)
        attack = pgd(verifier.module, ball, spec, restarts=6, steps=30, stop_early=False, dtype=torch.float64)
        found: dict[str, Any] = {"norm": norm_name(norm), "eps": eps, "attack": attack.margin}
        for method in METHODS:
            verifier.forget()
            begin = time.perf_counter()
            try:
                bound = float(spec.margin(verifier.row_bounds([ball], [spec], method)[0]))
                found[method] = {"margin": bound, "sound": not bound > attack.margin + 1e-9}
            except AttnBoundsError as e:
                found[method] = {"refused": str(e)}
            except Exception as e:  # what the run is to find
                found[method] = {"error": f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"}
            found[method]["seconds"] = time.perf_counter() - begin
        row["balls"].append(found)
    return row


def difference(path: Path, verifier: Verifier) -> float:
    """Largest difference from onnxruntime on the whole file, at batch 1 and 3, relative to the outputs."""
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    wanted = session.get_inputs()[0]
    worst = 0.0
    for batch in (1, 3):
        g = np.random.default_rng(batch)
        if "int" in wanted.type:
            given = g.integers(5, 40, (batch, *wanted.shape[1:]))
            inner = verifier.oracle.embed(given)
        else:
            given = g.standard_normal((batch, *verifier.input_shape)).astype(np.float32)
            inner = torch.from_numpy(given)
        theirs = session.run(None, {wanted.name: given})[0]
        with torch.no_grad():
            mine = verifier.module(inner.double()).numpy()
        worst = max(worst, float(np.abs(mine - theirs).max() / max(1.0, np.abs(theirs).max())))
    return worst


def wrong(row: dict[str, Any]) -> list[str]:
    """What is wrong with an outcome; a refusal is not."""
    if not row.get("loads"):
        return []
    found = [] if row["difference"] <= AGREEMENT else [f"differs from onnxruntime by {row['difference']:.1e}"]
    for ball in row["balls"]:
        for method in METHODS:
            if ball[method].get("sound") is False or "error" in ball[method]:
                found.append(f"{method}, {ball['norm']}: {ball[method]}")
    return found


def keep(target: Path) -> None:
    """Write the files that the tests load, with what is expected of each."""
    target.mkdir(parents=True, exist_ok=True)
    for old in target.glob("*.onnx"):
        old.unlink()
    expected: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, entry in ZOO.items():
            for path in write(name, Path(folder), entry.kept).values():
                if isinstance(path, str):
                    sys.exit(f"{name}: {path}")
                shutil.copy(path, target / path.name)
                row = judge(path, ())
                expected[path.name] = (
                    {k: row[k] for k in ("attention", "masked", "fused")}
                    if row["loads"]
                    else {"refused": row["reason"][:60]}
                )
    (target / "outcomes.json").write_text(json.dumps(expected, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", default=[], metavar="NAME")
    parser.add_argument("--dressing", action="append", default=[], choices=DRESSINGS)
    parser.add_argument("--folder", type=Path, help="where all files go (default: nowhere for good)")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="where those for the tests go")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.keep is not None:
        keep(args.keep)
        return
    names = [n for n in ZOO if not args.only or n.startswith(tuple(args.only))]
    rows: list[dict[str, Any]] = []
    seen: set[str] = set()
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary, progress(len(names)) as begin:
        folder = args.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for name in names:
            begin(name)
            for dressing, path in write(name, folder, args.dressing or ZOO[name].dressings).items():
                row: dict[str, Any] = {"model": name, "library": ZOO[name].library, "dressing": dressing}
                row |= {"written": False, "reason": path} if isinstance(path, str) else {"written": True}
                if not isinstance(path, str):  # bounds are of the function: the second ball once per model
                    row |= judge(path, BALLS[: 1 + (name not in seen)])
                    seen |= {name} if row["loads"] else set()
                rows.append(row)
                if args.only or args.dressing:
                    print(json_line(row))
    bad = [f"{row['model']}, {row['dressing']}: {what}" for row in rows for what in wrong(row)]
    if not args.only and not args.dressing:
        result = {
            "command": " ".join(["python benchmarks/models.py", *sys.argv[1:]]),
            "versions": {
                "auto_LiRPA": lirpa.version(),
                **{v: importlib.metadata.version(v) for v in VERSIONS},
            },
            "seconds": time.perf_counter() - start,
            "wrong": bad,
            "files": rows,
        }
        where = ROOT / "benchmarks" / "results" / f"models-{lirpa.version()}.json"
        where.write_text(json.dumps(result, indent=1) + "\n")
        (ROOT / "docs" / "models.md").write_text(page(result))
    if bad:
        sys.exit("\n".join(["wrong results:", *bad]))


if __name__ == "__main__":
    main()
