"""Sensitivity of attention layers: every bound against ascent in float64, and known answers."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from attn_bounds import head_rows
from attn_bounds.sensitivity import heads
from attn_bounds.sensitivity import weights as sensitivity_weights
from attn_bounds.sensitivity.heads import Moves
from attn_bounds.sensitivity.key import LayerAt, key_sensitivity, layer_bound
from attn_bounds.sensitivity.layer import PAPER, AttentionLayer, Improvements
from attn_bounds.sensitivity.weights import LayerWeights

F64 = torch.float64
RADII = [1e-4, 1e-2, 0.1, 0.3, 1.0, 3.0, 10.0]


class Case(NamedTuple):
    """Shapes and kinds of a family of layers."""

    n: int
    m: int
    d: int
    d_c: int
    heads: int
    kv_heads: int
    dk: int
    dv: int
    moves: Moves | None  # None: self-attention
    skip: str
    mask: str
    bias: bool


CASES = [
    Case(4, 4, 3, 3, 1, 1, 2, 3, None, "none", "none", False),
    Case(4, 4, 4, 4, 2, 2, 2, 2, None, "identity", "none", True),
    Case(5, 5, 4, 4, 4, 2, 3, 1, None, "matrix", "causal", True),
    Case(3, 3, 6, 6, 4, 1, 2, 2, None, "identity", "padding", True),
    Case(6, 6, 2, 2, 2, 2, 2, 4, None, "identity", "added", True),
    Case(1, 1, 4, 4, 2, 1, 2, 2, None, "identity", "none", True),
    Case(2, 2, 3, 3, 1, 1, 4, 2, None, "none", "causal", True),
    Case(4, 4, 4, 4, 2, 2, 2, 2, None, "identity", "per head", False),
    Case(20, 20, 2, 2, 1, 1, 2, 2, None, "none", "causal", True),
    Case(3, 5, 4, 3, 2, 2, 2, 2, "queries", "identity", "none", True),
    Case(3, 5, 4, 3, 2, 1, 2, 2, "context", "identity", "added", True),
    Case(3, 5, 4, 3, 2, 2, 2, 2, "both", "identity", "none", True),
    Case(5, 2, 3, 6, 3, 3, 1, 2, "both", "matrix", "padding", True),
    Case(4, 4, 3, 3, 2, 2, 2, 2, "both", "none", "causal", True),
    Case(1, 4, 2, 2, 1, 1, 2, 2, "context", "none", "none", False),
    Case(2, 1, 3, 3, 2, 2, 2, 2, "both", "identity", "none", True),
]


def rand(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=F64)


def make(case: Case, seed: int, gain: float, mean: float) -> tuple[AttentionLayer, Tensor, Tensor | None]:
    g = torch.Generator().manual_seed(seed)
    h, kv, d_c = case.heads, case.kv_heads, case.d_c if case.moves else case.d

    def bias(size: int) -> Tensor | None:
        return 2.0 * rand(g, size) if case.bias else None

    mask: Tensor | None = None
    if case.mask == "causal":
        mask = torch.ones(case.n, case.m, dtype=torch.bool).tril()
    elif case.mask == "padding":
        mask = (torch.arange(case.m) < max(case.m - 1, 1)).expand(case.n, case.m)
    elif case.mask == "added":
        mask = rand(g, case.n, case.m)
        mask[0, 0] = -math.inf
    elif case.mask == "per head":
        mask = torch.where(torch.rand((h, case.n, case.m), generator=g) < 0.3, -math.inf, 0.0)
        mask[..., 0] = 0.0
    skip: Tensor | bool = case.skip == "identity"
    if case.skip == "matrix":
        skip = rand(g, case.n, case.n)
    layer = AttentionLayer(
        gain * rand(g, case.d, h * case.dk),
        gain * rand(g, d_c, kv * case.dk),
        rand(g, d_c, kv * case.dv) / d_c**0.5,
        rand(g, h * case.dv, case.d) / case.d**0.5,
        h,
        kv,
        bias(h * case.dk),
        bias(kv * case.dk),
        bias(kv * case.dv),
        bias(case.d),
        mask=mask,
        skip=skip,
    )
    x = rand(g, case.n, case.d) + mean * rand(g, 1, case.d)
    context = rand(g, case.m, d_c) + mean * rand(g, 1, d_c) if case.moves else None
    return layer, x, context


def probabilities(layer: AttentionLayer, x: Tensor, c: Tensor) -> Tensor:
    def split(t: Tensor, b: Tensor | None, count: int) -> Tensor:
        return (t if b is None else t + b).unflatten(-1, (count, -1)).transpose(-3, -2)

    repeat = layer.heads // layer.groups
    q = split(x @ layer.w_q, layer.b_q, layer.heads)
    k = split(c @ layer.w_k, layer.b_k, layer.groups).repeat_interleave(repeat, -3)
    scores = layer.factor() * q @ k.mT
    if layer.mask is not None:
        hidden = torch.where(layer.mask, 0.0, -math.inf) if layer.mask.dtype == torch.bool else layer.mask
        scores = scores + hidden
    return torch.softmax(scores, -1)


def mix(layer: AttentionLayer, p: Tensor, x: Tensor, c: Tensor) -> Tensor:
    v = c @ layer.w_v if layer.b_v is None else c @ layer.w_v + layer.b_v
    v = v.unflatten(-1, (layer.groups, -1)).transpose(-3, -2)
    v = v.repeat_interleave(layer.heads // layer.groups, -3)
    out = (p @ v).transpose(-3, -2).flatten(-2) @ layer.w_o
    out = out if layer.b_o is None else out + layer.b_o
    if isinstance(layer.skip, Tensor):
        return out + layer.skip @ x
    return out + x if layer.skip else out


def outputs(layer: AttentionLayer, x: Tensor, context: Tensor | None, e: Tensor, moves: str | None) -> Tensor:
    """For perturbations e (starts, numbers), split by what moves."""
    moved, size = x, x.numel()
    if moves != "context":
        moved = x + e[:, :size].reshape(-1, *x.shape)
    if context is None:
        return mix(layer, probabilities(layer, moved, moved), moved, moved)
    other = context
    if moves != "queries":
        other = context + e[:, -context.numel() :].reshape(-1, *context.shape)
    return mix(layer, probabilities(layer, moved, other), moved, other)


def largest_move(
    layer: AttentionLayer, x: Tensor, context: Tensor | None, eps: float, moves: str | None, steps: int = 40
) -> float:
    size = {"queries": x.numel(), "context": 0 if context is None else context.numel()}.get(moves or "", 0)
    if not size:
        size = x.numel() + (0 if context is None else context.numel())
    e = rand(torch.Generator().manual_seed(1), 8, size)
    e = eps * e / e.norm(dim=1, keepdim=True)
    clean, best = outputs(layer, x, context, 0 * e[:1], moves), 0.0
    for step in range(steps):
        e.requires_grad_()
        move = (outputs(layer, x, context, e, moves) - clean).flatten(1).norm(dim=1)
        best = max(best, float(move.detach().max()))
        (slope,) = torch.autograd.grad(move.sum(), e)
        # the whole way along the gradient at first (a power step where the map is linear), then less
        unit = slope / slope.norm(dim=1, keepdim=True).clamp(min=1e-30)
        e = (1 - 1 / (1 + 0.1 * step)) * e.detach() / eps + unit / (1 + 0.1 * step)
        e = eps * e / e.norm(dim=1, keepdim=True).clamp(min=1e-30)
    return best


@pytest.mark.parametrize("case", CASES, ids=str)
def test_never_below_what_ascent_finds(case: Case) -> None:
    """14 layers for each of 16 shapes, every radius: 224 configurations, in both forms."""
    closest, closest_paper = math.inf, math.inf
    for i in range(14):
        gain, mean = [0.1, 0.5, 1.5, 0.5][i % 4], [0.0, 3.0][i % 2]
        layer, x, context = make(case, 100 + i, gain, mean)
        moves: Moves = case.moves or "both"
        eps = RADII[i % 7]
        found = largest_move(layer, x, context, eps, case.moves)
        ours = float(layer_bound(x, eps, layer, context, moves))
        paper = float(layer_bound(x, eps, layer, context, moves, PAPER))
        assert found <= ours * (1 + 1e-9), "an attack exceeds the bound"
        assert ours <= paper * (1 + 1e-12)
        if found > 0:
            closest, closest_paper = min(closest, ours / found), min(closest_paper, paper / found)
    assert closest < 1.7, f"loose everywhere: ours {closest:.2f} times, the paper's {closest_paper:.2f}"


@pytest.fixture
def as_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small layers go the way of large: nothing is formed that is as large as a weight times a weight."""
    monkeypatch.setattr(head_rows, "LARGE", 0)
    monkeypatch.setattr(sensitivity_weights, "forms_matrix", lambda *_: False)
    monkeypatch.setattr(sensitivity_weights, "squares", lambda *_: False)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_large_layers_are_never_below_what_ascent_finds(case: Case, as_large: None) -> None:
    """As above; several radii around one input, and one sample of a batch, get the bounds they get alone."""
    for i in range(3):
        layer, x, context = make(case, 100 + i, [0.1, 0.5, 1.5][i % 3], [0.0, 3.0][i % 2])
        moves: Moves = case.moves or "both"
        at = LayerAt(x, LayerWeights(layer), context, moves)
        many = torch.stack([x, 1.5 * x]), None if context is None else torch.stack([context, 0.5 * context])
        before = 0.0
        for eps in RADII:
            found = largest_move(layer, x, context, eps, case.moves, 15)
            bound = float(at.bound(eps))
            assert found <= bound * (1 + 1e-9), "an attack exceeds the bound"
            assert bound == float(layer_bound(x, eps, layer, context, moves))
            assert bound == pytest.approx(
                float(layer_bound(many[0], eps, layer, many[1], moves)[0]), rel=1e-9
            )
            assert before <= bound * (1 + 1e-3)  # each norm is within 1e-4 of what it is
            before = bound


@pytest.mark.parametrize("dead", ["head", "output", "queries", "values"])
def test_dead_heads_of_a_large_layer(dead: str) -> None:
    """Pruned heads, and weights that start at zero."""
    g = torch.Generator().manual_seed(0)
    x = rand(g, 6, 320)
    weights = {name: rand(g, 320, 320) / 320**0.5 for name in ("w_q", "w_k", "w_v", "w_o")}
    rest = AttentionLayer(
        **{k: w[64:] if k == "w_o" else w[:, 64:] for k, w in weights.items()}, heads=4, scale=0.1
    )
    if dead == "head":
        weights["w_o"][:64] = 0.0
    else:
        weights[{"output": "w_o", "queries": "w_q", "values": "w_v"}[dead]].zero_()
    layer = AttentionLayer(**weights, heads=5, scale=0.1)
    bound = float(layer_bound(x, 0.1, layer))
    if dead == "head":
        assert bound == pytest.approx(float(layer_bound(x, 0.1, rest)), rel=0.01)
    elif dead == "queries":
        assert bound == pytest.approx(0.1 * float(key_sensitivity(x, layer)), rel=0.5)
    else:
        assert bound < 1e-6


def test_large_layers_are_hardly_looser(request: pytest.FixtureRequest) -> None:
    small = {}
    for large in (False, True):
        if large:
            request.getfixturevalue("as_large")
        for i, case in itertools.product(range(4), CASES):
            layer, x, context = make(case, 100 + i, [0.1, 0.5][i % 2], 1.0)
            bound = float(layer_bound(x, RADII[i], layer, context, case.moves or "both"))
            if not large:
                small[i, case] = bound
            elif case.skip != "matrix" or case.moves is not None:
                assert bound <= (1.5 if case.moves is None else 1.6) * small[i, case], (i, case)


@pytest.mark.parametrize("case", CASES[1:13:2], ids=str)
def test_key_sensitivity_is_the_norm_of_the_fixed_attention(case: Case) -> None:
    for i in range(5):
        layer, x, context = make(case, i, 1.0, 1.0)
        clean = x if context is None else context
        p = probabilities(layer, x, clean)

        def linear(e: Tensor, layer=layer, x=x, context=context, p=p) -> Tensor:  # type: ignore[no-untyped-def]
            left, right = e, e
            if context is not None:
                left = e[: x.numel()] if case.moves != "context" else torch.zeros(x.numel(), dtype=F64)
                right = e[-context.numel() :] if case.moves != "queries" else torch.zeros_like(context)
            left, right = left.reshape(x.shape), right.reshape(x.shape if context is None else context.shape)
            return (mix(layer, p, left, right) - mix(layer, p, 0 * left, 0 * right)).flatten()

        size = sum(
            t.numel()
            for t, name in ((x, "context"), (context, "queries"))
            if t is not None and case.moves != name
        )
        matrix = torch.autograd.functional.jacobian(linear, torch.zeros(size, dtype=F64))
        true = float(torch.linalg.matrix_norm(matrix, 2))
        bound = float(key_sensitivity(x, layer, context, case.moves or "both"))
        assert true * (1 - 1e-12) <= bound
        exact = case.skip != "matrix" or case.moves != "both"
        assert bound <= true * (1 + 1e-9 if exact else 1.42) + 1e-11


def test_every_improvement_and_all_together_are_never_looser() -> None:
    names = Improvements._fields
    gains = dict.fromkeys(names, 0)
    for i, case in itertools.product(range(5), CASES):
        layer, x, context = make(case, 7 * i, [0.2, 0.7, 1.5][i % 3], 2.0 * (i % 2))
        moves: Moves = case.moves or "both"
        eps = RADII[(i + case.n) % 7]
        every = list(itertools.product([False, True], repeat=len(names)))
        if i or CASES.index(case) % 8 != 2:  # here only one switch from none or from all
            near = 0 if i else 1
            every = [switches for switches in every if min(sum(switches), len(names) - sum(switches)) <= near]
        bounds = {
            switches: float(layer_bound(x, eps, layer, context, moves, Improvements(*switches)))
            for switches in every
        }
        for switches, bound in bounds.items():
            for k, name in enumerate(names):
                off = (*switches[:k], False, *switches[k + 1 :])
                if switches[k] and off in bounds:
                    assert bound <= bounds[off] * (1 + 1e-12), f"{name} makes it looser"
                    gains[name] += bound < 0.999 * bounds[off]
        assert bounds[every[-1]] <= bounds[every[0]] * (1 + 1e-12)
    assert all(count > 3 for count in gains.values()), f"an improvement that improves nothing: {gains}"


def second_part(
    layer: AttentionLayer, x: Tensor, context: Tensor | None, e: Tensor, moves: str | None
) -> Tensor:
    """`Σ_h (P'_h − P_h)(C + G) W_h` for perturbations e (starts, numbers)."""
    clean = x if context is None else context
    plain = dataclasses.replace(layer, skip=False)
    y, c = x.expand(len(e), *x.shape), clean.expand(len(e), *clean.shape)
    if moves != "context":
        y = x + e[:, : x.numel()].reshape(-1, *x.shape)
    if context is None:
        c = y
    elif moves != "queries":
        c = context + e[:, -context.numel() :].reshape(-1, *context.shape)
    return mix(plain, probabilities(layer, y, c), y, c) - mix(plain, probabilities(layer, x, clean), y, c)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_heads_at_once_are_never_below_what_ascent_finds(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stacked and the weighted bound each by itself, not the smallest of all, against their own worst."""
    parts: dict[str, Tensor] = {}

    def watch(name: str) -> None:
        real = getattr(heads, name)

        def spy(*args: object) -> object:
            result = real(*args)
            found = result if isinstance(result, list) else [result]
            parts.update(
                {f"{name} {len(parts)} {i}": torch.stack(r) for i, r in enumerate(map(whole_rows, found))}
            )
            return result

        monkeypatch.setattr(heads, name, spy)

    def whole_rows(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return pair[0], pair[1].square().sum(-1).sqrt()

    watch("_stacked")
    watch("_weighted")
    closest = {"_stacked": math.inf, "_weighted": math.inf}
    for i in range(14):
        layer, x, context = make(case, 300 + i, [0.1, 0.5, 1.5, 0.5][i % 4], [0.0, 3.0][i % 2])
        eps = RADII[i % 7]
        parts.clear()
        layer_bound(x, eps, layer, context, case.moves or "both")
        size = x.numel() * (case.moves != "context") + (
            context.numel() if context is not None and case.moves != "queries" else 0
        )
        e = rand(torch.Generator().manual_seed(1), 8, size)
        worst = 0.0
        for step in range(40):
            e = (eps * e / e.norm(dim=1, keepdim=True).clamp(min=1e-30)).requires_grad_()
            move = second_part(layer, x, context, e, case.moves).flatten(1).norm(dim=1)
            worst = max(worst, float(move.detach().max()))
            (slope,) = torch.autograd.grad(move.sum(), e)
            unit = slope / slope.norm(dim=1, keepdim=True).clamp(min=1e-30)
            e = (1 - 1 / (1 + 0.1 * step)) * e.detach() / eps + unit / (1 + 0.1 * step)
        assert len(parts) == 5
        for name, values in parts.items():
            assert worst <= float(values.min()) * (1 + 1e-9) + 1e-12 * eps, name
            if worst > 1e-9 * eps:
                kind = name.split()[0]
                closest[kind] = min(closest[kind], float(values.min()) / worst)
    if closest["_stacked"] < math.inf:  # with one key that can be seen nothing moves
        assert max(closest.values()) < 4.0, closest


@pytest.mark.parametrize("moving", ["values", "scores"])
def test_a_head_that_cannot_move_hides_no_other(moving: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two heads, of which one sees one key only: what is shared by heads must be the largest of them."""
    g = torch.Generator().manual_seed(3)
    mask = torch.zeros(2, 4, 4)
    mask[1] = torch.full((4, 4), -math.inf).fill_diagonal_(0.0)
    weights = [rand(g, 4, 4) for _ in range(4)]
    x = rand(g, 1, 4).expand(4, 4).contiguous()  # equal tokens: nothing but the ball moves values and scores
    no_query = -(x[0] @ weights[0])  # then scores are those of the moves of queries and keys alone
    layer = AttentionLayer(*weights, 2, b_q=no_query if moving == "scores" else None, mask=mask)
    found: list[Tensor] = []
    real = heads._weighted

    def spy(*args: object) -> object:
        result = real(*args)  # type: ignore[arg-type]
        found.extend(torch.minimum(whole, rows.square().sum(-1).sqrt()) for whole, rows in result)
        return result

    monkeypatch.setattr(heads, "_weighted", spy)
    for eps in (0.1, 1.0):
        found.clear()
        layer_bound(x, eps, layer)
        e = rand(torch.Generator().manual_seed(1), 8, x.numel())
        worst = 0.0
        for step in range(40):
            e = (eps * e / e.norm(dim=1, keepdim=True)).requires_grad_()
            move = second_part(layer, x, None, e, None).flatten(1).norm(dim=1)
            worst = max(worst, float(move.detach().max()))
            (slope,) = torch.autograd.grad(move.sum(), e)
            unit = slope / slope.norm(dim=1, keepdim=True).clamp(min=1e-30)
            e = (1 - 1 / (1 + 0.1 * step)) * e.detach() / eps + unit / (1 + 0.1 * step)
        assert found and worst > 0 and all(worst <= float(f) for f in found)


@pytest.mark.parametrize("name", ["_stacked", "_weighted"])
def test_the_product_of_both_moves_counts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clean tokens of zero: the scores move by E A Eᵀ alone."""
    real, least = getattr(heads, name), [math.inf]

    def spy(*args: object) -> object:
        result = real(*args)
        least[0] = min(least[0], *(float(pair[0]) for pair in ([result] if name == "_stacked" else result)))
        return result

    monkeypatch.setattr(heads, name, spy)
    layer, x = simple(3, 4, heads=2), torch.zeros(3, 4, dtype=F64)
    layer_bound(x, 0.1, layer)
    linear = float(key_sensitivity(x, layer)) * 0.1
    e = rand(torch.Generator().manual_seed(0), 64, 12)
    for _ in range(60):
        e = (0.1 * e / e.norm(dim=1, keepdim=True)).requires_grad_()
        move = second_part(layer, x, None, e, None).flatten(1).norm(dim=1)
        (e,) = torch.autograd.grad(move.sum(), e)
    worst = float(move.detach().max())
    assert 1e-3 * linear < worst <= least[0] < 20 * worst


def test_heads_at_once_with_rows_and_keys_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many rows go in groups: still no attack exceeds it, and it is between no weights and rows apart."""
    ordered, groups, real = 0, list[int](), heads._row_order

    def spy(p: Tensor, count: int) -> Tensor:
        groups.append(count)
        return real(p, count)

    for seed, case in enumerate(CASES[4:13:2]):
        case = case._replace(n=8, m=8 if case.moves is None else 7, mask="none")
        layer, x, context = make(case, seed, 0.5, 0.0)
        moves: Moves = case.moves or "both"
        plain = float(layer_bound(x, 1e-3, layer, context, moves, Improvements(weighted=False)))
        apart = float(layer_bound(x, 1e-3, layer, context, moves))
        found = largest_move(layer, x, context, 1e-3, case.moves)
        groups.clear()
        for work in (0.0, 4e3, 8e3, 16e3, 32e3, 64e3):
            with monkeypatch.context() as patch:
                patch.setattr(heads, "GROUP_WORK", work)
                patch.setattr(heads, "_row_order", spy)
                grouped = float(layer_bound(x, 1e-3, layer, context, moves))
            assert found <= grouped <= plain * (1 + 1e-12)
            assert work or grouped == plain
            ordered += apart < grouped < plain
        assert any(1 < k < 8 for k in groups), groups
    assert ordered >= 3


def test_monotone_in_eps() -> None:
    for case, use in itertools.product(CASES, (Improvements(), PAPER)):
        layer, x, context = make(case, 3, 0.7, 1.0)
        eps = torch.logspace(-6, 2, 60, dtype=F64)
        many = x.expand(60, *x.shape)
        others = None if context is None else context.expand(60, *context.shape)
        bounds = layer_bound(many, eps, layer, others, case.moves or "both", use)
        assert bounds.shape == (60,)
        assert (bounds[1:] >= bounds[:-1] * (1 - 1e-9)).all()
        assert float(layer_bound(x, 0.0, layer, context, case.moves or "both", use)) == 0.0


def simple(n: int, d: int, heads: int = 1, **other: object) -> AttentionLayer:
    g = torch.Generator().manual_seed(n + d)
    weights = [rand(g, d, heads * d), rand(g, d, heads * d), rand(g, d, heads * d), rand(g, heads * d, d)]
    return AttentionLayer(*weights, heads, **other)  # type: ignore[arg-type]


def test_one_token_is_linear() -> None:
    layer = simple(1, 4, skip=True)
    x = rand(torch.Generator().manual_seed(0), 1, 4)
    true = float(torch.linalg.matrix_norm(torch.eye(4, dtype=F64) + layer.w_v @ layer.w_o, 2))
    for eps in (1e-3, 1.0, 50.0):
        assert float(layer_bound(x, eps, layer)) == pytest.approx(eps * true, rel=1e-9)


def test_without_queries_the_attention_is_constant_and_the_bound_exact() -> None:
    layer = simple(5, 4, heads=2, skip=True)
    layer = dataclasses.replace(layer, w_q=torch.zeros_like(layer.w_q), b_k=torch.ones(8, dtype=F64))
    x = rand(torch.Generator().manual_seed(0), 5, 4)
    flat = torch.full((5, 5), 0.2, dtype=F64)
    total = layer.w_v.unflatten(1, (2, 4)).transpose(0, 1) @ layer.w_o.unflatten(0, (2, 4))
    matrix = torch.eye(20, dtype=F64) + torch.kron(flat, total.sum(0).T.contiguous())
    true = float(torch.linalg.matrix_norm(matrix, 2))
    for use in (Improvements(), PAPER):
        assert float(layer_bound(x, 0.7, layer, use=use)) == pytest.approx(0.7 * true, rel=1e-9)


@pytest.mark.parametrize("factor,value", [(-0.5, 0.5), (0.5, 1.5)])
@pytest.mark.parametrize("dense_size", [0, 4000])
def test_heads_cancel(factor: float, value: float, dense_size: int) -> None:
    one = simple(6, 4)
    x = rand(torch.Generator().manual_seed(0), 6, 4)
    two = AttentionLayer(
        *(torch.cat([w, w], 1) for w in (one.w_q, one.w_k, one.w_v)),
        torch.cat([one.w_o, factor * one.w_o]),
        2,
    )
    single = float(key_sensitivity(x, one))
    assert float(key_sensitivity(x, two, dense_size=dense_size)) == pytest.approx(value * single, rel=2e-3)


def test_identity_weights_and_scales() -> None:
    """Tokens far apart attend to themselves: P = I, and the layer is (1 + c) X up to what cannot happen."""
    eye = torch.eye(3, dtype=F64)
    layer = AttentionLayer(100 * eye, eye, 0.5 * eye, eye, 1, scale=1.0, skip=True)
    x = 3.0 * torch.eye(3, dtype=F64)
    assert float(key_sensitivity(x, layer)) == pytest.approx(1.5, rel=1e-9)
    assert float(layer_bound(x, 1e-3, layer)) == pytest.approx(1.5e-3, rel=1e-9)
    scaled = dataclasses.replace(layer, scale=None)
    assert scaled.factor() == 3**-0.5


@pytest.mark.parametrize("moves", [None, "both", "queries", "context"])
@pytest.mark.parametrize("local", [False, True])
def test_the_bound_is_attained(moves: Moves | None, local: bool) -> None:
    """Two tokens, scores from one feature and large values from another: every inequality is an equality.

    So no factor of the second part (L = 1/2, a + b or the root of their squares) can be smaller.
    """
    first, second = torch.tensor([[1.0], [0.0]], dtype=F64), torch.tensor([[0.0], [1.0]], dtype=F64)
    layer = AttentionLayer(first, first, second, second.T.contiguous(), 1, scale=1.0)
    x = torch.tensor([[0.1, 1000.0], [-0.1, -1000.0]], dtype=F64)
    context = x.clone() if moves else None
    found = largest_move(layer, x, context, 1e-4, moves)
    bound = float(layer_bound(x, 1e-4, layer, context, moves or "both", Improvements(local=local)))
    assert 0.98 * bound <= found <= bound


def test_query_bias_counts() -> None:
    """theory.md, section 1: without it an attack exceeds the bound."""
    case = Case(4, 4, 3, 3, 1, 1, 3, 3, None, "none", "none", False)
    layer, x, _ = make(case, 5, 0.3, 0.0)
    biased = dataclasses.replace(layer, b_q=torch.full((3,), 30.0, dtype=F64))
    found = largest_move(biased, 0.1 * x, None, 0.05, None)
    assert float(layer_bound(0.1 * x, 0.05, layer)) < found <= float(layer_bound(0.1 * x, 0.05, biased))


@pytest.mark.parametrize("case", [CASES[2], CASES[3], CASES[11], CASES[12]], ids=str)
def test_gradients_are_finite_differences(case: Case) -> None:
    layer, x, context = make(case, 11, 0.5, 1.0)
    for eps in (0.01, 0.5):
        names = ["w_q", "w_k", "w_v", "w_o", "b_q"]
        free = {name: getattr(layer, name).clone().requires_grad_() for name in names}
        point = x.clone().requires_grad_()

        def value(x_: Tensor, weights: dict[str, Tensor], eps: float = eps) -> Tensor:
            return layer_bound(x_, eps, dataclasses.replace(layer, **weights), context, case.moves or "both")

        slopes = torch.autograd.grad(value(point, free), [point, *free.values()])
        g = torch.Generator().manual_seed(2)
        step = 1e-6
        for slope, name in zip(slopes, ["x", *names], strict=True):
            way = rand(g, *slope.shape)
            ends = []
            for sign in (1.0, -1.0):
                moved = {k: v.detach() + (sign * step * way if k == name else 0.0) for k, v in free.items()}
                start = x + sign * step * way if name == "x" else x
                ends.append(float(value(start, moved)))
            by_differences = (ends[0] - ends[1]) / (2 * step)
            assert float((slope * way).sum()) == pytest.approx(by_differences, rel=1e-3, abs=1e-5), name


def test_gradients_of_zero_weights_are_finite() -> None:
    layer = simple(4, 3, skip=True)
    zero = {name: torch.zeros_like(getattr(layer, name)).requires_grad_() for name in ("w_q", "w_v", "w_o")}
    x = torch.zeros(4, 3, dtype=F64, requires_grad=True)
    slopes = torch.autograd.grad(
        layer_bound(x, 0.1, dataclasses.replace(layer, **zero)), [x, *zero.values()], allow_unused=True
    )
    assert all(s is None or torch.isfinite(s).all() for s in slopes)


def test_batches_and_single_precision() -> None:
    for case in CASES:
        layer, _, _ = make(case, 0, 0.5, 1.0)
        draws = [make(case, i, 0.5, 1.0) for i in range(6)]
        x = torch.stack([d[1] for d in draws]).unflatten(0, (2, 3))
        context = torch.stack([d[2] for d in draws]).unflatten(0, (2, 3)) if case.moves else None  # type: ignore[misc]
        eps = torch.linspace(0.01, 1.0, 6, dtype=F64).reshape(2, 3)
        moves: Moves = case.moves or "both"
        whole = layer_bound(x, eps, layer, context, moves)
        one = layer_bound(x[1, 2], 1.0, layer, None if context is None else context[1, 2], moves)
        assert float(one) == pytest.approx(float(whole[1, 2]), rel=1e-9)
        weights = {
            f.name: v.float()
            for f in dataclasses.fields(layer)
            if isinstance(v := getattr(layer, f.name), Tensor) and v.is_floating_point()
        }
        single = dataclasses.replace(layer, **weights)  # type: ignore[arg-type]
        again = dataclasses.replace(layer, **{k: v.double() for k, v in weights.items()})  # type: ignore[arg-type]
        low = layer_bound(x.float(), eps, single, None if context is None else context.float(), moves)
        high = layer_bound(
            x.float().double(), eps, again, None if context is None else context.float().double(), moves
        )
        assert low.dtype == torch.float32 and (low.double() >= high).all()
        assert (low.double() <= high * (1 + 1e-5)).all()


def test_bad_input_is_refused() -> None:
    layer = simple(4, 3, heads=2, skip=True)
    x = rand(torch.Generator().manual_seed(0), 4, 3)
    with pytest.raises(ValueError, match="eps"):
        layer_bound(x, -1e-9, layer)
    with pytest.raises(ValueError, match="eps"):
        layer_bound(x, math.nan, layer)
    with pytest.raises(ValueError, match="eps"):
        layer_bound(x, torch.ones(3), layer)
    with pytest.raises(ValueError, match="finite"):
        layer_bound(x * math.nan, 1.0, layer)
    with pytest.raises(ValueError, match="x must be"):
        layer_bound(x[:, :2], 1.0, layer)
    with pytest.raises(ValueError, match="context must be"):
        layer_bound(x, 1.0, layer, x[:, :2])
    with pytest.raises(ValueError, match="self-attention"):
        layer_bound(x, 1.0, layer, moves="queries")
    with pytest.raises(ValueError, match="moves"):
        layer_bound(x, 1.0, layer, x, moves="all")  # type: ignore[arg-type]
    for hidden in (torch.zeros(4, dtype=torch.bool), torch.full((4,), -math.inf), torch.full((4,), -1e9)):
        mask = torch.zeros(4, 4, dtype=hidden.dtype) if hidden.is_floating_point() else torch.ones(4, 4) > 0
        mask[2] = hidden
        with pytest.raises(ValueError, match="hides every key"):
            layer_bound(x, 1.0, dataclasses.replace(layer, mask=mask))
    with pytest.raises(ValueError, match="mask"):
        layer_bound(x, 1.0, dataclasses.replace(layer, mask=torch.zeros(5, 4)))
    with pytest.raises(ValueError, match="mask"):
        dataclasses.replace(layer, mask=torch.full((4, 4), math.nan))
    with pytest.raises(ValueError, match="skip"):
        layer_bound(x, 1.0, dataclasses.replace(layer, skip=torch.eye(5, dtype=F64)))
    for change in (
        {"w_o": layer.w_o[:5]},
        {"w_o": layer.w_o[:, :2]},
        {"w_k": layer.w_k[:, :4]},
        {"w_v": layer.w_v[:2]},
        {"heads": 4},
        {"kv_heads": 3},
        {"b_q": torch.zeros(2, dtype=F64)},
        {"w_q": layer.w_q * math.inf},
    ):
        with pytest.raises(ValueError):
            dataclasses.replace(layer, **change)  # type: ignore[arg-type]
    huge = layer_bound(x, 1.7e308, layer)
    assert float(huge) == math.inf
