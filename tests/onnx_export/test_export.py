"""Exporting torch modules: what the file computes, what it consists of, and what happens on errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn_bounds.errors import InputError
from onnx_export import attention, export, functions, inspect, l2_attention


class Encoder(nn.Module):
    """torch's own layers, batch or sequence first."""

    def __init__(self, batch_first: bool = True) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.batch_first, self.head = batch_first, nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = tokens if self.batch_first else tokens.transpose(0, 1)
        x = self.encoder(x)
        return self.head((x if self.batch_first else x.transpose(0, 1)).mean(1))


class Layer(nn.Module):
    """One attention layer with a head; `kind` says how the attention is written."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.qkv, self.head = nn.Linear(8, 24), nn.Linear(8, 3)
        self.mha = nn.MultiheadAttention(8, 2, batch_first=True)
        self.register_buffer("lower", torch.ones(5, 5, dtype=torch.bool).tril())

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.kind == "sdpa":
            return F.scaled_dot_product_attention(q, k, v)
        if self.kind == "sdpa, causal":
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        if self.kind == "sdpa, boolean mask":
            return F.scaled_dot_product_attention(q, k, v, attn_mask=self.lower, scale=0.3)
        if self.kind == "sdpa, grouped":
            return F.scaled_dot_product_attention(q, k[:, :1], v[:, :1], enable_gqa=True)
        if self.kind == "ours":
            return attention(q, k, v, scale=0.5)
        if self.kind == "ours, l2":
            return l2_attention(q, k, v, scale=0.5)
        scores = q @ k.transpose(-2, -1) / 2.0  # "written out"
        return torch.softmax(scores + self.lower.float().log().clamp(min=-1e9), -1) @ v

    def forward(self, x: Tensor) -> Tensor:
        if self.kind.startswith("mha"):
            y, _ = self.mha(x, x, x, need_weights=self.kind == "mha, weights")
        else:
            q, k, v = (t.reshape(-1, 5, 2, 4).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
            y = self.attend(q, k, v).transpose(1, 2).reshape(-1, 5, 8)
        return self.head(functions.gelu(functions.layer_norm(x + y, None, None, eps=1e-5)).mean(1))


def agree(model: nn.Module, path: Path, shape: tuple[int, ...], name: str = "x") -> None:
    """onnxruntime, asked here and not by `export`, computes what torch does at two batch sizes."""
    session = onnxruntime.InferenceSession(str(path))
    assert [i.name for i in session.get_inputs()] == [name]
    mode = model.training
    for batch in (1, 4):
        x = torch.randn((batch, *shape), generator=torch.Generator().manual_seed(batch))
        with torch.no_grad():
            expected = model.eval()(x)
        (found,) = session.run(None, {name: x.numpy()})
        assert torch.allclose(torch.from_numpy(found), expected, atol=1e-5, rtol=1e-5)
    model.train(mode)
    assert {n.domain for n in onnx.load(path).graph.node} == {""}


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


KINDS = [
    "sdpa", "sdpa, causal", "sdpa, boolean mask", "sdpa, grouped", "ours", "ours, l2", "written out",
    "mha", "mha, weights",
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("opset", [13, 17])
def test_every_kind_of_attention(tmp_path: Path, kind: str, opset: int) -> None:
    """Through torchscript, which takes a tenth of a second; attention is found again in the file."""
    model = seeded(lambda: Layer(kind))
    done = export(model, torch.zeros(1, 5, 8), tmp_path / "m.onnx", opset=opset, exporter="torchscript")
    agree(model, tmp_path / "m.onnx", (5, 8))
    assert (done.opset, done.exporter) == (opset, "torchscript") and done.difference <= 1e-5
    assert done.inputs == {"x": ["batch", 5, 8]} and done.outputs == {"output": ["batch", 3]}
    assert done.operators["Softmax"] == 1


@pytest.mark.parametrize("kind", ["sdpa", "ours, l2"])
def test_dynamo(tmp_path: Path, kind: str) -> None:
    model = seeded(lambda: Layer(kind))
    done = export(model, torch.zeros(2, 5, 8), tmp_path / "m.onnx")
    agree(model, tmp_path / "m.onnx", (5, 8))
    assert (done.opset, done.exporter) == (18, "dynamo")
    assert done.attention == len(inspect(tmp_path / "m.onnx").attention) == 1


@pytest.mark.parametrize("batch_first", [True, False])
def test_torch_encoder(tmp_path: Path, batch_first: bool) -> None:
    model = seeded(lambda: Encoder(batch_first))
    done = export(model, torch.zeros(1, 5, 8), tmp_path / "m.onnx", exporter="torchscript", opset=17)
    agree(model, tmp_path / "m.onnx", (5, 8), "tokens")
    assert done.operators["Softmax"] == 2 and "Attention" not in done.operators


@pytest.mark.parametrize("kind", ["sdpa, causal", "ours", "written out", "mha, weights"])
def test_attention_operator(tmp_path: Path, kind: str) -> None:
    """`op23`: what torch writes as the operator, and what it leaves in pieces."""
    model = seeded(lambda: Layer(kind))
    done = export(model, torch.zeros(1, 5, 8), tmp_path / "m.onnx", attention="op23")
    agree(model, tmp_path / "m.onnx", (5, 8))
    assert done.opset == 23 and done.operators["Attention"] == 1 and "Softmax" not in done.operators


def test_attention_that_the_operator_cannot_say(tmp_path: Path) -> None:
    """Distances have no operator; what was not written as one is a note."""
    model = nn.Sequential(Mixed())
    done = export(model, torch.zeros(1, 5, 8), tmp_path / "m.onnx", attention="op23")
    agree(model, tmp_path / "m.onnx", (5, 8), "input")
    assert (done.operators["Attention"], done.operators["Softmax"]) == (1, 1)
    assert any("1 Softmax beside 1 Attention" in note for note in done.notes)


class Mixed(nn.Module):
    """Attention by products behind attention by distances."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = Layer("ours, l2"), Layer("sdpa")

    def forward(self, x: Tensor) -> Tensor:
        return self.second(x + self.first(x).unsqueeze(1).mean(-1, keepdim=True))


def test_decomposed_where_the_operator_exists(tmp_path: Path) -> None:
    model = seeded(lambda: Layer("sdpa"))
    done = export(model, torch.zeros(1, 5, 8), tmp_path / "m.onnx", opset=23)
    agree(model, tmp_path / "m.onnx", (5, 8))
    assert done.operators["Softmax"] == 1 and "Attention" not in done.operators


def test_names_and_fixed_batch(tmp_path: Path) -> None:
    done = export(
        seeded(Encoder), torch.zeros(2, 5, 8), tmp_path / "m.onnx", exporter="torchscript", opset=17,
        dynamic_batch=False, input_names=["pixels"], output_names=["logits"],
    )  # fmt: skip
    assert done.inputs == {"pixels": [2, 5, 8]} and done.outputs == {"logits": [2, 3]}


class Two(nn.Module):
    """Two inputs, two results in a dict; the mask has no batch."""

    def forward(self, x: Tensor, mask: Tensor) -> dict[str, Tensor]:
        y = torch.softmax(x @ x.transpose(-2, -1) + mask, -1) @ x
        return {"logits": y.mean(1), "states": y}


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_several_inputs_and_outputs(tmp_path: Path, exporter: str) -> None:
    example = {"x": torch.zeros(2, 5, 3), "mask": torch.zeros(5, 5)}
    done = export(Two(), example, tmp_path / "m.onnx", exporter=exporter)
    assert done.inputs == {"x": ["batch", 5, 3], "mask": [5, 5]}
    assert done.outputs == {"logits": ["batch", 3], "states": ["batch", 5, 3]}
    assert any("2 inputs" in note or "2 outputs" in note for note in done.notes)


def test_the_module_is_as_before(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Modes of every part, torch's function and our operators; and nothing was printed."""
    model = seeded(Encoder).train()
    model.encoder.layers[1].eval()
    modes = [m.training for m in model.modules()]
    sdpa, fast = F.scaled_dot_product_attention, torch.backends.mha.get_fastpath_enabled()
    export(model, torch.zeros(1, 5, 8), tmp_path / "m.onnx", exporter="torchscript", opset=17)
    with pytest.raises(InputError):
        export(model, torch.zeros(1, 5, 8), tmp_path / "m.onnx", exporter="torchscript", opset=9)
    assert capfd.readouterr() == ("", "")
    assert [m.training for m in model.modules()] == modes
    assert F.scaled_dot_product_attention is sdpa and torch.backends.mha.get_fastpath_enabled() == fast
    own = Layer("ours").eval()
    torch.onnx.export(
        own, (torch.zeros(1, 5, 8),), str(tmp_path / "own.onnx"), dynamo=False, opset_version=17
    )
    kinds = {(n.domain, n.op_type) for n in onnx.load(tmp_path / "own.onnx").graph.node}
    assert ("attn_bounds", "AttentionScores") in kinds


class Branch(nn.Module):
    """A tracer takes the branch of the example; another input takes the other one."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x) if float(x.sum()) == 0.0 else x * 2.0


class Broken(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("no good")


BAD: list[tuple[Any, dict[str, Any], str]] = [
    (Encoder(), {"attention": "op23", "opset": 20}, "begins with opset 23"),
    (Encoder(), {"attention": "op23", "exporter": "torchscript"}, "needs the exporter dynamo"),
    (Encoder(), {"attention": "fused"}, "unknown form of attention 'fused'; known: decomposed, op23"),
    (Encoder(), {"exporter": "onnx"}, "unknown exporter 'onnx'"),
    (Encoder(), {"opset": 17, "exporter": "dynamo"}, "dynamo writes opset 18 and later"),
    (Encoder(), {"opset": 8}, "opset 8 cannot be written"),
    (Encoder(), {"opset": 11}, "Encoder cannot be exported at opset 11: torchscript: .*aten::unflatten"),
    (Encoder(), {"input_names": ["a", "b"]}, "1 different names are needed"),
    (Broken(), {}, r"Broken fails on an input of shape \(1, 5, 8\) \(no good\)"),
    (Branch(), {"exporter": "torchscript"}, "differs from torch's"),
    (nn.Linear(8, 3), {"attention": "op23"}, "no dot-product attention"),
]  # fmt: skip


@pytest.mark.parametrize("model, options, message", BAD, ids=[m for _, _, m in BAD])
def test_errors_leave_the_old_file(
    tmp_path: Path, model: nn.Module, options: dict[str, Any], message: str
) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(b"old")
    with pytest.raises(InputError, match=message):
        export(model, torch.zeros(1, 5, 8), path, **options)
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_bad_paths_and_examples(tmp_path: Path) -> None:
    x, model = torch.zeros(1, 8), nn.Linear(8, 3)
    for example, path, message in (
        (x, tmp_path / "absent" / "m.onnx", "no such folder"),
        (x, tmp_path / "m.pt", "must end in .onnx"),
        ([1, 2], tmp_path / "m.onnx", "it holds int, int"),
        ((x, x), tmp_path / "m.onnx", "Linear takes .input.; the example has 2 inputs"),
        (torch.tensor(1.0), tmp_path / "m.onnx", r"\(batch, …\) is needed"),
        ({"y": x}, tmp_path / "m.onnx", "fails on an input"),
    ):
        with pytest.raises(InputError, match=message):
            export(model, example, path)  # type: ignore[arg-type]


class Foreign(torch.autograd.Function):
    """Traces to a node that nobody knows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2.0

    @staticmethod
    def symbolic(g: Any, x: Any) -> Any:
        return g.op("elsewhere::Twice", x).setType(x.type())


class Custom(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Foreign.apply(x)


def test_custom_domains(tmp_path: Path) -> None:
    options: dict[str, Any] = {"exporter": "torchscript", "opset": 17}
    with pytest.raises(InputError, match="outside the ONNX standard: elsewhere::Twice"):
        export(Custom(), torch.zeros(1, 8), tmp_path / "m.onnx", **options)
    with pytest.raises(InputError, match=r"onnxruntime .* cannot run"):
        export(Custom(), torch.zeros(1, 8), tmp_path / "m.onnx", domains=["elsewhere"], **options)
