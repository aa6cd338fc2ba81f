"""Normalisations and activations spelled out in small operators, in the forms people and exporters write."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper, save
from torch import Tensor, nn

from onnx_export import load

from .test_attention import TOKENS, checked, exported

Form = Callable[[Tensor, Tensor, Tensor], Tensor]  # of x, a gain and a bias
ROOT = math.sqrt(2.0 / math.pi)


def mean(x: Tensor, axis: int = -1) -> Tensor:
    return x.mean(axis, keepdim=True)


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    d = x - mean(x)
    return d, mean(d * d)


def tensorflow(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """`x r + (b − m r)`."""
    r = torch.rsqrt(moments(x)[1] + 1e-5) * w
    return x * r + (b - mean(x) * r)


def of_channels(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    d = x - mean(x, 1)
    w, b = w[:TOKENS, None], b[:TOKENS, None]
    return d / torch.sqrt(mean(d**2, 1) + 1e-5) * w + b


FORMS: dict[str, tuple[Form, list[str]]] = {
    "pow, sqrt, div": (
        lambda x, w, b: (x - mean(x)) / torch.sqrt(mean((x - mean(x)) ** 2) + 1e-5) * w + b,
        ["LayerNorm"],
    ),
    "var": (
        lambda x, w, b: b + w * ((x - mean(x)) / torch.sqrt(x.var(-1, keepdim=True, unbiased=False) + 1e-6)),
        ["LayerNorm"],
    ),
    "unbiased var": (
        lambda x, w, b: (x - mean(x)) / torch.sqrt(x.var(-1, keepdim=True) + 1e-6) * w,
        ["LayerNorm"],
    ),
    "rsqrt": (lambda x, w, b: moments(x)[0] * torch.rsqrt(moments(x)[1] + 1e-12), ["LayerNorm"]),
    "pow of -1/2": (lambda x, w, b: moments(x)[0] * (moments(x)[1] + 1e-5) ** -0.5 * w + b, ["LayerNorm"]),
    "two moments": (
        lambda x, w, b: (x - mean(x)) * (mean(x.pow(2)) - mean(x) ** 2 + 1e-3).rsqrt() * w,
        ["LayerNorm"],
    ),
    "tensorflow": (tensorflow, ["LayerNorm"]),
    "channels": (of_channels, ["Transpose", "LayerNorm", "Transpose"]),
    "gain of tokens": (
        lambda x, w, b: moments(x)[0] * torch.rsqrt(moments(x)[1] + 1e-5) * w[:TOKENS, None],
        ["LayerNorm", "Mul"],
    ),
    "rms": (lambda x, w, b: x * torch.rsqrt(mean(x.pow(2)) + 1e-6) * w, ["RMSNorm"]),
    "rms, div": (lambda x, w, b: w * (x / torch.sqrt(mean(x * x) + 1e-6)), ["RMSNorm"]),
    "length": (lambda x, w, b: x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6), ["RMSNorm"]),
    "rms and bias": (lambda x, w, b: x * torch.rsqrt(mean(x.pow(2)) + 1e-6) * w + b, ["RMSNorm", "Add"]),
    "gelu": (lambda x, w, b: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))), ["Gelu"]),
    "gelu of a sum": (
        lambda x, w, b: (0.5 * torch.erf((x + b) * math.sqrt(0.5)) + 0.5) * (x + b),
        ["Add", "Gelu"],
    ),
    "gelu, distributed": (lambda x, w, b: 0.5 * (x + x * torch.erf(x / 1.41421354)), ["Gelu"]),
    "gelu, tanh": (lambda x, w, b: 0.5 * x * (1.0 + torch.tanh(ROOT * (x + 0.044715 * x**3))), ["Gelu"]),
    "gelu, tanh, factored": (
        lambda x, w, b: x * (0.5 * (torch.tanh(0.7978845608 * x * (1.0 + 0.044715 * x * x)) + 1.0)),
        ["Gelu"],
    ),
    "silu": (lambda x, w, b: torch.sigmoid(x) * x, ["Silu"]),
    "silu, tanh": (lambda x, w, b: 0.5 * x * (1.0 + torch.tanh(0.5 * x)), ["Silu"]),
    "quick gelu": (lambda x, w, b: x * torch.sigmoid(1.702 * x), ["QuickGelu"]),
    "softmax": (
        lambda x, w, b: (lambda e: e / e.sum(-1, keepdim=True))((x - x.amax(-1, keepdim=True)).exp()),
        ["Softmax"],
    ),
    # nearly one of them, and another function
    "another slope": (lambda x, w, b: x * 0.5 * (1.0 + torch.erf(x / 1.4142)), ["Erf"]),
    "another cubic": (lambda x, w, b: 0.5 * x * (1.0 + torch.tanh(ROOT * (x + 0.0447 * x**3))), ["Tanh"]),
    "swish 1.7": (lambda x, w, b: x * torch.sigmoid(1.7 * x), ["Sigmoid"]),
    "eps outside": (lambda x, w, b: moments(x)[0] / (moments(x)[1].sqrt() + 1e-2), ["Sqrt", "Div"]),
    "gated": (lambda x, w, b: (x + b) * torch.sigmoid(x), ["Sigmoid", "Mul"]),
    "mean of another": (
        lambda x, w, b: (x - mean(x * w)) * torch.rsqrt(mean((x - mean(x * w)) ** 2) + 1e-5),
        ["RMSNorm"],
    ),
}
OURS = {"LayerNorm", "RMSNorm", "Gelu", "Silu", "QuickGelu"}


class Formula(nn.Module):
    def __init__(self, form: Form) -> None:
        super().__init__()
        self.form = form
        generator = torch.Generator().manual_seed(0)
        self.w, self.b = (nn.Parameter(torch.randn(8, generator=generator)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.form(x, self.w, self.b)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("opset", [11, 17])
def test_forms(tmp_path: Path, name: str, opset: int) -> None:
    form, wanted = FORMS[name]
    module = checked(exported(Formula(form), tmp_path / "m.onnx", opset))
    ops = [s.op for s in module.steps]
    if OURS & set(wanted):
        assert ops[-len(wanted) :] == wanted
    else:
        assert set(wanted) <= set(ops) and not OURS & set(ops)


@pytest.mark.parametrize(
    "name, module", [("LayerNorm", nn.LayerNorm(8)), ("RMSNorm", nn.RMSNorm(8)), ("Gelu", nn.GELU("tanh"))]
)
def test_torch_modules_from_dynamo(tmp_path: Path, name: str, module: nn.Module) -> None:
    steps = checked(exported(nn.Sequential(module), tmp_path / "m.onnx", 18, dynamo=True)).steps
    assert [s.op.replace("alization", "") for s in steps] == [name]


def test_what_is_nearly_the_identity_stays(tmp_path: Path) -> None:
    """A loaded model computes what the file says, to the last digit of float64."""
    nodes = [
        helper.make_node("Mul", ["x", "factor"], ["scaled"]),
        helper.make_node("Add", ["scaled", "shift"], ["y"]),
    ]
    weights = [numpy_helper.from_array(np.array(v), n) for n, v in (("factor", 1.000009), ("shift", 1e-9))]
    infos = [[helper.make_tensor_value_info(n, TensorProto.DOUBLE, ["b", 3])] for n in "xy"]
    graph = helper.make_graph(nodes, "g", *infos, weights)
    save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8),
        tmp_path / "m.onnx",
    )
    x = torch.zeros(1, 3, dtype=torch.float64)
    module = load(tmp_path / "m.onnx", dtype=torch.float64)
    assert torch.equal(module(x), x + 1e-9) and torch.equal(module(x + 1.0), x + (1.000009 + 1e-9))
