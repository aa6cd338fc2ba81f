"""Options of the command line that say where a model is entered: `--shape`, `--fix`, `--input-node`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .errors import InputError


def parse_sizes(options: Sequence[str]) -> dict[str, int | tuple[int, ...]]:
    """ "sequence=16" and "tokens=1x16"; raises InputError."""
    sizes: dict[str, int | tuple[int, ...]] = {}
    for option in options:
        name, equal, text = option.rpartition("=")
        parts = re.split("[x,]", text)
        if not equal or not name or not all(p.isdigit() and 0 < int(p) < 2**31 for p in parts):
            raise InputError(f"--shape {option!r}: NAME=SIZE is needed, like sequence=16 or tokens=1x16")
        numbers = tuple(int(p) for p in parts)
        sizes[name] = numbers[0] if len(numbers) == 1 else numbers
    return sizes


def parse_fixed(options: Sequence[str]) -> dict[str, Any]:
    """ "mask=ones", "mask=0.5" and "mask=file.npy"; raises InputError."""
    values: dict[str, Any] = {}
    for option in options:
        name, equal, text = option.partition("=")
        if not equal or not name or not text:
            raise InputError(f"--fix {option!r}: NAME=ones|zeros|positions|NUMBER|FILE.npy is needed")
        try:
            values[name] = float(text)
        except ValueError:
            values[name] = text
    return values


def choices(shape: list[str] | None, fix: list[str] | None, input_node: str | None) -> dict[str, Any]:
    """Arguments of `onnx_export.load` from the three options."""
    return {
        "shape": parse_sizes(shape or ()),
        "fix": parse_fixed(fix or ()),
        "input_node": input_node,
    }


def embedded(model: str | Path, x: np.ndarray, given: dict[str, Any]) -> np.ndarray | None:
    """Integer inputs behind the model's embedding; None where the model takes real numbers.

    Raises:
        InputError: they are no indices of the embedding, or do not have the shape of the input.
    """
    import onnx_export

    oracle = onnx_export.Oracle(model, **given)
    return oracle.embed(x).numpy() if oracle.entry.ids else None
