"""Affine forms with error sets: whole passes under `BoundContract`, and the sets by brute force."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from attn_bounds import lirpa
from attn_bounds.domain.forms import AffineForm, Groups
from attn_bounds.domain.rules import relu
from attn_bounds.domain.sets import Ball, BoxInBall
from attn_bounds.errors import InputError, UnsupportedModelError
from attn_bounds.module import BoundedModule
from onnx_export import attention, attention_average, attention_scores, attention_weights

from ..contract import BoundContract, Case, Flat, bounds, project, smallest
from ..operators.test_attention import Queries, SelfAttention, mask, tensor


class Block(nn.Module):
    """Pre-norm-free encoder blocks, mean pooling and a head: what the loader produces, in small."""

    def __init__(self, d: int, layers: int, seed: int, weight: float = 1.0) -> None:
        super().__init__()
        self.attention = nn.ModuleList(SelfAttention(d, 2, seed + 20 * i, weight) for i in range(layers))
        for i in range(layers):
            self.register_buffer(f"up{i}", tensor(seed + 100 + i, d, 2 * d, scale=weight / math.sqrt(d)))
            self.register_buffer(
                f"down{i}", tensor(seed + 200 + i, 2 * d, d, scale=weight / math.sqrt(2 * d))
            )
        self.register_buffer("shift", tensor(seed + 300, 2 * d, scale=0.3))
        self.register_buffer("head", tensor(seed + 400, d, 3))

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.attention):
            x = layer(x)
            hidden = torch.relu(torch.matmul(x, getattr(self, f"up{i}")) + self.shift)
            x = x + torch.matmul(hidden, getattr(self, f"down{i}"))
        return torch.matmul(x.mean(1), self.head)


class TestSensitivity(BoundContract):
    methods = ("sensitivity",)

    @staticmethod
    def cases() -> list[Case]:
        return [
            Case("one block", Block(4, 1, 0), [tensor(1, 1, 3, 4)], [0], 0.1),
            Case("two blocks", Block(4, 2, 10), [tensor(2, 1, 3, 4)], [0], 0.1),
            Case("small", Block(4, 2, 20), [tensor(3, 1, 3, 4)], [0], 1e-4),
            Case("wide", Block(4, 1, 30), [tensor(4, 1, 3, 4)], [0], 0.4),
            Case("steep", Block(4, 2, 40, 1.5), [tensor(5, 1, 3, 4)], [0], 0.05),
            Case("mask", SelfAttention(4, 2, 50, mask=mask(3, 3)), [tensor(6, 1, 3, 4)], [0], 0.3),
            Case("one token", Block(4, 1, 60), [tensor(7, 1, 1, 4)], [0], 0.5),
            Case(
                "constant keys",
                Queries(tensor(8, 2, 3, 3), tensor(9, 2, 3, 2)),
                [tensor(10, 1, 2, 3, 3)],
                [0],
                0.3,
            ),
        ]


def test_exact_on_linear_networks() -> None:
    """One token makes attention linear, and without ReLU the bound is the dual norm."""
    case = Case("n=1", SelfAttention(4, 2, 70), [tensor(71, 1, 1, 4)], [0], 0.3)
    c = tensor(72, 3, 4)
    jacobian = torch.autograd.functional.jacobian(lambda x: case.module(x).flatten() @ c.T, case.inputs[0])
    centre = case.module(case.inputs[0]).flatten(1) @ c.T
    for norm, dual in ((1.0, math.inf), (2.0, 2.0), (math.inf, 1.0)):
        low, high = bounds(case, c, norm, "sensitivity")
        spread = 0.3 * torch.linalg.vector_norm(jacobian.reshape(3, -1), dual, dim=1)
        assert torch.allclose(low, (centre - spread).detach(), atol=1e-9)
        assert torch.allclose(high, (centre + spread).detach(), atol=1e-9)


def test_tight_for_small_radii() -> None:
    gaps = []
    for eps in (1e-2, 1e-3):
        case = Case("tight", SelfAttention(4, 2, 80), [tensor(81, 1, 3, 4)], [0], eps)
        c = tensor(82, 2, 12)
        low, _ = bounds(case, c, 2.0, "sensitivity")
        found = smallest(case, c, 2.0, restarts=2)
        gaps.append(float((found - low).max()) / eps**2)
    assert gaps[1] < 1.5 * gaps[0] < 1e3, "the gap must be of second order"


def test_no_looser_than_crown_on_small_radii() -> None:
    case = Case("compare", Block(4, 2, 90), [tensor(91, 1, 3, 4)], [0], 0.02)
    c = tensor(92, 3, 3)
    assert (bounds(case, c, 2.0, "sensitivity")[0] > bounds(case, c, 2.0, "CROWN")[0]).all()


def test_unknown_node_is_refused_by_name() -> None:
    class Sine(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.sin(torch.matmul(x, torch.eye(3, dtype=x.dtype)))

    x = torch.zeros(1, 3, dtype=torch.float64)
    graph = BoundedModule(Sine(), x)
    bounded = lirpa.BoundedTensor(x, lirpa.perturbation(2.0, 0.1))
    with pytest.raises(UnsupportedModelError, match="BoundSin"):
        graph.compute_bounds(x=(bounded,), method="sensitivity")


@pytest.mark.parametrize("norm", [1.0, 2.0, math.inf])
def test_ball_support(norm: float) -> None:
    w = tensor(1, 1, 4, 3)
    low, high = Ball("b", 4, norm, 1, w).range(w)
    for f in range(3):
        g = w[:, :, f]
        if norm == math.inf:
            best = g.abs().sum()
        elif norm == 2.0:
            best = g.norm()
        else:
            best = g.abs().max()
        assert float(high[0, f]) == pytest.approx(float(best)) and float(low[0, f]) == pytest.approx(
            -float(best)
        )


def box_in_ball(radius: float) -> BoxInBall:
    lower = -torch.rand(1, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    upper = torch.rand(1, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return BoxInBall("e", lower, upper, torch.tensor([radius], dtype=torch.float64))


@pytest.mark.parametrize("radius", [0.1, 0.7, 10.0])
def test_box_in_ball_support_against_ascent(radius: float) -> None:
    s, w = box_in_ball(radius), tensor(2, 1, 5, 4)
    loose, tight = s.range(w), s.tight_range(w)
    for f in range(4):
        e = torch.zeros(1, 5, dtype=torch.float64)
        for step in range(1500):  # alternating projections converge to a point of the intersection
            e = e + 0.05 * (1 - step / 1500) * w[:, :, f]
            for _ in range(20):
                e = project(torch.maximum(torch.minimum(e, s.upper), s.lower), 2.0, radius)
        best = float((w[:, :, f] * e).sum())
        assert best <= float(tight[1][0, f]) + 1e-9 <= float(loose[1][0, f]) + 2e-9
        assert float(tight[1][0, f]) <= 1.02 * best + 1e-9
        assert float(tight[0][0, f]) >= float(loose[0][0, f])


def test_supports_are_sublinear_and_monotone() -> None:
    s = box_in_ball(0.7)
    a, b = tensor(3, 1, 5, 1), tensor(4, 1, 5, 1)
    for kind in (s.range, s.tight_range):
        assert float(kind(a + b)[1]) <= float(kind(a)[1] + kind(b)[1]) + 1e-6
        assert float(kind(2 * a)[1]) == pytest.approx(2 * float(kind(a)[1]), rel=1e-6)
    smaller = BoxInBall("e", s.lower / 2, s.upper / 2, torch.tensor([0.35], dtype=torch.float64))
    assert float(smaller.range(a)[1]) <= float(s.range(a)[1])


@pytest.mark.parametrize("eps", [0.3, 1.0])
def test_relu_rule_against_its_definition(eps: float) -> None:
    """For points of the ball, the error that makes the form exact lies in the box and in the ball."""
    g = tensor(5, 1, 4, 6) * eps
    x = AffineForm(tensor(6, 1, 6), g)
    groups = Groups(growth=1.0)
    groups.add(Ball("input", 4, 2.0, 1, g))
    out, (low, high) = relu(x, groups, "relu")
    errors = groups.sets[1]
    assert isinstance(errors, BoxInBall) and errors.radius is not None
    picked = out.generators[0, 4:].nonzero()[:, 1]
    z = tensor(7, 2000, 4)
    z = (
        z
        / z.norm(dim=1, keepdim=True)
        * torch.rand(2000, 1, generator=torch.Generator().manual_seed(8)).double()
    )
    z[:1000] = z[:1000] / z[:1000].norm(dim=1, keepdim=True)
    before = x.centre + z @ g[0]
    assert (before >= low - 1e-12).all() and (before <= high + 1e-12).all()
    error = torch.relu(before) - out.centre - z @ out.generators[0, :4]
    stable = [i for i in range(6) if i not in picked.tolist()]
    assert error[:, stable].abs().max() < 1e-12 if stable else True
    e = error[:, picked]
    assert (e >= errors.lower - 1e-12).all() and (e <= errors.upper + 1e-12).all()
    assert (e.norm(dim=1) <= errors.radius + 1e-12).all()


def test_l2_ball_is_reduced_without_loss() -> None:
    """A first layer of rank 2 on six inputs leaves two symbols, and the bound is exact."""

    class Narrow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("w", tensor(9, 6, 2) @ tensor(10, 2, 4))

        def forward(self, x: Tensor) -> Tensor:
            return torch.matmul(x, self.w) + 1.0

    module = Narrow()
    x = tensor(11, 1, 6)
    graph = BoundedModule(Flat(module, 4), x)
    bounded = lirpa.BoundedTensor(x, lirpa.perturbation(2.0, 0.5))
    low, high = graph.compute_bounds(x=(bounded,), method="sensitivity")
    spread = 0.5 * module.w.norm(dim=0)
    assert torch.allclose(low, module(x) - spread, atol=1e-9) and torch.allclose(
        high, module(x) + spread, atol=1e-9
    )


def test_auto_leaves_sensitivity_out_where_it_has_no_rule() -> None:
    from attn_bounds import Verifier

    class Sine(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.sin(torch.matmul(x, torch.eye(3, dtype=x.dtype)))

    verifier = Verifier(Sine(), input_shape=(3,))
    assert verifier.stages("auto") == ("ibp", "crown", "alpha-crown")
    result = verifier.certify_inputs([torch.tensor([1.0, 0.0, 0.0])], [0], norm=2.0, eps=0.1)[0]
    assert result.verified


class ReadTwice(nn.Module):
    """Several linear layers read the input directly, and nothing else does."""

    def __init__(self) -> None:
        super().__init__()
        for i in range(3):
            self.register_buffer(f"w{i}", tensor(500 + i, 4, 4, scale=0.5))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.matmul(x, getattr(self, f"w{i}")) for i in range(3))
        scores = attention_scores(q, k, scale=0.5)
        return attention_average(scores, attention_weights(scores), v) + torch.relu(v) + 0.5 * k


class TestInputReadByManyNodes(BoundContract):
    methods = ("sensitivity", "CROWN")

    @staticmethod
    def cases() -> list[Case]:
        return [
            Case("read twice", ReadTwice(), [tensor(510, 1, 3, 4)], [0], 0.3),
            Case("eps 0", ReadTwice(), [tensor(511, 1, 3, 4)], [0], 0.0),
        ]


class Heads(nn.Module):
    """Scores and weights of one attention, put to the use that a subclass names."""

    def __init__(self) -> None:
        super().__init__()
        for i, name in enumerate(("first", "wq", "wk", "wv", "wu")):
            self.register_buffer(name, tensor(600 + i, 4, 4))

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        n = x.shape[1]
        x = torch.matmul(x, self.first)
        q, k, v, u = (
            torch.matmul(x, w).reshape(-1, n, 2, 2).permute(0, 2, 1, 3)
            for w in (self.wq, self.wk, self.wv, self.wu)
        )
        return attention_scores(q, k, scale=0.7), v, u, q

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class TwoAverages(Heads):
    def forward(self, x: Tensor) -> Tensor:
        scores, v, u, q = self.parts(x)
        weights = attention_weights(scores)
        both = attention_average(scores, weights, v) + attention_average(scores, weights, u) + q
        return both.mean(2).reshape(-1, 4)


class WeightsUsed(Heads):
    def forward(self, x: Tensor) -> Tensor:
        scores, v, _, _ = self.parts(x)
        weights = attention_weights(scores)
        average = attention_average(scores, weights, v)
        return average.mean(2).reshape(-1, 4) + torch.matmul(weights.mean(1), self.wv[:3]).mean(1)


class ScoresUsed(Heads):
    def forward(self, x: Tensor) -> Tensor:
        scores, v, _, _ = self.parts(x)
        average = attention_average(scores, attention_weights(scores), v)
        return average.mean(2).reshape(-1, 4) + torch.matmul(scores.mean(1), self.wv[:3]).mean(1)


class Broadcast(nn.Module):
    """One token plus a table of positions: the constant makes the tensor larger."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("w", tensor(620, 4, 4))
        self.register_buffer("positions", tensor(621, 5, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(torch.matmul(x, self.w) + self.positions).sum(1)


class FusedQKV(nn.Module):
    """One projection, split in three: attention without a heads dimension."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out = nn.Linear(4, 12).double(), nn.Linear(4, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).split(4, -1)
        return self.out(attention(q, k, v, scale=0.5).mean(1))


class TestUnusualGraphs(BoundContract):
    methods = ("sensitivity",)

    @staticmethod
    def cases() -> list[Case]:
        return [
            Case("scores shared by two averages", TwoAverages(), [tensor(630, 1, 3, 4)], [0], 0.05),
            Case("constant that broadcasts", Broadcast(), [tensor(631, 1, 1, 4)], [0], 0.3),
            Case("weights used elsewhere", WeightsUsed(), [tensor(640, 1, 3, 4)], [0], 0.1),
            Case("scores used elsewhere", ScoresUsed(), [tensor(640, 1, 3, 4)], [0], 0.1),
            Case("fused projection", FusedQKV(), [tensor(632, 1, 3, 4)], [0], 0.3),
        ]


class ClassToken(nn.Module):
    """Reads one token; the scores of the others are enormous, and float32 factors overflow."""

    def __init__(self, size: float) -> None:
        super().__init__()
        for i, name in enumerate(("wq", "wk", "wv", "w1", "w2")):
            self.register_buffer(name, tensor(650 + i, 4, 4))
        gain = torch.ones(3, 1, dtype=torch.float64)
        gain[1:] = size
        self.register_buffer("gain", gain)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.matmul(x, w).unsqueeze(1) for w in (self.wq * 1.0, self.wk, self.wv))
        o = attention(q * self.gain, k * self.gain, v, scale=0.5).squeeze(1)
        return torch.matmul(torch.relu(torch.matmul(o, self.w1)), self.w2)[:, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [3.0, 30.0, 300.0])
def test_overflow_is_never_a_bound(dtype: torch.dtype, size: float) -> None:
    """A range that is not finite must not pass for a stable neuron."""
    case = Case("overflow", ClassToken(size), [tensor(660, 1, 3, 4)], [0], 0.3)
    c = torch.eye(4, dtype=torch.float64)[:3]
    for norm in (2.0, math.inf):
        low, high = bounds(case, c, norm, "sensitivity", dtype)
        room = 1e-4 * (1 + low.abs())
        assert (low.isnan() | (low <= smallest(case, c, norm) + room)).all()
        assert (high.isnan() | (high >= -smallest(case, -c, norm) - room)).all()


def test_small_generators_survive_large_constants() -> None:
    """float32: a generator below half a unit in the last place of the bias must not vanish."""

    class Bias(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 1)
            self.linear.weight.data.fill_(1.0)
            self.linear.bias.data.fill_(1000.0)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(torch.matmul(x, torch.eye(64, dtype=x.dtype)))

    module = Bias()
    x = torch.zeros(1, 64)
    bounded = lirpa.BoundedTensor(x, lirpa.perturbation(math.inf, None, x - 1e-6, x + 1e-6))
    found = BoundedModule(module, x).propagate((bounded,))
    loss = found.lower(torch.ones(1, 1, 1))[1][0].loss
    assert float(loss) == pytest.approx(64e-6, rel=1e-4)


def test_batch_in_single_precision_with_a_sample_that_is_stable() -> None:
    case = Case("relu", Block(4, 1, 670), [tensor(671, 1, 3, 4)], [0], 1e-3)
    still = Case("relu", case.module, [torch.cat([case.inputs[0], 50 * case.inputs[0]])], [0], 1e-3)
    low, high = bounds(still, tensor(672, 2, 3), 2.0, "sensitivity", torch.float32)
    assert torch.isfinite(low).all() and (low <= high).all()


def test_fully_masked_query_is_refused() -> None:
    """float32 forgets the scores under −1e9 and averages; no bound on exact scores could hold."""
    full = torch.full((3, 3), -1e9, dtype=torch.float64)
    with pytest.raises(InputError, match="every key"):
        BoundedModule(SelfAttention(4, 2, 680, mask=full), tensor(681, 1, 3, 4))


class TestManyFunctionals(BoundContract):
    """The simpler bounds that large models get."""

    methods = ("sensitivity",)

    @pytest.fixture(autouse=True)
    def large(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("attn_bounds.domain.sets.MANY", 0)
        monkeypatch.setattr("attn_bounds.domain.attention.EXACT_WORK", 0)

    @staticmethod
    def cases() -> list[Case]:
        return TestSensitivity.cases()[1:6]
