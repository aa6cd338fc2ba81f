"""Where models are entered: sizes, fixed inputs, fixed batches, embeddings, values inside the graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from attn_bounds.errors import InputError, UnsupportedModelError
from onnx_export import Oracle, inspect, load

from .test_load import agrees, graph, save, weight

node = helper.make_node


def test_dynamic_dimensions_need_a_size(tmp_path: Path) -> None:
    nodes = [node("ReduceMean", ["x"], ["m"], axes=[1], keepdims=1), node("Sub", ["x", "m"], ["y"])]
    path = save(graph(nodes, [("x", ["b", "n", 3])], [("y", None)], {}), tmp_path / "m.onnx")
    with pytest.raises(InputError, match="--shape n=16"):
        load(path)
    with pytest.raises(InputError, match="no such input or dynamic dimension"):
        load(path, shape={"k": 5})
    with pytest.raises(InputError, match="does not fit"):
        load(path, shape={"x": (1, 5, 4)})
    for shape in ({"n": 5}, {"x": (1, 5, 3)}, {"x": (5, 3)}):
        module = load(path, shape=shape)
        assert module.input_shape == (5, 3)
        x = torch.randn(4, 5, 3)
        assert torch.allclose(module(x), Oracle(path, shape=shape)(x), atol=1e-6)


def test_other_inputs_are_fixed(tmp_path: Path) -> None:
    """Masked mean pooling, the mask an input: mul, sum, div."""
    nodes = [
        node("Cast", ["mask"], ["f"], to=TensorProto.FLOAT),
        node("Unsqueeze", ["f", "two"], ["w"]),
        node("Mul", ["x", "w"], ["weighted"]),
        node("ReduceSum", ["weighted", "one"], ["sum"], keepdims=0),
        node("ReduceSum", ["w", "one"], ["count"], keepdims=0),
        node("Div", ["sum", "count"], ["y"]),
    ]
    weights = {"two": np.array([2]), "one": np.array([1])}
    model = graph(nodes, [("x", ["b", "n", 3]), ("mask", ["b", "n"])], [("y", None)], weights)
    model.graph.input[1].type.tensor_type.elem_type = TensorProto.INT64
    path = save(model, tmp_path / "m.onnx")
    with pytest.raises(InputError, match="--fix mask="):
        load(path, shape={"n": 4})
    with pytest.raises(InputError, match="inputs are x, mask"):
        load(path, fix={"musk": 1})
    mask = np.array([[1, 1, 0, 1]])
    module = load(path, fix={"mask": mask})  # which also says how large n is
    x = torch.randn(2, 4, 3)
    assert torch.allclose(module(x), x[:, [0, 1, 3]].mean(1), atol=1e-6)
    np.save(tmp_path / "mask.npy", mask)
    again = load(path, fix={"mask": str(tmp_path / "mask.npy")})
    assert torch.equal(again(x), module(x)) and torch.equal(module(x), module(x))
    ones = load(path, fix={"mask": "ones"}, shape={"n": 4})
    assert torch.allclose(ones(x), x.mean(1), atol=1e-6)
    with pytest.raises(InputError, match="is 4 elsewhere and 5 in mask"):
        load(path, fix={"mask": np.ones((1, 5))}, shape={"n": 4})


def fixed_batch(tmp_path: Path, target: list[int], batch: int = 4) -> Path:
    """Tokens with a repeated class token, as an exporter with a fixed batch writes them."""
    token = np.repeat(weight(0, 1, 1, 6), batch, 0)
    nodes = [
        node("Reshape", ["x", "s"], ["r"]),
        node("Concat", ["token", "r"], ["c"], axis=1),
        node("Transpose", ["c"], ["t"], perm=[0, 2, 1]),
        node("MatMul", ["c", "t"], ["m"]),
        node("Softmax", ["m"], ["p"], axis=-1),
        node("MatMul", ["p", "c"], ["o"]),
        node("Gather", ["o", "zero"], ["y"], axis=1),
    ]
    weights = {"token": token, "s": np.array(target), "zero": np.array(0)}
    model = graph(nodes, [("x", [batch, 12])], [("y", None)], weights)
    return save(model, tmp_path / "m.onnx")


def test_a_fixed_batch(tmp_path: Path) -> None:
    path = fixed_batch(tmp_path, [4, 2, 6])
    module = load(path)
    assert module.input_shape == (12,) and inspect(path).inputs == {"x": [4, 12]}
    x = torch.randn(6, 12)
    session = onnxruntime.InferenceSession(str(path))
    expected = session.run(None, {"x": x[:4].numpy()})[0]
    assert np.allclose(module(x)[:4], expected, atol=1e-5)
    assert torch.allclose(module(x), Oracle(path)(x), atol=1e-5)
    assert torch.allclose(load(fixed_batch(tmp_path, [-1, 2, 6]))(x), module(x))


def test_a_fixed_batch_with_the_sequence_first(tmp_path: Path) -> None:
    """The batch of 4 is the second axis, then part of the last: no rule on shapes finds both at once."""
    nodes = [
        node("Reshape", ["x", "s"], ["r"]),
        node("Transpose", ["r"], ["t"], perm=[1, 0, 2]),
        node("Reshape", ["t", "u"], ["flat"]),
        node("Reshape", ["flat", "v"], ["back"]),
        node("ReduceMax", ["back"], ["y"], axes=[0], keepdims=0),
    ]
    weights = {"s": np.array([4, 8, 3]), "u": np.array([8, 12]), "v": np.array([8, 4, 3])}
    path = save(graph(nodes, [("x", [4, 24])], [("y", None)], weights), tmp_path / "m.onnx")
    module = load(path, check=False)
    x = torch.randn(5, 24)
    assert torch.allclose(module(x).reshape(5, 3), x.reshape(5, 8, 3).amax(1))


def test_a_fixed_batch_that_is_mixed_is_refused(tmp_path: Path) -> None:
    """The samples are reshaped into one another; at batch 1 they would not be."""
    nodes = [node("Transpose", ["x"], ["t"], perm=[1, 0]), node("Reshape", ["t", "s"], ["y"])]
    model = graph(nodes, [("x", [4, 6])], [("y", None)], {"s": np.array([4, 6])})
    with pytest.raises(UnsupportedModelError, match="at batch 4"):
        load(save(model, tmp_path / "m.onnx"))


def language_model(tmp_path: Path, padding: bool = False) -> Path:
    """Word and position embeddings, a masked attention, and with `padding` a mask made from the ids."""
    mask = (
        [node("Equal", ["ids", "zero"], ["pad"]), node("Cast", ["pad"], ["far"], to=1)]
        if padding
        else [node("Cast", ["attention_mask"], ["seen"], to=1), node("Sub", ["unit", "seen"], ["far"])]
    )
    nodes = [
        node("Gather", ["words", "ids"], ["w"], name="words"),
        node("Gather", ["places", "order"], ["p"]),
        node("Add", ["w", "p"], ["e"], name="sum"),
        node("MatMul", ["e", "key"], ["k"]),
        node("Transpose", ["k"], ["kt"], perm=[0, 2, 1]),
        node("MatMul", ["e", "kt"], ["s"]),
        *mask,
        node("Mul", ["far", "low"], ["f1"]),
        node("Unsqueeze", ["f1", "one"], ["f2"]),
        node("Add", ["s", "f2"], ["masked"]),
        node("Softmax", ["masked"], ["a"], axis=-1),
        node("MatMul", ["a", "e"], ["o"]),
        node("ReduceMean", ["o"], ["y"], axes=[1], keepdims=0),
    ]
    weights = {
        "words": weight(0, 11, 6),
        "places": weight(1, 8, 6),
        "order": np.arange(5)[None],
        "key": weight(2, 6, 6),
        "zero": np.array(0),
        "unit": np.array(1, np.float32),
        "low": np.array(-1e4, np.float32),
        "one": np.array([1]),
    }
    names = ["ids"] if padding else ["ids", "attention_mask"]
    infos = [helper.make_tensor_value_info(n, TensorProto.INT64, ["b", 5]) for n in names]
    out = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["b", 6])
    tensors = [numpy_helper.from_array(w, n) for n, w in weights.items()]
    g = helper.make_graph(nodes, "g", infos, [out], tensors)
    model = helper.make_model(g, opset_imports=[helper.make_opsetid("", 14)], ir_version=8)
    onnx.checker.check_model(model)
    return save(model, tmp_path / "m.onnx")


def values(path: Path, **feeds: Any) -> np.ndarray:
    return onnxruntime.InferenceSession(str(path)).run(None, feeds)[0]


def test_bounds_start_behind_the_embedding(tmp_path: Path) -> None:
    path = language_model(tmp_path)
    info = inspect(path)
    assert info.inputs == {"e": ["batch", 5, 6]} and not info.unsupported
    assert any("bounds are over e, the embedding of ids" in note for note in info.chosen)
    assert any("attention_mask is fixed to ones" in note for note in info.chosen)
    module, oracle = load(path), Oracle(path)
    assert module.input_shape == (5, 6)
    ids = np.array([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
    x = oracle.embed(ids)
    expected = values(path, ids=ids, attention_mask=np.ones_like(ids))
    assert np.allclose(module(x), expected, atol=1e-5) and np.allclose(oracle(x), expected, atol=1e-5)
    with pytest.raises(InputError, match="cannot be embedded"):
        oracle.embed(ids + 100)
    mask = np.array([[1, 1, 1, 0, 0]])
    padded = load(path, fix={"attention_mask": mask})
    assert np.allclose(padded(x), values(path, ids=ids, attention_mask=np.repeat(mask, 2, 0)), atol=1e-5)


def test_bounds_start_where_they_are_told_to(tmp_path: Path) -> None:
    path = language_model(tmp_path)
    for name in ("w", "words"):  # a value, or its node
        module = load(path, input_node=name)
        words = torch.from_numpy(weight(0, 11, 6)[[[3, 1, 4, 1, 5]]])
        places = torch.from_numpy(weight(1, 8, 6)[:5])
        assert torch.allclose(module(words), load(path)(words + places), atol=1e-6)
    with pytest.raises(InputError, match=r"no value or node 'wor'.*similar: words"):
        load(path, input_node="wor")
    with pytest.raises(InputError, match="start at a float value"):
        load(language_model(tmp_path, padding=True), input_node="pad")


def test_what_else_depends_on_the_indices_must_be_given(tmp_path: Path) -> None:
    path = language_model(tmp_path, padding=True)
    with pytest.raises(UnsupportedModelError, match=r"depends on ids directly.*--fix ids="):
        load(path)
    ids = np.array([[3, 1, 4, 0, 0]])
    module = load(path, fix={"ids": ids}, input_node="e")
    x = Oracle(language_model(tmp_path)).embed(ids)
    path = language_model(tmp_path, padding=True)
    assert np.allclose(module(x), values(path, ids=ids), atol=1e-5)
    for where in (None, "ids"):  # what the message proposes is enough: bounds start behind the embedding
        choices = {"fix": {"ids": ids}, "input_node": where}
        assert inspect(path, **choices).chosen[0].startswith("bounds are over e, the embedding of ids")
        other = np.array([[9, 2, 6, 0, 0]])
        y = load(path, **choices)(Oracle(path, **choices).embed(other))
        assert np.allclose(y, values(path, ids=other), atol=1e-5)
        with pytest.raises(InputError, match=r"\[3, 1, 4, 1, 0\]: besides the embedding"):
            Oracle(path, **choices).embed(np.array([[3, 1, 4, 1, 0]]))
    with pytest.raises(InputError, match="every input is fixed"):
        load(
            save(graph([node("Identity", ["x"], ["y"])], [("x", [1, 3])], [("y", None)], {}), path),
            fix={"x": 1},
        )


def test_a_model_is_loaded_twice(tmp_path: Path) -> None:
    path = fixed_batch(tmp_path, [4, 2, 6])
    first, second = load(path), load(path, dtype=torch.float64)
    x = torch.randn(3, 12)
    assert torch.allclose(first(x).double(), second(x.double()), atol=1e-5)


def test_bad_types_are_refused(tmp_path: Path) -> None:
    model = graph([node("Identity", ["x"], ["y"])], [("x", ["b", 3])], [("y", None)], {})
    for kind in (TensorProto.FLOAT16, TensorProto.BOOL):
        model.graph.input[0].type.tensor_type.elem_type = kind
        model.graph.output[0].type.tensor_type.elem_type = kind
        with pytest.raises(InputError, match="a float or double input is needed"):
            load(save(model, tmp_path / "m.onnx"))
    model.graph.input[0].type.tensor_type.elem_type = TensorProto.INT64
    model.graph.output[0].type.tensor_type.elem_type = TensorProto.INT64
    with pytest.raises(InputError, match="no embedding of it was found"):
        load(save(model, tmp_path / "m.onnx"))


def test_usual_inputs_keep_their_meaning(tmp_path: Path) -> None:
    """A float input called attention_mask alone is what bounds are over."""
    model = graph(
        [node("Relu", ["attention_mask"], ["y"])], [("attention_mask", ["b", 3])], [("y", None)], {}
    )
    assert agrees(save(model, tmp_path / "m.onnx")).input_shape == (3,)
