"""Shared fixtures. No test needs the network; those that need the competition files skip without them."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared" / "data" / "vnncomp_vit"


@pytest.fixture(scope="session")
def digits() -> Path:
    """The bundled model."""
    return ROOT / "examples" / "digits_vit.onnx"


@pytest.fixture(scope="session")
def vnncomp_vit() -> Path:
    """Folder of the competition's Vision Transformers."""
    if not SHARED.is_dir():
        pytest.skip("the competition's Vision Transformers are not at ../shared/data/vnncomp_vit")
    return SHARED


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """The models are tiny; two threads on a busy machine can be a hundred times slower than one."""
    import torch

    torch.set_num_threads(1)
