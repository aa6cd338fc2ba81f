"""Matrix products, convolutions, pooling, normalisation by constants, and reductions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from . import functions as f
from .arithmetic import Array, Interval, align
from .dual import Dual, abs_product, add, along, dot, larger, multiply, scaled, summed
from .elementwise import checked
from .node import Node


def matmul(node: Node, a: Dual, b: Dual) -> Dual:
    if not a.shape or not b.shape:
        node.fail("on a scalar")
    row, column = len(a.shape) == 1, len(b.shape) == 1
    if row:
        a = a.mapped(lambda x: x[:, None, :])
    if column:
        b = b.mapped(lambda x: x[:, :, None])
    result = checked(node, dot(a, b, node.floats))
    if column:
        result = result.mapped(lambda x: x[..., 0])
    return result.mapped(lambda x: x[..., 0] if column else x[..., 0, :]) if row else result


def gemm(node: Node, a: Dual, b: Dual, c: Dual | None = None) -> Dual:
    node.float_only(a, b, c)
    if node.get("transA", 0):
        a = a.mapped(_swapped)
    if node.get("transB", 0):
        b = b.mapped(_swapped)
    alpha, beta = (Interval.of([float(np.float32(node.get(k, 1.0)))]) for k in ("alpha", "beta"))
    result, terms = dot(a, b, ()), a.shape[-1]
    size = abs_product(a.v, b.v) * alpha.largest()
    if alpha.lo != 1:
        result, terms = multiply(result, Dual(alpha), ()), terms + 1
    if c is not None and beta.lo != 0:
        c = c if beta.lo == 1 else multiply(c, Dual(beta), ())
        size = size + align(c.v, result.v)[0].largest()
        result, terms = add(result, c, ()), terms + 1 + (beta.lo[0] != 1)
    # an implementation may scale before or after, and begin its sums with c
    return _accumulated(result, size, terms, node)


def _accumulated(exact: Dual, size: Array, terms: int, node: Node) -> Dual:
    """What `terms` roundings make of sums whose absolute values add up to `size`."""
    return replace(exact, v=f.accumulated(exact.v, size * (1 + 2.0**-50), terms, node.floats))


def _swapped(x: Interval) -> Interval:
    return Interval(np.swapaxes(x.lo, -1, -2), np.swapaxes(x.hi, -1, -2))


class Windows:
    """The windows of a convolution or pooling over the spatial axes of (boxes, n, c, *spatial).

    Attributes:
        out: sizes of the result. count: entries of a window.
    """

    def __init__(self, node: Node, spatial: tuple[int, ...], kernel: list[int]) -> None:
        d = len(spatial)
        strides, dilations = (node.get(k) or [1] * d for k in ("strides", "dilations"))
        reach = [(k - 1) * s + 1 for k, s in zip(kernel, dilations, strict=True)]
        mode = node.get("auto_pad", "NOTSET")
        before, after = [0] * d, [0] * d
        if mode == "NOTSET":
            pads = node.get("pads") or [0] * 2 * d
            before, after = list(pads[:d]), list(pads[d:])
        elif mode != "VALID":
            for i, (size, s, r) in enumerate(zip(spatial, strides, reach, strict=True)):
                missing = max((math.ceil(size / s) - 1) * s + r - size, 0)
                small, large = missing // 2, missing - missing // 2
                before[i], after[i] = (small, large) if mode == "SAME_UPPER" else (large, small)
        self.out = []
        for i, size in enumerate(spatial):
            room = size + before[i] + after[i] - reach[i]
            steps = -(-room // strides[i]) if node.get("ceil_mode", 0) else room // strides[i]
            if node.get("ceil_mode", 0) and steps * strides[i] >= size + before[i]:
                steps -= 1  # a window must start inside the input or the padding before it
            if steps < 0:
                node.fail("a window larger than the input")
            self.out.append(steps + 1)
            # what the last windows reach behind the padding, and room for all index arithmetic
            after[i] = max(after[i], steps * strides[i] + reach[i] - size - before[i])
        self.pads = [(0, 0)] * 3 + list(zip(before, after, strict=True))
        self.padded = [n + b + a for n, b, a in zip(spatial, before, after, strict=True)]
        self.count = math.prod(kernel)
        index = []
        for offset in itertools.product(*map(range, kernel)):
            grids = np.meshgrid(
                *(
                    np.arange(n) * s + o * q
                    for n, s, o, q in zip(self.out, strides, offset, dilations, strict=True)
                ),
                indexing="ij",
            )
            index.append(np.ravel_multi_index([g.ravel() for g in grids], self.padded))
        self._index = np.stack(index)  # (count, positions)

    def __call__(self, x: Interval, fill: float = 0.0) -> Interval:
        """(boxes, n, c, *spatial) to (boxes, n, c, count, positions)."""
        lo, hi = (np.pad(v, self.pads, constant_values=fill) for v in (x.lo, x.hi))
        flat = Interval(lo, hi).reshape(*x.shape[:3], -1)
        return flat[..., self._index]


def conv(node: Node, x: Dual, w: Dual, bias: Dual | None = None) -> Dual:
    node.float_only(x, w, bias)
    groups = node.get("group", 1)
    filters, per_group, *kernel = w.shape
    windows = Windows(node, x.shape[2:], kernel)
    inputs, batch = x.shape[1], x.shape[0]
    if inputs != per_group * groups:
        node.fail(f"{inputs} channels for {groups} groups of {per_group}")

    def columns(v: Interval) -> Interval:
        """(boxes, n, groups, channels * count, positions)"""
        found = windows(v)
        return found.reshape(v.shape[0], batch, groups, per_group * windows.count, -1)

    def weights(v: Interval) -> Interval:
        return v.reshape(v.shape[0], 1, groups, filters // groups, -1)

    filter_rows, input_columns = w.mapped(weights), x.mapped(columns)
    shape = (batch, filters, *windows.out)
    result = dot(filter_rows, input_columns, ()).mapped(lambda v: v.reshape(v.shape[0], *shape))
    size = abs_product(filter_rows.v, input_columns.v)
    size = size.reshape(size.shape[0], *shape)
    if bias is not None:
        column = bias.mapped(lambda v: v.reshape(v.shape[0], filters, *(1,) * len(kernel)))
        size = size + align(column.v, result.v)[0].largest()
        result = add(result, column, ())
    return _accumulated(result, size, per_group * windows.count + (bias is not None), node)


def max_pool(node: Node, x: Dual) -> Dual:
    if node.outputs > 1:
        node.fail("its indices are used")
    windows = Windows(node, x.shape[2:], node.get("kernel_shape"))
    # the padding is never the maximum; minus infinity stands for it
    v = windows(x.v, -np.inf)
    d = along(x.d, windows)
    result: Dual | None = None
    for k in range(windows.count):
        part = Dual(v[..., k, :], None if d is None else d[..., k, :], x.kind)
        result = part if result is None else larger(result, part)
    assert result is not None
    return result.mapped(lambda y: y.reshape(*y.shape[:3], *windows.out))


def average_pool(node: Node, x: Dual) -> Dual:
    node.float_only(x)
    if node.get("ceil_mode", 0) or (not node.get("count_include_pad", 0) and any(node.get("pads") or [0])):
        node.fail("with padding that does not count, or ceil_mode")
    if node.get("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        node.fail("with auto_pad")
    windows = Windows(node, x.shape[2:], node.get("kernel_shape"))
    sums = summed(x.mapped(windows), -2, node.floats)
    mean = _divided(sums, windows.count, node)
    return mean.mapped(lambda y: y.reshape(*y.shape[:3], *windows.out))


def _divided(x: Dual, count: int, node: Node) -> Dual:
    divisor = Interval.of(float(count))
    d = None if x.d is None else x.d / divisor
    value = f.rounded(x.v / divisor, node.floats)
    if node.floats and count & (count - 1):  # some multiply with the rounded inverse
        value = value.hull(f.computed(x.v / divisor, node.floats))
    return Dual(value, d, x.kind)


def global_average_pool(node: Node, x: Dual) -> Dual:
    return _reduced(node, x, list(range(2, len(x.shape))), True, mean=True)


def global_max_pool(node: Node, x: Dual) -> Dual:
    return _largest(x, list(range(2, len(x.shape))), True)


def batch_normalization(node: Node, x: Dual, scale: Dual, bias: Dual, mean: Dual, var: Dual) -> Dual:
    """(x - mean) * (scale / sqrt(var + epsilon)) + bias, or multiplied out as implementations do."""
    node.float_only(x)
    if node.get("training_mode", 0) or node.outputs > 1:
        node.fail("in training mode")
    if any(p.constant is None for p in (scale, bias, mean, var)):
        node.fail("its parameters must be constant")
    column = (1, scale.shape[0], *(1,) * (len(x.shape) - 2))
    s, b, m, v = (p.v.reshape(*column) for p in (scale, bias, mean, var))
    eps = Interval.of(float(np.float32(node.get("epsilon", 1e-5))))
    factor = s / f.sqrt(v + eps)
    x0 = align(x.v, factor)[0]
    value = (x0 - m) * factor + b
    if node.floats:
        size = (x0.largest() + abs(m.lo)) * factor.largest() + abs(b.lo)
        exact = _exact(factor, m, b)
        value = f.accumulated(value, size, 2 if exact else 8, node.floats)
    return Dual(value, scaled(x.d, factor), x.kind)


def _exact(factor: Interval, mean: Interval, bias: Interval) -> bool:
    """Whether the folded factors are small whole numbers or halves, which no implementation rounds."""
    return all(
        bool(((p.lo == p.hi) & (p.lo * 4 == np.round(p.lo * 4)) & (abs(p.lo) < 1024)).all())
        for p in (factor, mean, bias)
    )


def _reduced(node: Node, x: Dual, axes: list[int], keep: bool, mean: bool) -> Dual:
    """Sum or mean over axes of the shape."""
    rank = len(x.shape)
    rest = [a for a in range(rank) if a not in axes]
    count = math.prod(x.shape[a] for a in axes)
    out = [x.shape[a] for a in rest]

    def gathered(v: Interval) -> Interval:
        order = [0, *(a + 1 for a in rest), *(a + 1 for a in axes)]
        moved = Interval(np.transpose(v.lo, order), np.transpose(v.hi, order))
        return moved.reshape(v.shape[0], *out, count)

    result = summed(x.mapped(gathered), -1, node.floats)
    if mean:
        result = _divided(result, count, node)
    shape = [1 if a in axes else x.shape[a] for a in range(rank)] if keep else out
    return checked(node, result.mapped(lambda v: v.reshape(v.shape[0], *shape)))


def reduce_sum(node: Node, x: Dual, axes: Dual | None = None) -> Dual:
    return _reduction(node, x, axes, lambda a, keep: _reduced(node, x, a, keep, mean=False))


def reduce_mean(node: Node, x: Dual, axes: Dual | None = None) -> Dual:
    node.float_only(x)
    return _reduction(node, x, axes, lambda a, keep: _reduced(node, x, a, keep, mean=True))


def reduce_max(node: Node, x: Dual, axes: Dual | None = None) -> Dual:
    return _reduction(node, x, axes, lambda a, keep: _largest(x, a, keep))


def reduce_min(node: Node, x: Dual, axes: Dual | None = None) -> Dual:
    opposite = x.mapped(lambda v: -v)
    return _reduction(node, x, axes, lambda a, keep: _largest(opposite, a, keep).mapped(lambda v: -v))


def _reduction(node: Node, x: Dual, given: Dual | None, reduce: Callable[[list[int], bool], Dual]) -> Dual:
    axes = node.axes(given, len(x.shape))
    if not axes:  # none or an empty list: all of them, or nothing is done
        if node.get("noop_with_empty_axes", 0):
            return x
        axes = list(range(len(x.shape)))
    return reduce(axes, bool(node.get("keepdims", 1)))


def _largest(x: Dual, axes: list[int], keep: bool) -> Dual:
    for axis in sorted(axes, reverse=True):
        parts = [x.mapped(_entry(axis, i, keep)) for i in range(x.shape[axis])]
        x = parts[0]
        for part in parts[1:]:
            x = larger(x, part)
    return x


def _entry(axis: int, i: int, keep: bool) -> Callable[[Interval], Interval]:
    """One entry of an axis of the shape, which stays with size 1 or goes."""
    key = (slice(None),) * (axis + 1) + ((slice(i, i + 1),) if keep else (i,))
    return lambda v: v[key]
