"""Files of real models from real exporters: each loads as the table says, and bounds of each model hold.

`python benchmarks/models.py --keep tests/onnx_export/models` writes the files and `outcomes.json`.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor

from attn_bounds import InputSet, Verifier, pgd
from attn_bounds.errors import InputError
from onnx_export import OnnxModule, Oracle, inspect, load

FOLDER = Path(__file__).parent / "models"
OUTCOMES: dict[str, dict[str, Any]] = json.loads((FOLDER / "outcomes.json").read_text())
LOADED = [name for name, outcome in OUTCOMES.items() if "refused" not in outcome]
FIRST = {name.split(".")[0]: name for name in reversed(LOADED)}  # one file per model


def test_the_table_is_about_these_files() -> None:
    assert {path.name for path in FOLDER.glob("*.onnx")} == set(OUTCOMES)
    assert max(path.stat().st_size for path in FOLDER.iterdir()) < 1e6
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 4e6


def onnxruntime_says(path: Path, module: OnnxModule, batch: int) -> tuple[Tensor, Tensor]:
    """An input of the module (behind the embedding, where the file takes integers), and the file's output."""
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    wanted, g = session.get_inputs()[0], np.random.default_rng(batch)
    if "int" in wanted.type:
        given = g.integers(5, 40, (batch, *wanted.shape[1:]))
        x = Oracle(path).embed(given)
    else:
        given = g.standard_normal((batch, *module.input_shape)).astype(np.float32)
        x = torch.from_numpy(given)
    return x, torch.from_numpy(session.run(None, {wanted.name: given})[0])


@pytest.mark.parametrize("name", OUTCOMES)
def test_loads_as_expected(name: str) -> None:
    path, outcome = FOLDER / name, OUTCOMES[name]
    fused = {n.op_type for n in onnx.load(path).graph.node if n.domain not in ("", "ai.onnx")}
    if "refused" in outcome:
        with pytest.raises(InputError) as e:
            load(path)
        assert str(e.value).startswith(f"{path}: {outcome['refused']}")
        return
    assert sorted(fused) == outcome["fused"]
    module = load(path)
    units = module.info.attention
    assert (len(units), sum(u.masked for u in units)) == (outcome["attention"], outcome["masked"])
    assert not module.info.notes and [b[0].kind for b in module.info.structure.blocks] == ["attention"] * 2
    assert all(b[0].residual for b in module.info.structure.blocks)
    for batch in (1, 3):
        x, expected = onnxruntime_says(path, module, batch)
        with torch.no_grad():
            assert torch.allclose(module(x), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", FIRST.values(), ids=list(FIRST))
def test_bounds_hold(name: str) -> None:
    """Intervals and another method on one file of each model, in turn, as the norms; attacked in float64."""
    verifier = Verifier(FOLDER / name, dtype=torch.float64)
    g = torch.Generator().manual_seed(1)
    x = torch.randn((1, *verifier.input_shape), generator=g, dtype=torch.float64)
    with torch.no_grad():
        logits = verifier.module(x).flatten(1)
    spec, turn = verifier.specification(int(logits.argmax())), list(FIRST.values()).index(name)
    norm, method = (1.0, 2.0, math.inf)[turn % 3], ("sensitivity", "crown")[turn % 2]
    ball = InputSet.ball(x, norm, 0.002 if norm == math.inf else 0.02)
    attack = pgd(verifier.module, ball, spec, restarts=4, steps=20, stop_early=False, dtype=torch.float64)
    loose, bound = (float(spec.margin(verifier.row_bounds([ball], [spec], m)[0])) for m in ("ibp", method))
    assert loose <= attack.margin + 1e-9 and bound <= attack.margin + 1e-9
    centre = float(spec.margin(spec.margins(logits)))
    assert math.isfinite(loose) and loose < bound
    assert centre - bound <= 3.0 * (centre - attack.margin) + 0.01  # nearly linear at this size


def test_advice_for_what_is_refused() -> None:
    quantised = next(name for name in OUTCOMES if name.endswith("+int8.onnx"))
    assert all("float32" in row.why or row.op for row in inspect(FOLDER / quantised).unsupported)
    with pytest.raises(InputError, match="export the model in float32, before quantisation"):
        load(FOLDER / quantised)
