"""Normalisations and activations as torch functions: values and gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from onnx_export import functions

WEIGHT, BIAS = torch.tensor([1.0, -0.5, 0.0, 3.0]).double(), torch.tensor([0.0, 1.0, 2.0, -1.0]).double()

CASES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "LayerNorm": (
        lambda x: functions.layer_norm(x, WEIGHT, BIAS, eps=1e-3),
        lambda x: F.layer_norm(x, (4,), WEIGHT, BIAS, 1e-3),
    ),
    "LayerNorm over two axes": (
        lambda x: functions.layer_norm(x, None, None, axes=2, eps=1e-3),
        lambda x: F.layer_norm(x, (3, 4), None, None, 1e-3),
    ),
    "RMSNorm": (
        lambda x: functions.rms_norm(x, WEIGHT, eps=1e-3),
        lambda x: F.rms_norm(x, (4,), WEIGHT, 1e-3),
    ),
    "RMSNorm over two axes": (
        lambda x: functions.rms_norm(x, None, axes=2, eps=1e-3),
        lambda x: F.rms_norm(x, (3, 4), None, 1e-3),
    ),
    "Gelu": (functions.gelu, F.gelu),
    "Gelu tanh": (lambda x: functions.gelu(x, "tanh"), lambda x: F.gelu(x, approximate="tanh")),
    "Silu": (functions.silu, F.silu),
    "QuickGelu": (functions.quick_gelu, lambda x: x * torch.sigmoid(1.702 * x)),
    "Erf": (functions.erf, torch.erf),
}


def data() -> Tensor:
    return 2.0 * torch.randn(2, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name: str) -> None:
    ours, reference = CASES[name]
    x = data()
    assert torch.allclose(ours(x), reference(x), atol=1e-12)
    assert torch.autograd.gradcheck(ours, x.requires_grad_())
    assert torch.autograd.gradgradcheck(ours, x)
