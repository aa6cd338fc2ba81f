"""Transposes and reshapes between a product, its softmax and the average: data movements, composed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from .graph import Builder, permutation, sizes

RESHAPES = ("Reshape", "Unsqueeze", "Squeeze", "Flatten")


@dataclass(frozen=True)
class Step:
    """One movement of data: a permutation of axes if one is given, else a reshape."""

    before: tuple[int, ...]
    after: tuple[int, ...]
    perm: tuple[int, ...] | None = None

    def inverse(self) -> Step:
        perm = None if self.perm is None else tuple(int(i) for i in np.argsort(self.perm))
        return Step(self.after, self.before, perm)

    def undone(self, array: np.ndarray) -> np.ndarray:
        """A constant that broadcasts to `after`, as one that broadcasts to `before`."""
        array = np.asarray(array)
        if array.size == 1:
            return array.reshape(())
        if self.perm is not None:
            array = array.reshape((1,) * (len(self.after) - array.ndim) + array.shape)
            return array.transpose(np.argsort(self.perm))
        return np.broadcast_to(array, self.after).reshape(self.before)

    def source_axis(self, axis: int) -> int | None:
        """The axis of the input that the given one is, or None where a reshape mixes it with others."""
        if self.perm is not None:
            return self.perm[axis]
        if self.before[len(self.before) - (len(self.after) - axis) :] != self.after[axis:]:
            return None
        return axis - len(self.after) + len(self.before)


def step_of(node: ir.Node) -> Step | None:
    """The movement that a node is, or None."""
    before, after = sizes(node.inputs[0] if node.inputs else None), sizes(node.outputs[0])
    if before is None or after is None or node.domain not in ("", "ai.onnx"):
        return None
    if node.op_type == "Transpose":
        return Step(before, after, tuple(permutation(node, len(before))))
    return Step(before, after) if node.op_type in RESHAPES else None


def composed(steps: Sequence[Step]) -> list[Step]:
    """The same movement in fewer steps: neighbours of one kind merged, those that move nothing dropped."""
    found: list[Step] = []
    for step in steps:
        if found and found[-1].perm is None and step.perm is None:
            step = Step(found.pop().before, step.after)
        elif found and found[-1].perm is not None and step.perm is not None:
            last = found.pop()
            assert last.perm is not None
            step = Step(last.before, step.after, tuple(last.perm[i] for i in step.perm))
        still = step.before == step.after and step.perm in (None, tuple(range(len(step.before))))
        if not still:
            found.append(step)
    return found if len(found) == len(steps) else composed(found)


def on_rows(steps: Sequence[Step]) -> tuple[list[Step], bool] | None:
    """What the steps do to the leading axes alone, and whether they exchange the last two.

    None where a step mixes the last two axes with others. The steps returned act on the shapes of the leading
    axes; the same then holds for any values with two more axes.
    """
    leading: list[Step] = []
    swap = False
    for step in steps:
        rank = len(step.before)
        if rank < 2 or len(step.after) < 2:
            return None
        if step.perm is None:
            if step.before[-2:] != step.after[-2:]:
                return None
            leading.append(Step(step.before[:-2], step.after[:-2]))
            continue
        if set(step.perm[-2:]) != {rank - 2, rank - 1}:
            return None
        swap ^= step.perm[-1] == rank - 2
        leading.append(Step(step.before[:-2], step.after[:-2], step.perm[:-2]))
    return composed(leading), swap


def apply(builder: Builder, steps: Sequence[Step], value: ir.Value, kept: int = 0) -> ir.Value:
    """Emit the steps on a value; its last `kept` axes stay as they are."""
    for step in steps:
        shape = sizes(value)
        assert shape is not None and math.prod(shape[: len(shape) - kept]) == math.prod(step.before)
        tail = shape[len(shape) - kept :]
        if step.perm is None:
            value = builder.reshape(value, (*step.after, *tail))
        else:
            rank = len(step.perm)
            value = builder.transpose(value, [*step.perm, *range(rank, rank + kept)])
    return value


def inverted(steps: Sequence[Step]) -> list[Step]:
    return [step.inverse() for step in reversed(steps)]
