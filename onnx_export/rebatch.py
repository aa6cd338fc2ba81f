"""A graph that was exported with a fixed batch, at batch 1."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from .graph import constant

SHAPED = {"Reshape": 1, "Expand": 1, "ConstantOfShape": 0}  # which input is a shape
BROADCAST = ("Add", "Sub", "Mul", "Div", "Where", "Concat", "Expand")


def _first(shape: list[int], batch: int) -> int | None:
    """The first dimension that the batch divides; none where the first one is left open."""
    return None if shape[:1] in ([-1], [0]) else _any(shape, batch)


def _equal(shape: list[int], batch: int) -> int | None:
    """A dimension of the size of the batch, if there is one."""
    return shape.index(batch) if batch in shape else _first(shape, batch)


def _last(shape: list[int], batch: int) -> int | None:
    return next((i for i, d in reversed(list(enumerate(shape))) if d > 0 and d % batch == 0), None)


def _any(shape: list[int], batch: int) -> int | None:
    return next((i for i, d in enumerate(shape) if d > 0 and d % batch == 0), None)


GUESSES: tuple[Callable[[list[int], int], int | None], ...] = (_first, _equal, _last, _any)


def rebatch(model: ir.Model, batch: int, guess: int = 0) -> None:
    """Divide the batch out of constant shapes, and take one row of constants that repeat it per sample.

    What a shape means is not written in the file: one of `GUESSES` says which dimension has the batch in it.
    Whether that was right, the comparison with onnxruntime at the file's own batch tells.
    """
    for node in list(model.graph):
        if node.op_type in SHAPED and len(node.inputs) > SHAPED[node.op_type]:
            i = SHAPED[node.op_type]
            shape = constant(node.inputs[i])
            if shape is not None and (found := _divided(shape, batch, GUESSES[guess])) is not None:
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


def _divided(
    shape: np.ndarray, batch: int, guess: Callable[[list[int], int], int | None]
) -> np.ndarray | None:
    i = guess([int(d) for d in shape.reshape(-1)], batch)
    if i is None:
        return None
    found = shape.reshape(-1).copy()
    found[i] //= batch
    return found


def _constant(model: ir.Model, array: np.ndarray, name: str) -> ir.Value:
    tensor = ir.tensor(array, name=name)
    value = ir.Value(
        name=name, const_value=tensor, shape=ir.Shape(list(array.shape)), type=ir.TensorType(tensor.dtype)
    )
    model.graph.initializers[name] = value
    return value
