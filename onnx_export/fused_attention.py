"""Attention in one node, of the standard and of onnxruntime, as product, softmax and average."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from .graph import constant, sizes
from .primitives import MICROSOFT, Lowering, Refused, Results, Rule


def _split_heads(b: Lowering, x: ir.Value, heads: int) -> ir.Value:
    """(batch, n, heads · d) → (batch, heads, n, d)."""
    return b.op("Transpose", b.op("Reshape", x, b.ints([0, 0, heads, -1])), perm=[0, 2, 1, 3])


def _merge_heads(b: Lowering, x: ir.Value) -> ir.Value:
    """(batch, heads, n, d) → (batch, n, heads · d)."""
    return b.op("Reshape", b.op("Transpose", x, perm=[0, 2, 1, 3]), b.ints([0, 0, -1]))


def _repeat(b: Lowering, x: ir.Value, heads: int, kv_heads: int) -> ir.Value:
    """Keys or values (batch, kv_heads, m, d), each head given to its group of queries."""
    if heads == kv_heads:
        return x
    if heads % kv_heads:
        raise Refused(f"{heads} heads of queries for {kv_heads} of keys")
    groups = np.repeat(np.arange(kv_heads, dtype=np.int64), heads // kv_heads)
    return b.op("Gather", x, b.constant(groups, "groups"), axis=1)


def _size(b: Lowering, x: ir.Value, axis: int) -> ir.Value:
    """A size as a tensor of one integer, folded once it is known."""
    return b.op("Gather", b.op("Shape", x), b.ints([axis]), axis=0)


def _range(b: Lowering, size: ir.Value) -> ir.Value:
    """0, 1, … up to a size."""
    zero, one = (b.constant(np.array(v, dtype=np.int64), "int") for v in (0, 1))
    return b.op("Range", zero, b.op("Reshape", size, b.ints([])), one)


def _causal(b: Lowering, query: ir.Value, key: ir.Value, aligned_right: bool) -> ir.Value:
    """The additive mask (n, m) that excludes every key behind the query."""
    n, m = _size(b, query, 2), _size(b, key, 2)
    rows = b.op("Reshape", _range(b, n), b.ints([-1, 1]))
    if aligned_right:
        rows = b.op("Add", rows, b.op("Sub", m, n))
    return b.op("Where", b.op("Greater", _range(b, m), rows), -math.inf, 0.0)


def _attend(
    b: Lowering,
    query: ir.Value,
    key: ir.Value,
    value: ir.Value,
    scale: float,
    masks: list[ir.Value],
    softcap: float = 0.0,
) -> ir.Value:
    """All with leading axes (batch, heads); a scale of 0 means 1/√d. A query without any key gets zeros."""
    scores = b.op("MatMul", query, b.op("Transpose", key, perm=[0, 1, 3, 2]))
    if scale:
        scores = b.op("Mul", scores, scale)
    else:
        size = b.op("Cast", _size(b, query, 3), to=int(b.dtype))
        scores = b.op("Div", scores, b.op("Sqrt", size))
    if softcap:
        scores = b.op("Mul", b.op("Tanh", b.op("Div", scores, softcap)), softcap)
    for mask in masks:
        scores = b.op("Add", scores, mask)
    weights = b.op("Softmax", scores, axis=-1)
    if masks:
        weights = b.op("Where", b.op("IsNaN", weights), 0.0, weights)
    return b.op("MatMul", weights, value)


def _rank(value: ir.Value, default: int) -> int:
    c = constant(value)
    shape = value.shape if c is None else c.shape
    return default if shape is None else len(shape)


def _standard(b: Lowering) -> Results:
    """Attention of opset 23 and 24: 4-D or 3-D, grouped keys, mask, is_causal, softcap."""
    if b.given(4) is not None or b.given(5) is not None:
        raise Refused("a cache of past keys and values")
    if b.given(6) is not None:
        raise Refused("nonpad_kv_seqlen")
    query, key, value = (b.wanted(i) for i in range(3))
    flat = _rank(query, 4) == 3
    heads, kv_heads = b.integer("q_num_heads", 0), b.integer("kv_num_heads", 0)
    if flat:
        if not heads or not kv_heads:
            raise Refused("3-D inputs without q_num_heads and kv_num_heads")
        query = _split_heads(b, query, heads)
        key, value = _split_heads(b, key, kv_heads), _split_heads(b, value, kv_heads)
    else:
        q_shape, k_shape = sizes(query), sizes(key)
        if q_shape is None or k_shape is None:
            raise Refused("the shapes of queries and keys are not known")
        heads, kv_heads = q_shape[1], k_shape[1]
    masks = []
    if b.integer("is_causal", 0) == 1:
        masks.append(_causal(b, query, key, aligned_right=False))
    mask = b.given(3)
    if mask is not None:
        boolean = mask.dtype == ir.DataType.BOOL
        masks.append(b.op("Where", mask, 0.0, -math.inf) if boolean else mask)
    key, value = _repeat(b, key, heads, kv_heads), _repeat(b, value, heads, kv_heads)
    y = _attend(b, query, key, value, b.real("scale", 0.0), masks, b.real("softcap", 0.0))
    return {0: _merge_heads(b, y) if flat else y}


def _padding(b: Lowering, mask: ir.Value | None, key: ir.Value) -> list[ir.Value]:
    """onnxruntime's mask of keys, a constant: 1 keeps, key by key, or how many are kept from the first on."""
    if mask is None:
        return []
    array = constant(mask)
    if array is None:
        raise Refused("a mask that is no constant")
    low = b.real("mask_filter_value", -10000.0)
    if array.ndim in (2, 3):
        added = (1.0 - array.astype(np.float64)) * low
        return [b.constant(added[:, None] if array.ndim == 3 else added[:, None, None], "mask")]
    if array.shape != (1,):
        raise Refused(f"a mask of shape {array.shape}; give it key by key, of shape (batch, keys)")
    last = b.constant(np.array(int(array[0]) - 1, dtype=np.int64), "last")
    return [b.op("Where", b.op("Greater", _range(b, _size(b, key, 2)), last), low, 0.0)]


def _masked(
    b: Lowering, query: ir.Value, key: ir.Value, value: ir.Value, padding: ir.Value | None
) -> Results:
    """onnxruntime's operators once heads are split: padding, an added mask as input 5, causal or not."""
    masks = _padding(b, padding, key)
    if (added := b.given(5)) is not None:
        masks.append(added)
    if b.integer("unidirectional", 0) == 1:
        masks.append(_causal(b, query, key, aligned_right=True))
    return {0: _merge_heads(b, _attend(b, query, key, value, b.real("scale", 0.0), masks))}


def _microsoft(b: Lowering) -> Results:
    """Attention of onnxruntime: the projection to queries, keys and values is part of it."""
    if b.given(4) is not None:
        raise Refused("a cache of past keys and values")
    if b.integer("do_rotary", 0):
        raise Refused("do_rotary")
    heads = b.integer("num_heads", 0)
    weight = b.wanted(1)
    array = constant(weight)
    if array is None:
        raise Refused("weights that are no constant")
    parts = b.source.attributes.get_ints("qkv_hidden_sizes", None) or [array.shape[1] // 3] * 3
    x = b.op("MatMul", b.wanted(0), weight)
    if (bias := b.given(2)) is not None:
        x = b.op("Add", x, bias)
    ends = np.cumsum(parts).tolist()
    query, key, value = (
        _split_heads(b, b.cut(x, end - part, end, 2), heads) for end, part in zip(ends, parts, strict=True)
    )
    return _masked(b, query, key, value, b.given(3))


def _microsoft_heads(b: Lowering) -> Results:
    """MultiHeadAttention of onnxruntime: queries, keys and values come projected."""
    if any(b.given(i) is not None for i in (6, 7, 8, 9)):
        raise Refused("a cache of past keys and values")
    if b.given(1) is None or b.given(2) is None or _rank(b.wanted(0), 3) != 3:
        raise Refused("packed queries, keys and values; turn off packing in the optimiser")
    heads = b.integer("num_heads", 0)
    inputs = [b.wanted(i) for i in range(3)]
    bias = b.given(3)
    if bias is not None:
        if (c := constant(bias)) is None:
            raise Refused("a bias that is no constant")
        if len(c) % 3 or any(_rank(v, 3) != 3 for v in inputs):
            raise Refused("a bias for values of another width, or for keys that are split into heads")
        inputs = [
            b.op("Add", v, b.constant(part.copy(), "bias"))
            for v, part in zip(inputs, np.split(c, 3), strict=True)
        ]
    query, key, value = (_split_heads(b, v, heads) if _rank(v, 3) == 3 else v for v in inputs)
    return _masked(b, query, key, value, b.given(4))


def _grouped(b: Lowering) -> Results:
    """GroupQueryAttention of onnxruntime, without a cache: causal, with grouped keys."""
    if b.given(3) is not None or b.given(4) is not None:
        raise Refused("a cache of past keys and values")
    if b.given(1) is None or b.given(2) is None:
        raise Refused("packed queries, keys and values; turn off packing in the optimiser")
    if (
        b.integer("do_rotary", 0)
        or b.integer("smooth_softmax", 0)
        or b.integer("local_window_size", -1) != -1
    ):
        raise Refused("do_rotary, smooth_softmax or local_window_size")
    if any(b.given(i) is not None for i in range(9, len(b.source.inputs))):
        raise Refused("positions, a bias or a sink")
    heads, kv_heads = b.integer("num_heads", 0), b.integer("kv_num_heads", 0)
    query = _split_heads(b, b.wanted(0), heads)
    key, value = (_split_heads(b, b.wanted(i), kv_heads) for i in (1, 2))
    masks = [_causal(b, query, key, aligned_right=True)]
    key, value = _repeat(b, key, heads, kv_heads), _repeat(b, value, heads, kv_heads)
    y = _attend(b, query, key, value, b.real("scale", 0.0), masks, b.real("softcap", 0.0))
    return {0: _merge_heads(b, y)}


def _packed(b: Lowering) -> Results:
    raise Refused("packed sequences; turn off packing in the optimiser")


ATTENTION_RULES: dict[tuple[str, str], Rule] = {
    ("", "Attention"): _standard,
    (MICROSOFT, "Attention"): _microsoft,
    (MICROSOFT, "MultiHeadAttention"): _microsoft_heads,
    (MICROSOFT, "GroupQueryAttention"): _grouped,
    (MICROSOFT, "PackedAttention"): _packed,
    (MICROSOFT, "PackedMultiHeadAttention"): _packed,
}
