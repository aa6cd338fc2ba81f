"""`--shape`, `--fix` and `--input-node`: where a model is entered, on the command line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from attn_bounds import certify
from attn_bounds.entering import parse_fixed, parse_sizes
from attn_bounds.errors import InputError
from onnx_export import Oracle, load

from ..onnx_export.test_entry import language_model, node
from ..onnx_export.test_load import graph, save, weight
from .cli_tools import rows, run


def test_options_are_parsed() -> None:
    assert parse_sizes(["sequence=16", "tokens=1x16", "a=b=2,3"]) == {
        "sequence": 16,
        "tokens": (1, 16),
        "a=b": (2, 3),
    }
    assert parse_fixed(["mask=ones", "x=0.5", "y=a=b.npy"]) == {"mask": "ones", "x": 0.5, "y": "a=b.npy"}
    for bad in ("sequence", "=3", "n=0", "n=1x", "n=-1", "n=2.5"):
        with pytest.raises(InputError, match="NAME=SIZE"):
            parse_sizes([bad])
    for bad in ("mask", "=1", "mask="):
        with pytest.raises(InputError, match=r"FILE\.npy"):
            parse_fixed([bad])


def test_integers_are_embedded(tmp_path: Path) -> None:
    """Bounds are over embeddings, and the labels are those of the model on the integers."""
    model = language_model(tmp_path)
    ids = np.array([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
    x = Oracle(model).embed(ids)
    y = load(model)(x).argmax(1).numpy()
    np.savez(tmp_path / "ids.npz", x=ids, y=y)
    np.savez(tmp_path / "x.npz", x=x.numpy(), y=y)
    found = [
        rows("certify", model, "--data", tmp_path / name, "--eps", 1e-4, "--method", "ibp", "--no-attack")
        for name in ("ids.npz", "x.npz")
    ]
    assert [r["margin"] for r in found[0]] == pytest.approx([r["margin"] for r in found[1]])
    assert all(r["status"] == "verified" for r in found[0])
    assert "the embedding of ids" in found[0][0]["note"] and "fixed to ones" in found[0][0]["note"]
    alone = certify(model, x[0], y[0], eps=1e-4, method="ibp", attack=False, fix={"attention_mask": 1})
    assert alone.margin == pytest.approx(found[0][0]["margin"])  # type: ignore[union-attr]
    np.savez(tmp_path / "bad.npz", x=ids + 20, y=y)
    result = run("certify", model, "--data", tmp_path / "bad.npz", "--eps", 1e-4, code=2)
    assert "cannot be embedded" in result.output


def test_inspect_says_what_was_chosen(tmp_path: Path) -> None:
    model = language_model(tmp_path)
    (row,) = rows("inspect", model)
    assert row["inputs"] == {"e": ["batch", 5, 6]} and len(row["chosen"]) == 2
    (row,) = rows("inspect", model, "--input-node", "words", "--fix", "attention_mask=1")
    assert list(row["inputs"]) == ["w"] and "chosen as the input" in row["chosen"][0]
    assert "embedding of ids" in run("inspect", model, code=0).output


def test_labels_of_outputs_with_tokens_are_places_in_them(tmp_path: Path) -> None:
    nodes = [node("MatMul", ["x", "w"], ["y"])]
    model = save(
        graph(nodes, [("x", ["b", 2, 3])], [("y", None)], {"w": weight(0, 3, 4)}), tmp_path / "m.onnx"
    )
    np.savez(tmp_path / "d.npz", x=np.ones((1, 2, 3), np.float32), y=[7])
    for limits in ((), ("--timeout", "60")):
        options = ("--data", tmp_path / "d.npz", "--eps", 0, "--method", "ibp", "--target", 4, *limits)
        (row,) = rows("certify", model, *options)
        assert "shape (2, 4); labels are places in it, 0 to 7" in row["note"]
