"""Loading ONNX files, with onnxruntime as the judge of what they compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

import onnx_export
from attn_bounds.errors import InputError, UnsupportedModelError
from onnx_export import Oracle, inspect, load


def graph(
    nodes: list[Any], inputs: Any, outputs: Any, weights: dict[str, np.ndarray], opset: int = 13
) -> Any:
    """A checked ModelProto; inputs and outputs are (name, shape)."""
    infos = [
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in pairs]
        for pairs in (inputs, outputs)
    ]
    tensors = [numpy_helper.from_array(w, n) for n, w in weights.items()]
    g = helper.make_graph(nodes, "g", *infos, tensors)
    model = helper.make_model(g, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    if all(s is not None for _, s in outputs):
        onnx.checker.check_model(model)
    return model


def save(model: Any, path: Path) -> Path:
    onnx.save(model, str(path))
    return path


def weight(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def agrees(path: Path, batch: int = 2, **kwargs: Any) -> onnx_export.OnnxModule:
    module = load(path, **kwargs)
    x = torch.randn((batch, *module.input_shape), generator=torch.Generator().manual_seed(5))
    y = Oracle(path)(x)
    mine = module.with_head(module(x.to(kwargs.get("dtype", torch.float32))))
    assert torch.allclose(mine.detach().float().reshape(y.shape), y, atol=1e-4, rtol=1e-4)
    return module


@pytest.mark.parametrize("name, layers, tokens", [("pgd_2_3_16", 2, 5), ("ibp_3_3_8", 3, 17)])
def test_competition_models(vnncomp_vit: Path, name: str, layers: int, tokens: int) -> None:
    path = vnncomp_vit / f"{name}.onnx"
    for options in ({}, {"attention": "decomposed"}, {"dtype": torch.float64}):
        module = agrees(path, batch=3, **options)
    info = inspect(path)
    assert [(a.heads, a.queries, a.keys, a.head_dim, a.value_dim) for a in info.attention] == [
        (3, tokens, tokens, 16, 16)
    ] * layers
    assert info.opset == 9 and not info.unsupported and info.inputs == {"input": ["batch", 3, 32, 32]}
    assert module.input_shape == (3, 32, 32) and module.output_shape == (10,)


def test_bundled_model(digits: Path) -> None:
    module = agrees(digits, batch=4)
    assert len(module.info.attention) == 2 and module.info.attention[0].heads == 2
    data = np.load(digits.parent / "digits_test.npz")
    with torch.no_grad():
        accuracy = (module(torch.from_numpy(data["x"])).argmax(1).numpy() == data["y"]).mean()
    assert accuracy >= 0.95


class Attention(nn.Module):
    """Attention in a plain torch module, in the given dress."""

    def __init__(self, dress: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dress = dress
        self.qkv = nn.Linear(8, 24)
        self.out = nn.Linear(8, 3)
        mask = torch.zeros(4, 4)
        mask[0, 2:] = float("-inf")
        mask[3, 0] = -2.0
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v = (t.reshape(b, n, 2, 4).transpose(1, 2) for t in self.qkv(x).split(8, dim=-1))
        if self.dress == "scale before":
            s = (q * 0.5) @ k.transpose(-2, -1)
        elif self.dress == "divide":
            s = q @ k.transpose(-2, -1) / 2.0
        elif self.dress == "mask":
            s = q @ k.transpose(-2, -1) * 0.5 + self.mask
        elif self.dress == "mask then scale":
            s = (q @ k.transpose(-2, -1) + self.mask) * 0.5
        else:
            s = q @ k.transpose(-2, -1)
        o = torch.softmax(s, -1) @ v
        return self.out(o.transpose(1, 2).reshape(b, n, 8)[:, 0])


@pytest.mark.parametrize("dress", ["plain", "scale before", "divide", "mask", "mask then scale"])
@pytest.mark.parametrize("opset", [11, 17])
def test_attention_is_recognised(tmp_path: Path, dress: str, opset: int) -> None:
    path = tmp_path / "m.onnx"
    torch.onnx.export(
        Attention(dress).eval(),
        (torch.zeros(2, 4, 8),),
        str(path),
        dynamo=False,
        opset_version=opset,
        input_names=["x"],
        dynamic_axes={"x": {0: "batch"}},
    )
    module = agrees(path, batch=3)
    assert len(module.info.attention) == 1
    unit = module.info.attention[0]
    assert (unit.heads, unit.queries, unit.keys, unit.head_dim) == (2, 4, 4, 4)
    assert unit.masked == ("mask" in dress)
    assert unit.scale == pytest.approx(1.0 if dress == "plain" else 0.5)


def test_unrecognised_softmax_is_left_alone(tmp_path: Path) -> None:
    """The scores leave the attention as an output of their own use: no unit, same values."""
    nodes = [
        helper.make_node("MatMul", ["x", "wt"], ["k"]),
        helper.make_node("Transpose", ["k"], ["kt"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["x", "kt"], ["s"]),
        helper.make_node("Softmax", ["s"], ["p"], axis=-1),
        helper.make_node("Add", ["p", "s"], ["y"]),
    ]
    model = graph(nodes, [("x", ["b", 3, 4])], [("y", ["b", 3, 3])], {"wt": weight(0, 4, 4)})
    module = agrees(save(model, tmp_path / "m.onnx"))
    assert module.info.attention == []


@pytest.mark.parametrize("opset, axis", [(11, 2), (11, -1), (13, -1), (13, 1)])
def test_softmax_axis(tmp_path: Path, opset: int, axis: int) -> None:
    nodes = [helper.make_node("Softmax", ["x"], ["y"], axis=axis)]
    agrees(save(graph(nodes, [("x", ["b", 3, 4])], [("y", ["b", 3, 4])], {}, opset), tmp_path / "m.onnx"))


def test_old_softmax_over_several_axes(tmp_path: Path) -> None:
    """Below opset 13 the default axis 1 flattens all that follow: not a softmax over one axis."""
    nodes = [helper.make_node("Softmax", ["x"], ["y"])]
    path = save(graph(nodes, [("x", ["b", 3, 4])], [("y", ["b", 3, 4])], {}, 11), tmp_path / "m.onnx")
    y = agrees(path)(torch.randn(2, 3, 4))
    assert torch.allclose(y.sum((1, 2)), torch.ones(2))


def test_flatten_is_onnx_flatten(tmp_path: Path) -> None:
    """auto_LiRPA 0.7.1 takes torch's meaning of `axis`; the loader emits a reshape instead."""
    nodes = [
        helper.make_node("Flatten", ["x"], ["f"], axis=1),
        helper.make_node("Gemm", ["f", "w"], ["y"], transB=1),
    ]
    model = graph(nodes, [("x", ["b", 2, 3, 2])], [("y", ["b", 5])], {"w": weight(0, 5, 12)})
    agrees(save(model, tmp_path / "m.onnx"))
    nodes = [helper.make_node("Flatten", ["x"], ["f"], axis=2), helper.make_node("Relu", ["f"], ["y"])]
    model = graph(nodes, [("x", ["b", 2, 3])], [("y", None)], {})  # rows of all samples in one axis
    assert agrees(save(model, tmp_path / "n.onnx")).output_shape == (2, 3)


def test_vocabulary(tmp_path: Path) -> None:
    """Ops of a small convolutional model, each in its ONNX spelling."""
    nodes = [
        helper.make_node("Conv", ["x", "cw"], ["c"], kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("BatchNormalization", ["c", "g", "b", "m", "v"], ["n"], epsilon=1e-3),
        helper.make_node("LeakyRelu", ["n"], ["l"], alpha=0.2),
        helper.make_node("Slice", ["l", "one", "three", "axis1"], ["sl"]),
        helper.make_node("Sub", ["half", "sl"], ["sub"]),
        helper.make_node("Div", ["sub", "two"], ["div"]),
        helper.make_node("Neg", ["div"], ["neg"]),
        helper.make_node("ReduceMean", ["neg"], ["r"], axes=[2], keepdims=1),
        helper.make_node("Squeeze", ["r", "axis2"], ["sq"]),
        helper.make_node("Tanh", ["sq"], ["t"]),
        helper.make_node("Concat", ["t", "const"], ["cat"], axis=1),
        helper.make_node("Transpose", ["cat"], ["tr"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["left", "tr"], ["mm"]),
        helper.make_node("Gather", ["mm", "index"], ["ga"], axis=1),
        helper.make_node("Sigmoid", ["ga"], ["s"]),
        helper.make_node("Add", ["s", "ga"], ["y"]),
    ]
    weights = {
        "cw": weight(0, 4, 2, 2, 2),
        "g": weight(1, 4),
        "b": weight(2, 4),
        "m": weight(3, 4),
        "v": np.abs(weight(4, 4)) + 0.1,
        "one": np.array([1]),
        "three": np.array([3]),
        "axis1": np.array([1]),
        "half": np.array(0.5, np.float32),
        "two": weight(5, 1, 2, 1, 1),
        "axis2": np.array([2]),
        "const": weight(6, 1, 1, 3),
        "left": weight(7, 5, 3),
        "index": np.array(-1),
    }
    agrees(save(graph(nodes, [("x", ["b", 2, 6, 6])], [("y", None)], weights), tmp_path / "m.onnx"), batch=3)


def test_fixed_batch(tmp_path: Path) -> None:
    nodes = [helper.make_node("Gemm", ["x", "w"], ["y"])]
    path = save(graph(nodes, [("x", [1, 3])], [("y", [1, 2])], {"w": weight(0, 3, 2)}), tmp_path / "m.onnx")
    assert agrees(path, batch=4).input_shape == (3,)


@pytest.mark.parametrize("head", ["Softmax", "LogSoftmax", "ArgMax", "Sigmoid"])
def test_heads(tmp_path: Path, head: str) -> None:
    outputs = 1 if head == "Sigmoid" else 4
    attributes = {} if head == "Sigmoid" else {"axis": 1}
    nodes = [
        helper.make_node("Gemm", ["x", "w"], ["logits"]),
        helper.make_node(head, ["logits"], ["y"], **attributes),
    ]
    g = graph(nodes, [("x", ["b", 3])], [("y", None)], {"w": weight(0, 3, outputs)})
    if head == "ArgMax":
        g.graph.output[0].type.tensor_type.elem_type = TensorProto.INT64
    path = save(g, tmp_path / "m.onnx")
    module = load(path, logits=True)
    assert module.info.head == head
    x = torch.randn(3, 3)
    expected = x @ torch.from_numpy(weight(0, 3, outputs))
    assert torch.allclose(module(x), expected, atol=1e-5)


def test_every_unsupported_node_is_listed(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Cos", ["x"], ["a"], name="first"),
        helper.make_node("Relu", ["a"], ["r"]),
        helper.make_node("Sin", ["r"], ["y"], name="second"),
    ]
    path = save(graph(nodes, [("x", ["b", 3])], [("y", ["b", 3])], {}), tmp_path / "m.onnx")
    with pytest.raises(UnsupportedModelError) as e:
        load(path)
    assert all(word in str(e.value) for word in (path.name, "Cos", "first", "Sin", "second", "2 unsupported"))
    assert [u.op for u in inspect(path).unsupported] == ["Cos", "Sin"]


def test_bad_files(tmp_path: Path, digits: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        load(tmp_path / "absent.onnx")
    garbage = tmp_path / "garbage.onnx"
    garbage.write_bytes(b"this is not a model")
    truncated = tmp_path / "truncated.onnx"
    truncated.write_bytes(digits.read_bytes()[:5000])
    empty = tmp_path / "empty.onnx"
    empty.write_bytes(b"")
    for path in (garbage, truncated, empty):
        with pytest.raises(InputError, match=path.name):
            load(path)


def test_missing_external_data(tmp_path: Path) -> None:
    nodes = [helper.make_node("Gemm", ["x", "w"], ["y"])]
    model = graph(nodes, [("x", ["b", 300])], [("y", ["b", 20])], {"w": weight(0, 300, 20)})
    path = tmp_path / "m.onnx"
    onnx.save(model, str(path), save_as_external_data=True, location="weights.bin", size_threshold=0)
    agrees(path)
    (tmp_path / "weights.bin").unlink()
    with pytest.raises(InputError, match="external data"):
        load(path)


def test_samples_that_influence_each_other_are_refused(tmp_path: Path) -> None:
    """A fixed batch of 1 hides a constant that depends on the batch; the loop over samples finds it."""
    nodes = [
        helper.make_node("ReduceMean", ["x"], ["m"], axes=[0], keepdims=1),
        helper.make_node("Add", ["x", "m"], ["y"]),
    ]
    path = save(graph(nodes, [("x", ["b", 3])], [("y", ["b", 3])], {}), tmp_path / "m.onnx")
    with pytest.raises(UnsupportedModelError, match="ReduceMean"):
        load(path)


def test_difference_is_reported_with_the_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When an importer is wrong, loading fails and names the first node that differs."""
    from onnx_export import importers

    nodes = [
        helper.make_node("Gemm", ["x", "w"], ["h"], name="fine"),
        helper.make_node("Tanh", ["h"], ["t"], name="wrong"),
        helper.make_node("Relu", ["t"], ["y"], name="after"),
    ]
    path = save(
        graph(nodes, [("x", ["b", 3])], [("y", ["b", 4])], {"w": weight(0, 3, 4)}), tmp_path / "m.onnx"
    )
    monkeypatch.setitem(importers.IMPORTERS, ("", "Tanh"), lambda ctx: torch.sigmoid)
    with pytest.raises(UnsupportedModelError, match="first node that differs: Tanh wrong"):
        load(path)


def test_copies_are_refused(digits: Path) -> None:
    import copy

    with pytest.raises(TypeError, match="load the file again"):
        copy.deepcopy(load(digits, check=False))
