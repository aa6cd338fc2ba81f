"""The adapter: lazily imported, clear when auto_LiRPA is missing, and quiet about global state."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from attn_bounds import lirpa
from attn_bounds.module import BoundedModule

ROOT = Path(__file__).resolve().parents[2]


def run(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **env}, cwd=ROOT
    )


def test_mathematics_without_auto_lirpa(tmp_path: Path) -> None:
    """`import attn_bounds` and the sensitivity package load neither auto_LiRPA nor onnx."""
    code = (
        "import sys, attn_bounds, attn_bounds.sensitivity.softmax, attn_bounds.properties\n"
        "bad = [m for m in ('auto_LiRPA', 'onnx', 'onnxruntime') if m in sys.modules]\n"
        "sys.exit(' '.join(bad) or 0)"
    )
    done = run(code)
    assert done.returncode == 0, done.stderr


def test_absent_or_broken_auto_lirpa(tmp_path: Path) -> None:
    (tmp_path / "auto_LiRPA.py").write_text("raise RuntimeError('made to fail')\n")
    code = "import attn_bounds\ntry:\n    attn_bounds.BoundedModule\nexcept ImportError as e:\n    print(e)"
    done = run(code, PYTHONPATH=str(tmp_path))
    assert "pip install --no-deps auto_LiRPA==0.3" in done.stdout and "made to fail" in done.stdout


def test_global_state_is_given_back() -> None:
    exporter = lirpa._exporter_globals()
    before = (exporter.export_onnx_opset_version, exporter.autograd_inlining, torch.get_default_dtype())
    with lirpa.tracing(), lirpa.default_dtype(torch.float64):
        assert torch.get_default_dtype() == torch.float64 and not exporter.autograd_inlining
    assert before == (
        exporter.export_onnx_opset_version,
        exporter.autograd_inlining,
        torch.get_default_dtype(),
    )


def test_modes_of_the_model_are_given_back() -> None:
    """A BatchNorm in evaluation mode inside a module in training mode must not start to train."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4).eval(), torch.nn.Dropout())
    BoundedModule(model, torch.zeros(1, 3))
    assert [m.training for m in model] == [True, False, True] and model.training


def test_root_logger_is_left_alone() -> None:
    """auto_LiRPA configures the root logger when it is imported; other libraries would start to talk."""
    code = (
        "import logging, attn_bounds.lirpa as l\n"
        "before = (logging.getLogger().level, len(logging.getLogger().handlers))\n"
        "l.package()\n"
        "assert before == (logging.getLogger().level, len(logging.getLogger().handlers))"
    )
    done = run(code)
    assert done.returncode == 0, done.stderr
    assert logging.getLogger().level >= logging.WARNING or logging.getLogger().level == 0


def test_a_method_that_nobody_has_is_named() -> None:
    x = torch.randn(1, 3)
    graph = BoundedModule(torch.nn.Linear(3, 2), x)
    ball = lirpa.BoundedTensor(x, lirpa.perturbation(2.0, 0.1))
    with pytest.raises(NotImplementedError, match=r"nonsense.*lofast"):
        graph.compute_bounds(x=(ball,), method="nonsense")
