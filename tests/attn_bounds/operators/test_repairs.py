"""auto_LiRPA's own operators after repair: `stock-*` must be bounds too. Each test fails without a repair."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from attn_bounds import lirpa
from attn_bounds.module import BoundedModule, StockModule

from ..contract import Case, Flat, bounded_inputs, smallest


def rand(seed: int, *shape: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Decomposed(nn.Module):
    """Attention in plain torch operators, as auto_LiRPA alone sees it."""

    def __init__(self, d: int, seed: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            nn.Parameter(rand(seed + i, d, d, scale=1 / math.sqrt(d)), requires_grad=False) for i in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.matmul(x, w) for w in self.weights)
        return torch.matmul(torch.softmax(torch.matmul(q, k.transpose(-2, -1)), -1), v)


@pytest.mark.parametrize("norm", [2.0, math.inf])
@pytest.mark.parametrize("batch", [1, 2])
def test_stock_crown_on_decomposed_attention(norm: float, batch: int) -> None:
    """0.3's ReduceMax scatters the first functional only: its CROWN through a softmax was violated."""
    for seed in range(3):
        case = Case("stock", Decomposed(4, 10 * seed), [rand(seed, batch, 3, 4)], [0], 0.3)
        c = rand(seed + 5, 3, 12)
        graph = StockModule(Flat(case.module, 12), case.inputs[0])
        functionals = c.expand(batch, 3, 12).contiguous()
        low, high = graph.compute_bounds(
            x=bounded_inputs(case, norm, torch.float64), C=functionals, method="CROWN"
        )
        assert (low <= smallest(case, c, norm) + 1e-9).all()
        assert (high >= -smallest(case, -c, norm) - 1e-9).all()


def test_stock_softmax_interval() -> None:
    """0.7.1 reports a lower bound 0.990 for these scores in float32; the truth is 0.00995."""

    class Softmax(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.softmax(x + 0.0, -1)

    low, high = torch.tensor([[-23.0, -18.5]]), torch.tensor([[0.0, -18.4]])
    for kind in (StockModule, BoundedModule):
        graph = kind(Softmax(), low)
        x = lirpa.BoundedTensor((low + high) / 2, lirpa.perturbation(math.inf, None, low, high))
        found, _ = graph.compute_bounds(x=(x,), method="IBP")
        assert float(found[0, 0]) <= float(torch.softmax(torch.tensor([-23.0, -18.4]), -1)[0]) + 1e-6


def test_final_product_in_interval_mode() -> None:
    """0.3 hands C to an operator that does not take it."""
    weight = rand(1, 3, 4)

    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(weight, requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            return torch.matmul(torch.relu(x), self.weight)

    case = Case("product", Product(), [rand(2, 1, 3)], [0], 0.2)
    c = rand(3, 2, 4)
    graph = BoundedModule(case.module, case.inputs[0])
    low, _ = graph.compute_bounds(x=bounded_inputs(case, math.inf, torch.float64), C=c[None], method="IBP")
    assert (low <= smallest(case, c, math.inf) + 1e-9).all()


def test_buffers_do_not_mix_the_samples_of_a_batch() -> None:
    """0.3 takes buffers for inputs with a batch dimension."""

    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("shift", rand(4, 3))

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(x + self.shift)

    x = rand(5, 2, 3)
    graph = BoundedModule(Shift(), x)
    both = [
        graph.compute_bounds(x=bounded_inputs(Case("", Shift(), [x], [0]), 2.0, x.dtype), method="CROWN")[0]
    ]
    each = [
        graph.compute_bounds(
            x=bounded_inputs(Case("", Shift(), [x[i : i + 1]], [0]), 2.0, x.dtype), method="CROWN"
        )[0]
        for i in range(2)
    ]
    assert torch.allclose(both[0], torch.cat(each), atol=1e-12)


def test_linear_layers_on_tokens() -> None:
    """0.3 makes a product with a transposed weight of them, and reads the weight as bounds of a node."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2)).double()
    case = Case("tokens", model, [rand(1, 2, 3, 4)], [0], 0.3)
    c = rand(2, 3, 6)
    for kind in (StockModule, BoundedModule):
        graph = kind(Flat(case.module, 6), case.inputs[0])
        functionals = c.expand(2, 3, 6).contiguous()
        low, _ = graph.compute_bounds(
            x=bounded_inputs(case, 2.0, torch.float64), C=functionals, method="CROWN"
        )
        found = smallest(case, c, 2.0)
        assert (low <= found + 1e-9).all() and (low >= found - 3.0).all()


@pytest.mark.parametrize("kind", [StockModule, BoundedModule])
def test_decomposed_layer_norm(kind: type[BoundedModule]) -> None:
    """0.3 takes `a / √b` for a formula of its own, numerators for positive, and its √ is violated."""

    class Norm(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            z = x * 1.0 + x.mean(-1, keepdim=True) * -1.0
            return (z + 0.3) / torch.sqrt((z * z).mean(-1, keepdim=True) + 0.1)

    x = rand(6, 1, 4)
    graph = kind(Flat(Norm(), 4), x)
    assert torch.allclose(graph(x), Norm()(x))
    case, c = Case("norm", Norm(), [x], [0], 0.1), torch.cat([torch.eye(4), -torch.eye(4)]).double()
    for norm in (2.0, math.inf):
        found = smallest(case, c, norm)
        for method in ("IBP", "CROWN"):
            low, _ = graph.compute_bounds(x=bounded_inputs(case, norm, x.dtype), C=c[None], method=method)
            assert (low <= found + 1e-9).all(), (norm, method, low, found)


def test_quotients_by_what_may_be_zero_are_unknown() -> None:
    """0.3 returns numbers; 0.7.1 raises where it is left alone."""

    class Quotient(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x + 1.0) / (x * 2.0)

    x = torch.tensor([[0.1, 2.0]], dtype=torch.float64)
    case, c = Case("quotient", Quotient(), [x], [0], 0.5), torch.eye(2).double()
    for kind in (StockModule, BoundedModule) if lirpa.is_old() else (BoundedModule,):
        graph = kind(Flat(Quotient(), 2), x)
        low, high = graph.compute_bounds(x=bounded_inputs(case, math.inf, x.dtype), C=c[None], method="CROWN")
        assert not torch.isfinite(low[0, 0]) and not torch.isfinite(high[0, 0])
