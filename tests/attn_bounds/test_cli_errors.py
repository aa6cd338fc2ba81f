"""Bad input to the command line: one line on stderr that names the place, exit code 2, nothing on stdout."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper

from .cli_tools import Files, run
from .small_models import DIGITS, linear_model, weights, write


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("cli"))


def complaint(*args: object) -> str:
    """The one line on stderr of a run that ends with code 2 and prints nothing else."""
    result = run(*args, code=2)
    assert result.stdout == "" and result.stderr.startswith("attn-bounds: ")
    assert result.stderr.count("\n") == 1 and result.stderr.endswith("\n")
    return str(result.stderr)


@pytest.mark.parametrize("command", ["inspect", "certify"])
def test_bad_models(files: Files, tmp_path: Path, command: str) -> None:
    rest = () if command == "inspect" else ("--data", files.data, "--eps", 0.1)
    text, truncated = tmp_path / "text.onnx", tmp_path / "truncated.onnx"
    text.write_text("this is not a model")
    truncated.write_bytes(files.model.read_bytes()[:-200])
    weight, bias = weights(3, 4)
    outside = write(
        tmp_path / "outside.onnx",
        [helper.make_node("Gemm", ["x", "w", "b"], ["y"], transB=1)],
        {"w": weight, "b": bias},
        (4,),
        helper.make_tensor_value_info("y", TensorProto.FLOAT, None),
        external=True,
    )
    (tmp_path / "outside.onnx.data").unlink()
    for path, words in (
        (tmp_path / "missing.onnx", "no such file"),
        (text, "not a readable ONNX file"),
        (truncated, "truncated"),
        (outside, "external data"),
    ):
        line = complaint(command, path, *rest)
        assert str(path) in line and words in line


def test_all_unsupported_nodes_at_once(files: Files, tmp_path: Path) -> None:
    weight, bias = weights(3, 4)
    model = linear_model(tmp_path / "u.onnx", weight, bias, unsupported=("Sin", "Cos"))
    line = complaint("certify", model, "--data", files.data, "--eps", 0.1, "--json")
    assert "2 unsupported nodes" in line and "Sin at sin" in line and "Cos at cos" in line


def test_bad_data(files: Files, tmp_path: Path) -> None:
    x, y = files.x, files.y
    nan = x.copy()
    nan[2, 1] = np.nan
    np.save(files.folder / "array.npy", x)
    (files.folder / "text.npz").write_text("no archive")
    (files.folder / "cut.npz").write_bytes(files.data.read_bytes()[:-50])
    for path, words in (
        (files.npz("shape.npz", x=x[:, :3], y=y), "x has shape (4, 3); this model needs (N, 4)"),
        (files.npz("label.npz", x=x, y=y * 0 + 3), "label 3 of y[0] is out of range"),
        (files.npz("negative.npz", x=x, y=y - 5), "is out of range"),
        (files.npz("no_x.npz", y=y), "no array x"),
        (files.npz("no_y.npz", x=x), "no array y"),
        (files.npz("few.npz", x=x, y=y[:2]), "4 integer labels"),
        (files.npz("words.npz", x=x.astype(str), y=y), "numbers"),
        (files.npz("object.npz", x=x.astype(object), y=y), "not an npz file"),
        (files.npz("nan.npz", x=nan, y=y), "x[2] has values that are NaN"),
        (files.folder / "array.npy", "single array"),
        (files.folder / "text.npz", "not an npz file"),
        (files.folder / "cut.npz", "damaged"),
        (files.folder / "missing.npz", "No such file"),
    ):
        line = complaint("certify", files.model, "--data", path, "--eps", 0.1)
        assert str(path) in line and words in line
    whole = ("certify", files.model, "--data", files.data, "--eps", 0.1)
    assert "index 4 is out of range" in complaint(*whole, "--index", 4)
    assert "--count 5 is out of range" in complaint(*whole, "--count", 5)
    assert "index 0: target" in complaint(*whole, "--target", int(y[0]))
    assert "index 0: " in complaint(*whole, "--norm", 2, "--clip", 10, 11)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--eps", -0.1), "eps is -0.1"),
        (("--eps", "nan"), "eps is nan"),
        (("--eps", "inf"), "eps is inf"),
        (("--eps", "big"), "--eps"),
        ((), "--data needs --eps"),
        (("--eps", 0.1, "--norm", 3), "unknown norm '3'; known: 1, 2, inf"),
        (("--eps", 0.1, "--method", "magic"), "unknown method 'magic'; known: ibp"),
        (("--eps", 0.1, "--dtype", "float16"), "unknown dtype"),
        (("--eps", 0.1, "--device", "toaster"), "device 'toaster'"),
        (("--eps", 0.1, "--memory", "4XB"), "memory limit '4XB' is malformed"),
        (("--eps", 0.1, "--timeout", 0), "timeout is 0"),
        (("--eps", 0.1, "--mean", "a,b"), "--mean 'a,b'"),
        (("--eps", 0.1, "--std", "0"), "std positive"),
        (("--eps", 0.1, "--batch", 0), "--batch"),
        (("--eps", 0.1, "--batch", 2, "--timeout", 9), "--batch"),
        (("--eps", 0.1, "--index", 0, "--count", 1), "cannot be combined"),
        (("--eps", 0.1, "--top-k", 3), "k is 3"),
        (("--eps", 0.1, "--magic"), "--magic"),
        (("--eps", 0.1, "--vnnlib", "x"), "either"),
    ],
)
def test_bad_options(files: Files, options: tuple[object, ...], words: str) -> None:
    assert words in complaint("certify", files.model, "--data", files.data, *options)


def test_bad_options_of_the_other_commands(files: Files) -> None:
    data = ("--data", files.data)
    assert "--tol is nan" in complaint("radius", files.model, *data, "--tol", "nan")
    assert "--upper is 0" in complaint("radius", files.model, *data, "--upper", 0)
    assert "unknown method ''" in complaint(
        "compare", files.model, *data, "--eps", 0.1, "--methods", "crown,"
    )
    assert "eps is -1" in complaint("compare", files.model, *data, "--eps", 0.1, "--eps", -1)
    assert "needs --eps" in complaint("compare", files.model, *data)
    assert "No such command" in complaint("certfy")
    assert "MODEL" in complaint("inspect")


def test_bad_properties(files: Files, tmp_path: Path) -> None:
    good = files.vnnlib(0.01)
    bad = tmp_path / "bad.vnnlib"
    bad.write_text(good.read_text().replace("(assert (<= X_0", "(assrt (<= X_0"))
    line = complaint("certify", files.model, "--vnnlib", bad)
    assert f"{bad}:4" in line and "assrt" in line
    line = complaint("certify", DIGITS, "--vnnlib", good)
    assert str(good) in line and "64 values" in line
    assert "--target" in complaint("certify", files.model, "--vnnlib", good, "--target", 1)
    assert "--count" in complaint("certify", files.model, "--vnnlib", good, "--count", 1)
    assert "--norm needs --eps" in complaint("certify", files.model, "--vnnlib", good, "--norm", 2)
    assert "--mean needs --eps" in complaint("certify", files.model, "--vnnlib", good, "--mean", 0.5)
    assert "either with --data or with --vnnlib" in complaint("certify", files.model)
