"""Methods lofast and lofast-paper: never below an attack, exact where theory says so, and the tools."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from attn_bounds import InputError, InputSet, Verifier, head_rows, lirpa, read_vnnlib
from attn_bounds.errors import UnsupportedModelError
from attn_bounds.lofast import columns
from attn_bounds.lofast.columns import Columns, Sloped
from attn_bounds.lofast.forms import Anchor, Form, Term, added, fresh, norm
from attn_bounds.lofast.patterns import GELU, SILU, TANH_GELU, Activation, activation
from attn_bounds.module import BoundedModule
from attn_bounds.sensitivity import weights as sensitivity_weights
from onnx_export import attention, l2_attention

from .cli_tools import Files, rows, run
from .contract import Case, Flat, bounds, smallest
from .operators.test_attention import KeysAndValues, Queries, SelfAttention, mask, tensor
from .small_models import DIGITS, DIGITS_DATA, linear_model, relu_model, weights

METHODS = ("lofast", "lofast-paper")
RADII = (1e-3, 1e-2, 0.1, 1.0)


class Norm(nn.Module):
    """LayerNorm as exporters write it, in the form that 0.3 computes rightly."""

    def __init__(self, d: int, seed: int) -> None:
        super().__init__()
        self.register_buffer("gain", 1.0 + tensor(seed, d, scale=0.3))
        self.register_buffer("shift", tensor(seed + 1, d, scale=0.3))

    def forward(self, x: Tensor) -> Tensor:
        z = x - x.mean(-1, keepdim=True)
        return z * (1.0 / torch.sqrt((z * z).mean(-1, keepdim=True) + 1e-5)) * self.gain + self.shift


class Channels(nn.Module):
    """BatchNorm over the features of tokens, as in the competition's Vision Transformers."""

    def __init__(self, d: int, seed: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(d).double().eval()
        with torch.no_grad():
            self.norm.weight.copy_(1.0 + tensor(seed, d, scale=0.5))
            self.norm.bias.copy_(tensor(seed + 1, d, scale=0.3))
            self.norm.running_mean.copy_(tensor(seed + 2, d, scale=0.3))  # type: ignore[union-attr]
            self.norm.running_var.copy_(0.5 + tensor(seed + 3, d).abs())  # type: ignore[union-attr]

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "gelu": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "tanh": torch.tanh,
    "silu": lambda x: x * torch.sigmoid(x),
}


class Transformer(nn.Module):
    """Encoder blocks with a class token or mean pooling; normalisation before or after each branch."""

    def __init__(
        self,
        seed: int,
        d: int = 4,
        layers: int = 2,
        norm: str = "",
        after: bool = False,
        act: str = "relu",
        pool: str = "mean",
        weight: float = 1.0,
        hidden: tuple[Tensor, ...] = (),
    ) -> None:
        super().__init__()
        kinds: dict[str, Callable[[int, int], nn.Module]] = {
            "": lambda d, seed: nn.Identity(),
            "layer": Norm,
            "batch": Channels,
        }
        self.act, self.pool, self.after = ACTIVATIONS[act], pool, after
        self.norms = nn.ModuleList(kinds[norm](d, seed + 50 * i) for i in range(2 * layers))
        self.attention = nn.ModuleList(_Heads(d, 2, seed + 20 * i, weight) for i in range(layers))
        for i in range(layers):
            for name, r, c in (("up", d, 2 * d), ("down", 2 * d, d)):
                self.register_buffer(
                    f"{name}{i}", tensor(seed + len(name) * 100 + i, r, c, scale=weight / r**0.5)
                )
        self.register_buffer("bias", tensor(seed + 300, 2 * d, scale=0.3))
        self.register_buffer("first", tensor(seed + 400, 1, 1, d))
        self.register_buffer("position", tensor(seed + 500, 4, d, scale=0.5))
        self.register_buffer("head", tensor(seed + 600, d, 3))

    def forward(self, x: Tensor) -> Tensor:
        if self.pool == "cls":
            x = torch.cat([self.first.reshape(1, 1, -1).expand(x.shape[0], -1, -1), x], 1) + self.position
        for i, layer in enumerate(self.attention):
            before, behind = self.norms[2 * i : 2 * i + 2]
            if self.after:
                x = before(x + layer(x))
                x = behind(x + self.mlp(x, i))
            else:
                x = x + layer(before(x))
                x = x + self.mlp(behind(x), i)
        return torch.matmul(x[:, 0] if self.pool == "cls" else x.mean(1), self.head)

    def mlp(self, x: Tensor, i: int) -> Tensor:
        hidden = self.act(torch.matmul(x, getattr(self, f"up{i}")) + self.bias)
        return torch.matmul(hidden, getattr(self, f"down{i}"))


class _Heads(SelfAttention):
    """Self-attention without its skip connection."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) - x


class Plain(nn.Module):
    """Heads that are averaged as they are, and classes read from all tokens."""

    def forward(self, x: Tensor) -> Tensor:
        q = x.reshape(-1, 3, 2, 2).permute(0, 2, 1, 3)
        return torch.relu(attention(q, q, 2.0 * q, scale=0.7)).flatten(1)


class SharedSum(nn.Module):
    """A tensor that is one weight away from the input: which anchor attention reads depends on the method."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = _Heads(4, 2, 20)
        self.register_buffer("weight", tensor(30, 4, 4, scale=0.5))

    def forward(self, x: Tensor) -> Tensor:
        t = x + torch.matmul(x, self.weight)
        return (t + self.attention(t)).mean(1)


class Cross(nn.Module):
    """Keys and values that are no maps of one tensor, and queries that are constant."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = KeysAndValues(tensor(0, 2, 3, 3))
        self.register_buffer("key", tensor(1, 3, 3))
        self.register_buffer("value", tensor(2, 3, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(torch.relu(torch.matmul(x, self.key)), torch.matmul(x, self.value))


class ClassToken(SelfAttention):
    """Only one token goes through the output map."""

    def forward(self, x: Tensor) -> Tensor:
        n, d = x.shape[1:]
        heads = [
            (torch.matmul(x, w) + b).reshape(-1, n, 2, d // 2).permute(0, 2, 1, 3)
            for w, b in ((self.wq, self.wq_b), (self.wk, self.wk_b), (self.wv, self.wv_b))
        ]
        o = attention(*heads, scale=0.7).permute(0, 2, 1, 3).reshape(-1, n, d)
        return torch.matmul(o[:, 0], self.wo) + x[:, 0]


class Convolutional(nn.Module):
    """A patch embedding behind a scaled input, overlapping convolutions, BatchNorm of images."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(2, 3, 2, 2)
        self.second = nn.Conv2d(3, 4, 3, 1, 1)
        self.norm = nn.BatchNorm2d(4).eval()
        self.double()
        self.norm.running_var.copy_(torch.tensor([0.3, 2.0, 1.0, 0.5]))  # type: ignore[union-attr]
        self.register_buffer("std", torch.tensor([0.5, 0.2]).double().reshape(2, 1, 1))
        self.register_buffer("each", tensor(5, 4, 2, 2))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first((x - 0.3) / self.std))
        return (self.norm(self.second(x)) * self.each).flatten(2).mean(2)


def cases() -> list[Case]:
    x = tensor(1, 2, 3, 4)
    options: list[dict[str, Any]] = [
        {},
        {"norm": "batch", "act": "relu", "pool": "cls"},
        {"norm": "layer", "act": "gelu"},
        {"norm": "layer", "act": "gelu", "pool": "cls", "after": True},
        {"norm": "batch", "act": "tanh", "weight": 2.0},
        {"norm": "layer", "act": "silu", "weight": 0.5, "layers": 1},
    ]
    models: list[tuple[str, nn.Module, Tensor]] = [
        (f"transformer {i} {o}", Transformer(17 * i, **o), x) for i, o in enumerate(options)
    ]
    models += [
        ("masked", SelfAttention(4, 2, 50, mask=mask(3, 3)), x),
        ("heads without an output map", Plain(), x),
        ("constant keys", Queries(tensor(8, 2, 3, 3), tensor(9, 2, 3, 2)), tensor(10, 2, 2, 3, 3)),
        ("cross-attention", Cross(), tensor(3, 2, 2, 4, 3)),
        ("a sum that attention and its skip connection read", SharedSum(), x),
        ("a token before the output map", ClassToken(4, 2, 50), x),
        ("convolutions", Convolutional(), tensor(11, 2, 2, 4, 4)),
    ]
    return [Case(name, m, [x], [0]) for name, m, x in models]


@pytest.mark.parametrize("case", cases(), ids=str)
def test_never_below_an_attack(case: Case) -> None:
    """Over radii, in both directions; monotone in eps; lofast is never behind the paper's form."""
    with torch.no_grad():
        outputs = case.module(*case.inputs).flatten(1).shape[1]
    c = tensor(3, 3, outputs)
    before: dict[str, Tensor] = {}
    # one graph for all radii, as in a bisection: what is kept of the centre must serve all of them
    graph = BoundedModule(Flat(case.module, outputs), case.inputs[0])
    for eps in RADII:
        case.eps = eps
        low_found = smallest(case, c, 2.0, restarts=4, steps=25)
        high_found = -smallest(case, -c, 2.0, restarts=4, steps=25)
        width = {}
        for method in METHODS:
            ball = lirpa.BoundedTensor(case.inputs[0], lirpa.perturbation(2.0, eps))
            low, high = graph.compute_bounds(x=(ball,), C=c.expand(2, -1, -1), method=method)
            assert torch.isfinite(low).all() and (low <= low_found + 1e-12).all(), (
                eps,
                method,
                low,
                low_found,
            )
            assert (high >= high_found - 1e-12).all(), (eps, method, high, high_found)
            width[method] = high - low
            if method in before:
                assert (width[method] >= before[method]).all(), (eps, method)
            before[method] = width[method]
        assert (width["lofast"] <= width["lofast-paper"] * (1 + 1e-9)).all(), eps


LARGE_CASES = [c for c in cases() if any(k in c.name for k in ("batch", "layer", "masked", "cross"))]


@pytest.mark.parametrize("case", LARGE_CASES, ids=str)
def test_the_ways_of_large_models_hold(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small models as if they were large; two inputs after each other, the second as if it were the first."""
    with torch.no_grad():
        outputs = case.module(*case.inputs).flatten(1).shape[1]
    c = tensor(3, 3, outputs)

    def width(graph: BoundedModule, x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        ball = lirpa.BoundedTensor(x, lirpa.perturbation(2.0, eps))
        low, high = graph.compute_bounds(x=(ball,), C=c.expand(len(x), -1, -1), method="lofast")
        return low, high

    def fresh_graph() -> BoundedModule:
        return BoundedModule(Flat(case.module, outputs), case.inputs[0])

    plain = [width(fresh_graph(), case.inputs[0], eps) for eps in RADII]
    for module in (head_rows, columns):
        monkeypatch.setattr(module, "LARGE", 0)
    monkeypatch.setattr(sensitivity_weights, "forms_matrix", lambda *_: False)
    monkeypatch.setattr(sensitivity_weights, "squares", lambda *_: False)
    graph, other = fresh_graph(), 0.5 * case.inputs[0] + 0.1
    for eps, (low_plain, high_plain) in zip(RADII, plain, strict=True):
        case.eps = eps
        low, high = width(graph, case.inputs[0], eps)
        assert (low <= smallest(case, c, 2.0, restarts=3, steps=20) + 1e-12).all()
        assert (high >= -smallest(case, -c, 2.0, restarts=3, steps=20) - 1e-12).all()
        assert ((high - low) <= 2.0 * (high_plain - low_plain)).all()
        for used, alone in zip(width(graph, other, eps), width(fresh_graph(), other, eps), strict=True):
            assert torch.allclose(used, alone, rtol=1e-9, atol=1e-12)


def l2_bounds(graph: BoundedModule, x: Tensor, eps: float = 0.1, c: Tensor | None = None) -> Tensor:
    """Lower and upper bounds of `lofast`, (2, batch, rows)."""
    ball = lirpa.BoundedTensor(x, lirpa.perturbation(2.0, eps))
    return torch.stack(graph.compute_bounds(x=(ball,), C=c, method="lofast"))


@pytest.mark.parametrize("how", ["in place", "data", "sign", "order", "fused"])
def test_changed_weights_are_seen(how: str) -> None:
    """Bounds after a step of an optimiser, or any other change of the weights, are those of a new graph."""
    module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    x = tensor(1, 2, 4)
    graph = BoundedModule(module, x)
    before = l2_bounds(graph, x)
    weights = list(graph.parameters())
    if how == "fused":
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        torch.optim.AdamW(weights, lr=0.05, fused=True).step()
    for weight in weights:
        if how == "in place":
            with torch.no_grad():
                weight.mul_(1.5)
        elif how == "data":
            weight.data.mul_(1.5)
        elif how == "sign":
            weight.data.neg_()
        elif how == "order":
            weight.data.copy_(weight.data.flip(0))
    with torch.no_grad():
        for mine, weight in zip(module.parameters(), weights, strict=True):
            mine.copy_(weight)
    after = l2_bounds(graph, x)
    assert not torch.allclose(before, after)
    assert torch.equal(after, l2_bounds(BoundedModule(module, x), x))


def test_tensors_of_the_caller_are_not_kept() -> None:
    """Inputs and functionals in float64 that change after a bound, which has to be that of what they were."""
    case = cases()[0]
    x = case.inputs[0].clone()
    graph = BoundedModule(case.module, x)
    c = torch.zeros(2, 1, 3, dtype=torch.float64)
    c[..., 0] = 1.0
    l2_bounds(graph, x, 1e-3, c)
    other = c.clone()
    c.zero_()
    c[..., 1] = 100.0
    assert torch.equal(l2_bounds(graph, x, 1e-3, c), l2_bounds(BoundedModule(case.module, x), x, 1e-3, c))
    same = x.clone()
    x.zero_()
    assert torch.equal(
        l2_bounds(graph, same, 0.02, other), l2_bounds(BoundedModule(case.module, same), same, 0.02, other)
    )


def test_other_shapes_and_sizes_get_bounds_of_their_own() -> None:
    """What holds for one shape, or for an input beside which positions vanish, need not for others."""

    class Mean(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(x.mean(1)) * 2.0 - 1.0

    many, few = tensor(1, 2, 16, 3), tensor(2, 2, 4, 3)
    graph = BoundedModule(Mean(), many)
    for x in (many, few, many):
        assert torch.allclose(l2_bounds(graph, x), l2_bounds(BoundedModule(Mean(), x), x), rtol=1e-12)

    class Position(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = SelfAttention(4, 2, 50)
            self.register_buffer("position", tensor(7, 3, 4))

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x + self.position).flatten(1)

    x = tensor(3, 2, 3, 4)
    graph = BoundedModule(Position(), x)
    l2_bounds(graph, 1e12 * x, 0.05)
    assert torch.equal(l2_bounds(graph, x, 0.003), l2_bounds(BoundedModule(Position(), x), x, 0.003))


def test_graphs_are_not_kept_alive() -> None:
    x = tensor(1, 2, 4)
    graph = BoundedModule(nn.Linear(4, 3).double(), x)
    graph.compute_bounds(x=(lirpa.BoundedTensor(x, lirpa.perturbation(2.0, 0.1)),), C=None, method="lofast")
    alive = weakref.ref(graph)
    del graph
    gc.collect()
    assert alive() is None


# -- known answers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_linear_networks_are_exact(tmp_path: Any, method: str) -> None:
    weight, bias = weights(4, 12)
    verifier = Verifier(linear_model(tmp_path / "m.onnx", weight, bias, shape=(3, 4)), dtype=torch.float64)
    x = torch.linspace(-1, 1, 12).double().reshape(1, 3, 4)
    spec = verifier.specification(1)
    low = verifier.row_bounds([InputSet.ball(x, 2.0, 0.3)], [spec], method)[0]
    w = spec.A.double().numpy() @ weight.astype(float)
    exact = w @ x.flatten().numpy() + spec.A.double().numpy() @ bias - 0.3 * np.linalg.norm(w, axis=1)
    np.testing.assert_allclose(low.numpy(), exact, rtol=1e-6)
    assert (low.numpy() <= exact).all()


def test_one_token_is_linear_and_exact() -> None:
    """Attention of one token is its value; with its skip connection the layer is one matrix."""
    case = Case("n=1", SelfAttention(4, 2, 70), [tensor(71, 1, 1, 4)], [0], 0.3)
    c = tensor(72, 3, 4)
    jacobian = torch.autograd.functional.jacobian(lambda x: case.module(x).flatten() @ c.T, case.inputs[0])
    spread = 0.3 * torch.linalg.vector_norm(jacobian.reshape(3, -1), dim=1)
    low, _ = bounds(case, c, 2.0, "lofast")
    # exact but for what the scores' move is bounded by, which one key cancels in `lofast` only
    assert torch.allclose(low, case.module(case.inputs[0]).flatten(1) @ c.T - spread, rtol=1e-6)


class Residual(nn.Module):
    """`x + W₂ relu(W₁ x + b)`, all neurons on: I + W₁ W₂; and two such branches that cancel."""

    def __init__(self, shift: float, cancel: bool = False) -> None:
        super().__init__()
        self.register_buffer("up", tensor(80, 4, 6))
        self.register_buffer("down", -torch.linalg.pinv(tensor(80, 4, 6)) if cancel else tensor(81, 6, 4))
        self.shift = shift

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.matmul(torch.relu(torch.matmul(x, self.up) + self.shift), self.down)


def test_a_residual_block_is_one_map() -> None:
    c = torch.eye(4, dtype=torch.float64)
    x = tensor(82, 1, 4)
    one = Case("stable", Residual(50.0), [x], [0], 0.1)
    low, high = bounds(one, c, 2.0, "lofast")
    exact = torch.linalg.vector_norm(torch.eye(4) + one.module.up @ one.module.down, dim=0)  # type: ignore
    assert torch.allclose((high - low)[0] / 0.2, exact, rtol=1e-6)
    none = Case("cancel", Residual(50.0, cancel=True), [x], [0], 0.1)
    low, high = bounds(none, c, 2.0, "lofast")
    assert float((high - low).max()) < 1e-6, "the branches cancel"
    low, high = bounds(none, c, 2.0, "lofast-paper")
    assert float((high - low).min()) > 0.2, "their norms do not"


def test_pooling_divides_by_the_root_of_the_tokens() -> None:
    class Pool(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (2.0 * x + 1.0).mean(1)

    case = Case("pool", Pool(), [tensor(0, 1, 9, 3)], [0], 0.3)
    low, high = bounds(case, torch.eye(3, dtype=torch.float64), 2.0, "lofast")
    assert torch.allclose(high - low, torch.full((1, 3), 2 * 0.3 * 2 / 3).double(), rtol=1e-6)


# -- parts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("f", [TANH_GELU, GELU, SILU], ids=["tanh gelu", "gelu", "silu"])
def test_slopes_of_an_activation_hold(f: Any) -> None:
    act = Activation(None, f, float(f.slope(torch.tensor(f.breaks[-1], dtype=torch.float64))))
    assert act.lipschitz == pytest.approx(1.0998 if f is SILU else 1.1290, abs=1e-4)
    u, reach = 3.0 * tensor(0, 400), 4.0 * tensor(1, 400).abs()
    low, high = act.slopes(u, reach)
    for t in torch.linspace(-1, 1, 201).double():
        d = t * reach
        chord = (f.value(u + d) - f.value(u)) / torch.where(d == 0, 1.0, d)
        ok = d.abs() > 1e-6
        assert (chord[ok] >= low[ok] - 1e-9).all() and (chord[ok] <= high[ok] + 1e-9).all()
        assert (chord[ok].abs() <= act.constant + 1e-9).all()


@pytest.mark.parametrize("alpha", [0.0, 0.2, 3.0])
def test_chords_of_relu_are_attained(alpha: float) -> None:
    from attn_bounds.domain.activations import leaky_relu

    act = Activation(None, leaky_relu(alpha), max(1.0, alpha), alpha, outer=-2.0)
    u, reach = tensor(0, 300), 0.1 + tensor(1, 300).abs()
    low, high = act.slopes(u, reach)
    d = torch.linspace(-1, 1, 401).double()[:, None] * reach
    d = d[d.abs().amin(1) > 0]
    chord = -2.0 * (act.function.value(u + d) - act.function.value(u)) / d
    assert torch.allclose(chord.amin(0), low, atol=1e-7) and torch.allclose(chord.amax(0), high, atol=1e-7)


def test_written_out_activations_are_recognised() -> None:
    x = tensor(0, 1, 3)
    for name, f in (("gelu", TANH_GELU), ("silu", SILU)):

        class Net(nn.Module):
            def forward(self, x: Tensor, name: str = name) -> Tensor:
                return ACTIVATIONS[name](torch.matmul(x, torch.eye(3, dtype=x.dtype)))

        graph = BoundedModule(Net(), x)
        found = [a for n in graph.all_nodes() if n.inputs and (a := activation(n)) is not None]
        whole = [a for a in found if a.function is f]
        assert len(whole) == 1 and whole[0].outer in (1.0, 2.0), name


def test_forms_follow_tensors() -> None:
    """Reshapes, transposes and products on random maps: the form's map is the tensor's."""
    a = Anchor(0.5, tensor(0, 3, 4), "a")
    e = tensor(1, 3, 4)
    form = fresh(a, (3, 4)).along(-1, tensor(2, 4, 6))
    assert form is not None
    moved = e @ tensor(2, 4, 6)
    form = Form(form.terms, form.n, form.d, form.place.reshape(3, 2, 3).permute(1, 0, 2)[:, 1:])
    moved = moved.reshape(3, 2, 3).permute(1, 0, 2)[:, 1:]
    factor = tensor(3, 2, 1, 3).expand(2, 2, 3)
    scaled = form.scaled(factor.contiguous())
    assert scaled is not None
    moved = moved * factor
    ((_, terms),) = scaled.terms.items()
    matrix = sum((e if t.h is None else t.h @ e) @ t.w for t in terms)
    assert torch.allclose(matrix.flatten()[scaled.place], moved)  # type: ignore[union-attr]
    pooled = Form(scaled.terms, scaled.n, scaled.d, scaled.place.transpose(0, 1)).along(0, tensor(4, 2, 1))
    assert pooled is not None
    ((_, terms),) = pooled.terms.items()
    matrix = sum((e if t.h is None else t.h @ e) @ t.w for t in terms)
    expected = torch.einsum("hnk,no->ohk", moved, tensor(4, 2, 1))
    assert torch.allclose(matrix.flatten()[pooled.place], expected)  # type: ignore[union-attr]
    assert pooled.radius() >= 0.5 * float(torch.linalg.norm(matrix)) / float(torch.linalg.norm(e))  # type: ignore


def test_norms_of_sums_see_terms_cancel() -> None:
    h, w = tensor(0, 3, 3), tensor(1, 4, 4)
    assert norm([Term(h, w), Term(h.clone(), -w)], 3, 4) < 1e-6
    assert norm([Term(None, w)], 3, 4) == pytest.approx(float(torch.linalg.matrix_norm(w, 2)))


def test_scaled_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """`‖W diag(f)‖` and `W diag(λ) V` by what is known of W, for factors that are mostly equal, or not."""
    monkeypatch.setattr(columns, "LARGE", 0)
    for seed in range(60):
        g = torch.Generator().manual_seed(seed)
        d, k = 1 + seed % 4, 4 + seed % 9
        w, v = tensor(seed, d, k), tensor(seed + 1, k, 3)
        own = Columns(w)
        f = torch.full((k,), 0.5, dtype=torch.float64)
        f[torch.rand(k, generator=g) < [0.0, 0.2, 0.9][seed % 3]] = [0.0, 0.7, 0.3][seed % 3]
        f = f + 1e-5 * (seed % 2) * torch.rand(k, generator=g, dtype=torch.float64)
        true = float(torch.linalg.svdvals(w * f)[0])
        assert true * (1 - 1e-13) <= own.scaled_norm(f) <= true * 1.001 + 1e-7
        assert true * (1 - 1e-13) <= own.scaled_norm_roughly(f)
        for _ in range(2):  # the second time by what the first has left
            assert torch.allclose(Sloped(own, f).then(v, "v"), (w * f) @ v, rtol=1e-12, atol=1e-12)
    assert own.scaled_norm(0.0 * f) == 0.0 and own.scaled_norm(f / 0.0) == math.inf


def test_equal_keys_mean_equal_weights() -> None:
    """Of sums, products, slices and factors of one tensor: whatever order they come in."""
    a = Anchor(0.0, None, "a")
    x = fresh(a, (2, 4))
    w = {name: tensor(i, 4, 4) for i, name in enumerate("pqr")}

    def along(f: Form, name: str) -> Form:
        found = f.along(-1, w[name], name)
        assert found is not None
        return found

    def sliced(f: Form, index: list[int]) -> Form:
        found = Form(f.terms, f.n, f.d, f.place[:, index]).matrix()
        assert found is not None
        return found

    def plus(f: Form, g: Form) -> Form:
        found = added(f, g)
        assert found is not None
        return found

    p, q, r = (along(x, name) for name in "pqr")
    forms = [
        x,
        p,
        q,
        along(p, "q"),
        along(q, "p"),
        plus(p, q),
        plus(p, along(q, "r")),
        along(plus(p, q), "r"),
    ]
    forms += [plus(x, p), plus(p, x), along(plus(x, p), "q"), plus(p, plus(q, r)), plus(plus(p, q), r)]
    forms += [sliced(p, [0, 1]), sliced(p, [1, 0]), sliced(x, [0, 1]), p.negated(), plus(p, q.negated())]
    forms += [x.scaled(tensor(9, 1, 4).expand(2, 4), "f"), p.scaled(tensor(9, 1, 4).expand(2, 4), "f")]
    known: dict[Any, Tensor] = {}
    for form in forms:
        (terms,) = form.terms.values()
        for t in terms:
            if t.w is None:
                continue
            assert t.key is not None, "a constant of the model"
            matrix = t.matrix()
            assert matrix is not None
            assert torch.allclose(known.setdefault(t.key, matrix), matrix)
    assert len(known) >= 14
    assert p.times(tensor(0, 4)).terms[a][0].key is None  # what depends on the input has none


def test_gains_that_follow_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is enlarged before branches part, and shrunk in each of them, does not count."""

    class Shrunk(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            g = torch.tensor([0.01, 1.0]).to(x)
            y = torch.matmul(torch.tanh(x), torch.diag(1.0 / g))
            return torch.matmul(torch.relu(y * g), torch.eye(2).to(x)) + y * (2.0 * g)

    case = Case("gains", Shrunk(), [tensor(0, 1, 3, 2)], [0], 0.1)
    c = torch.eye(6, dtype=torch.float64)
    low, high = bounds(case, c, 2.0, "lofast")
    assert float((high - low).max()) <= 2 * 0.1 * 3.0 * (1 + 1e-6)
    monkeypatch.setattr("attn_bounds.lofast.walk.gains", lambda *_: [])
    low, high = bounds(case, c, 2.0, "lofast")
    assert float((high - low).max()) > 2 * 0.1 * 3.0 * 2


# -- what is refused ------------------------------------------------------------------------------------


def test_other_norms_are_refused() -> None:
    verifier = Verifier(DIGITS)
    x = torch.zeros(1, 1, 8, 8)
    for p in (1.0, math.inf):
        with pytest.raises(InputError, match="l2 balls only"):
            verifier.row_bounds([InputSet.ball(x, p, 0.1)], [verifier.specification(0)], "lofast")


def test_nodes_without_a_rule_are_named() -> None:
    class Sine(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.sin(torch.matmul(x, torch.eye(3, dtype=x.dtype)))

    class Distances(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return l2_attention(x, x, x, scale=0.5)

    for module, x, name in (
        (Sine(), tensor(0, 1, 3), "BoundSin"),
        (Distances(), tensor(0, 1, 3, 3), "L2Scores"),
    ):
        graph = BoundedModule(module, x)
        bounded = lirpa.BoundedTensor(x, lirpa.perturbation(2.0, 0.1))
        with pytest.raises(UnsupportedModelError, match=name):
            graph.compute_bounds(x=(bounded,), method="lofast")


def test_values_that_are_not_finite_are_unknown(tmp_path: Any) -> None:
    verifier = Verifier(relu_model(tmp_path / "m.onnx", nan=True))
    ball = InputSet.ball(torch.zeros(1, 4), 2.0, 0.1)
    assert verifier.row_bounds([ball], [verifier.specification(0)], "lofast").isnan().all()


# -- whole tools ----------------------------------------------------------------------------------------


def test_batches_and_single_precision() -> None:
    x = tensor(1, 2, 3, 4)
    case = Case("one", Transformer(3, norm="batch"), [x], [0], 0.01)
    c = tensor(2, 3, 3)
    together = torch.stack(bounds(case, c, 2.0, "lofast"))
    for i in range(2):
        one = Case("one", case.module, [x[i : i + 1]], [0], 0.01)
        alone = torch.stack(bounds(one, c, 2.0, "lofast"))
        assert torch.allclose(together[:, i : i + 1], alone, rtol=1e-12)
    single = torch.stack(bounds(case, c, 2.0, "lofast", torch.float32))
    assert torch.allclose(single, together, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_command_line(tmp_path: Any, method: str) -> None:
    files = Files(tmp_path)
    data = ("--data", files.data, "--norm", 2)
    good = rows("certify", files.model, *data, "--eps", 1e-3, "--method", method, "--no-attack")
    assert all(r["status"] == "verified" and r["method"] == method and r["margin"] > 0 for r in good)
    found = rows("radius", files.model, *data, "--count", 1, "--method", method)[0]
    assert 0 < found["radius"] <= found["attack_radius"]
    both = rows("compare", files.model, *data, "--eps", 0.01, "--count", 1, "--methods", f"{method},crown")
    assert [r["method"] for r in both] == [method, "crown"]
    assert both[0]["margin"] <= both[1]["margin"] + 1e-6
    result = run("certify", files.model, "--data", files.data, "--eps", 0.1, "--method", method, code=2)
    assert "l2 balls only" in result.stderr and len(result.stderr.strip().splitlines()) == 1


def test_bundled_model_has_radii() -> None:
    base = ("radius", DIGITS, "--data", DIGITS_DATA, "--count", 1, "--norm", 2, "--no-attack")
    ours, paper = (rows(*base, "--method", m)[0]["radius"] for m in METHODS)
    assert ours > 1e-4 and ours >= paper


def test_competition_models(vnncomp_vit: Any) -> None:
    """A positive radius, and never above what the attack reaches."""
    verifier = Verifier(vnncomp_vit / "pgd_2_3_16.onnx")
    path = sorted((vnncomp_vit / "vnnlib").glob("pgd*"))[0]
    prop = read_vnnlib(path, verifier.input_shape, verifier.outputs)
    inputs, spec = prop.cases[0]
    found = verifier.certified_radius(inputs.center, spec, norm=2.0, method="lofast", restarts=2, steps=10)
    assert 0 < found.radius < found.attack_radius
