"""Fused operators, hand-built and from onnxruntime's transformer optimiser; onnxruntime is the judge."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from attn_bounds.errors import UnsupportedModelError
from onnx_export import OnnxModule, Oracle, load

from .test_attention import exported

TOKENS, WIDTH, HEADS = 5, 8, 2


def weight(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


WEIGHTS = {
    "wq": weight(0, WIDTH, WIDTH),
    "wk": weight(1, WIDTH, WIDTH),
    "wv": weight(2, WIDTH, WIDTH),
    "one_head": weight(3, WIDTH, WIDTH // HEADS),
    "qkv": weight(4, WIDTH, 3 * WIDTH),
    "uneven": weight(5, WIDTH, 2 * WIDTH + 4),
    "bias": weight(6, 3 * WIDTH),
    "uneven_bias": weight(7, 2 * WIDTH + 4),
    "bias8": weight(12, WIDTH),
    "gain": weight(8, WIDTH),
    "shift": weight(9, WIDTH),
    "added": weight(10, 1, HEADS, TOKENS, TOKENS),
    "padding": np.array([[1, 1, 1, 0, 0]], np.int32),
    "lengths": np.array([3], np.int32),
    "ends": np.array([3, 1], np.int32),
    "keep": np.tril(np.ones((TOKENS, TOKENS), bool)),
    "nothing_first": np.arange(TOKENS)[:, None] * np.ones((1, TOKENS)) > 0,
    "heads4": np.array([0, 0, HEADS, WIDTH // HEADS]),
    "one4": np.array([0, 0, 1, WIDTH // HEADS]),
    "half": np.array(0.5, np.float32),
    "yes": np.array(True),
    "whole": np.array([0, 0, WIDTH]),
    "wide": weight(13, WIDTH, 2 * WIDTH),
    "last": np.array([TOKENS - 1], np.int32),
    "length": np.array(TOKENS, np.int32),
    "past": weight(11, 1, HEADS, 2, WIDTH // HEADS),
}
PROJECTED = [helper.make_node("MatMul", ["x", f"w{c}"], [c]) for c in "qkv"]
SHARED = [
    PROJECTED[0],
    *(helper.make_node("MatMul", ["x", "one_head"], [c]) for c in "kv"),
]


def four(c: str, shape: str = "heads4") -> list[Any]:
    """Heads as an axis of their own."""
    return [
        helper.make_node("Reshape", [c, shape], [f"{c}_r"]),
        helper.make_node("Transpose", [f"{c}_r"], [f"{c}4"], perm=[0, 2, 1, 3]),
    ]


FOUR = [n for c in "qkv" for n in four(c)]
BACK = [
    helper.make_node("Transpose", ["y4"], ["y_t"], perm=[0, 2, 1, 3]),
    helper.make_node("Reshape", ["y_t", "whole"], ["y"]),
]


def standard(*inputs: str, **attributes: Any) -> list[Any]:
    """The operator of opset 23 on heads of their own."""
    return [
        *PROJECTED,
        *FOUR,
        helper.make_node("Attention", ["q4", "k4", "v4", *inputs], ["y4"], **attributes),
        *BACK,
    ]


def fused(op: str, *inputs: str, front: list[Any] = PROJECTED, **attributes: Any) -> list[Any]:
    """One operator of onnxruntime."""
    return [*front, helper.make_node(op, list(inputs), ["y"], domain="com.microsoft", **attributes)]


def saved(nodes: list[Any], path: Path, opset: int, batch: str | int = "batch") -> Path:
    used = {i for n in nodes for i in n.input}
    tensors = [numpy_helper.from_array(w, n) for n, w in WEIGHTS.items() if n in used]
    infos = [
        helper.make_tensor_value_info(n, TensorProto.FLOAT, s)
        for n, s in (("x", [batch, TOKENS, WIDTH]), ("y", None))
    ]
    needed = [n for n in nodes if set(n.output) & (used | {"y"})]
    model = helper.make_model(
        helper.make_graph(needed, "g", infos[:1], infos[1:], tensors),
        opset_imports=[helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)],
        ir_version=10,
    )
    onnx.save(model, str(path))
    return path


def checked(path: Path) -> OnnxModule:
    """Loaded (at batch 1 and 3 compared with onnxruntime), and compared again on other values."""
    module = load(path, dtype=torch.float64)
    x = 2.0 * torch.randn(3, TOKENS, WIDTH, generator=torch.Generator().manual_seed(3))
    expected = Oracle(path)(x)
    assert torch.allclose(module(x.double()).float().reshape(expected.shape), expected, atol=1e-5, rtol=1e-4)
    return module


SCALE = 1 / math.sqrt(WIDTH / HEADS)
STANDARD: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "plain": (standard(), {}),
    "scale": (standard(scale=0.3), {"scale": 0.3}),
    "causal": (standard(is_causal=1), {"masked": True, "causal": True}),
    "boolean mask": (standard("keep"), {"masked": True, "causal": True}),
    "added mask": (standard("added"), {"masked": True}),
    "a query without keys": (standard("nothing_first"), {}),
    "3-D": (
        [*PROJECTED, helper.make_node("Attention", ["q", "k", "v"], ["y"], q_num_heads=2, kv_num_heads=2)],
        {},
    ),
    "3-D, grouped": (
        [*SHARED, helper.make_node("Attention", ["q", "k", "v"], ["y"], q_num_heads=2, kv_num_heads=1)],
        {"kv_heads": 1},
    ),
    "4-D, grouped": (
        [
            *SHARED,
            *four("q"),
            *four("k", "one4"),
            *four("v", "one4"),
            helper.make_node("Attention", ["q4", "k4", "v4"], ["y4"]),
            *BACK,
        ],
        {"kv_heads": 1},
    ),
    "softcap": (standard(softcap=2.0), {"note": "softcap"}),
    "softcap and a mask": (standard("added", softcap=2.0), {"note": "softcap"}),
}
MICROSOFT: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "Attention": (fused("Attention", "x", "qkv", "bias", num_heads=2), {}),
    "Attention with padding": (
        fused("Attention", "x", "qkv", "bias", "padding", num_heads=2),
        {"masked": True},
    ),
    "Attention, causal": (
        fused("Attention", "x", "qkv", "bias", num_heads=2, unidirectional=1, scale=0.2),
        {"masked": True, "causal": True, "scale": 0.2},
    ),
    "Attention with a bias": (
        fused("Attention", "x", "qkv", "bias", "", "", "added", num_heads=2),
        {"masked": True},
    ),
    "Attention, uneven": (
        fused(
            "Attention",
            "x",
            "uneven",
            "uneven_bias",
            num_heads=2,
            qkv_hidden_sizes=[WIDTH, WIDTH, WIDTH // 2],
        ),
        {"value_dim": 2},
    ),
    "MultiHeadAttention": (fused("MultiHeadAttention", "q", "k", "v", num_heads=2), {}),
    "MultiHeadAttention with biases": (
        fused("MultiHeadAttention", "q", "k", "v", "bias", "padding", "added", num_heads=2),
        {"masked": True},
    ),
}


@pytest.mark.parametrize("name", [*STANDARD, *MICROSOFT])
def test_attention_operators(tmp_path: Path, name: str) -> None:
    nodes, wanted = (STANDARD | MICROSOFT)[name]
    module = checked(saved(nodes, tmp_path / "m.onnx", 23 if name in STANDARD else 17))
    if "note" in wanted:
        (note,) = module.info.notes
        assert wanted["note"] in note and not module.info.attention
        return
    (unit,) = module.info.attention
    full = {"heads": 2, "kv_heads": 2, "masked": False, "causal": False, "value_dim": 4, **wanted}
    full["scale"] = pytest.approx(full.get("scale", SCALE))
    assert {n: getattr(unit, n) for n in full} == full


def test_grouped_queries_of_onnxruntime(tmp_path: Path) -> None:
    """Without a cache; it wants heads of 8 features."""
    front = [
        helper.make_node("MatMul", ["x", w], [c]) for c, w in zip("qkv", ("wide", "wk", "wv"), strict=True)
    ]
    inputs = ("q", "k", "v", "", "", "last", "length")
    nodes = fused("GroupQueryAttention", *inputs, front=front, num_heads=2, kv_num_heads=1)
    (unit,) = checked(saved(nodes, tmp_path / "m.onnx", 17, batch=1)).info.attention
    assert (unit.heads, unit.kv_heads, unit.head_dim, unit.causal) == (2, 1, 8, True)
    assert unit.scale == pytest.approx(8**-0.5)


def test_dropout_in_training_is_not_passed_over(tmp_path: Path) -> None:
    """Inside an attention too, which would be recognised without it."""
    core = [
        helper.make_node("Transpose", ["k4"], ["k_t"], perm=[0, 1, 3, 2]),
        helper.make_node("MatMul", ["q4", "k_t"], ["s"]),
        helper.make_node("Softmax", ["s"], ["p"], axis=-1),
        helper.make_node("Dropout", ["p", "half", "yes"], ["dropped"]),
        helper.make_node("MatMul", ["dropped", "v4"], ["y4"]),
    ]
    path = saved([*PROJECTED, *FOUR, *core, *BACK], tmp_path / "m.onnx", 17)
    with pytest.raises(UnsupportedModelError, match=r"Dropout.*training mode"):
        load(path, check=False)


def test_keys_kept_by_their_number(tmp_path: Path) -> None:
    nodes = fused("Attention", "x", "qkv", "bias", "lengths", num_heads=2)
    (unit,) = checked(saved(nodes, tmp_path / "m.onnx", 17, batch=1)).info.attention
    assert unit.masked and not unit.causal


@pytest.mark.parametrize(
    "nodes, reason",
    [
        (fused("Attention", "x", "qkv", "bias", "ends", num_heads=2), "a mask of shape"),
        (standard("", "past", "past"), "past keys"),
        (
            [helper.make_node("PackedAttention", ["x", "qkv", "bias"], ["y"], domain="com.microsoft")],
            "packed",
        ),
    ],
    ids=["ends and starts", "cache", "packed"],
)
def test_what_cannot_be_lowered_says_why(tmp_path: Path, nodes: list[Any], reason: str) -> None:
    path = saved(nodes, tmp_path / "m.onnx", 23)
    with pytest.raises(UnsupportedModelError, match=rf"Attention.*{reason}"):
        load(path)


@pytest.mark.parametrize(
    "nodes, steps",
    [
        (fused("Gelu", "x"), ["Gelu"]),
        (fused("BiasGelu", "x", "shift"), ["Add", "Gelu"]),
        (fused("FastGelu", "x", "shift"), ["Add", "Gelu"]),
        (fused("QuickGelu", "x", alpha=1.702), ["QuickGelu"]),
        (fused("QuickGelu", "x", alpha=1.0), ["Silu"]),
        (
            fused("SkipLayerNormalization", "x", "q", "gain", "shift", "bias8"),
            ["MatMul", "Add", "Add", "LayerNorm"],
        ),
        (fused("SkipSimplifiedLayerNormalization", "x", "q", "gain"), ["MatMul", "Add", "RMSNorm"]),
        ([helper.make_node("SimplifiedLayerNormalization", ["x", "gain"], ["y"])], ["RMSNorm"]),
        (
            fused("FusedMatMul", "q", "k", transB=1, alpha=0.25),
            ["MatMul", "MatMul", "Transpose", "MatMul", "Mul"],
        ),
    ],
    ids=lambda v: "".join(v) if isinstance(v, list) and v and isinstance(v[0], str) else "",
)
def test_other_operators(tmp_path: Path, nodes: list[Any], steps: list[str]) -> None:
    module = checked(saved(nodes, tmp_path / "m.onnx", 16))
    assert [s.op for s in module.steps] == steps


class Block(nn.Module):
    """One layer of BERT in the form that the optimiser knows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key, self.value, self.dense = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)
        self.before, self.one, self.two = (nn.LayerNorm(WIDTH) for _ in range(3))

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(*x.shape[:2], HEADS, WIDTH // HEADS).permute(0, 2, 1, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        q, k, v = (self.heads(layer(x)) for layer in (self.query, self.key, self.value))
        s = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(WIDTH // HEADS)
        o = torch.matmul(torch.softmax(s, -1), v).permute(0, 2, 1, 3).contiguous()
        x = self.one(self.dense(o.view(*o.shape[:2], WIDTH)) + x)
        return self.two(self.down(torch.nn.functional.gelu(self.up(x))) + x)


def test_after_the_transformer_optimiser(tmp_path: Path) -> None:
    from onnxruntime.transformers.optimizer import optimize_model

    plain = exported(Block(), tmp_path / "plain.onnx", 14)
    optimised = tmp_path / "optimised.onnx"
    optimize_model(str(plain), "bert", num_heads=HEADS, hidden_size=WIDTH, opt_level=0).save_model_to_file(
        str(optimised)
    )
    ops = {n.op_type for n in onnx.load(str(optimised)).graph.node if n.domain == "com.microsoft"}
    assert ops == {"Attention", "SkipLayerNormalization", "BiasGelu"}
    units = [checked(path).info.attention for path in (plain, optimised)]
    assert [[(u.heads, u.queries, u.keys, round(u.scale, 6)) for u in found] for found in units] == [
        [(HEADS, TOKENS, TOKENS, 0.5)]
    ] * 2


class Images(nn.Module):
    """A convolution with an activation behind it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.out = nn.Conv2d(1, 32, 2), nn.Linear(32, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.conv(x.unsqueeze(1))).flatten(2).transpose(1, 2)
        return self.out(torch.nn.functional.gelu(y)).mean(1)


@pytest.mark.parametrize("level, op", [("EXTENDED", "FusedConv"), ("ALL", "ReorderOutput")])
def test_as_onnxruntime_saves_it(tmp_path: Path, level: str, op: str) -> None:
    """Its own optimisation before running, which can be saved; at the last level for one machine alone."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, f"ORT_ENABLE_{level}")
    options.optimized_model_filepath, options.log_severity_level = str(tmp_path / "saved.onnx"), 4
    plain = exported(Images(), tmp_path / "plain.onnx", 17)
    onnxruntime.InferenceSession(str(plain), options, providers=["CPUExecutionProvider"])
    if op not in {n.op_type for n in onnx.load(str(tmp_path / "saved.onnx")).graph.node}:
        pytest.skip(f"onnxruntime has no {op} on this machine")
    if level == "ALL":
        with pytest.raises(UnsupportedModelError, match="ORT_ENABLE_EXTENDED"):
            load(tmp_path / "saved.onnx")
    else:
        checked(tmp_path / "saved.onnx")
