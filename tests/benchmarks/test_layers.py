"""The studies of one attention layer: on a tiny one, and the page's tables against the recorded figures."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tightness() -> Iterator[ModuleType]:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import layer_tightness

    yield layer_tightness
    sys.path.remove(str(ROOT / "benchmarks"))


@pytest.fixture(scope="module")
def cost(tightness: ModuleType) -> ModuleType:
    import layer_cost

    return layer_cost


@pytest.mark.parametrize("study", ["eps", "input", "weights", "two-heads"])
def test_quick_studies(tightness: ModuleType, study: str, tmp_path: Path) -> None:
    layers = tightness.examples(True, 0)
    rows = tightness.STUDIES[study](layers, True, 0, lambda what: None)
    assert rows and not tightness.violations(rows)
    for row in rows:
        assert all(bound >= row["ascent"] > 0 for bound in row.get("bounds", {}).values())
    if study == "two-heads":
        share = {r["c"]: r["key_sensitivity"] / r["single"] for r in rows}
        naive = {r["c"]: r["naive"] / r["single"] for r in rows}
        assert share == {-0.5: pytest.approx(0.5, rel=2e-3), 0.5: pytest.approx(1.5, rel=2e-3)}
        assert naive == {-0.5: pytest.approx(1.5, rel=2e-3), 0.5: pytest.approx(1.5, rel=2e-3)}
    if study == "weights":
        assert {r["part"] for r in rows} == {"W_Q", "W_K", "W_V", "W_O", "X"}
        assert all(r["down"][0] < 1.0 < r["up"][0] for r in rows)
    assert json.loads(json.dumps(rows)) == rows


def test_a_bound_below_ascent_is_reported(tightness: ModuleType) -> None:
    row = {"layer": "x", "eps": 1.0, "ascent": 1.0, "bounds": {"good": 1.1, "bad": 0.9}}
    (message,) = tightness.violations([row])
    assert message.startswith("bad of x")


def test_kim_holds_on_its_layer(tightness: ModuleType) -> None:
    rows = tightness.measure(tightness.random_l2_layer(2, 4, 4), [0.1, 1.0], starts=4, steps=20)
    assert not tightness.violations(rows) and set(rows[0]["bounds"]) == {"Kim"}


@pytest.mark.parametrize("kind", ["causal_layer", "cross_layer"])
def test_masks_and_cross_attention(tightness: ModuleType, kind: str) -> None:
    rows = tightness.measure(getattr(tightness, kind)(2), [0.1, 1.0], starts=4, steps=20)
    assert not tightness.violations(rows) and set(rows[0]["bounds"]) == {"ours", "LoFAST"}
    assert all(bound < 50.0 * row["ascent"] for row in rows for bound in row["bounds"].values())


def test_layers_of_the_bundled_model(tightness: ModuleType) -> None:
    """`from_onnx` compares each layer with the model itself."""
    from layers import from_onnx  # type: ignore[import-not-found]

    image = torch.rand((1, 1, 8, 8), generator=torch.Generator().manual_seed(0))
    found = from_onnx(ROOT / "examples" / "digits_vit.onnx", image, "digits")
    names = ["digits, layer 1", "digits, layer 2"]
    assert [e.name for e in found] == [n + end for n in names for end in ("", " with its sum")]
    assert all(e.layer.heads == 2 and e.layer.b_q is not None and e.x.shape == (5, 32) for e in found)


def test_exponents(cost: ModuleType) -> None:
    axis, sizes, others = cost.AXES[0]
    rows = [
        {"axis": axis, **others, axis: n, "seconds": {name: 1e-6 * n**2.5 for name in cost.FUNCTIONS}}
        for n in sizes
    ]
    found = cost.exponents(rows)
    assert [e["matrix"] for e in found] == ["formed", "not formed"]
    assert all(math.isclose(v, 2.5) for e in found for v in e["exponent"].values())


def test_the_tables_of_the_page_are_those_of_the_records(tightness: ModuleType, cost: ModuleType) -> None:
    page = tightness.DOCS.read_text()
    recorded = tightness.load("eps")
    assert not tightness.violations(recorded)
    assert tightness.between(page, "table of benchmarks/layer_tightness.py")[1] == tightness.table(recorded)
    assert tightness.between(page, "table of benchmarks/layer_cost.py")[1] == cost.table(
        tightness.load("cost")
    )


def test_figures_are_there(tightness: ModuleType) -> None:
    for name in ("eps-random", "eps-models", "input", "weights", "two-heads", "cost"):
        assert (tightness.OUT / f"layer_{name}.png").is_file()
