"""Static ONNX graph → the steps of a torch module, one importer per node."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

from attn_bounds.errors import first_line

from .graph import constant
from .importers import IMPORTERS, Context, Function, Unsupported, exact, fold_node
from .lowering import REFUSED

if TYPE_CHECKING:
    from .load import OnnxModule

Shape = tuple[int, ...]
NO_SHAPE = "could not be inferred"


@dataclass(frozen=True)
class Step:
    """One node of a loaded graph: reads values by name, writes one."""

    name: str
    op: str
    inputs: tuple[str, ...]
    output: str
    run: Function


@dataclass(frozen=True)
class UnsupportedNode:
    """A node that could not be imported, and why."""

    op: str
    node: str
    why: str


def is_plain(shape: Sequence[int]) -> bool:
    """Whether the first axis of a value at batch 1 is taken for the batch (see `importers.context`)."""
    return len(shape) >= 2 and shape[0] == 1


def held(shape: Shape) -> Shape:
    """How the module holds a value that has this shape in the file at batch 1; first the batch, 1."""
    return shape if is_plain(shape) else (1, *shape)


class Builder:
    """Fills a module with the nodes of a graph; what fails is in `failed`, all of it.

    Arguments:
        dtype: of the constants.
        version: of the standard operator set.
    """

    def __init__(self, module: OnnxModule, dtype: torch.dtype, version: int) -> None:
        self.module, self.dtype, self.version = module, dtype, version
        self.failed: list[UnsupportedNode] = []
        self._folded: dict[str, np.ndarray] = {}
        self._count = 0
        self._unknown: set[str] = set()  # made by nodes that failed

    def add_all(self, model: ir.Model) -> None:
        for node in model.graph:
            try:
                self._add(node)
            except Unsupported as e:
                read = {str(v.name) for v in node.inputs if v is not None}
                follows = bool(read & self._unknown) and str(e).endswith(NO_SHAPE)
                self._unknown.update(str(o.name) for o in node.outputs)
                if follows:  # only from what is already listed
                    continue
                domain = f"{node.domain}::" if node.domain else ""
                label = node.name or str(node.outputs[0].name)
                self.failed.append(UnsupportedNode(f"{domain}{node.op_type}", label, str(e)))

    def _parameter(self, c: Tensor) -> Callable[[], Tensor]:
        module, name = self.module, f"constant_{self._count}"
        self._count += 1
        module.register_buffer(name, c.detach().to(self.dtype, copy=True).contiguous())
        return lambda: getattr(module, name)

    def _array(self, value: ir.Value | None) -> np.ndarray | None:
        if value is None:
            return None
        found = self._folded.get(str(value.name))
        return constant(value) if found is None else found

    def _add(self, node: ir.Node) -> None:
        inputs = list(node.inputs)
        arrays = [self._array(v) for v in inputs]
        if all(a is not None for a, v in zip(arrays, inputs, strict=True) if v is not None):
            for out, array in zip(node.outputs, fold_node(node, arrays, self.version), strict=False):
                self._folded[str(out.name)] = array
            return
        if node.op_type in ("Shape", "Size") and inputs[0] is not None:
            size = np.array(_shape(inputs[0], None), dtype=np.int64)
            start, end = node.attributes.get_int("start", 0), node.attributes.get_int("end", None)
            value = size[start:end] if node.op_type == "Shape" else np.array(size.prod())
            self._folded[str(node.outputs[0].name)] = value
            return
        if REFUSED in node.metadata_props:
            raise Unsupported(node.metadata_props[REFUSED])
        importer = IMPORTERS.get(("" if node.domain == "ai.onnx" else node.domain, node.op_type))
        if importer is None:
            raise Unsupported("operator not supported")
        shapes = [_shape(v, a) for v, a in zip(inputs, arrays, strict=True)]
        data = [v is not None and a is None for v, a in zip(inputs, arrays, strict=True)]
        known = [o for o in node.outputs if o is node.outputs[0] or o.shape is not None]
        try:
            out_shapes = [_shape(o, None) for o in known]
        except Unsupported as e:
            raise Unsupported(f"{e} from those of its inputs, {', '.join(map(str, shapes))}") from None
        if any(0 in s for s in (*shapes, *out_shapes)):
            raise Unsupported("a value without entries (an axis of size 0)")
        moving = [s for s, d in zip(shapes, data, strict=True) if d]
        plain = all(is_plain(s) for s in (*moving, *out_shapes))
        constants = [None if a is None else _tensor(a) for a in arrays]

        def attempt(lifted: bool) -> list[Function]:
            start = self._count

            def as_held(shape: Shape, is_data: bool) -> Shape:
                return (1, *shape) if lifted and is_data else shape

            context = Context(
                node=node,
                opset=self.version,
                constants=constants,
                present=[v is not None for v in inputs],
                shapes=[as_held(s, d) for s, d in zip(shapes, data, strict=True)],
                out_shapes=[as_held(s, True) for s in out_shapes],
                lifted=lifted,
                parameter=self._parameter,
            )
            try:
                runs = importer(context)
            except Exception as e:
                for i in range(start, self._count):
                    delattr(self.module, f"constant_{i}")
                self._count = start
                if isinstance(e, Unsupported):
                    raise
                raise Unsupported(f"its attributes, shapes and constants do not fit ({first_line(e)})") from e
            runs = runs if isinstance(runs, list) else [runs]
            return [_lift(f, moving, s) for f, s in zip(runs, out_shapes, strict=False)] if lifted else runs

        try:
            runs = attempt(lifted=not plain)
        except Unsupported as first:
            if not plain:
                raise
            try:
                runs = attempt(lifted=True)
            except Unsupported:
                raise first from None
        if any(o.uses() or o.is_graph_output() for o in node.outputs[len(runs) :]):
            raise Unsupported("its second output is used")
        names = tuple(str(v.name) for v, d in zip(inputs, data, strict=True) if v is not None and d)
        label = node.name or str(node.outputs[0].name)
        for out, run in zip(node.outputs, runs, strict=False):
            self.module.steps.append(Step(label, node.op_type, names, str(out.name), run))


def _lift(f: Function, shapes: list[Shape], out: Shape) -> Function:
    """Give the inputs a batch axis on top of all of theirs, and take it off a plain result."""
    targets = [(-1, *s) if is_plain(s) else None for s in shapes]
    result = (-1, *out[1:]) if is_plain(out) else None

    def run(*xs: Tensor) -> Tensor:
        y = f(*(x if t is None else x.reshape(t) for x, t in zip(xs, targets, strict=True)))
        return y if result is None else y.reshape(result)

    return run


def _tensor(array: np.ndarray) -> Tensor:
    if array.dtype.kind in "SUO":
        raise Unsupported("strings")
    array = exact(array)
    if array.dtype.kind == "u":
        array = array.astype(np.int64)
    with_own_memory = array if array.flags.writeable else array.copy()
    return torch.from_numpy(with_own_memory)


def _shape(value: ir.Value | None, array: np.ndarray | None) -> Shape:
    if array is not None:
        return tuple(array.shape)
    if value is None:
        return ()
    if value.shape is None or not value.shape.is_static():
        raise Unsupported(f"shape of {value.name} {NO_SHAPE}")
    shape = tuple(int(d) for d in value.shape)  # type: ignore[arg-type]
    if math.prod(shape) > 2**31:
        raise Unsupported(f"{value.name} would have {math.prod(shape)} entries")
    return shape
