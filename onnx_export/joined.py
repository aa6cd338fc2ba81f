"""Several inputs and outputs as one of each, for properties that speak of all of them at once."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import TensorProto, ValueInfoProto, helper, numpy_helper
from torch import Tensor

from attn_bounds.errors import InputError, UnsupportedModelError, first_line

PREFIX = "attn_bounds_joined"


def counts(path: str | Path) -> tuple[int, int]:
    """Numbers of inputs and of outputs of an ONNX file; weights are not read."""
    graph = _read(path, weights=False).graph
    return len(_inputs(graph)), len(graph.output)


def join(path: str | Path, target: str | Path) -> list[int]:
    """Write the model with its inputs joined to one and its outputs to one, each flat, in their order.

    Arguments:
        path: ONNX file whose inputs are all float or all double, of known sizes (a dynamic batch is 1).
        target: where to write it: (batch, all entries) → (batch, all outputs) if every input has a first axis
            of size 1 or dynamic and further axes, else (all entries,) → (all outputs,).

    Returns:
        The number of entries of each input.

    Raises:
        InputError, UnsupportedModelError: name the input that cannot be joined.
    """
    model = _read(path)
    graph = model.graph
    inputs = _inputs(graph)
    kinds = {v.type.tensor_type.elem_type for v in inputs}
    if not kinds <= {TensorProto.FLOAT} and not kinds <= {TensorProto.DOUBLE}:
        names = {v.name: TensorProto.DataType.Name(v.type.tensor_type.elem_type) for v in inputs}
        raise UnsupportedModelError(f"{path}: inputs of types {names}; several must all be float, or double")
    shapes = [_shape(v) for v in inputs]
    batched = all(len(s) > 1 and s[0] in (1, None) for s in shapes)
    sizes = []
    for v, shape in zip(inputs, shapes, strict=True):
        if None in (shape[1:] if batched else shape):
            raise UnsupportedModelError(
                f"{path}: input {v.name} has dynamic sizes {shape}; fix them in the file"
            )
        sizes.append(math.prod(d or 1 for d in shape))
    axis = 1 if batched else 0
    front: list[onnx.NodeProto] = []
    constants: list[onnx.TensorProto] = []

    def constant(name: str, values: list[int]) -> str:
        constants.append(numpy_helper.from_array(np.array(values, dtype=np.int64), f"{PREFIX}_{name}"))
        return f"{PREFIX}_{name}"

    at = 0
    for i, (v, shape, size) in enumerate(zip(inputs, shapes, sizes, strict=True)):
        ends = [constant(f"{what}{i}", [value]) for what, value in (("from", at), ("to", at + size))]
        part = f"{PREFIX}_part{i}"
        front.append(helper.make_node("Slice", [PREFIX, *ends, constant(f"axis{i}", [axis])], [part]))
        dims = [-1 if batched and k == 0 else int(d or 1) for k, d in enumerate(shape)]
        front.append(helper.make_node("Reshape", [part, constant(f"shape{i}", dims)], [v.name]))
        at += size
    back, parts = [], []
    for i, v in enumerate(graph.output):
        parts.append(f"{PREFIX}_flat{i}")
        shape = _shape(v)
        flat = [-1]
        if batched:  # the first axis stays; what is behind it must be known, for -1 is the batch's
            rest = [d for d in shape[1:] if d is not None]
            flat = [0, -1] if len(rest) < len(shape) - 1 else [-1, math.prod(rest)]
        back.append(helper.make_node("Reshape", [v.name, constant(f"row{i}", flat)], parts[-1:]))
    back.append(helper.make_node("Concat", parts, [f"{PREFIX}_out"], axis=axis))
    nodes = [*front, *graph.node, *back]
    del graph.node[:], graph.output[:]
    graph.node.extend(nodes)
    graph.initializer.extend(constants)
    kept = [v for v in graph.input if v.name not in {i.name for i in inputs}]
    del graph.input[:]
    whole: list[str | int | None] = [f"{PREFIX}_batch", sum(sizes)] if batched else [sum(sizes)]
    kind = kinds.pop()
    graph.input.extend([helper.make_tensor_value_info(PREFIX, kind, whole), *kept])
    graph.output.append(helper.make_tensor_value_info(f"{PREFIX}_out", kind, None))
    onnx.save(model, str(target))
    return sizes


class Original:
    """The file as anybody runs it: onnxruntime with its default options, all inputs and outputs flat.

    A counterexample has to hold here. Other options choose other kernels, which round otherwise.

    Attributes:
        size: entries of all inputs together, a dynamic batch being 1.
    """

    def __init__(self, path: str | Path) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        try:
            self.session = onnxruntime.InferenceSession(
                str(path), options, providers=["CPUExecutionProvider"]
            )
        except Exception as e:
            raise InputError(f"{path}: onnxruntime cannot run this model ({first_line(e)})") from None
        self.inputs = [
            (
                i.name,
                np.float64 if "double" in i.type else np.float32,
                [d if isinstance(d, int) else 1 for d in i.shape],
            )
            for i in self.session.get_inputs()
        ]
        self.size = sum(math.prod(shape) for _, _, shape in self.inputs)

    def __call__(self, x: Tensor) -> Tensor:
        """(batch, *any) of `size` entries each, in the order of the inputs → (batch, all outputs)."""
        rows = []
        for sample in x.detach().cpu().flatten(1).numpy():
            feed, at = {}, 0
            for name, kind, shape in self.inputs:
                count = math.prod(shape)
                feed[name] = sample[at : at + count].astype(kind).reshape(shape)
                at += count
            rows.append(np.concatenate([np.asarray(v).flatten() for v in self.session.run(None, feed)]))
        return torch.from_numpy(np.stack(rows))


def _read(path: str | Path, weights: bool = True) -> onnx.ModelProto:
    try:
        return onnx.load(str(path), load_external_data=weights)
    except Exception as e:
        raise InputError(
            f"{path}: is no ONNX file ({str(e).splitlines()[0] if str(e) else type(e).__name__})"
        ) from None


def _inputs(graph: onnx.GraphProto) -> list[ValueInfoProto]:
    weights = {w.name for w in graph.initializer}
    return [v for v in graph.input if v.name not in weights]


def _shape(value: ValueInfoProto) -> list[int | None]:
    """Sizes, None where dynamic."""
    return [d.dim_value if d.HasField("dim_value") else None for d in value.type.tensor_type.shape.dim]
