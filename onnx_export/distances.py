"""Scores by squared distances, `‖q_i‖² − 2 q_i · k_j + ‖k_j‖²`: recognised in the terms of a sum."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import onnx_ir as ir

from .algebra import ONE, Polynomial, scalar
from .graph import constant, permutation, reduced_axes, sizes

REDUCED = ("ReduceSum", "ReduceSumSquare")


@dataclass(frozen=True)
class Distances:
    """`−scale · ‖query_i − key_j‖²`, of which `product` is the MatMul."""

    product: ir.Node
    query: ir.Value
    key: ir.Value
    scale: float


def _untransposed(value: ir.Value) -> tuple[ir.Value, tuple[int, ...]]:
    """The value behind any Transposes, and their joint permutation."""
    perm = tuple(range(len(sizes(value) or ())))
    while (node := value.producer()) is not None and node.op_type == "Transpose":
        own = permutation(node, len(perm))
        perm = tuple(own[i] for i in perm)
        assert node.inputs[0] is not None
        value = node.inputs[0]
    return value, perm


def _is_swapped(a: ir.Value, b: ir.Value) -> bool:
    """Whether a is b with its last two axes exchanged."""
    (source_a, perm_a), (source_b, perm_b) = _untransposed(a), _untransposed(b)
    return source_a is source_b and perm_a == (*perm_b[:-2], perm_b[-1], perm_b[-2])


def _square_norm(value: ir.Value) -> tuple[ir.Value, tuple[int, ...]] | None:
    """The x of `Σ x²` over the last axis, and the shape in which it arrives, axes of size 1 put anywhere."""
    wanted = sizes(value)
    if wanted is None:
        return None
    while (node := value.producer()) is not None and node.op_type in (
        "Unsqueeze",
        "Squeeze",
        "Reshape",
        "Transpose",
        "Identity",
    ):
        source = node.inputs[0]
        own = sizes(source)
        if source is None or own is None:
            return None
        if node.op_type == "Transpose":  # only axes of size 1 may pass others
            kept = [p for p in permutation(node, len(own)) if own[p] != 1]
            if kept != sorted(kept):
                return None
        value = source
    if node is None or node.op_type not in REDUCED:
        return None
    square = node.inputs[0]
    if square is None or square.shape is None or reduced_axes(node) != [len(square.shape) - 1]:
        return None
    if node.op_type == "ReduceSumSquare":
        return square, wanted
    product = square.producer()
    if product is None or len(product.inputs) != 2:
        return None
    first, second = product.inputs
    exponent = constant(second) if product.op_type == "Pow" else None
    squared = product.op_type == "Mul" and first is second
    if exponent is not None and exponent.size == 1:
        squared = float(exponent.reshape(())) == 2.0
    return (first, wanted) if squared and first is not None else None


def unscaled(value: ir.Value) -> list[tuple[float, ir.Value]]:
    """(factor, v) with `value = factor · v`: the value itself, and behind each constant factor."""
    found = [(1.0, value)]
    while (node := value.producer()) is not None and node.op_type in ("Mul", "Div"):
        a, b = node.inputs
        c = constant(b)
        if c is None and node.op_type == "Mul":
            a, c = b, constant(a)
        if a is None or c is None or c.size != 1:
            break
        factor = float(c.reshape(()))
        if factor == 0.0:
            break
        value = a
        found.append((found[-1][0] * (factor if node.op_type == "Mul" else 1.0 / factor), value))
    return found


def _matched(
    query: ir.Value, key_t: ir.Value, norms: list[tuple[ir.Value, tuple[int, ...]]]
) -> ir.Value | None:
    """The keys, if the squared norms are those of the columns of key_t, and of the rows of query if any."""
    q, k = sizes(query), sizes(key_t)
    if q is None or k is None or len(q) != len(k):
        return None
    lead, n, m = q[:-2], q[-2], k[-1]
    key: ir.Value | None = None
    row = False
    for source, shape in norms:
        if key is None and shape == (*lead, 1, m) and _is_swapped(key_t, source):
            key = source
        elif not row and shape == (*lead, n, 1) and source is query:
            row = True
        else:
            return None
    return key


def distances(terms: Polynomial) -> Distances | None:
    """The distances whose terms these are (constants aside); the term of the queries may be missing: the
    softmax does not see it."""
    products: list[tuple[float, ir.Node]] = []
    norms: list[tuple[float, tuple[ir.Value, tuple[int, ...]]]] = []
    for monomial, c in terms.items():
        if monomial == ONE:
            continue
        factor = scalar(c)
        ((atom, exponent), *rest) = monomial
        if factor is None or exponent != 1.0 or rest:
            return None
        node = atom.producer()
        if node is not None and node.op_type == "MatMul":
            products.append((factor, node))
        elif (norm := _square_norm(atom)) is not None:
            norms.append((factor, norm))
        else:
            return None
    if len(products) != 1 or not 1 <= len(norms) <= 2:
        return None
    ((factor, product),) = products
    if any(v is None or constant(v) is not None for v in product.inputs):
        return None
    queries, keys = (unscaled(v) for v in product.inputs if v is not None)
    for (q_factor, query), (k_factor, key_t) in itertools.product(queries, keys):
        scale = factor * q_factor * k_factor / 2.0
        if not all(math.isclose(f, -scale, rel_tol=1e-6) for f, _ in norms):
            continue
        key = _matched(query, key_t, [n for _, n in norms])
        if key is not None:
            return Distances(product, query, key, scale)
    return None


def differences(value: ir.Value) -> Distances | None:
    """`Σ (q_i − k_j)²` over the features, the differences formed one by one."""
    found, source = _square_norm(value), value.producer()
    if found is None or source is None or source.op_type not in REDUCED:
        return None
    node, shape = found[0].producer(), sizes(found[0])
    if node is None or node.op_type != "Sub" or shape is None or found[1] != shape[:-1]:
        return None
    for q_axis, k_axis in ((-2, -3), (-3, -2)):  # q_i − k_j, or k_j − q_i
        a, b = (_without_axis(v, axis) for v, axis in zip(node.inputs, (q_axis, k_axis), strict=True))
        if a is not None and b is not None:
            query, key = (a, b) if q_axis == -2 else (b, a)
            return Distances(source, query, key, -1.0)
    return None


def _without_axis(value: ir.Value | None, axis: int) -> ir.Value | None:
    """What an Unsqueeze (or Reshape) at this axis, counted from the end, was applied to."""
    after, node = sizes(value), value.producer() if value is not None else None
    if after is None or node is None or node.op_type not in ("Unsqueeze", "Reshape"):
        return None
    before = sizes(node.inputs[0])
    fits = before is not None and after[axis] == 1 and before == (*after[:axis], *after[axis + 1 :])
    return node.inputs[0] if fits else None
