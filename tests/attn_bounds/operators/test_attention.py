"""The attention operators under `BoundContract`, and what is known about them exactly."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from attn_bounds import lirpa
from attn_bounds.module import BoundedModule
from onnx_export import attention, attention_average, attention_scores, attention_weights

from ..contract import BoundContract, Case, Flat, bounds, smallest


def tensor(seed: int, *shape: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Roots(nn.Module):
    """Attention whose queries, keys and values are inputs themselves."""

    def __init__(self, scale: float = 0.5, mask: Tensor | None = None) -> None:
        super().__init__()
        self.scale = scale
        self.register_buffer("mask", mask)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, self.mask, scale=self.scale)


class Queries(nn.Module):
    """Attention over keys and values that are constants without a batch dimension."""

    def __init__(self, key: Tensor, value: Tensor) -> None:
        super().__init__()
        self.register_buffer("key", key)
        self.register_buffer("value", value)

    def forward(self, q: Tensor) -> Tensor:
        return attention(q, self.key, self.value, scale=0.5)


class KeysAndValues(nn.Module):
    """Learned queries without a batch dimension attend to the input."""

    def __init__(self, query: Tensor) -> None:
        super().__init__()
        self.register_buffer("query", query)

    def forward(self, k: Tensor, v: Tensor) -> Tensor:
        return attention(self.query, k, v, scale=0.5)


class SelfAttention(nn.Module):
    """One input, linear maps to Q, K and V, heads, residual connection."""

    def __init__(
        self, d: int, heads: int, seed: int, weight: float = 1.0, mask: Tensor | None = None
    ) -> None:
        super().__init__()
        self.heads = heads
        self.register_buffer("mask", mask)
        for i, name in enumerate(("wq", "wk", "wv", "wo")):
            self.register_buffer(name, tensor(seed + i, d, d, scale=weight / math.sqrt(d)))
            self.register_buffer(name + "_b", tensor(seed + 10 + i, d, scale=0.3 * weight))

    def forward(self, x: Tensor) -> Tensor:
        n, d = x.shape[1:]

        def split(w: Tensor, b: Tensor) -> Tensor:
            return (torch.matmul(x, w) + b).reshape(-1, n, self.heads, d // self.heads).permute(0, 2, 1, 3)

        q, k, v = split(self.wq, self.wq_b), split(self.wk, self.wk_b), split(self.wv, self.wv_b)
        o = attention(q, k, v, self.mask, scale=1.0 / math.sqrt(d // self.heads))
        o = o.permute(0, 2, 1, 3).reshape(-1, n, d)
        return torch.matmul(o, self.wo) + self.wo_b + x


def roots_case(
    name: str,
    heads: int,
    n: int,
    m: int,
    perturbed: list[int],
    eps: float,
    size: float,
    seed: int,
    **kwargs: object,
) -> Case:
    options = {k: kwargs.pop(k) for k in list(kwargs) if k == "attention_relaxation"}
    shapes = (heads, n, 3), (heads, m, 3), (heads, m, 2)
    inputs = [tensor(seed + i, 1, *s, scale=size) for i, s in enumerate(shapes)]
    return Case(name, Roots(**kwargs), inputs, perturbed, eps, options)  # type: ignore[arg-type]


def mask(n: int, m: int) -> Tensor:
    out = torch.zeros(n, m, dtype=torch.float64)
    out[0, 1:] = -1e9
    out[-1, 0] = -3.0
    return out


class TestQueriesKeysValuesAsInputs(BoundContract):
    @staticmethod
    def cases() -> list[Case]:
        return [
            roots_case("all perturbed", 2, 3, 3, [0, 1, 2], 0.1, 1.0, 0),
            roots_case("cross-attention", 1, 2, 4, [0, 1, 2], 0.3, 1.0, 1),
            roots_case("one key", 1, 3, 1, [0, 1, 2], 0.5, 1.0, 2),
            roots_case("one query", 1, 1, 3, [0, 1, 2], 0.02, 3.0, 3),
            Case(
                "constant keys",
                Queries(tensor(1, 2, 3, 3), tensor(2, 2, 3, 2)),
                [tensor(3, 1, 2, 3, 3)],
                [0],
                0.5,
            ),
            Case(
                "constant queries",
                KeysAndValues(tensor(4, 2, 2, 3)),
                [tensor(5, 1, 2, 3, 3), tensor(6, 1, 2, 3, 2)],
                [0, 1],
                0.3,
            ),
            roots_case("queries only", 2, 3, 3, [0], 0.5, 1.0, 4),
            roots_case("values only", 2, 3, 3, [2], 0.5, 1.0, 5),
            roots_case("keys and values", 2, 2, 3, [1, 2], 0.3, 1.0, 6),
            roots_case("large scores", 1, 3, 3, [0, 1, 2], 0.5, 30.0, 7),
            roots_case("tiny scale", 1, 3, 3, [0, 1, 2], 3.0, 1.0, 8, scale=1e-3),
            roots_case("negative scale", 1, 3, 3, [0, 1, 2], 0.3, 1.0, 9, scale=-0.7),
            roots_case("mask", 2, 3, 3, [0, 1, 2], 0.3, 1.0, 10, mask=mask(3, 3)),
        ]


class TestKeyRelaxation(BoundContract):
    methods = ("CROWN", "alpha-crown")

    @staticmethod
    def cases() -> list[Case]:
        key = {"attention_relaxation": "key"}
        return [
            roots_case("all perturbed", 2, 3, 3, [0, 1, 2], 0.1, 1.0, 20, **key),
            roots_case("large scores", 1, 3, 4, [0, 1, 2], 0.5, 10.0, 21, **key),
            roots_case("queries only", 1, 3, 4, [0], 0.5, 1.0, 22, **key),
            roots_case("mask", 1, 3, 3, [0, 1, 2], 0.3, 1.0, 23, mask=mask(3, 3), **key),
        ]


class TestSelfAttention(BoundContract):
    methods = ("IBP", "CROWN", "alpha-crown")

    @staticmethod
    def cases() -> list[Case]:
        return [
            Case("plain", SelfAttention(4, 2, 30), [tensor(40, 1, 3, 4)], [0], 0.1),
            Case("small", SelfAttention(4, 1, 31), [tensor(41, 1, 3, 4)], [0], 1e-4),
            Case("wide", SelfAttention(4, 2, 32), [tensor(42, 1, 4, 4)], [0], 1.0),
            Case("steep", SelfAttention(4, 2, 33, weight=4.0), [tensor(43, 1, 3, 4)], [0], 0.1),
            Case("one token", SelfAttention(4, 2, 34), [tensor(44, 1, 1, 4)], [0], 0.5),
            Case("mask", SelfAttention(4, 2, 35, mask=mask(3, 3)), [tensor(45, 1, 3, 4)], [0], 0.2),
        ]


class TestForwardMode(BoundContract):
    methods = ("forward",)

    @staticmethod
    def cases() -> list[Case]:
        constant = Case(
            "constant keys",
            Queries(tensor(1, 2, 3, 3), tensor(2, 2, 3, 2)),
            [tensor(3, 1, 2, 3, 3)],
            [0],
            0.5,
        )
        return [*TestSelfAttention.cases(), constant]


def test_forward_mode_of_several_inputs_is_refused_where_it_is_wrong() -> None:
    """0.7.1 leaves out all perturbed inputs but the first in forward mode."""
    case = TestQueriesKeysValuesAsInputs.cases()[0]
    c = tensor(53, 2, 12)
    if lirpa.is_old():
        assert (bounds(case, c, 2.0, "forward")[0] <= smallest(case, c, 2.0) + 1e-9).all()
    else:
        with pytest.raises(NotImplementedError, match="forward mode"):
            bounds(case, c, 2.0, "forward")


@pytest.mark.parametrize("norm", [2.0, math.inf])
def test_lse_is_tight_for_small_radii(norm: float) -> None:
    """As eps → 0 the gap between CROWN and the attack shrinks faster than the interval's width."""
    gaps = []
    for eps in (1e-2, 1e-3, 1e-4):
        case = Case("tight", SelfAttention(4, 2, 50), [tensor(51, 1, 3, 4)], [0], eps)
        c = tensor(52, 2, 12)
        low, _ = bounds(case, c, norm, "CROWN")
        found = smallest(case, c, norm, restarts=2)
        centre = (case.module(case.inputs[0]).flatten(1) @ c.T).detach()
        gaps.append(float(((found - low) / (centre - found)).max()))
    assert gaps[2] < 1e-2 and gaps[2] < gaps[0] / 10, gaps


def test_one_token_is_exact() -> None:
    """With one token attention is linear: bounds equal the optimum."""
    case = Case("n=1", SelfAttention(4, 2, 60), [tensor(61, 1, 1, 4)], [0], 0.3)
    c = tensor(62, 3, 4)
    low, high = bounds(case, c, 2.0, "CROWN")
    jacobian = torch.autograd.functional.jacobian(lambda x: case.module(x).flatten() @ c.T, case.inputs[0])
    centre = case.module(case.inputs[0]).flatten(1) @ c.T
    spread = 0.3 * jacobian.reshape(3, -1).norm(dim=1)
    assert torch.allclose(low, (centre - spread).detach(), atol=1e-10)
    assert torch.allclose(high, (centre + spread).detach(), atol=1e-10)


def test_constant_scores_are_exact() -> None:
    """With W_Q = 0 the probabilities are constant and the bound is that of the linear map."""
    module = SelfAttention(4, 2, 70)
    module.wq.zero_()
    module.wq_b.zero_()
    case = Case("W_Q=0", module, [tensor(71, 1, 3, 4)], [0], 0.3)
    c = tensor(72, 3, 12)
    low, _ = bounds(case, c, 2.0, "CROWN")
    jacobian = torch.autograd.functional.jacobian(lambda x: case.module(x).flatten() @ c.T, case.inputs[0])
    centre = case.module(case.inputs[0]).flatten(1) @ c.T
    assert torch.allclose(low, (centre - 0.3 * jacobian.reshape(3, -1).norm(dim=1)).detach(), atol=1e-9)


def test_alpha_never_worsens() -> None:
    for case in TestSelfAttention.cases():
        c = tensor(80, 3, case.module(case.inputs[0])[0].numel())
        plain = bounds(case, c, 2.0, "CROWN")
        tuned = bounds(case, c, 2.0, "alpha-crown")
        assert (tuned[0] >= plain[0] - 1e-12).all() and (tuned[1] <= plain[1] + 1e-12).all(), str(case)
    wide = TestSelfAttention.cases()[2]
    c = tensor(81, 3, 16)
    assert (bounds(wide, c, 2.0, "alpha-crown")[0] > bounds(wide, c, 2.0, "CROWN")[0] + 1e-3).any()


def test_l2_root_has_a_box() -> None:
    """auto_LiRPA gives l1/l2 roots the box lower = upper = x: relu(x) came out as 0 where 0.4 is reached."""

    class Relu(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(x)

    class Shifted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.matmul(x + 1.0, torch.ones(3, 1, dtype=x.dtype))

    x = torch.zeros(1, 3, dtype=torch.float64)
    for norm in (1.0, 2.0):
        for method in ("IBP", "CROWN", "alpha-crown"):
            for module, c in (
                (Relu(), torch.eye(3, dtype=torch.float64)),
                (Shifted(), torch.ones(1, 1).double()),
            ):
                case = Case("root", module, [x], [0], 0.4)
                found = -smallest(case, -c, norm)
                _, high = bounds(case, c, norm, method)
                assert (high >= found - 1e-9).all(), (norm, method, high, found)


def test_failed_run_leaves_the_module_usable() -> None:
    case = TestSelfAttention.cases()[0]
    graph = BoundedModule(Flat(case.module.double(), 12), case.inputs[0])
    x = lirpa.BoundedTensor(case.inputs[0], lirpa.perturbation(2.0, 0.1))
    with pytest.raises(Exception):  # noqa: B017 (what auto_LiRPA raises is its own affair)
        graph.compute_bounds(x=(x,), C=torch.zeros(1, 2, 5, dtype=torch.float64), method="alpha-crown")
    c = tensor(90, 1, 2, 12)
    low, high = graph.compute_bounds(x=(x,), C=c, method="CROWN")
    assert torch.isfinite(low).all() and (low <= high).all()


def test_torch_export_before_does_not_change_the_graph(tmp_path) -> None:  # type: ignore[no-untyped-def]
    module = SelfAttention(4, 2, 95)
    x = tensor(96, 1, 3, 4)
    before = [type(n).__name__ for n in BoundedModule(module, x).all_nodes()]
    linear = nn.Linear(2, 2)
    torch.onnx.export(linear, torch.zeros(1, 2), str(tmp_path / "m.onnx"), dynamo=False, opset_version=17)
    after = [type(n).__name__ for n in BoundedModule(module, x).all_nodes()]
    assert before == after and "BoundAttentionAverage" in before


def test_operators_compute_attention() -> None:
    q, k, v = tensor(100, 2, 3, 4, 5), tensor(101, 2, 3, 6, 5), tensor(102, 2, 3, 6, 7)
    m = mask(4, 6)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=m, scale=0.3)
    scores = attention_scores(q, k, m, scale=0.3)
    assert torch.allclose(attention_average(scores, attention_weights(scores), v), expected, atol=1e-12)
    inputs = [t.clone().requires_grad_() for t in (q, k, v)]
    assert torch.autograd.gradcheck(lambda a, b, c: attention(a, b, c, m, scale=0.3), inputs)
