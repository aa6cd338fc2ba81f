"""Every operator, attribute and opset of the table: right, and bounded soundly, or refused with a reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from attn_bounds import lirpa
from attn_bounds.errors import InputError
from attn_bounds.module import BoundedModule
from onnx_export import Oracle, load

from .operator_cases import CASES, Case

EPS = 0.1


class Rows(nn.Module):
    """The module with its output as one row per sample."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        shape = module.input_shape
        self.outputs = module(torch.zeros(1, *shape, dtype=torch.float64) + 1.0).numel()

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x).reshape(-1, self.outputs)


def sample(case: Case, batch: int, dtype: torch.dtype) -> Tensor:
    x = torch.randn((batch, *case.x), generator=torch.Generator().manual_seed(7), dtype=dtype)
    return x if case.lowest is None else x.abs() + case.lowest + EPS


def attacked(module: nn.Module, x: Tensor, steps: int = 8) -> tuple[Tensor, Tensor]:
    """Smallest and largest outputs found in the box around every sample: corners, and signed gradients."""
    generator = torch.Generator().manual_seed(1)
    batch, outputs = len(x), module(x).shape[1]
    low = high = module(x).detach()
    for sign in (1.0, -1.0):
        target = torch.randint(outputs, (32,), generator=generator)
        start = torch.rand((32, *x.shape), generator=generator, dtype=x.dtype)
        start[16:] = start[16:].round()
        d = (2 * EPS * start - EPS).flatten(0, 1)
        for _ in range(steps):
            d.requires_grad_()
            y = module(x.repeat(32, *[1] * (x.ndim - 1)) + d)
            found = y.detach().reshape(32, batch, outputs)
            low, high = torch.minimum(low, found.amin(0)), torch.maximum(high, found.amax(0))
            picked = y[torch.arange(len(y)), target.repeat_interleave(batch)]
            (g,) = torch.autograd.grad(sign * picked.sum(), d)
            d = (d.detach() + EPS / 2 * g.sign()).clamp(-EPS, EPS)
    return low, high


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_operator(case: Case, tmp_path: Path) -> None:
    path = case.save(tmp_path)
    if case.refused:
        with pytest.raises(InputError, match=case.refused):
            load(path)
        return
    module = load(path)
    oracle = Oracle(path)
    for batch in (1, 3):
        x = sample(case, batch, torch.float32)
        expected = oracle(x)
        assert torch.allclose(module(x).reshape(expected.shape), expected, atol=2e-5, rtol=2e-5)
    rows = Rows(load(path, dtype=torch.float64, check=False))
    x = sample(case, 2, torch.float64)
    low, high = attacked(rows, x)
    graph = BoundedModule(rows, x)
    assert torch.allclose(graph(x), rows(x), atol=1e-9, rtol=1e-7)
    bounded = lirpa.BoundedTensor(x, lirpa.perturbation(torch.inf, EPS))
    for method in ("IBP", "CROWN"):
        lower, upper = graph.compute_bounds(x=(bounded,), method=method)
        room = 1e-7 * (1.0 + high.abs().maximum(low.abs()))
        assert bool((lower <= low + room).all()) and bool((high - room <= upper).all()), method
        assert bool(torch.isfinite(lower).all()) and bool(torch.isfinite(upper).all()), method
    if case.linear:  # then the last bounds are those of CROWN, which are exact
        centre = rows(x)
        jacobian = torch.func.vmap(torch.func.jacrev(lambda v: rows(v.unsqueeze(0))[0]))(x).flatten(2)
        reach = EPS * jacobian.abs().sum(2)
        assert torch.allclose(lower, centre - reach, atol=1e-6, rtol=1e-6)
        assert torch.allclose(upper, centre + reach, atol=1e-6, rtol=1e-6)
