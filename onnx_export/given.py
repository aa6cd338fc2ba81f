"""The inputs of a file: their sizes, and what those are fixed to that bounds are not over."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from onnx import GraphProto, TensorProto, ValueInfoProto, helper

from attn_bounds.errors import InputError

Sizes = Mapping[str, "int | Sequence[int]"]
Fixed = Mapping[str, Any]

FLOATS = (TensorProto.FLOAT, TensorProto.DOUBLE)
LARGEST = 2**28  # entries of an input
INTEGERS = (TensorProto.INT64, TensorProto.INT32)
# what these inputs of language models are unless something else is asked for; said by `inspect`
USUAL: dict[str, str] = {"attention_mask": "ones", "token_type_ids": "zeros", "position_ids": "positions"}


def free_inputs(graph: GraphProto) -> list[ValueInfoProto]:
    """Inputs that are not initializers (old files list the weights among the inputs)."""
    weights = {t.name for t in graph.initializer} | {t.values.name for t in graph.sparse_initializer}
    return [v for v in graph.input if v.name not in weights]


def dims(value: ValueInfoProto) -> list[int | str] | None:
    """Declared dimensions: numbers, names, or "" where unnamed; None without a shape."""
    tensor = value.type.tensor_type
    if not value.type.HasField("tensor_type") or not tensor.HasField("shape"):
        return None
    return [d.dim_value if d.HasField("dim_value") else d.dim_param for d in tensor.shape.dim]


class Inputs:
    """Sizes and fixed values of all inputs of a file.

    Arguments:
        sizes: of dynamic dimensions by name, or of inputs by name.
        fix: values of inputs: arrays, numbers, "ones", "zeros", "positions", or paths of .npy files.
    """

    def __init__(self, path: str | Path, graph: GraphProto, sizes: Sizes, fix: Fixed) -> None:
        self.path, self.notes = path, list[str]()
        self.values = {v.name: v for v in free_inputs(graph)}
        self.dims = {n: self._declared(v) for n, v in self.values.items()}
        self.names: dict[str, int] = {}
        self.fix = {n: self._given(n, v) for n, v in fix.items()}
        known = {d for shape in self.dims.values() for d in shape if isinstance(d, str) and d}
        for name, size in sizes.items():
            if name in self.dims:
                self._match(name, [int(d) for d in size] if isinstance(size, Sequence) else [int(size)])
            elif name in known and not isinstance(size, Sequence):
                self.names[name] = int(size)
            else:
                raise InputError(
                    f"{path}: shape of {name!r}: the file has no such input or dynamic dimension; it has "
                    f"{self._listing()}"
                )
        for name, value in self.fix.items():
            if isinstance(value, np.ndarray) and value.ndim > 0:
                self._match(name, list(value.shape))

    def _listing(self) -> str:
        return ", ".join(f"{n} ({', '.join(str(d) or '?' for d in s)})" for n, s in self.dims.items())

    def _declared(self, value: ValueInfoProto) -> list[int | str]:
        found = dims(value)
        if found is None:
            raise InputError(f"{self.path}: input {value.name} has no shape; export with one")
        if any(isinstance(d, int) and d < 1 for d in found):
            raise InputError(f"{self.path}: input {value.name} has shape {found}, which holds nothing")
        return found

    def _given(self, name: str, value: Any) -> Any:
        if name not in self.values:
            raise InputError(f"{self.path}: cannot fix {name!r}: the inputs are {', '.join(self.values)}")
        if isinstance(value, (str, Path)) and str(value) not in ("ones", "zeros", "positions"):
            try:
                return np.load(value, allow_pickle=False)
            except (OSError, ValueError, EOFError) as e:
                raise InputError(
                    f"{value}: cannot be read as a .npy array for {name} ({e}); a number, ones, zeros or "
                    "positions are other ways to fix an input"
                ) from None
        return value if isinstance(value, str) else np.asarray(value)

    def _match(self, name: str, sizes: list[int]) -> None:
        shape = self.dims[name]
        if len(sizes) == len(shape) - 1 and not isinstance(shape[0], int):
            sizes = [1, *sizes]
        fits = len(sizes) == len(shape) and all(
            b >= 1 and (not isinstance(a, int) or a == b) for a, b in zip(shape, sizes, strict=True)
        )
        if not fits:
            raise InputError(f"{self.path}: shape {tuple(sizes)} does not fit input {name}, {tuple(shape)}")
        for i, (declared, size) in enumerate(zip(shape, sizes, strict=True)):
            if isinstance(declared, int) or self._is_batch(shape, i):
                continue
            if self.names.setdefault(declared, size) != size and declared:
                raise InputError(
                    f"{self.path}: dimension {declared!r} is {self.names[declared]} elsewhere and {size} "
                    f"in {name}"
                )
            shape[i] = size

    def _is_batch(self, shape: Sequence[int | str], i: int) -> bool:
        """Whether dimension i is a dynamic batch: the first one, or one called so where that is fixed."""
        if isinstance(shape[i], int) or shape[i] in self.names:
            return False
        return i == 0 or (isinstance(shape[0], int) and "batch" in str(shape[i]).lower())

    def shape(self, name: str) -> tuple[int, ...]:
        """At batch 1. Raises InputError with the dimensions that need a size."""
        shape = self.dims[name]
        sizes = [
            1 if self._is_batch(shape, i) else d if isinstance(d, int) else self.names.get(d)
            for i, d in enumerate(shape)
        ]
        missing = [str(d) for d, s in zip(shape, sizes, strict=True) if s is None]
        if missing:
            example = next((d for d in missing if d), None)
            how = f"{example}=16" if example else f"{name}={'x'.join(str(s or 16) for s in sizes)}"
            raise InputError(
                f"{self.path}: input {name} has shape ({', '.join(str(d) or '?' for d in shape)}); besides "
                f"the batch every size must be chosen: --shape {how}, or shape={{...}} in Python"
            )
        found = tuple(int(s) for s in sizes if s is not None)
        if math.prod(found) > LARGEST:
            raise InputError(f"{self.path}: input {name} of shape {found} is too large")
        return found

    def has_dynamic_batch(self, name: str) -> bool:
        shape = self.dims[name]
        return bool(shape) and self._is_batch(shape, 0)

    def batch_elsewhere(self, name: str) -> bool:
        return any(self._is_batch(self.dims[name], i) for i in range(1, len(self.dims[name])))

    def value(self, name: str) -> np.ndarray:
        """A fixed input at batch 1."""
        given = self.fix[name]
        kind = self.values[name].type.tensor_type.elem_type
        try:
            dtype = helper.tensor_dtype_to_np_dtype(kind)
        except KeyError:
            raise InputError(f"{self.path}: input {name} has a type that cannot be fixed") from None
        if isinstance(given, np.ndarray) and given.ndim > 0:
            shape = self.shape(name)
            if given.size != int(np.prod(shape)):
                raise InputError(
                    f"{self.path}: the value for {name} has shape {given.shape}; {shape} is needed"
                )
            return given.reshape(shape).astype(dtype)
        shape = self.shape(name)
        if isinstance(given, str) and given == "positions":
            return np.broadcast_to(np.arange(shape[-1]), shape).astype(dtype)
        number = {"ones": 1, "zeros": 0}[given] if isinstance(given, str) else given
        return np.full(shape, number).astype(dtype)

    def add_usual(self) -> None:
        """Fix what is usual in language models, as long as an input is left."""
        for name, value in USUAL.items():
            free = [n for n in self.values if n not in self.fix]
            if name in free and len(free) > 1:
                self.fix[name] = value
                self.notes.append(f"{name} is fixed to {value}; --fix {name}=FILE.npy takes something else")
