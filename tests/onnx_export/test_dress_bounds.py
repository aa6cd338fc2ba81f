"""Bounds of loaded attention: sound under attack, and the same for one function in different dresses."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from attn_bounds import lirpa
from attn_bounds.module import BoundedModule
from onnx_export import load

from ..attn_bounds.contract import Case, smallest
from .test_attention import CASES, TOKENS, Layer, exported, talking, turned

POINTS = 0.7 * torch.randn(2, TOKENS, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
METHODS = ("IBP", "CROWN", "sensitivity")
SAME = [
    "both scaled",
    "heads as slices",
    "softmax over rows",
    "values first",
    "softmax of a matrix",
    "einsum, heads last",
    "exponentials",
    "unbind",
]


def lower_bounds(module: torch.nn.Module, c: Tensor, norm: float, eps: float) -> dict[str, Tensor]:
    bounded = BoundedModule(module, POINTS)
    ball = lirpa.BoundedTensor(POINTS, lirpa.PerturbationLpNorm(norm=norm, eps=eps))
    return {
        method: bounded.compute_bounds(x=(ball,), C=c.expand(2, -1, -1), method=method, bound_upper=False)[0]
        for method in METHODS
    }


def functionals(outputs: int) -> Tensor:
    one = torch.eye(outputs, dtype=torch.float64)
    return torch.cat([one, -one])


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    path = exported(CASES["split"][0](), tmp_path_factory.mktemp("plain") / "m.onnx", 17)
    return lower_bounds(load(path, dtype=torch.float64), functionals(3), math.inf, 0.05)


@pytest.mark.parametrize("name", SAME)
def test_one_function_has_one_bound(tmp_path: Path, plain: dict[str, Tensor], name: str) -> None:
    module = load(exported(CASES[name][0](), tmp_path / "m.onnx", 17), dtype=torch.float64)
    for method, bound in lower_bounds(module, functionals(3), math.inf, 0.05).items():
        assert torch.allclose(bound, plain[method], atol=1e-6), method


SOUND = {
    **{
        name: CASES[name][0]
        for name in (
            "temperature per head",
            "filled -inf",
            "grouped by queries",
            "sdpa, one query sees nothing",
            "weights used twice",
            "learned queries",
            "MultiheadAttention, sequence first",
            "encoder layer",
        )
    },
    "talking": lambda: Layer(talking),
    "softcap": lambda: Layer(lambda q, k, v: (torch.tanh(q @ turned(k) / 3.0) * 3.0).softmax(-1) @ v),
}


@pytest.mark.parametrize("name", SOUND)
def test_bounds_hold(tmp_path: Path, name: str) -> None:
    module = load(exported(SOUND[name](), tmp_path / "m.onnx", 17), dtype=torch.float64)
    c = functionals(module.output_shape[0])[:8]
    for norm, eps in ((math.inf, 0.05), (2.0, 0.2)):
        found = smallest(Case("", module, [POINTS], [0], eps), c, norm, restarts=2, steps=15)
        for method, bound in lower_bounds(module, c, norm, eps).items():
            assert torch.isfinite(bound).all() and (bound <= found + 1e-9).all(), (method, norm)
            # a bound that holds for want of information is no use
            assert method != "sensitivity" or (found - bound).amax() < 0.6, norm
