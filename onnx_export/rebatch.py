"""A graph that was exported with a fixed batch, at batch 1."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from .graph import constant

SHAPED = {"Reshape": 1, "Expand": 1, "ConstantOfShape": 0}  # which input is a shape
BROADCAST = ("Add", "Sub", "Mul", "Div", "Where", "Concat", "Expand")


def rebatch(model: ir.Model, batch: int) -> None:
    """Divide the batch out of constant shapes, and take one row of constants that repeat it per sample.

    What a shape means is not written in the file: the first dimension that the batch divides is taken for it.
    Whether that was right, the comparison with onnxruntime at the file's own batch tells.
    """
    for node in list(model.graph):
        if node.op_type in SHAPED and len(node.inputs) > SHAPED[node.op_type]:
            i = SHAPED[node.op_type]
            shape = constant(node.inputs[i])
            if shape is not None and (found := _divided(shape, batch)) is not None:
                node.replace_input_with(
                    i, _constant(model, found, f"{node.name}/shape_{node.outputs[0].name}")
                )
        if node.op_type in BROADCAST:
            for i, value in enumerate(node.inputs):
                array = constant(value)
                if array is None or array.ndim < 2 or len(array) != batch:
                    continue
                if bool((array == array[:1]).all()):
                    name = f"{node.name}/{i}_{node.outputs[0].name}"
                    node.replace_input_with(i, _constant(model, array[:1], name))


def _divided(shape: np.ndarray, batch: int) -> np.ndarray | None:
    for i, size in enumerate(shape):
        if size > 0 and size % batch == 0:
            found = shape.copy()
            found[i] = size // batch
            return found
    return None


def _constant(model: ir.Model, array: np.ndarray, name: str) -> ir.Value:
    tensor = ir.tensor(array, name=name)
    value = ir.Value(
        name=name, const_value=tensor, shape=ir.Shape(list(array.shape)), type=ir.TensorType(tensor.dtype)
    )
    model.graph.initializers[name] = value
    return value
