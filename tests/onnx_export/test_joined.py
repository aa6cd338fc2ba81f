"""Models with several inputs and outputs behind one of each: onnxruntime on the original is the judge."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from attn_bounds import InputError, Verifier
from attn_bounds.search import worker
from attn_bounds.search.answer import Job
from onnx_export.joined import Original, counts, join


def two_by_two(path: Path, batch: str | int | None, kind: int = TensorProto.FLOAT) -> Path:
    """x of 2 and z of 2 x 2 entries to y of 3 (relu) and w of 3 (tanh); batch None: no batch axis."""
    rng = np.random.default_rng(0)
    lead = [] if batch is None else [batch]
    arrays = {
        "a": rng.normal(size=(2, 3)).astype(np.float32),
        "b": rng.normal(size=(4, 3)).astype(np.float32),
        "flat": np.array([4] if batch is None else [-1, 4], dtype=np.int64),
    }
    nodes = [
        helper.make_node("MatMul", ["x", "a"], ["h"]),
        helper.make_node("Reshape", ["z", "flat"], ["f"]),
        helper.make_node("MatMul", ["f", "b"], ["k"]),
        helper.make_node("Add", ["h", "k"], ["s"]),
        helper.make_node("Relu", ["s"], ["y"]),
        helper.make_node("Tanh", ["h"], ["w"]),
    ]
    graph = helper.make_graph(
        nodes,
        "two by two",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, [*lead, 2]),
            helper.make_tensor_value_info("z", kind, [*lead, 2, 2]),
        ],
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, [*lead, 3]) for n in "yw"],
        [numpy_helper.from_array(a, name) for name, a in arrays.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


@pytest.mark.parametrize("batch", ["batch", 1, None])
def test_joined_model_computes_the_same(tmp_path: Path, batch: str | int | None) -> None:
    path = two_by_two(tmp_path / "m.onnx", batch)
    assert counts(path) == (2, 2) and join(path, tmp_path / "j.onnx") == [2, 4]
    verifier = Verifier(tmp_path / "j.onnx", logits=False)
    assert verifier.input_shape == (6,) and verifier.outputs == 6
    x = torch.randn(1, 6, generator=torch.Generator().manual_seed(0))
    lead = [] if batch is None else [1]
    feed = {"x": x[0, :2].reshape(*lead, 2).numpy(), "z": x[0, 2:].reshape(*lead, 2, 2).numpy()}
    found = onnxruntime.InferenceSession(str(path)).run(None, feed)
    expected = np.concatenate([v.flatten() for v in found])
    original = Original(path)
    assert original.size == 6
    np.testing.assert_array_equal(original(x)[0].numpy(), expected)
    np.testing.assert_allclose(verifier.replay(x)[0].numpy(), expected, atol=1e-6)
    with torch.no_grad():
        np.testing.assert_allclose(verifier.module(x)[0].numpy(), expected, atol=1e-6)


@pytest.mark.parametrize(("limit", "status"), [("-1.0", "unsat"), ("0.5", "sat")])
def test_a_property_of_several_inputs_and_outputs(tmp_path: Path, limit: str, status: str) -> None:
    """Unsafe: y_0 > 0.1 and w_1 < limit, for the tanh never reached if the limit is -1."""
    prop = tmp_path / "p.vnnlib"
    entries = ["X[0,0]", "X[0,1]", *(f"Z[0,{i},{j}]" for i in (0, 1) for j in (0, 1))]
    prop.write_text(
        "(vnnlib-version <2.0>)\n(declare-network N\n(declare-input X float32 [1,2]) "
        "(declare-input Z float32 [1,2,2])\n(declare-output Y float32 [1,3])"
        "(declare-output W float32 [1,3]))\n"
        + "".join(f"(assert (and (>= {e} -1.0) (<= {e} 1.0)))\n" for e in entries)
        + f"(assert (and (> Y[0,0] 0.1) (< W[0,1] {limit})))"
    )
    job = Job(str(two_by_two(tmp_path / "m.onnx", 1)), str(prop), str(tmp_path))
    answer = worker.verify(job, lambda _: None)
    assert answer.status == status
    if answer.witness is not None:
        assert [line for line in answer.witness.lines() if "[" in line] == [
            "X float32 [1,2]",
            "Z float32 [1,2,2]",
            "Y float32 [1,3]",
            "W float32 [1,3]",
        ]
        assert answer.witness.outputs[0] > 0.1 and answer.witness.outputs[4] < 0.5
    # the same number of entries, but of other inputs
    text = prop.read_text().replace("X float32 [1,2]", "X float32 [1,3]")
    text = text.replace("Z float32 [1,2,2]", "Z float32 [1,1,3]").replace("Z[0,0,0]", "X[0,2]")
    text = (
        text.replace("Z[0,0,1]", "Z[0,0,0]").replace("Z[0,1,0]", "Z[0,0,1]").replace("Z[0,1,1]", "Z[0,0,2]")
    )
    prop.write_text(text)
    with pytest.raises(InputError, match=r"declares inputs of \[3, 3\] entries, .* have \[2, 4\]"):
        worker.verify(job, lambda _: None)


def test_what_cannot_be_joined_is_refused(tmp_path: Path) -> None:
    path = two_by_two(tmp_path / "m.onnx", 1, TensorProto.INT64)
    with pytest.raises(InputError, match="several must all be float"):
        join(path, tmp_path / "j.onnx")
    model = onnx.load(two_by_two(path, 1))
    model.graph.input[1].type.tensor_type.shape.dim[2].dim_param = "width"
    onnx.save(model, path)
    with pytest.raises(InputError, match="input z has dynamic sizes"):
        join(path, tmp_path / "j.onnx")
    path.write_bytes(b"nothing of the kind")
    with pytest.raises(InputError, match="is no ONNX file"):
        counts(path)
