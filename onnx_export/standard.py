"""Attention that an exporter left as products and a Softmax, as the standard operator Attention."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

OPSET = 23  # the first with the operator


def _constant(value: ir.Value | None) -> np.ndarray | None:
    tensor = ir.convenience.get_const_tensor(value) if value is not None else None
    return None if tensor is None else tensor.numpy()


def _used_once(value: ir.Value | None) -> bool:
    return value is not None and len(list(value.uses())) == 1 and not value.is_graph_output()


def _scaled_product(value: ir.Value | None) -> tuple[ir.Node, float, ir.Value | None] | None:
    """(MatMul, scale, mask) of `scale · A B + mask`, the scale constant; nothing of it used elsewhere."""
    mask: ir.Value | None = None
    scale = 1.0
    while value is not None and _used_once(value) and (node := value.producer()) is not None:
        if node.op_type == "MatMul":
            return node, scale, mask
        if node.op_type not in ("Add", "Mul", "Div"):
            return None
        a, b = node.inputs
        if node.op_type == "Add":
            if mask is not None or scale != 1.0:
                return None  # the operator scales first and has one mask
            source = None if a is None else a.producer()
            product = source is not None and source.op_type in ("MatMul", "Mul", "Div")
            value, mask = (a, b) if product else (b, a)
            continue
        if (factor := _constant(b)) is None and node.op_type == "Mul":
            a, factor = b, _constant(a)
        if factor is None or factor.size != 1:
            return None
        scale *= float(factor.reshape(())) if node.op_type == "Mul" else 1.0 / float(factor.reshape(()))
        value = a
    return None


def _rank(value: ir.Value | None) -> int:
    return 0 if value is None or value.shape is None else len(value.shape)


def _swap_last(value: ir.Value) -> ir.Node:
    rank = _rank(value)
    perm = [*range(rank - 2), rank - 1, rank - 2]
    return ir.Node("", "Transpose", [value], [ir.AttrInt64s("perm", perm)])


def use_attention_operator(model: ir.Model) -> int:
    """Rewrite `Softmax(scale · Q Kᵀ + mask) V` of rank 3 or 4 into Attention, in place; returns how many.

    The mask may be any tensor. A Softmax that fits no attention is left as it is.
    """
    done = 0
    for node in list(model.graph):
        if node.op_type != "Softmax" or node.domain not in ("", "ai.onnx"):
            continue
        weights, scores = node.outputs[0], node.inputs[0]
        rank = _rank(scores)
        if rank not in (3, 4) or node.attributes.get_int("axis", -1) not in (-1, rank - 1):
            continue
        found = _scaled_product(scores)
        if found is None or not _used_once(weights):
            continue
        consumer = next(iter(weights.uses())).node
        if consumer.op_type != "MatMul" or consumer.inputs[0] is not weights:
            continue
        product, scale, mask = found
        if rank == 3 and mask is not None and _rank(mask) != 2:
            continue  # a mask of rank 3 would be one per head there
        query, key_t = product.inputs
        value = consumer.inputs[1]
        if not _rank(query) == _rank(key_t) == _rank(value) == rank:
            continue
        assert key_t is not None
        swap = _swap_last(key_t)
        attributes: list[ir.Attr] = [ir.AttrFloat32("scale", scale)]
        if rank == 3:  # (batch, tokens, width) there: one head
            attributes += [ir.AttrInt64("q_num_heads", 1), ir.AttrInt64("kv_num_heads", 1)]
        inputs = [query, swap.outputs[0], value] + ([] if mask is None else [mask])
        attention = ir.Node("", "Attention", inputs, attributes, name=f"{consumer.name}/Attention")
        old = consumer.outputs[0]
        attention.outputs[0].shape = old.shape
        if old.dtype is not None:
            attention.outputs[0].dtype = old.dtype
        name = old.name
        ir.convenience.replace_nodes_and_values(
            model.graph, consumer, [consumer], [swap, attention], [old], [attention.outputs[0]]
        )
        attention.outputs[0].name = name
        done += 1
    if done:
        ir.passes.common.RemoveUnusedNodesPass()(model)
    return done
