"""Operators of L2 self-attention under `BoundContract`, in graphs of their own and loaded from ONNX."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attn_bounds import InputSet, Specification, certify, pgd
from attn_bounds.module import BoundedModule
from attn_bounds.sensitivity.distance import distance_lower_plane, distance_range
from attn_bounds.sensitivity.l2_attention import ContractiveL2SelfAttention, L2SelfAttention
from onnx_export import Oracle, inspect, l2_attention, l2_scores, load

from ..contract import BoundContract, Case, bounds, smallest
from .test_attention import mask, tensor


class Roots(nn.Module):
    """L2 attention whose queries, keys and values are inputs themselves."""

    def __init__(self, scale: float = 0.5, mask: Tensor | None = None) -> None:
        super().__init__()
        self.scale = scale
        self.register_buffer("mask", mask)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return l2_attention(q, k, v, self.mask, scale=self.scale)


class Tied(nn.Module):
    """Queries are the keys."""

    def forward(self, q: Tensor, v: Tensor) -> Tensor:
        return l2_attention(q, q, v, scale=0.5)


class Constant(nn.Module):
    """Constant keys and values, or constant queries, without a batch dimension."""

    def __init__(self, keys: bool, other: Tensor, value: Tensor) -> None:
        super().__init__()
        self.keys = keys
        self.register_buffer("other", other)
        self.register_buffer("value", value)

    def forward(self, x: Tensor) -> Tensor:
        q, k = (x, self.other) if self.keys else (self.other, x)
        return l2_attention(q, k, self.value, scale=0.5)


class Layer(nn.Module):
    """One input, heads, tied queries and keys, values, residual connection."""

    def __init__(
        self,
        d: int,
        heads: int,
        seed: int,
        weight: float = 1.0,
        mask: Tensor | None = None,
        tied: bool = True,
    ) -> None:
        super().__init__()
        self.heads, self.tied = heads, tied
        self.register_buffer("mask", mask)
        for i, name in enumerate(("wq", "wk", "wv", "wo")):
            self.register_buffer(name, tensor(seed + i, d, d, scale=weight / math.sqrt(d)))

    def forward(self, x: Tensor) -> Tensor:
        n, d = x.shape[1:]

        def split(w: Tensor) -> Tensor:
            return torch.matmul(x, w).reshape(-1, n, self.heads, d // self.heads).permute(0, 2, 1, 3)

        q = split(self.wq)
        k = q if self.tied else split(self.wk)
        o = l2_attention(q, k, split(self.wv), self.mask, scale=1.0 / math.sqrt(d // self.heads))
        return torch.matmul(o.permute(0, 2, 1, 3).reshape(-1, n, d), self.wo) + x


class Scores(nn.Module):
    """The scores themselves, read by something else than an attention."""

    def __init__(self, w: Tensor) -> None:
        super().__init__()
        self.register_buffer("w", w)

    def forward(self, x: Tensor) -> Tensor:
        q = torch.matmul(x, self.w).unsqueeze(1)
        return l2_scores(q, q, scale=0.3).squeeze(1)


def roots_case(
    name: str, heads: int, n: int, m: int, perturbed: list[int], eps: float, size: float, seed: int, **kw: Any
) -> Case:
    shapes = (heads, n, 3), (heads, m, 3), (heads, m, 2)
    inputs = [tensor(seed + i, 1, *s, scale=size) for i, s in enumerate(shapes)]
    return Case(name, Roots(**kw), inputs, perturbed, eps)


class TestQueriesKeysValuesAsInputs(BoundContract):
    @staticmethod
    def cases() -> list[Case]:
        constants = tensor(1, 2, 3, 3), tensor(2, 2, 3, 2)
        return [
            roots_case("all perturbed", 2, 3, 3, [0, 1, 2], 0.2, 1.0, 20),
            roots_case("cross-attention", 1, 2, 4, [0, 1, 2], 0.3, 1.0, 1),
            Case("tied", Tied(), [tensor(3, 1, 2, 3, 3), tensor(4, 1, 2, 3, 2)], [0, 1], 0.3),
            Case(
                "constant keys",
                Constant(True, *constants),
                [tensor(3, 1, 2, 3, 3)],
                [0],
                0.5,
            ),
            Case(
                "constant queries",
                Constant(False, *constants),
                [tensor(6, 1, 2, 3, 3)],
                [0],
                0.3,
            ),
            roots_case("one key", 1, 3, 1, [0, 1, 2], 0.5, 1.0, 2),
            roots_case("values only", 2, 3, 3, [2], 0.5, 1.0, 5),
            roots_case("keys and values", 2, 2, 3, [1, 2], 0.3, 1.0, 6),
            roots_case("far apart", 1, 3, 3, [0, 1, 2], 0.5, 5.0, 7),
            roots_case("negative scale", 1, 3, 3, [0, 1, 2], 0.3, 1.0, 9, scale=-0.7),
            roots_case("mask", 2, 3, 3, [0, 1, 2], 0.3, 1.0, 10, mask=mask(3, 3)),
        ]


def layers() -> list[Case]:
    return [
        Case("plain", Layer(4, 2, 30), [tensor(40, 1, 3, 4)], [0], 0.1),
        Case("untied", Layer(4, 2, 36, tied=False), [tensor(46, 1, 3, 4)], [0], 0.2),
        Case("wide", Layer(4, 2, 32), [tensor(42, 1, 4, 4)], [0], 1.0),
        Case("far from 0", Layer(4, 2, 37), [tensor(47, 1, 3, 4) + 20.0], [0], 0.2),
        Case("mask", Layer(4, 2, 35, mask=mask(3, 3)), [tensor(45, 1, 3, 4)], [0], 0.2),
        Case("steep", Layer(4, 2, 33, weight=3.0), [tensor(43, 1, 3, 4)], [0], 0.1),
        Case("one token", Layer(4, 2, 34), [tensor(44, 1, 1, 4)], [0], 0.5),
        Case("small", Layer(4, 1, 31), [tensor(41, 1, 3, 4)], [0], 1e-4),
    ]


class TestLayer(BoundContract):
    methods = ("CROWN", "alpha-crown")

    @staticmethod
    def cases() -> list[Case]:
        return layers()[:4]


class TestLayerForward(BoundContract):
    methods = ("IBP", "forward")

    @staticmethod
    def cases() -> list[Case]:
        return layers()


class TestSensitivity(BoundContract):
    methods = ("sensitivity", "sensitivity-crown")

    @staticmethod
    def cases() -> list[Case]:
        return [
            *layers(),
            Case("scores alone", Scores(tensor(50, 4, 4, scale=0.5)), [tensor(51, 1, 3, 4)], [0], 0.2),
        ]

    @pytest.mark.parametrize("method", ["sensitivity", "CROWN"])
    def test_tight_for_small_radii(self, method: str) -> None:
        """The loss against the attack, as a part of how far the attack gets, vanishes with the radius."""
        gaps = []
        for eps in (1e-2, 1e-4):
            case = Case("tight", Layer(4, 2, 60), [tensor(61, 1, 3, 4)], [0], eps)
            c = tensor(62, 2, 12)
            low, _ = bounds(case, c, 2.0, method)
            found = smallest(case, c, 2.0, restarts=2)
            centre = (case.module(case.inputs[0]).flatten(1) @ c.T).detach()
            gaps.append(float(((found - low) / (centre - found)).max()))
        assert gaps[1] < 1e-2 and gaps[1] < gaps[0] / 10, gaps


def test_planes_and_ranges_enclose() -> None:
    """Corners and random points of the boxes, over random tangent points; the range is attained."""
    for seed in range(30):
        same = seed % 3 == 0
        x_c, x_r = tensor(seed, 1, 3, 2), tensor(seed + 100, 1, 3, 2).abs()
        y_c, y_r = (x_c, x_r) if same else (tensor(seed + 200, 1, 3, 2), tensor(seed + 300, 1, 3, 2).abs())
        a, t = tensor(seed + 400, 5, 1, 3, 3), tensor(seed + 500, 5, 1, 3, 3)
        box = x_c - x_r, x_c + x_r, y_c - y_r, y_c + y_r
        low, high = distance_range(*box, same)
        planes = [distance_lower_plane(a, *box, s, same) for s in (0.0, t)]
        generator = torch.Generator().manual_seed(seed)
        reached_low, reached_high = torch.full_like(low, math.inf), torch.full_like(high, -math.inf)
        for i in range(300):
            u, v = (2.0 * torch.rand(x_c.shape, generator=generator, dtype=torch.float64) - 1.0 for _ in "xy")
            u, v = (u, v) if i % 2 else (u.sign(), v.sign())
            x = x_c + x_r * u
            y = x if same else y_c + y_r * v
            d = torch.cdist(x, y).square()
            reached_low, reached_high = torch.minimum(reached_low, d), torch.maximum(reached_high, d)
            value = (a * d).flatten(2).sum(-1)
            for plane in planes:
                bound = (plane.x * x).flatten(2).sum(-1) + (plane.y * y).flatten(2).sum(-1) + plane.bias
                assert (bound <= value + 1e-9).all()
        assert (low <= reached_low + 1e-9).all() and (high >= reached_high - 1e-9).all()
        assert torch.allclose(reached_high, high)


def test_a_token_has_distance_zero_from_itself() -> None:
    """The box forgets it: with two tokens and tied weights the intervals differ."""
    tied, free = Tied(), Roots()
    q, v = tensor(1, 1, 1, 2, 3), tensor(2, 1, 1, 2, 2)
    c = tensor(3, 4, 4)
    one = bounds(Case("tied", tied, [q, v], [0], 0.3), c, math.inf, "IBP")
    two = bounds(Case("free", free, [q, q, v], [0, 1], 0.3), c, math.inf, "IBP")
    assert (one[0] >= two[0] - 1e-12).all() and (one[1] <= two[1] + 1e-12).all()
    assert (one[1] - one[0]).sum() < 0.95 * (two[1] - two[0]).sum()


def test_shift_changes_no_bound() -> None:
    """Distances do not see a constant added to all tokens, nor do the bounds.

    (Forward mode is left out: its average does not centre the values.)
    """
    c = tensor(70, 3, 12)
    for method in ("IBP", "CROWN", "sensitivity"):
        near, far = (
            bounds(Case("shift", Layer(4, 2, 71), [tensor(72, 1, 3, 4) + s], [0], 0.1), c, 2.0, method)
            for s in (0.0, 100.0)
        )
        widths = [high - low for low, high in (near, far)]
        assert torch.allclose(*widths, rtol=1e-6), method


def test_operators_compute_l2_attention() -> None:
    q, k, v = tensor(100, 2, 3, 4, 5), tensor(101, 2, 3, 6, 5), tensor(102, 2, 3, 6, 7)
    m = mask(4, 6)
    expected = torch.softmax(-0.3 * torch.cdist(q, k).square() + m, -1) @ v
    assert torch.allclose(l2_attention(q, k, v, m, scale=0.3), expected, atol=1e-10)
    inputs = [t.clone().requires_grad_() for t in (q, k, v)]
    assert torch.autograd.gradcheck(lambda a, b, c: l2_attention(a, b, c, m, scale=0.3), inputs)
    assert torch.autograd.gradcheck(lambda a, c: l2_attention(a, a, c, scale=0.3), [inputs[0], v[..., :4, :]])


class Transformer(nn.Module):
    """Embedding, one block of L2 self-attention and a perceptron, mean over tokens, classifier."""

    def __init__(self, contractive: bool = False, dress: str = "module") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dress = dress
        self.embed, self.position = nn.Linear(3, 8), nn.Parameter(0.3 * torch.randn(4, 8))
        self.attention = (
            ContractiveL2SelfAttention(8, 2, 4, contraction=0.95) if contractive else L2SelfAttention(8, 2)
        )
        self.key = nn.Linear(8, 8)
        self.up, self.down, self.head = nn.Linear(8, 12), nn.Linear(12, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) + self.position
        x = x + (self.attention(x) if self.dress == "module" else self.dressed(x))
        x = x + self.down(torch.relu(self.up(x)))
        return self.head(x.mean(1))

    def dressed(self, x: Tensor) -> Tensor:
        q, k, v = (t.reshape(-1, 4, 2, 4).transpose(1, 2) for t in (self.key(x), self.up(x)[..., :8], x))
        columns = (k**2).sum(-1).unsqueeze(-2)
        if self.dress == "no row term":
            s = 0.3 * (2.0 * (q @ k.transpose(2, 3)) - columns)
        elif self.dress == "scale before":
            q, k = 0.5 * q, 0.5 * k
            s = (2.0 * q) @ k.transpose(2, 3) - (k * k).sum(-1)[:, :, None, :] - (q * q).sum(-1)[..., None]
        elif self.dress == "wrong factor":
            s = q @ k.transpose(2, 3) - columns
        else:  # a bias between the distance's terms, so that none is a distance
            s = 2.0 * ((q + 1.0) @ k.transpose(2, 3)) - columns - (q * q).sum(-1, keepdim=True)
        return (torch.softmax(s, -1) @ v).transpose(1, 2).reshape(-1, 4, 8)


def export(model: nn.Module, path: Path, dynamo: bool = False, opset: int = 17) -> Path:
    batch: dict[str, Any] = {"dynamic_axes": {"x": {0: "batch"}}}
    if dynamo:
        batch = {"dynamic_shapes": {"x": {0: torch.export.Dim("batch")}}}
    torch.onnx.export(
        model.eval(),
        (torch.zeros(2, 4, 3),),
        str(path),
        dynamo=dynamo,
        opset_version=opset,
        input_names=["x"],
        **batch,
    )
    return path


def loads(path: Path, model: nn.Module) -> Any:
    module = load(path)
    x = torch.randn(5, 4, 3, generator=torch.Generator().manual_seed(1))
    assert (module(x) - Oracle(path)(x)).abs().max() <= 1e-5
    assert (module(x) - model(x)).abs().max() <= 1e-5
    return module


@pytest.mark.parametrize("contractive", [False, True])
@pytest.mark.parametrize("dynamo, opset", [(False, 11), (False, 17), (True, 18)])
def test_module_is_recognised_in_onnx(tmp_path: Path, dynamo: bool, opset: int, contractive: bool) -> None:
    model = Transformer(contractive)
    path = export(model, tmp_path / "m.onnx", dynamo, opset)
    module = loads(path, model)
    (unit,) = module.info.attention
    assert unit.kind == "distance" and (unit.heads, unit.queries, unit.keys, unit.head_dim) == (2, 4, 4, 4)
    assert unit.scale == pytest.approx(0.5) and not unit.masked
    (step,) = [s for s in module.steps if s.op == "L2Scores"]
    assert step.inputs[0] == step.inputs[1]  # one tensor: distances of tokens from themselves are known
    assert {"Softmax", "ReduceSum"}.isdisjoint(s.op for s in module.steps)
    load(path, attention="decomposed")


@pytest.mark.parametrize(
    "dress, scale", [("no row term", 0.3), ("scale before", 1.0), ("wrong factor", None), ("bias", None)]
)
def test_other_dresses(tmp_path: Path, dress: str, scale: float | None) -> None:
    """Distances in other words are recognised; what only looks like one is left alone, or refused by name."""
    model = Transformer(dress=dress)
    path = export(model, tmp_path / "m.onnx")
    found = inspect(path).attention
    if scale is None:
        assert found == []
        return
    (unit,) = loads(path, model).info.attention
    assert unit.kind == "distance" and unit.scale == pytest.approx(scale)


def test_transformer_is_certified(tmp_path: Path) -> None:
    """Every method's bounds of the margins hold against the attack, and are within twice what it moves."""
    path = export(Transformer(), tmp_path / "m.onnx")
    module = load(path, dtype=torch.float64)
    x = torch.randn(1, 4, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    logits = module(x)[0]
    label = int(logits.argmax())
    c = torch.eye(3, dtype=torch.float64)[label] - torch.eye(3, dtype=torch.float64)
    c = c[[i for i in range(3) if i != label]]
    kinds = [type(n).__name__ for n in BoundedModule(module, x).all_nodes()]
    assert "BoundL2Scores" in kinds and "BoundSoftmax" not in kinds
    for norm, eps in ((2.0, 0.3), (math.inf, 0.1)):
        case = Case("transformer", module, [x], [0], eps)
        found, above = smallest(case, c, norm, restarts=8, steps=80), -smallest(case, -c, norm)
        centre = (logits @ c.T).detach()
        for method in ("IBP", "CROWN", "alpha-crown", "sensitivity", "sensitivity-crown"):
            low, high = bounds(case, c, norm, method)
            assert (low <= found + 1e-9).all() and (high >= above - 1e-9).all(), method
            assert method == "IBP" or ((centre - low) <= 2.0 * (centre - found)).all(), (method, low, found)
        for method in ("crown", "alpha-crown", "sensitivity"):
            certificate = certify(path, x, label, norm=norm, eps=eps, method=method, dtype=torch.float64)
            assert certificate.status == "verified", (method, norm)
            ball = InputSet.ball(x, norm, eps)
            attacked = pgd(module, ball, Specification.classification(label, 3), dtype=torch.float64)
            assert certificate.margin is not None and certificate.margin <= attacked.margin
    assert certify(path, x, label, norm=2.0, eps=5.0, method="sensitivity").status != "verified"
