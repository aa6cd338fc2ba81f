"""`attn-bounds export`: modules of scripts and packages, what is printed, and errors in the user's code."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from .cli_tools import rows, run

SCRIPT = """
import torch
import torch.nn.functional as F
from torch import nn

from helper import WIDTH  # beside the script

print("noise on stdout")


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x):
        return F.scaled_dot_product_attention(*self.qkv(x).chunk(3, dim=-1)).mean(1)


def make():
    return Attention()


def with_example():
    return Attention().double(), torch.zeros(1, 3, WIDTH, dtype=torch.float64)


ready = Attention()
number = 3


def broken():
    raise RuntimeError("two\\nlines")


def other():
    return "a string"


def leaves():
    raise SystemExit(3)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "helper.py").write_text("WIDTH = 4")
    path = tmp_path / "made.py"
    path.write_text(SCRIPT)
    return path


FAST = ("--exporter", "torchscript", "--opset", 17)


def test_script_with_shape(script: Path) -> None:
    out = script.parent / "m.onnx"
    (row,) = rows("export", f"{script}:make", out, "--shape", "3,4", *FAST)
    assert row["path"] == str(out) and row["opset"] == 17 and row["exporter"] == "torchscript"
    assert row["inputs"] == {"x": ["batch", 3, 4]} and row["outputs"] == {"output": ["batch", 4]}
    assert row["attention"] == 1 and row["notes"] == [] and row["difference"] <= 1e-5
    assert row["operators"]["Softmax"] == 1
    (loaded,) = rows("inspect", out)
    assert loaded["unsupported"] == [] and len(loaded["attention"]) == 1
    text = run("export", f"{script}:ready", out, "--shape", "3,4", "--fixed-batch", *FAST, code=0).stdout
    assert "x (1, 3, 4)" in text and "attention found in the file: 1 unit" in text
    assert "noise" not in text


def test_module_path_example_and_operator(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(script.parent)
    monkeypatch.syspath_prepend(script.parent)
    (row,) = rows("export", "made:with_example", "m.onnx", "--attention", "op23")
    assert row["opset"] == 23 and row["operators"]["Attention"] == 1
    graph = onnx.load("m.onnx").graph
    assert graph.input[0].type.tensor_type.elem_type == onnx.TensorProto.DOUBLE


def test_errors(script: Path) -> None:
    folder = script.parent
    (folder / "syntax.py").write_text("def f(:\n")
    (folder / "missing.py").write_text("import not_installed_anywhere\n")
    shape = ("--shape", "3,4")
    for reference, options, words in (
        (script, shape, "SCRIPT.py:FACTORY"),
        (f"{script}:absent", shape, "nothing named absent (found: "),
        (f"{script}:number", shape, "int, which is neither a function nor a module"),
        (f"{script}:make", (), "give its input's shape with --shape"),
        (f"{script}:make", ("--shape", "3,x"), "sizes with commas"),
        (f"{script}:make", ("--shape", "3,5"), "Attention fails on an input of shape (1, 3, 5)"),
        (f"{script}:broken", shape, ":broken: RuntimeError at made.py:33: two"),
        (f"{script}:other", shape, "returns str; a torch.nn.Module is needed"),
        (f"{script}:leaves", shape, "SystemExit at made.py"),
        (f"{folder / 'absent.py'}:make", shape, "no such file"),
        (f"{folder / 'syntax.py'}:make", shape, "SyntaxError at syntax.py:1"),
        (f"{folder / 'missing.py'}:make", shape, "ModuleNotFoundError at missing.py:1: No module named"),
        ("no.such.package:make", shape, "no such module"),
        (f"{script}:make", (*shape, "--attention", "op23", "--opset", 20), "begins with opset 23"),
        (f"{script}:make", (*shape, "--exporter", "tf"), "unknown exporter 'tf'"),
    ):
        result = run("export", reference, folder / "m.onnx", *options, "--json", code=2)
        assert result.stdout == "" and words in result.stderr, result.stderr
        assert result.stderr.rstrip().count("attn-bounds: ") == 1 and "Traceback" not in result.stderr
    assert not (folder / "m.onnx").exists()
