"""What the tests of the command line share: files to work on, and ways to run it in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from typer.testing import CliRunner

from attn_bounds import Verifier
from attn_bounds.cli import app

from .small_models import relu_model

VNNLIB = """
(declare-const X_0 Real)(declare-const X_1 Real)(declare-const X_2 Real)(declare-const X_3 Real)
(declare-const Y_0 Real)(declare-const Y_1 Real)(declare-const Y_2 Real)
(assert (<= X_0 {high}))(assert (>= X_0 {low}))(assert (<= X_1 {high}))(assert (>= X_1 {low}))
(assert (<= X_2 {high}))(assert (>= X_2 {low}))(assert (<= X_3 {high}))(assert (>= X_3 {low}))
(assert (or (and (>= Y_{a} Y_{y})) (and (>= Y_{b} Y_{y}))))
"""


class Files:
    """A model of three classes with data and properties in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = relu_model(folder / "m.onnx")
        self.verifier = Verifier(self.model)
        x = np.random.default_rng(0).normal(size=(40, 4)).astype(np.float32)
        with torch.no_grad():
            logits = self.verifier.module(torch.from_numpy(x))
            self.label = int(self.verifier.module(torch.zeros(1, 4)).argmax())
        first, second = logits.topk(2).values.T
        clear = np.flatnonzero((first - second).numpy() > 0.5)[:4]  # far enough from the decision boundary
        self.x, self.y = x[clear], logits.argmax(1).numpy()[clear]
        self.data = self.npz("data.npz", x=self.x, y=self.y)

    def npz(self, name: str, **arrays: np.ndarray) -> Path:
        np.savez(self.folder / name, **arrays)
        return self.folder / name

    def vnnlib(self, width: float) -> Path:
        path = self.folder / f"width_{width}.vnnlib"
        a, b = (j for j in range(3) if j != self.label)
        path.write_text(VNNLIB.format(low=-width, high=width, a=a, b=b, y=self.label))
        return path


def run(*args: object, code: int) -> Any:
    result = CliRunner().invoke(app, [str(a) for a in args])
    assert result.exit_code == code, result.output
    return result


def rows(*args: object, code: int = 0) -> list[dict[str, Any]]:
    """Objects on stdout of a --json run; fails on anything else there."""
    return [json.loads(line) for line in run(*args, "--json", code=code).stdout.splitlines()]
