"""Torch modules where a path may stand: exported on the way, and left as they were."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attn_bounds
from attn_bounds import (
    BoundedModule,
    InputError,
    InputSet,
    UnsupportedModelError,
    Verifier,
    certified_radius,
    certify,
    load,
    pgd,
)

X = torch.randn((1, 4, 6), generator=torch.Generator().manual_seed(3))


class Attention(nn.Module):
    """Self-attention in torch's own function, which auto_LiRPA cannot trace, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.drop, self.head = nn.Linear(6, 18), nn.Dropout(0.5), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.reshape(-1, 4, 2, 3).transpose(1, 2) for t in self.qkv(x).split(6, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(-1, 4, 6)
        return self.head(torch.relu(self.drop(x + y)).mean(1))


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Temporary files of other processes are not looked at."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def left_over() -> list[Path]:
    return list(Path(tempfile.gettempdir()).glob("attn-bounds-*"))


def test_load_a_module() -> None:
    model = Attention()
    loaded = load(model, X)
    assert model.training and model.drop.training and not left_over()
    x = torch.cat([X, 2 * X, -X])
    with torch.no_grad():
        assert torch.allclose(loaded(x), model.eval()(x), atol=1e-5)
    assert loaded.info.path == "Attention" and len(loaded.info.attention) == 1
    assert loaded.input_shape == (4, 6) and loaded.output_shape == (3,)
    assert load(model.double(), X.double(), dtype=torch.float64)(X.double()).dtype == torch.float64
    assert Verifier(loaded).input_shape == (4, 6)


def test_load_a_path(digits: Path) -> None:
    assert load(str(digits)).info == attn_bounds.load(digits).info
    with pytest.raises(InputError, match="says itself"):
        load(digits, X)
    with pytest.raises(InputError, match="already loaded"):
        load(load(digits), X)


def test_errors_name_the_class() -> None:
    class Sine(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.sin(x)

    with pytest.raises(InputError, match="Attention: a torch module needs an example"):
        load(Attention())
    with pytest.raises(UnsupportedModelError, match=r"^Sine: 1 unsupported nodes: Sin at"):
        load(Sine(), X)
    with pytest.raises(UnsupportedModelError, match=r"^Attention: .*attn_bounds\.load"):
        BoundedModule(Attention(), X)
    with pytest.raises(InputError, match=r"^Attention fails on an input of shape \(1, 5\)"):
        load(Attention(), torch.zeros(1, 5))
    assert not left_over()


def test_certify_a_module() -> None:
    """Ours, auto_LiRPA's own, and in a child process; bounds below what the attack finds."""
    model = Attention()
    label = int(model.eval()(X).argmax())
    margins = {
        method: certify(model, X, label, eps=0.1, method=method, attack=False).margin  # type: ignore[union-attr]
        for method in ("crown", "stock-crown")
    }
    limited = certify(model, X[0], label, eps=0.1, method="crown", attack=False, timeout=100.0)
    found = pgd(model, InputSet.ball(X, float("inf"), 0.1), Verifier(load(model, X)).specification(label))
    assert margins["stock-crown"] < margins["crown"] <= found.margin  # type: ignore[operator]
    assert limited.margin == pytest.approx(margins["crown"], rel=1e-5)  # type: ignore[union-attr]
    falsified = certify(model, X, label, eps=10.0, method="ibp")
    assert falsified.status == "falsified" and falsified.model_sha256 == ""  # type: ignore[union-attr]
    assert certified_radius(model, X, np.int64(label), method="ibp").radius > 0.0
    assert not left_over()


def test_labels_of_any_integer_type(digits: Path) -> None:
    options: dict[str, Any] = {"eps": 1e-3, "method": "ibp", "attack": False}
    shape = load(digits).input_shape
    x = np.zeros((2, *shape), np.float32)
    margins = [
        certify(digits, x[0], y, **options).margin  # type: ignore[arg-type, union-attr]
        for y in (3, np.int64(3), torch.tensor(3), np.array(3))
    ]
    assert len(set(margins)) == 1
    for labels in ([3, 3], np.array([3, 3]), torch.tensor([3, 3])):
        found = certify(digits, x, labels, **options)  # type: ignore[arg-type]
        assert [c.margin for c in found] == pytest.approx([margins[0]] * 2)  # type: ignore[union-attr]
    for bad in (1.5, "3", None, [[3]], [[3], [3, 4]]):
        with pytest.raises(InputError, match="an integer is needed"):
            certify(digits, x[0], bad, **options)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="x is no tensor"):
        certify(digits, "x", 3, **options)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="one input and one label"):
        certified_radius(digits, x, [3, 3], method="ibp")  # type: ignore[arg-type]


def test_limits_in_a_script_without_a_main_guard(digits: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import attn_bounds, numpy\n"
        f"x = numpy.zeros({load(digits).input_shape}, numpy.float32)\n"
        f"found = attn_bounds.certify({str(digits)!r}, x, 3, eps=1e-4, method='ibp', timeout=60)\n"
        "print(found.margin)"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() != "None" and "Traceback" not in done.stderr
