"""Attention in every dress that people write and exporters emit: found, and equal to onnxruntime."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import onnx_export
from onnx_export import Attention, Oracle, load

HEADS, TOKENS, WIDTH = 2, 5, 4  # WIDTH per head
UNIT = {"heads": 2, "kv_heads": 2, "queries": 5, "keys": 5, "head_dim": 4, "value_dim": 4, "scale": 0.5}
MASK = torch.zeros(TOKENS, TOKENS)
MASK[0, 3:], MASK[2, 1] = float("-inf"), -1.5
KEEP = MASK == 0.0
FUTURE = torch.ones(TOKENS, TOKENS).triu(1).bool()
BIAS = torch.randn(HEADS, TOKENS, TOKENS, generator=torch.Generator().manual_seed(1))

Core = Callable[[Tensor, Tensor, Tensor], Tensor]
Case = tuple[Any, dict[str, Any]]  # a core, or a module on (batch, 5, 8); what the unit is, besides UNIT


def turned(x: Tensor) -> Tensor:
    return x.transpose(-2, -1)


def sdp(q: Tensor, k: Tensor, v: Tensor, *masks: Tensor) -> Tensor:
    s = q @ k.transpose(-2, -1) * 0.5
    for mask in masks:
        s = s + mask
    return s.softmax(-1) @ v


def filled(value: float) -> Core:
    return lambda q, k, v: (q @ turned(k) / 2.0).masked_fill(FUTURE, value).softmax(-1) @ v


def added(value: float) -> Core:
    return lambda q, k, v: sdp(q, k, v, FUTURE * value)


def shared(x: Tensor, times: int) -> Tensor:
    """One head of keys for several of queries: head 0 repeated."""
    return x[:, :1].expand(-1, times, -1, -1)


def sliced(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Heads as slices of the features, one by one."""
    q, k, v = (t.transpose(1, 2).flatten(2) for t in (q, k, v))
    heads = [[t[..., i * WIDTH : (i + 1) * WIDTH] for t in (q, k, v)] for i in range(HEADS)]
    return torch.cat([sdp(*head) for head in heads], -1).reshape(-1, TOKENS, HEADS, WIDTH).transpose(1, 2)


def merged(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Batch and heads in one axis; the mask is added where they are apart."""
    b = q.shape[0]
    q, k, v = (t.reshape(-1, TOKENS, WIDTH) for t in (q, k, v))
    s = torch.bmm(q * 0.5, turned(k)).view(b, HEADS, TOKENS, TOKENS) + BIAS
    return torch.bmm(s.view(-1, TOKENS, TOKENS).softmax(-1), v).view(b, HEADS, TOKENS, WIDTH)


def grouped_by_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """All heads of queries in one matrix beside the one head of keys."""
    b = q.shape[0]
    s = (q.reshape(b, 1, -1, WIDTH) @ turned(k[:, :1]) * 0.5).view(b, HEADS, TOKENS, TOKENS)
    p = (s + MASK).softmax(-1)
    return (p.view(b, 1, -1, TOKENS) @ v[:, :1]).view(b, HEADS, TOKENS, WIDTH)


def einsum(scores: str, average: str) -> Core:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if scores.startswith("bi"):
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        s = torch.einsum(scores, q, k) * 0.5
        axis = scores.index("j", scores.index(">")) - scores.index(">") - 1
        o = torch.einsum(average, s.softmax(axis), v)
        return o if average.endswith("bhid") else o.transpose(1, 2)

    return run


def keras(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The equations of `keras.layers.MultiHeadAttention`."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    p = torch.einsum("aecd,abcd->acbe", k, q * 0.5).softmax(-1)
    return torch.einsum("acbe,aecd->abcd", p, v).transpose(1, 2)


# cores see (batch, heads, tokens, width) each
CORES: dict[str, Case] = {
    "both scaled": (lambda q, k, v: ((q * 0.5**0.5) @ turned(k * 0.5**0.5)).softmax(-1) @ v, {}),
    "keys scaled": (lambda q, k, v: (q @ (turned(k) * 0.5)).softmax(-1) @ v, {}),
    "no scale": (lambda q, k, v: (q @ turned(k)).softmax(-1) @ v, {"scale": 1.0}),
    "temperature per head": (
        lambda q, k, v: (q @ turned(k) * torch.tensor([0.3, 0.7]).view(2, 1, 1)).softmax(-1) @ v,
        {"scale": 1.0},
    ),
    "mask": (lambda q, k, v: sdp(q, k, v, MASK), {"masked": True}),
    "bias and mask": (lambda q, k, v: sdp(q, k, v, BIAS, MASK), {"masked": True}),
    "mask scaled": (lambda q, k, v: ((q @ turned(k) + MASK) * 0.5).softmax(-1) @ v, {"masked": True}),
    "added -1e9": (added(-1e9), {"masked": True, "causal": True}),
    "added -10000": (added(-1e4), {"masked": True, "causal": True}),
    "added lowest": (added(torch.finfo(torch.float32).min), {"masked": True, "causal": True}),
    "filled -inf": (filled(float("-inf")), {"masked": True, "causal": True}),
    "filled -1e9": (filled(-1e9), {"masked": True, "causal": True}),
    "where": (
        lambda q, k, v: torch.where(KEEP, q @ turned(k), torch.tensor(-1e30)).mul(0.5).softmax(-1) @ v,
        {"masked": True},
    ),
    "masked twice, transposed": (
        lambda q, k, v: (
            torch.where(KEEP, turned(k @ turned(q) * 0.5 + turned(MASK)), torch.tensor(-1e9)).softmax(-1) @ v
        ),
        {"masked": True},
    ),
    "computed causal": (
        lambda q, k, v: sdp(
            q, k, v, torch.full((q.shape[2], k.shape[2]), float("-inf")).triu(1)[: q.shape[2]]
        ),
        {"masked": True, "causal": True},
    ),
    "heads as slices": (sliced, {"heads": 1, "kv_heads": 1, "count": 2}),
    "heads merged with the batch": (merged, {"masked": True}),
    "cross": (lambda q, k, v: sdp(q[:, :, :2], k[:, :, 1:], v[:, :, 1:]), {"queries": 2, "keys": 4}),
    "broadcast keys": (lambda q, k, v: sdp(q, k[:, :1], v[:, :1]), {"kv_heads": 1}),
    "expanded keys": (lambda q, k, v: sdp(q, shared(k, 2), shared(v, 2)), {"kv_heads": 1}),
    "repeated keys": (
        lambda q, k, v: sdp(q, *(t[:, :1].repeat_interleave(2, 1) for t in (k, v))),
        {"kv_heads": 1},
    ),
    "grouped by queries": (
        grouped_by_queries,
        {"heads": 1, "kv_heads": 1, "queries": 10, "masked": True},
    ),
    "softmax over rows": (lambda q, k, v: turned((k @ turned(q) * 0.5).softmax(-2)) @ v, {}),
    "values first": (lambda q, k, v: turned(turned(v) @ turned((q @ turned(k) * 0.5).softmax(-1))), {}),
    "softmax of a matrix": (
        lambda q, k, v: (
            (q @ turned(k) * 0.5).view(-1, TOKENS).softmax(-1).view(-1, HEADS, TOKENS, TOKENS) @ v
        ),
        {},
    ),
    "weights used twice": (
        lambda q, k, v: (lambda p: p @ v + turned(p.mean(-2, keepdim=True)))(
            (q @ turned(k) * 0.5).softmax(-1)
        ),
        {},
    ),
    "einsum": (einsum("bhid,bhjd->bhij", "bhij,bhjd->bhid"), {}),
    "einsum, tokens first": (einsum("bihd,bjhd->bhij", "bhij,bjhd->bihd"), {}),
    "einsum, heads last": (einsum("bihd,bjhd->bijh", "bijh,bjhd->bihd"), {}),
    "einsum of keras": (keras, {}),
    "exponentials": (
        lambda q, k, v: (lambda e: e / e.sum(-1, keepdim=True) @ v)((q @ turned(k) * 0.5).exp()),
        {},
    ),
    "squared differences": (
        lambda q, k, v: (-0.5 * ((q.unsqueeze(3) - k.unsqueeze(2)) ** 2).sum(-1) + BIAS).softmax(-1) @ v,
        {"kind": "distance", "masked": True},
    ),
    "squared differences, keys first": (
        lambda q, k, v: (-(k.unsqueeze(2) - q.unsqueeze(3)).pow(2).sum(-1) / 2.0).softmax(-1) @ v,
        {"kind": "distance"},
    ),
    "sdpa": (F.scaled_dot_product_attention, {}),
    "sdpa, boolean mask": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=KEEP),
        {"masked": True},
    ),
    "sdpa, causal": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        {"masked": True, "causal": True},
    ),
    "sdpa, causal by a mask": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=~FUTURE),
        {"masked": True, "causal": True},
    ),
    "sdpa, one query sees nothing": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=torch.arange(5)[:, None] > 0),
        {},
    ),
}


class Layer(nn.Module):
    """(batch, 5, 8) → (batch, 3): projections, heads in one of several ways, attention, mean, linear."""

    def __init__(self, core: Core, split: str = "chunk") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 3)
        self.core, self.split = core, split

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = self.qkv(x)
        b, n, _ = y.shape
        if self.split == "unbind":
            return y.reshape(b, n, 3, HEADS, WIDTH).permute(2, 0, 3, 1, 4).unbind(0)  # type: ignore[return-value]
        if self.split == "select":
            z = y.reshape(b, n, 3, HEADS, WIDTH)
            q, k, v = (z[:, :, i].transpose(1, 2) for i in range(3))
        elif self.split == "index":
            z = y.view(b, n, HEADS, 3 * WIDTH).transpose(1, 2)
            q, k, v = (z[..., i * WIDTH : (i + 1) * WIDTH] for i in range(3))
        else:
            parts = y.chunk(3, -1) if self.split == "chunk" else y.split([8, 8, 8], -1)
            q, k, v = (t.view(b, n, HEADS, WIDTH).transpose(1, 2) for t in parts)
        return q, k, v

    def forward(self, x: Tensor) -> Tensor:
        o = self.core(*self.heads(x))
        return self.out(o.transpose(1, 2).flatten(2).mean(1))


class Learned(Layer):
    """Queries, or keys, that are weights of the model."""

    def __init__(self, queries: bool) -> None:
        super().__init__(sdp)
        self.queries, self.learned = queries, nn.Parameter(torch.randn(1, HEADS, 3, WIDTH))

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().heads(x)
        return (self.learned, k, v) if self.queries else (q, self.learned, v[:, :, :3])


class Torch(nn.Module):
    """`nn.MultiheadAttention` in a layer of its own."""

    def __init__(self, weights: bool, batch_first: bool, mask: Tensor | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.MultiheadAttention(8, HEADS, batch_first=batch_first)
        self.weights, self.mask, self.turned = weights, mask, not batch_first

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1) if self.turned else x
        y = self.layer(x, x, x, need_weights=self.weights, attn_mask=self.mask)[0]
        return y.mean(0 if self.turned else 1)


MODULES: dict[str, Case] = {
    "unbind": (lambda: Layer(sdp, "unbind"), {}),
    "select": (lambda: Layer(sdp, "select"), {}),
    "index": (lambda: Layer(sdp, "index"), {}),
    "split": (lambda: Layer(sdp, "split"), {}),
    "learned queries": (lambda: Learned(True), {"queries": 3}),
    "learned keys": (lambda: Learned(False), {"keys": 3}),
    "MultiheadAttention": (lambda: Torch(False, True), {}),
    "MultiheadAttention with weights": (lambda: Torch(True, True), {}),
    "MultiheadAttention, sequence first": (lambda: Torch(True, False, MASK), {"masked": True}),
    "encoder layer": (
        lambda: nn.Sequential(
            nn.TransformerEncoderLayer(8, 2, 12, 0.0, "gelu", batch_first=True), nn.Flatten(1)
        ),
        {},
    ),
}
CASES = {
    **{name: ((lambda core=core: Layer(core)), unit) for name, (core, unit) in CORES.items()},
    **MODULES,
}
LATE = ("sdpa", "Multihead", "encoder", "einsum", "computed")
DYNAMO = ["unbind", "sdpa, boolean mask", "repeated keys", "MultiheadAttention", "einsum, heads last"]


def exported(
    module: nn.Module, path: Path, opset: int, dynamo: bool = False, points: Tensor | None = None
) -> Path:
    """A file with a dynamic batch."""
    x = torch.randn(2, TOKENS, 8, generator=torch.Generator().manual_seed(2)) if points is None else points
    options: dict[str, Any] = {"dynamic_axes": {"x": {0: "batch"}}}
    if dynamo:
        options = {
            "dynamic_shapes": ({0: torch.export.Dim("batch")},),
            "external_data": False,
            "verbose": False,
        }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module.eval(), (x,), str(path), dynamo=dynamo, opset_version=opset, input_names=["x"], **options
        )
    return path


def checked(path: Path) -> onnx_export.OnnxModule:
    """Loaded (at batch 1 and 3 compared with onnxruntime), and compared again on other values."""
    module = load(path, dtype=torch.float64)
    x = 2.0 * torch.randn(3, TOKENS, 8, generator=torch.Generator().manual_seed(3))
    expected = Oracle(path)(x)
    mine = module(x.double()).to(expected.dtype).reshape(expected.shape)
    assert torch.allclose(mine, expected, atol=1e-5, rtol=1e-4)
    return module


def expect(units: list[Attention], wanted: dict[str, Any]) -> None:
    wanted = {"count": 1, "kind": "dot", "masked": False, "causal": False, **UNIT, **wanted}
    assert len(units) == wanted.pop("count")
    for unit in units:
        found = {name: getattr(unit, name) for name in wanted}
        assert found == {**wanted, "scale": pytest.approx(wanted["scale"])}


@pytest.mark.parametrize(
    ("name", "opset"),
    [(name, opset) for name in CASES for opset in (11, 17) if opset > 11 or not name.startswith(LATE)],
)
def test_dresses(tmp_path: Path, name: str, opset: int) -> None:
    make, unit = CASES[name]
    module = checked(exported(make(), tmp_path / "m.onnx", opset))
    expect(module.info.attention, unit)
    assert module.info.notes == []


@pytest.mark.parametrize("name", DYNAMO)
@pytest.mark.parametrize("opset", [18, 23])
def test_dresses_of_dynamo(tmp_path: Path, name: str, opset: int) -> None:
    make, unit = CASES[name]
    expect(checked(exported(make(), tmp_path / "m.onnx", opset, dynamo=True)).info.attention, unit)


def test_a_lowered_row_is_not_an_excluded_one(tmp_path: Path) -> None:
    """All scores of a query lowered by 10000: no softmax sees it, but for the rounding of float32."""
    low = (MASK - 1e4 * (torch.arange(TOKENS)[:, None] > 2)).double()
    module = Layer(lambda q, k, v: sdp(q, k, v, low)).double()
    path = exported(module, tmp_path / "m.onnx", 17, points=torch.zeros(2, TOKENS, 8).double())
    expect(checked(path).info.attention, {"masked": True})


@pytest.mark.parametrize("value, size", [(-1e4, 300.0), (float("-inf"), 1e7)])
def test_what_is_masked_stays_so_for_large_scores(tmp_path: Path, value: float, size: float) -> None:
    """A score in place of another one does not depend on it, and nothing makes up for −inf."""
    layer = Layer(filled(value)).double()
    points = torch.randn(2, TOKENS, 8, generator=torch.Generator().manual_seed(2)).double()
    module = load(exported(layer, tmp_path / "m.onnx", 17, points=points), dtype=torch.float64)
    expected = layer(size * points)
    assert torch.allclose(module(size * points), expected, rtol=0.0, atol=1e-6 * float(expected.abs().max()))


def talking(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mix = torch.tensor([[0.8, 0.2], [-0.3, 1.1]])
    return torch.einsum("gh,bhij->bgij", mix, q @ turned(k)).softmax(-1) @ v


def talking_after(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mix = torch.tensor([[0.8, 0.2], [-0.3, 1.1]])
    p = (q @ turned(k)).softmax(-1)
    return (p.permute(0, 2, 3, 1) @ mix).permute(0, 3, 1, 2) @ v


@pytest.mark.parametrize(
    "core, reason",
    [
        (talking, "mixes the heads between scores and softmax"),
        (talking_after, "mixes the heads between softmax and average"),
        (lambda q, k, v: (torch.tanh(q @ turned(k) / 3.0) * 3.0).softmax(-1) @ v, "softcap"),
        (lambda q, k, v: (q @ turned(k) + v.mean(-1, keepdim=True)).softmax(-1) @ v, "sum of several terms"),
        (lambda q, k, v: (q @ turned(k)).softmax(-2) @ v, "averaged over the queries"),
        (
            lambda q, k, v: torch.where(KEEP, q @ turned(k), torch.tensor(-3.0)).softmax(-1) @ v,
            "by a constant",
        ),
        (filled(-1e4), "others may fall below"),
        (
            lambda q, k, v: (
                (-((q.unsqueeze(3) - k.unsqueeze(2)) ** 2).sum(-1) * torch.arange(1.0, 6.0)[:, None]).softmax(
                    -1
                )
                @ v
            ),
            "row by row",
        ),
        (
            lambda q, k, v: (q @ turned(k)).masked_fill(torch.arange(5)[:, None] < 1, -1e9).softmax(-1) @ v,
            "by a constant",
        ),
        (
            lambda q, k, v: (q[:, :, :1] @ turned(k) + BIAS).softmax(-1) @ v,
            "one product serves several",
        ),
        (lambda q, k, v: (q * k).softmax(-1) * v, "entry by entry"),
    ],
    ids=[
        "talking",
        "talking after",
        "softcap",
        "sum",
        "wrong axis",
        "weak replacement",
        "strong replacement",
        "scaled distances",
        "uniform row",
        "one product",
        "no product",
    ],
)
def test_what_is_no_unit_says_why(tmp_path: Path, core: Core, reason: str) -> None:
    """The model is loaded all the same, op by op."""
    module = checked(exported(Layer(core), tmp_path / "m.onnx", 17))
    assert module.info.attention == []
    (note,) = module.info.notes
    assert reason in note and "Softmax" in note
