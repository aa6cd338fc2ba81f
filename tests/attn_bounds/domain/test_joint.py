"""The joint bound of final functionals: valid whatever the mixtures, never looser than sets alone."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from attn_bounds import lirpa
from attn_bounds.domain import joint
from attn_bounds.domain.propagate import Propagation
from attn_bounds.module import BoundedModule
from onnx_export import attention

from ..contract import BoundContract, Case
from ..operators.test_attention import tensor
from .test_propagate import Block, TestSensitivity


class TestAnyMixture(BoundContract):
    """Random mixtures instead of chosen ones: every one of them must be valid."""

    methods = ("sensitivity",)
    spread = 3.0

    @pytest.fixture(autouse=True)
    def mixed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def random(walk: joint._Walk, z: Tensor, iterations: int) -> Tensor:
            generator = torch.Generator().manual_seed(3)
            for mix in walk.mixes:
                for t in mix.values():
                    t += self.spread * torch.randn(t.shape, generator=generator, dtype=t.dtype)
            return walk.worst(torch.randn(z.shape, generator=generator, dtype=z.dtype), z, z, [])

        monkeypatch.setattr(joint, "_choose", random)
        # the better of two would hide a wrong one
        monkeypatch.setattr(Propagation, "is_better", staticmethod(lambda a, _: torch.isfinite(a)))

    @staticmethod
    def cases() -> list[Case]:
        return TestSensitivity.cases()

    def test_batch_equals_loop(self) -> None:
        """Not so: the random numbers differ."""


class TestFactored(TestAnyMixture):
    """As above, through factors instead of the matrix."""

    @pytest.fixture(autouse=True)
    def factored(self, monkeypatch: pytest.MonkeyPatch) -> None:
        losses = joint.joint_losses
        none = joint.Effort(1, 0.0, True)
        monkeypatch.setattr(
            "attn_bounds.domain.propagate.joint_losses", lambda *args: losses(*args[:3], none)
        )


def lower(module: nn.Module, x: Tensor, norm: float, eps: float | Tensor, c: Tensor) -> Tensor:
    if norm == math.inf:
        ptb = lirpa.perturbation(norm, None, x - eps, x + eps)
    else:
        ptb = lirpa.perturbation(norm, eps)
    bounded = lirpa.BoundedTensor(x, ptb)
    found = BoundedModule(module, x).compute_bounds(x=(bounded,), C=c, method="sensitivity")[0]
    return found.detach().double()


def test_is_much_tighter_than_sets_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    x, c = tensor(950, 1, 3, 4), tensor(951, 1, 2, 3)
    module = Block(4, 2, 952)
    together = lower(module, x, 2.0, 0.2, c)
    monkeypatch.setattr(Propagation, "is_better", staticmethod(lambda a, b: torch.zeros_like(a) > 0))
    alone = lower(module, x, 2.0, 0.2, c)
    centre = (module(x) @ c[0].T)[0]
    assert (centre - together < 0.9 * (centre - alone)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("hidden", [2, 6])
def test_box_with_fixed_entries(hidden: int, dtype: torch.dtype) -> None:
    """Entries that move nothing have no place in an ellipsoid around the box."""
    for seed in range(4):
        torch.manual_seed(seed)
        module = nn.Sequential(nn.Linear(8, hidden), nn.ReLU(), nn.Linear(hidden, 3)).to(dtype)
        for p in module.parameters():
            p.data *= 10
        x = torch.randn(1, 8, dtype=dtype)
        radius = torch.full_like(x, 0.5)
        radius[0, :2] = 0
        assert torch.isfinite(lower(module, x, math.inf, radius, torch.eye(3, dtype=dtype)[None])).all()


def test_huge_scores_do_not_overflow_the_quadratic() -> None:
    """Weights near 1e300 are finite, their squares are not."""

    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("q", tensor(960, 6, 3))
            self.register_buffer("v", tensor(961, 6, 3))
            self.register_buffer("k", tensor(962, 1, 2, 3))

        def forward(self, x: Tensor) -> Tensor:
            return attention(torch.matmul(x, self.q), self.k, torch.matmul(x, self.v), scale=1.0).reshape(
                -1, 6
            )

    x = tensor(963, 1, 2, 6)
    for eps in range(50, 300, 10):
        found = lower(One(), x, math.inf, float(eps), torch.eye(6, dtype=torch.float64)[None])
        assert not found.isnan().any()


@pytest.mark.parametrize("shift", [10.0, 1e3, 1e4])
def test_keys_that_move_together_in_single_precision(shift: float) -> None:
    """What all keys share cancels in the scores; what float32 loses of it does not."""

    class Pool(nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            w = shift * tensor(seed, 1, 1, 4) + 0.01 * tensor(seed + 1, 1, 3, 4)
            self.register_buffer("w", w.reshape(1, 12))
            self.register_buffer("b", tensor(seed + 2, 12))
            self.register_buffer("q", tensor(seed + 3, 1, 1, 4))
            self.register_buffer("v", tensor(seed + 4, 1, 3, 2))

        def forward(self, x: Tensor) -> Tensor:
            k = (torch.matmul(x, self.w) + self.b).reshape(-1, 3, 4)
            return attention(self.q, k, self.v, scale=0.5).reshape(-1, 2)

    t = torch.linspace(-1, 1, 20001, dtype=torch.float64)[:, None]
    for seed in range(970, 995):
        module = Pool(seed)
        outputs = module.double()(t)
        single = lower(module.float(), torch.zeros(1, 1), 2.0, 1.0, torch.eye(2)[None])
        slack = 256 * torch.finfo(torch.float32).eps * outputs.abs().max().clamp(min=1.0)
        assert (single[0] - slack <= outputs.amin(0)).all()
