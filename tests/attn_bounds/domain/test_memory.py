"""A memory budget: errors that get no symbols stay sound, are reported, and cost margin."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from attn_bounds import lirpa
from attn_bounds.domain.forms import NO_SYMBOLS, Rest
from attn_bounds.domain.propagate import Domain
from attn_bounds.errors import UnsupportedModelError
from attn_bounds.module import BoundedModule
from onnx_export import attention

from ..contract import BoundContract, Case
from ..operators.test_attention import SelfAttention, mask, tensor
from ..operators.test_l2_attention import Layer as L2Layer
from .test_propagate import Block


class Everything(nn.Module):
    """What errors without symbols pass through: convolution, class token, reshapes, products, activations."""

    def __init__(self, pool: str) -> None:
        super().__init__()
        self.pool = pool
        self.register_buffer("up", tensor(901, 4, 6, scale=0.5))
        self.register_buffer("token", tensor(902, 1, 1, 4))
        self.register_buffer("mix", tensor(903, 4, 4, scale=0.5))
        self.register_buffer("head", tensor(904, 4, 3))
        self.register_buffer("gain", tensor(905, 4))
        self.register_buffer("kernel", tensor(906, 6, 6, 1, 1, scale=0.5))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(torch.matmul(x, self.up))  # (b, 3, 6)
        h = nn.functional.conv2d(h.transpose(1, 2).reshape(-1, 6, 3, 1), self.kernel)
        h = h.reshape(-1, 6, 3).transpose(1, 2)
        h = torch.matmul(torch.tanh(h), self.up.T)
        h = torch.cat([self.token.expand(len(x), 1, 4), h], 1)
        h = torch.matmul(self.mix, h) * self.gain - x.mean(1, keepdim=True)
        q = h.reshape(-1, 4, 2, 2).transpose(1, 2)
        h = h + attention(q, q, q, scale=0.7).transpose(1, 2).reshape(-1, 4, 4)
        h = torch.relu(h + 1.0) * torch.sigmoid(h)
        h = h.mean(1) if self.pool == "mean" else h[:, 0]
        return torch.matmul(h, self.head)


class Distances(nn.Module):
    """Two layers of L2 self-attention: errors of the first reach queries, keys and values of the second."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(L2Layer(4, 2, 930), L2Layer(4, 2, 940))
        self.register_buffer("head", tensor(950, 4, 3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.matmul(self.layers(x).mean(1), self.head)


def cases() -> list[Case]:
    return [
        Case("two blocks", Block(4, 2, 910), [tensor(911, 1, 3, 4)], [0], 0.1),
        Case("wide", Block(4, 1, 912), [tensor(913, 1, 3, 4)], [0], 0.4),
        Case("mask", SelfAttention(4, 2, 914, mask=mask(3, 3)), [tensor(915, 1, 3, 4)], [0], 0.3),
        Case("mean pool", Everything("mean"), [tensor(916, 1, 3, 4)], [0], 0.1),
        Case("class token", Everything("token"), [tensor(917, 1, 3, 4)], [0], 0.02),
        Case("distances", Distances(), [tensor(918, 1, 3, 4)], [0], 0.2),
    ]


class TestNoRoom(BoundContract):
    """Every later error set is folded."""

    methods = ("sensitivity",)
    room = 0

    @pytest.fixture(autouse=True)
    def limited(self, monkeypatch: pytest.MonkeyPatch) -> None:
        room, run = self.room, Domain.run

        def few(self: Domain, memory: float, batch: int, dtype: torch.dtype) -> tuple[int, int]:
            return 12 + room, 10**6 if room else 0

        monkeypatch.setattr(Domain, "_symbols", few)
        monkeypatch.setattr(Domain, "run", lambda self, *args: run(self, *args[:3], 1e9))
        monkeypatch.setattr("attn_bounds.domain.attention.BLOCK", 1)  # one query row at a time

    @staticmethod
    def cases() -> list[Case]:
        return cases()

    def test_costs_margin_and_says_so(self) -> None:
        for case in cases():
            c = self.functional(case)
            graph = BoundedModule(case.module, tuple(case.inputs))
            x = lirpa.BoundedTensor(case.inputs[0], lirpa.perturbation(2.0, case.eps))
            found = graph.propagate((x,))
            assert found.groups.offsets[-1] <= 12 + self.room or "pool" in case.name or "token" in case.name
            assert sum(count for _, count in found.groups.folded) > 0
            _, shares = found.lower(c[None])
            assert sum(float(loss.min()) for label, _, loss in shares if label == NO_SYMBOLS) > 0


class TestSomeRoom(TestNoRoom):
    """Half of the sets keep symbols for their largest errors."""

    room = 9

    def test_batch_equals_loop(self) -> None:
        """Not so: the samples of a batch share the symbols."""


def test_no_budget_is_as_before_and_a_large_one_too() -> None:
    case = cases()[0]
    graph = BoundedModule(case.module, tuple(case.inputs))
    x = lirpa.BoundedTensor(case.inputs[0], lirpa.perturbation(2.0, case.eps))
    c = tensor(920, 1, 3, 3)
    free, _ = graph.compute_bounds(x=(x,), C=c, method="sensitivity")
    limited, _ = graph.compute_bounds(x=(x,), C=c, method="sensitivity", memory=4e9)
    assert torch.allclose(free, limited, rtol=1e-12)


def test_a_budget_that_the_input_does_not_fit_in_is_refused() -> None:
    case = cases()[0]
    graph = BoundedModule(case.module, tuple(case.inputs))
    x = lirpa.BoundedTensor(case.inputs[0], lirpa.perturbation(2.0, case.eps))
    with pytest.raises(UnsupportedModelError, match="GB for the 12 symbols"):
        graph.compute_bounds(x=(x,), method="sensitivity", memory=6e8 + 100)


def test_rest_through_maps() -> None:
    """Random members of a rest stay members of its image."""
    generator = torch.Generator().manual_seed(0)
    box = torch.rand((1, 3, 4), generator=generator, dtype=torch.float64)
    rest = Rest(box, 0.6 * torch.linalg.vector_norm(box, dim=-1))
    r = (2 * torch.rand((500, 3, 4), generator=generator, dtype=torch.float64) - 1) * box
    r = r * (rest.norm.unsqueeze(-1) / torch.linalg.vector_norm(r, dim=-1, keepdim=True)).clamp(max=1.0)
    weight = tensor(921, 4, 5)

    def inside(image: Rest, members: Tensor) -> None:
        assert (members.abs() <= image.box + 1e-12).all()
        assert (torch.linalg.vector_norm(members, dim=-1) <= image.norm + 1e-12).all()
        assert bool(torch.isfinite(image.norm).all())

    inside(rest.through(weight), r @ weight)
    inside(rest.scaled(tensor(922, 4)), r * tensor(922, 4))
    inside(rest.summed(lambda t: t.mean(1)), r.mean(1))
    inside(rest + rest, r + r.flip(0))
    heads = rest.moved(lambda t: t.reshape(-1, 3, 2, 2).transpose(1, 2))
    inside(heads, r.reshape(-1, 3, 2, 2).transpose(1, 2))
    assert float(heads.norm.max()) <= float(rest.norm.max()), "a part of a row is no longer than the row"
    inside(rest.moved(lambda t: t.mT), r.mT)
    inside(rest.moved(lambda t: t[:, 1:]), r[:, 1:])
    assert math.isfinite(float(rest.norm.sum()))
