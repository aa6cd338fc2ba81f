"""What `inspect` says a graph is made of, and what it advises where it is stuck."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

from onnx_export import attention, export, inspect
from onnx_export.advice import nearest
from onnx_export.structure import Part, Structure


class Block(nn.Module):
    """Attention and MLP, with their norms before or after the residual sums, or side by side."""

    def __init__(self, order: str, activation: nn.Module) -> None:
        super().__init__()
        self.order, self.activation = order, activation
        self.norms = nn.ModuleList([nn.LayerNorm(8), nn.LayerNorm(8)])
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (t.reshape(-1, 5, 2, 4).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        return self.out(attention(q, k, v, scale=0.5).transpose(1, 2).reshape(-1, 5, 8))

    def mlp(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.norms
        if self.order == "before":
            x = x + self.attend(first(x))
            return x + self.mlp(second(x))
        if self.order == "after":
            x = first(x + self.attend(x))
            return second(x + self.mlp(x))
        if self.order == "side by side":
            y = first(x)
            return x + self.attend(y) + self.mlp(y)
        return self.mlp(self.attend(x))  # "no sums"


def made_of(model: nn.Module, folder: Path) -> Structure:
    path = folder / "m.onnx"
    export(model, torch.zeros(1, 5, 8), path, exporter="torchscript", opset=17)
    return inspect(path).structure


@pytest.mark.parametrize("order", ["before", "after", "side by side", "no sums"])
def test_blocks(tmp_path: Path, order: str) -> None:
    torch.manual_seed(0)
    layers = [
        nn.Linear(8, 8),
        Block(order, nn.ReLU()),
        Block(order, nn.Tanh()),
        nn.Flatten(),
        nn.Linear(40, 3),
    ]
    model = nn.Sequential(*layers)
    found = made_of(model, tmp_path)
    assert len(found.blocks) == 2
    if order == "no sums":  # a chain: where one layer ends and the next begins is not to be seen
        assert [b[0].kind for b in found.blocks] == ["attention"] * 2 and found.blocks[0][1].kind == "mlp"
        assert not any(p.residual for p in every(found))
        return
    assert [p.linear for p in found.stem] == [["8→8"]]
    for block, activation in zip(found.blocks, ("ReLU", "tanh"), strict=True):
        linear = [["8→24", "8→8"], ["8→12", "12→8"]]
        if order == "side by side":
            (part,) = block
            assert part.kind == "attention and mlp" and part.residual and part.norms == ["LayerNorm"]
            assert sorted(part.linear) == sorted(linear[0] + linear[1]) and part.activations == [activation]
            continue
        assert [p.kind for p in block] == ["attention", "mlp"] and [p.linear for p in block] == linear
        assert all(p.residual for p in block)
        assert [len(p.units) for p in block] == [1, 0] and block[0].units[0].heads == 2
        assert block[1].activations == [activation] and block[0].input == ["batch", 5, 8]
    norms = [n for p in every(found) for n in p.norms]
    assert norms == ["LayerNorm"] * {"before": 4, "after": 4, "side by side": 2}[order]
    used = [p for n, p in model.named_parameters() if order != "side by side" or "norms.1" not in n]
    assert found.parameters == sum(p.parameters for p in every(found)) == sum(p.numel() for p in used)
    assert [p.linear for p in found.head][-1][-1] == "40→3" and found.head[-1].output == ["batch", 3]


def every(found: Structure) -> list[Part]:
    return [*found.stem, *(p for block in found.blocks for p in block), *found.head]


def test_bundled_model(digits: Path) -> None:
    found = inspect(digits).structure
    assert [[p.kind for p in block] for block in found.blocks] == [["attention", "mlp"]] * 2
    assert all(p.residual for block in found.blocks for p in block)


def test_no_attention_and_unsupported_nodes(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Gemm", ["x", "w"], ["h"]),
        helper.make_node("Sin", ["h"], ["s"], name="wave"),
        helper.make_node("Add", ["h", "s"], ["a"]),
        helper.make_node("MaxPool", ["a"], ["y"], kernel_shape=[2], name="pool"),
    ]
    infos = [
        helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("x", ["b", 3]), ("y", None))
    ]
    weight = numpy_helper.from_array(np.ones((3, 4), np.float32), "w")
    model = helper.make_model(
        helper.make_graph(nodes, "g", infos[:1], infos[1:], [weight]),
        opset_imports=[helper.make_opsetid("", 17)],
    )
    onnx.save(model, tmp_path / "m.onnx")
    info = inspect(tmp_path / "m.onnx")
    assert info.structure.blocks == [] and info.structure.parameters == 12
    stuck = [name for p in info.structure.stem for name in p.unsupported]
    assert stuck == [u.node for u in info.unsupported] == ["wave", "pool"]
    assert any(p.residual for p in info.structure.stem)


@pytest.mark.parametrize(
    "op, words",
    [
        ("Sin", "GELU"),
        ("TopK", "take it off"),
        ("Loop", "control flow"),
        ("QLinearMatMul", "float32"),
        ("com.microsoft::FusedConv", "before onnxruntime's optimiser"),
        ("my.domain::Thing", "attn-bounds export"),
        ("ReduceMen", "ReduceMean is supported"),
        ("Utterly", ""),
    ],
)
def test_advice(op: str, words: str) -> None:
    advice = nearest(op, "operator not supported")
    assert words in advice and bool(words) == bool(advice)
    assert nearest("MatMul", "product of values of rank 1") == ""
