"""Normalisations and activations that a file spells out in small operators, recognised by what they compute.

An activation is a polynomial (`algebra`) in its input and one function of it: `½x + ½x·erf(x/√2)` is GELU in
whatever order it is written.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from .algebra import ARITHMETIC, ONE, Polynomial, close, downstream, parse, scalar
from .graph import Builder, behind, constant, opset, reduced_axes, replace, sizes
from .normalizations import fuse_normalization
from .ops import DOMAIN

SQRT_2_OVER_PI = math.sqrt(2.0 / math.pi)
HALVES: dict[tuple[int, ...], float] = {(1, 0): 0.5, (1, 1): 0.5}


@dataclass(frozen=True)
class Activation:
    """`Σ c_ij xⁱ tʲ` (`result`) with t = inner(`Σ c_i xⁱ`) (`argument`) is our operator `op`."""

    inner: str
    argument: dict[int, float]
    result: dict[tuple[int, ...], float]
    op: str
    attributes: dict[str, str]


ACTIVATIONS = (
    Activation("Erf", {1: math.sqrt(0.5)}, HALVES, "Gelu", {"approximate": "none"}),
    Activation(
        "Tanh", {1: SQRT_2_OVER_PI, 3: 0.044715 * SQRT_2_OVER_PI}, HALVES, "Gelu", {"approximate": "tanh"}
    ),
    Activation("Tanh", {1: 0.5}, HALVES, "Silu", {}),
    Activation("Sigmoid", {1: 1.0}, {(1, 1): 1.0}, "Silu", {}),
    Activation("Sigmoid", {1: 1.702}, {(1, 1): 1.0}, "QuickGelu", {}),
)


def fuse_patterns(model: ir.Model) -> None:
    """Replace normalisations and activations by nodes of our own domain, in place."""
    ir.passes.common.CommonSubexpressionEliminationPass()(model)
    for node in list(model.graph):
        if node.graph is None or node.domain not in ("", "ai.onnx"):
            continue
        if node.op_type in ("Erf", "Tanh", "Sigmoid"):
            _fuse_activation(model.graph, node)
        elif node.op_type in ("Sqrt", "Pow"):
            fuse_normalization(model.graph, node)
        elif node.op_type == "Div":
            _fuse_softmax(model.graph, node, opset(model))
        elif node.op_type == "Where" and guarded_weights(node) is not None:
            _drop_guard(node)
    ir.passes.common.RemoveUnusedNodesPass()(model)


def guarded_weights(node: ir.Node) -> ir.Value | None:
    """The p of `Where(IsNaN(p), 0, p)`, exported around a softmax whose mask may exclude every key."""
    condition, zero, value = (*node.inputs, None, None, None)[:3]
    test = condition.producer() if condition is not None else None
    if test is None or test.op_type != "IsNaN" or value is None or test.inputs[0] is not value:
        return None
    array = constant(zero)
    return value if array is not None and not np.any(array) else None


def _drop_guard(node: ir.Node) -> None:
    """Take the guard off where every row keeps a finite score, so that no weight is NaN."""
    weights = guarded_weights(node)
    softmax = weights.producer() if weights is not None else None
    if weights is None or softmax is None or softmax.op_type != "Softmax" or softmax.inputs[0] is None:
        return
    mask = parse(softmax.inputs[0]).get(ONE)
    if mask is None or np.all(np.any(np.isfinite(np.atleast_1d(mask)), axis=-1)):
        ir.convenience.replace_all_uses_with(node.outputs[0], weights, replace_graph_outputs=True)


def _fuse_softmax(graph: ir.Graph, node: ir.Node, version: int) -> None:
    """`exp(x) / Σ exp(x)`, a maximum subtracted from x or not."""
    top, bottom = (None if v is None else behind(v).producer() for v in node.inputs)
    if top is None or bottom is None or top.op_type != "Exp" or bottom.op_type != "ReduceSum":
        return
    summed = bottom.inputs[0]
    if summed is None or behind(summed) is not top.outputs[0] or not bottom.attributes.get_int("keepdims", 1):
        return
    axes, x, shape = reduced_axes(bottom), top.inputs[0], sizes(node.outputs[0])
    if axes is None or len(axes) != 1 or x is None or shape is None:
        return
    if version < 13 and axes != [len(shape) - 1]:
        return
    shift = behind(x).producer()
    if shift is not None and shift.op_type == "Sub" and None not in shift.inputs:
        of, by = (behind(v) for v in shift.inputs if v is not None)
        peak = by.producer()
        largest = peak is not None and peak.op_type == "ReduceMax" and reduced_axes(peak) == axes
        if peak is not None and largest and peak.inputs[0] is not None and behind(peak.inputs[0]) is of:
            x = of
    builder = Builder(graph, node.name or str(node.outputs[0].name), node.outputs[0].dtype)
    new = builder.node("Softmax", [x], shape, {"axis": axes[0]})
    builder.insert_before(node)
    replace(node.outputs[0], new)


def _coefficients(terms: Polynomial, atoms: list[ir.Value]) -> dict[tuple[int, ...], float | None] | None:
    """A polynomial in the given values alone, with one number each as coefficients, by exponents."""
    found: dict[tuple[int, ...], float | None] = {}
    for monomial, c in terms.items():
        powers = dict(monomial)
        if set(powers) - set(atoms):
            return None
        if not np.any(c):
            continue
        exponents = [powers.get(a, 0.0) for a in atoms]
        if any(e != int(e) for e in exponents):
            return None
        found[tuple(int(e) for e in exponents)] = scalar(c)
    return found


def _same(found: dict[tuple[int, ...], float | None] | None, wanted: dict[tuple[int, ...], float]) -> bool:
    return (
        found is not None and set(found) == set(wanted) and all(close(found[k], v) for k, v in wanted.items())
    )


def _inputs_of(value: ir.Value, depth: int = 6) -> Iterator[ir.Value]:
    """The value, and what arithmetic made it of, nearest first."""
    level, seen = [behind(value)], set()
    for _ in range(depth):
        following: list[ir.Value] = []
        for current in level:
            if id(current) in seen or constant(current) is not None:
                continue
            seen.add(id(current))
            yield current
            node = current.producer()
            if node is not None and node.op_type in ARITHMETIC and node.domain in ("", "ai.onnx"):
                following += [behind(v) for v in node.inputs if v is not None]
        level = following


def _fuse_activation(graph: ir.Graph, node: ir.Node) -> None:
    argument, inner = node.inputs[0], node.outputs[0]
    assert argument is not None
    for x in _inputs_of(argument):
        terms = _coefficients(parse(argument, (x,)), [x])
        for known in ACTIVATIONS:
            if known.inner != node.op_type or not _same(terms, {(k,): v for k, v in known.argument.items()}):
                continue
            for out in downstream(inner, 6):
                if _same(_coefficients(parse(out, (x, inner)), [x, inner]), known.result):
                    if sizes(out) != sizes(x):
                        return
                    maker = out.producer()
                    assert maker is not None
                    builder = Builder(graph, maker.name or str(out.name), out.dtype)
                    new = builder.node(known.op, [x], sizes(x), dict(known.attributes), DOMAIN)
                    builder.insert_before(maker)
                    replace(out, new)
                    return
