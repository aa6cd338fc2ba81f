"""The two competition ViTs and their twenty properties, for the benchmarks beside this file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
DATA = ROOT.parent / "shared" / "data" / "vnncomp_vit"


def names(models: str = "pgd,ibp") -> list[str]:
    """The properties of the models whose names begin like one of these; stops where the files are absent."""
    if not DATA.is_dir():
        sys.exit(f"the competition files are not there: {DATA}")
    lines = (DATA / "instances.csv").read_text().split()
    every = [Path(line.split(",")[1]).name.split(".")[0] for line in lines]
    return [n for n in every if n.startswith(tuple(models.split(",")))]


def model_of(name: str) -> Path:
    """Path of the model that a property is about."""
    return DATA / f"{name.rsplit('_', 1)[0]}.onnx"


def load(name: str, **options: Any) -> tuple[Any, Any, Any]:
    """Verifier of the model, input set and specification of a property; `options` of `Verifier`."""
    from attn_bounds import Verifier, read_vnnlib

    verifier = Verifier(model_of(name), **options)
    prop = read_vnnlib(DATA / "vnnlib" / f"{name}.vnnlib.gz", verifier.input_shape, verifier.outputs)
    return verifier, *prop.cases[0]
