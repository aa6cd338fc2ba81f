"""Operators that move entries, and those that make constants."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .arithmetic import Interval
from .dual import FLOAT, Dual, along, spread
from .node import Node


def _both(f: Callable[[Any], Any]) -> Callable[[Interval], Interval]:
    return lambda x: Interval(f(x.lo), f(x.hi))


def identity(node: Node, x: Dual, *options: Dual | None) -> Dual:
    training = options[1] if len(options) > 1 else None
    if node.outputs > 1 or (training is not None and (training.constant is None or training.constant.any())):
        node.fail("its mask is used, or it is in training mode")
    return x


def constant(node: Node) -> Dual:
    for key, kind in (
        ("value_int", "int64"),
        ("value_ints", "int64"),
        ("value_float", FLOAT),
        ("value_floats", FLOAT),
    ):
        if key in node.attributes:
            return Dual(Interval.of(np.asarray(node.attributes[key], dtype=np.float64)[None]), None, kind)
    if "value" not in node.attributes:
        node.fail("without a value that can be read")
    return literal(node, node.attributes["value"])


def literal(node: Node, tensor: Any) -> Dual:
    """A stored tensor."""
    from onnx import numpy_helper

    array = numpy_helper.to_array(tensor)
    if array.dtype.kind not in "fiub":
        node.fail(f"a constant of type {array.dtype}")
    kind = {"f": FLOAT, "b": "bool"}.get(array.dtype.kind, str(array.dtype))
    values = array.astype(np.float64)
    if not np.isfinite(values).all():
        node.fail("a constant that is infinite or not a number")
    if array.dtype.kind in "iu" and (values.astype(array.dtype) != array).any():
        values = np.clip(values, -(2.0**53), 2.0**53)  # "to the end" in Slice and the like
    return Dual(Interval.of(values[None]), None, kind)


def constant_of_shape(node: Node, shape: Dual) -> Dual:
    sizes = node.ints(shape, "the shape") or []
    value = node.attributes.get("value")
    if value is None:
        return Dual(Interval.of(np.zeros((1, *sizes))))
    one = literal(node, value)
    return Dual(Interval.of(np.full((1, *sizes), float(one.v.lo.ravel()[0]))), None, one.kind)


def shape(node: Node, x: Dual) -> Dual:
    sizes = list(x.shape)[slice(node.get("start", 0), node.get("end"))]
    return Dual(Interval.of(np.asarray([sizes], dtype=np.float64)), None, "int64")


def _reshaped(x: Dual, sizes: Sequence[int]) -> Dual:
    return x.mapped(lambda v: v.reshape(v.shape[0], *sizes))


def reshape(node: Node, x: Dual, target: Dual | None = None) -> Dual:
    sizes = node.needed(target, "shape")
    if not node.get("allowzero", 0):
        sizes = [x.shape[i] if s == 0 else s for i, s in enumerate(sizes)]
    if -1 in sizes:
        known = math.prod(s for s in sizes if s != -1)
        sizes = [math.prod(x.shape) // known if s == -1 else s for s in sizes]
    return _reshaped(x, sizes)


def flatten(node: Node, x: Dual) -> Dual:
    axis = node.get("axis", 1)
    axis = axis + len(x.shape) if axis < 0 else axis
    return _reshaped(x, [math.prod(x.shape[:axis]), math.prod(x.shape[axis:])])


def squeeze(node: Node, x: Dual, axes: Dual | None = None) -> Dual:
    found = node.axes(axes, len(x.shape))
    if found is None:
        found = [i for i, n in enumerate(x.shape) if n == 1]
    return _reshaped(x, [n for i, n in enumerate(x.shape) if i not in found])


def unsqueeze(node: Node, x: Dual, axes: Dual | None = None) -> Dual:
    given = node.needed(axes, "axes")
    rank = len(x.shape) + len(given)
    places = {node.axis(a, rank) for a in given}
    if len(places) < len(given):
        node.fail("an axis is given twice")
    rest = iter(x.shape)
    return _reshaped(x, [1 if i in places else next(rest) for i in range(rank)])


def transpose(node: Node, x: Dual) -> Dual:
    order = node.get("perm") or list(range(len(x.shape)))[::-1]
    return x.mapped(_both(lambda v: np.transpose(v, (0, *(a + 1 for a in order)))))


def expand(node: Node, x: Dual, target: Dual) -> Dual:
    sizes = np.broadcast_shapes(x.shape, tuple(node.ints(target, "the shape") or ()))
    pad = (1,) * (len(sizes) - len(x.shape))
    v = x.v.reshape(x.v.shape[0], *pad, *x.shape)
    v = _both(lambda a: np.broadcast_to(a, (a.shape[0], *sizes)))(v)
    return Dual(v, spread(x.d, sizes), x.kind)


def tile(node: Node, x: Dual, repeats: Dual) -> Dual:
    times = node.ints(repeats, "repeats") or []
    return x.mapped(_both(lambda v: np.tile(v, (1, *times))))


def concat(node: Node, *parts: Dual) -> Dual:
    axis = node.axis(node.get("axis"), len(parts[0].shape))
    boxes = max(p.v.shape[0] for p in parts)

    def joined(values: list[Interval], at: int) -> Interval:
        return Interval(*(np.concatenate([getattr(v, s) for v in values], axis=at) for s in ("lo", "hi")))

    v = joined([_boxed(p.v, boxes) for p in parts], axis + 1)
    moving = next((p.d for p in parts if p.d is not None), None)
    if moving is None:
        return Dual(v, None, parts[0].kind)
    boxes = max(p.d.shape[0] for p in parts if p.d is not None)
    n = moving.shape[1]
    ds = [Interval.of(np.zeros((boxes, n, *p.shape))) if p.d is None else _boxed(p.d, boxes) for p in parts]
    return Dual(v, joined(ds, axis + 2), parts[0].kind)


def _boxed(x: Interval, boxes: int) -> Interval:
    return _both(lambda v: np.broadcast_to(v, (boxes, *v.shape[1:])))(x)


def split(node: Node, x: Dual, sizes: Dual | None = None) -> list[Dual]:
    axis = node.axis(node.get("axis", 0), len(x.shape))
    parts = node.given(sizes, "split")
    if parts is None:
        each = -(-x.shape[axis] // node.outputs)
        parts = [each] * (node.outputs - 1)
        parts.append(x.shape[axis] - sum(parts))
    first, found = 0, []
    for size in parts:
        part = slice(first, first + size)
        found.append(x.mapped(_taken((slice(None),) * (axis + 1) + (part,))))
        first += size
    return found


def _taken(key: Any) -> Callable[[Interval], Interval]:
    return lambda v: v[key]


def slice_(
    node: Node,
    x: Dual,
    starts: Dual | None = None,
    ends: Dual | None = None,
    axes: Dual | None = None,
    steps: Dual | None = None,
) -> Dual:
    first, last = node.needed(starts, "starts"), node.needed(ends, "ends")
    at = node.axes(axes, len(x.shape)) or list(range(len(first)))
    step = node.ints(steps, "steps") or [1] * len(first)
    key: list[Any] = [slice(None)] * (len(x.shape) + 1)
    for a, b, e, s in zip(at, first, last, step, strict=True):
        n = x.shape[a]
        b, e = (v + n if v < 0 else v for v in (b, e))
        b, e = (
            (min(max(v, 0), n) for v in (b, e)) if s > 0 else (min(max(b, 0), n - 1), min(max(e, -1), n - 1))
        )
        key[a + 1] = np.arange(b, e, s)
    result = x
    for i, k in enumerate(key):
        if not isinstance(k, slice):
            result = result.mapped(_taken((slice(None),) * i + (k,)))
    return result


def gather(node: Node, x: Dual, indices: Dual) -> Dual:
    axis = node.axis(node.get("axis", 0), len(x.shape))
    found = indices.constant
    if found is None:
        node.fail("its indices must be constant")
    places = found.astype(np.int64)
    n = x.shape[axis]
    if places.size and (places.min() < -n or places.max() >= n):
        node.fail(f"an index outside of axis {axis}, which has {n} entries")
    return x.mapped(_both(lambda v: np.take(v, places % n, axis=axis + 1)))


def pad(
    node: Node, x: Dual, pads: Dual | None = None, value: Dual | None = None, axes: Dual | None = None
) -> Dual:
    if node.get("mode", "constant") != "constant":
        node.fail("only with constant values")
    amounts = node.needed(pads, "pads")
    rank = len(x.shape)
    at = node.axes(axes, rank) or list(range(rank))
    widths = [(0, 0)] * (rank + 1)
    for i, a in enumerate(at):
        widths[a + 1] = (amounts[i], amounts[i + len(at)])
    if min(map(min, widths)) < 0:
        node.fail("negative pads")
    fill = float(node.get("value", 0.0))
    if value is not None:
        if value.constant is None:
            node.fail("its value must be constant")
        fill = float(value.constant.ravel()[0])
    v = _both(lambda a: np.pad(a, widths, constant_values=fill))(x.v)
    d = along(x.d, _both(lambda a: np.pad(a, widths)))
    return Dual(v, d, x.kind)
