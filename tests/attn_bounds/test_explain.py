"""Where the margin goes, and what the model does not see at all."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from attn_bounds import InputError, InputSet, Verifier, invariances
from attn_bounds.cli import app
from attn_bounds.domain.activations import FUNCTIONS


def test_shares_add_up(digits: Path) -> None:
    verifier = Verifier(digits)
    data = np.load(digits.parent / "digits_test.npz")
    spec = verifier.specification(int(data["y"][0]))
    ball = verifier.ball(torch.from_numpy(data["x"][0]), 2.0, 0.1)
    found = verifier.explain(ball, spec)
    assert [s[0] for s in found.shares] == ["input", "attention 1", "ReLU 1", "attention 2", "ReLU 2"]
    total = sum(loss for _, _, loss in found.shares)
    assert all(loss >= 0 for _, _, loss in found.shares)
    assert found.centre - total == pytest.approx(found.margin, abs=1e-2)
    assert found.margin == pytest.approx(
        float(spec.margin(verifier.row_bounds([ball], [spec], "sensitivity")[0]))
    )


def test_explain_command(digits: Path, tmp_path: Path) -> None:
    data = digits.parent / "digits_test.npz"
    plot = tmp_path / "e.png"
    pytest.importorskip("matplotlib")
    options = ["--data", data, "--count", "2", "--norm", "2", "--eps", "0.1", "--plot", plot]
    result = CliRunner().invoke(app, [str(a) for a in ["explain", digits, *options, "--json"]])
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(rows) == 2 and set(rows[0]) >= {
        "index",
        "against",
        "margin",
        "centre",
        "shares",
        "eps",
        "norm",
    }
    assert plot.stat().st_size > 1000
    table = CliRunner().invoke(app, [str(a) for a in ["explain", digits, *options[:8]]])
    assert "attention 2" in table.stdout


def test_explain_names_the_node_without_a_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import onnx
    from onnx import TensorProto, helper

    node = [helper.make_node("Gemm", ["x", "w"], ["h"]), helper.make_node("Tanh", ["h"], ["y"])]
    info = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["b", 3]) for n in ("x", "y")]
    w = helper.make_tensor("w", TensorProto.FLOAT, [3, 3], np.eye(3, dtype=np.float32).flatten())
    model = helper.make_model(helper.make_graph(node, "g", info[:1], info[1:], [w]), ir_version=8)
    onnx.save(model, str(tmp_path / "m.onnx"))
    np.savez(tmp_path / "d.npz", x=np.ones((1, 3), np.float32), y=np.array([0]))
    monkeypatch.delitem(FUNCTIONS, "BoundTanh")  # every operator that the loader knows has a rule
    command = ["explain", tmp_path / "m.onnx", "--data", tmp_path / "d.npz", "--eps", "0.1"]
    result = CliRunner().invoke(app, [str(a) for a in command])
    assert result.exit_code == 2 and "BoundTanh" in result.stderr and "Traceback" not in result.stderr


@pytest.mark.parametrize("name", ["pgd_2_3_16", "ibp_3_3_8"])
def test_invariances_change_nothing(vnncomp_vit: Path, name: str) -> None:
    """Move a hundred times the image's size along every direction at once."""
    verifier = Verifier(vnncomp_vit / f"{name}.onnx", dtype=torch.float64)
    basis = invariances(verifier)
    patches = {"pgd_2_3_16": 4, "ibp_3_3_8": 16}[name]
    assert len(basis) >= 3072 - 48 * patches
    gram = basis.flatten(1) @ basis.flatten(1).T
    assert (gram - torch.eye(len(basis), dtype=gram.dtype)).abs().max() < 1e-10
    x = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    coefficients = torch.randn(len(basis), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    move = torch.einsum("k,kcij->cij", coefficients, basis)[None]
    move = move * 100 * x.norm() / move.norm()
    with torch.no_grad():
        change = (verifier.module(x + move) - verifier.module(x)).abs().max()
        size = verifier.module(x).abs().max()
    assert change <= 1e-9 * size * 100
    random = torch.randn(x.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    with torch.no_grad():
        assert (verifier.module(x + random) - verifier.module(x)).abs().max() > 1e-2


def test_small_input_model_has_no_invariance(digits: Path) -> None:
    assert len(invariances(digits)) == 0  # 16 pixels a patch, 32 features


def test_part_of_the_input_may_move() -> None:
    """A box of width zero outside the chosen entries perturbs those only."""
    with pytest.raises(InputError):
        InputSet.box(torch.ones(1, 2), torch.zeros(1, 2))
    box = InputSet.box(torch.tensor([[0.0, 1.0]]), torch.tensor([[0.0, 2.0]]))
    assert bool(box.contains(torch.tensor([[0.0, 1.5]]))) and not bool(
        box.contains(torch.tensor([[0.1, 1.5]]))
    )
