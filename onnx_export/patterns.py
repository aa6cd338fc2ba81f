"""Normalisations and activations that a file spells out in small operators, recognised by what they compute.

Each is a polynomial (`algebra`) in the input and one other value: `½x + ½x·erf(x/√2)` is GELU in whatever
order it is written; `γ·x·v^−½ − γ·m·v^−½ + β`, with m the mean and v the variance plus ε, is a LayerNorm.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from .algebra import ONE, Monomial, Polynomial, parse, scalar, single
from .graph import Builder, behind, constant, opset, passes, reduced_axes, replace, sizes
from .ops import DOMAIN

TOLERANCE = 1e-6  # relative, of constants: what float32 files and short decimals differ by
ARITHMETIC = ("Add", "Sub", "Mul", "Div", "Neg", "Reciprocal", "Sqrt", "Pow")
REACH = 10  # nodes between a square root or an erf and the end of its pattern
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
            _fuse_normalization(model.graph, node)
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


def _downstream(value: ir.Value, reach: int) -> Iterator[ir.Value]:
    """Values that plain arithmetic makes of a value, nearest first."""
    level, seen = [value], {id(value)}
    for _ in range(reach):
        following = []
        for current in level:
            for use in current.uses():
                node = use.node
                if node.domain in ("", "ai.onnx") and (node.op_type in ARITHMETIC or passes(node)):
                    out = node.outputs[0]
                    if id(out) not in seen:
                        seen.add(id(out))
                        following.append(out)
        yield from following
        level = following


def _close(a: float | None, b: float) -> bool:
    return a is not None and math.isclose(a, b, rel_tol=TOLERANCE)


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
        found is not None
        and set(found) == set(wanted)
        and all(_close(found[k], v) for k, v in wanted.items())
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
            for out in _downstream(inner, 6):
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


@dataclass(frozen=True)
class _Moments:
    """`v = growth · (E[(x − mean)²] + eps)` over the axes; without a mean it is that of x²."""

    x: ir.Value
    means: tuple[ir.Value, ...]  # values that are `mean` or a constant multiple of it
    axes: list[int]
    eps: float
    growth: float


def _mean_of(value: ir.Value) -> tuple[ir.Value, list[int], float] | None:
    """(x, axes, c) of a value that is c times the mean of x over the axes, which stay as axes of size 1."""
    node = value.producer()
    if node is None or node.op_type not in ("ReduceMean", "ReduceSum") or node.inputs[0] is None:
        return None
    axes, shape = reduced_axes(node), sizes(node.inputs[0])
    if not axes or shape is None or not node.attributes.get_int("keepdims", 1):
        return None
    entries = math.prod(shape[a] for a in axes)
    return behind(node.inputs[0]), axes, 1.0 if node.op_type == "ReduceMean" else float(entries)


def _moments(v: ir.Value) -> _Moments | None:
    """Take apart what stands under the square root."""
    terms = dict(parse(v))
    eps = scalar(terms.pop(ONE, np.zeros(1)))
    atoms = {m: scalar(c) for m, c in terms.items()}
    if eps is None or eps <= 0.0 or not 1 <= len(atoms) <= 2 or any(c is None for c in atoms.values()):
        return None
    square: tuple[ir.Value, list[int], float] | None = None
    growth = 1.0
    minus: tuple[ir.Value, float] | None = None
    for monomial, c in atoms.items():
        ((atom, exponent), *rest) = monomial
        assert c is not None
        if rest:
            return None
        if exponent == 1.0 and (found := _mean_of(atom)) is not None and square is None:
            square, growth = found, c * found[2]
        elif exponent == 2.0:
            minus = atom, c
    if square is None or growth <= 0.0 or len(atoms) != (1 if minus is None else 2):
        return None
    q, axes, _ = square
    base = _squared(q)
    if base is None:
        return None
    if minus is not None:  # E[x²] − E[x]²
        mean = _mean_of(minus[0])
        if mean is None or mean[0] is not base or mean[1] != axes:
            return None
        if not _close(minus[1] * mean[2] ** 2, -growth):
            return None
        return _Moments(base, (minus[0],), axes, eps / growth, growth)
    for monomial, factor in parse(base).items():  # x − mean ?
        if len(monomial) != 1:
            continue
        ((atom, exponent),) = monomial
        mean = _mean_of(atom) if exponent == 1.0 else None
        if mean is None or mean[1] != axes or not _close(scalar(np.asarray(factor) * mean[2]), -1.0):
            continue
        x = mean[0]
        own = parse(base, (x, atom))
        if set(own) == {single(x), single(atom)} and _close(scalar(own[single(x)]), 1.0):
            return _Moments(x, (atom,), axes, eps / growth, growth)
    return _Moments(base, (), axes, eps / growth, growth)


def _squared(value: ir.Value) -> ir.Value | None:
    """The b of `b·b` or `b²`."""
    node = value.producer()
    if node is None or len(node.inputs) != 2 or any(v is None for v in node.inputs):
        return None
    first, second = node.inputs
    assert first is not None and second is not None
    if node.op_type == "Mul" and behind(first) is behind(second):
        return behind(first)
    exponent = constant(second) if node.op_type == "Pow" else None
    return behind(first) if exponent is not None and exponent.size == 1 and exponent.item() == 2.0 else None


def _fuse_normalization(graph: ir.Graph, node: ir.Node) -> None:
    v = node.inputs[0]
    if v is None or constant(v) is not None:
        return
    if node.op_type == "Pow":
        exponent = constant(node.inputs[1])
        if exponent is None or exponent.size != 1 or exponent.item() not in (0.5, -0.5):
            return
    v = behind(v)
    moments = _moments(v)
    if moments is None:
        return
    shape = sizes(moments.x)
    if shape is None or 0 in moments.axes:
        return
    best: tuple[ir.Value, np.ndarray | None, np.ndarray | None] | None = None
    for out in _downstream(node.outputs[0], REACH):
        if best is not None and not _follows(best[0], out):
            continue
        affine = _affine(parse(out, (moments.x, v, *moments.means)), moments, v, shape)
        if affine is not None and sizes(out) == shape:
            best = (out, *affine)
    if best is not None:
        _emit_normalization(graph, moments, shape, *best)


def _follows(value: ir.Value, out: ir.Value) -> bool:
    """Whether `out` is all that is made of the value, which may be passed on on the way."""
    while not value.is_graph_output() and len(uses := list(value.uses())) == 1:
        value = uses[0].node.outputs[0]
        if value is out:
            return True
        if not passes(uses[0].node):
            return False
    return False


def _affine(
    terms: Polynomial, moments: _Moments, v: ir.Value, shape: tuple[int, ...]
) -> tuple[np.ndarray | None, np.ndarray | None] | None:
    """(gain, bias) of a normalisation, each of the normalised axes alone or None; None where it is none."""
    root = float(np.sqrt(moments.growth))
    main: Monomial = frozenset({(moments.x, 1.0), (v, -0.5)})
    gain = terms.pop(main, None)
    bias = terms.pop(ONE, None)
    if gain is None or (bias is not None and not moments.means and np.any(bias)):
        return None
    if moments.means:
        (mean,) = moments.means
        times = _mean_of(mean)
        shift = terms.pop(frozenset({(mean, 1.0), (v, -0.5)}), None)
        if (
            times is None
            or shift is None
            or not np.allclose(shift * times[2], -gain, rtol=TOLERANCE, atol=0.0)
        ):
            return None
    if terms:
        return None
    arrays: list[np.ndarray | None] = []
    for c, factor in ((gain, 1.0 / root), (bias, 1.0)):
        if c is None:
            arrays.append(None)
            continue
        c = np.asarray(c) * factor
        c = c.reshape((1,) * (len(shape) - c.ndim) + c.shape) if c.ndim <= len(shape) else c
        if c.ndim != len(shape) or any(c.shape[i] != 1 for i in range(c.ndim) if i not in moments.axes):
            return None
        arrays.append(c)
    return arrays[0], arrays[1]


def _emit_normalization(
    graph: ir.Graph,
    moments: _Moments,
    shape: tuple[int, ...],
    out: ir.Value,
    gain: np.ndarray | None,
    bias: np.ndarray | None,
) -> None:
    maker = out.producer()
    assert maker is not None
    builder = Builder(graph, maker.name or str(out.name), out.dtype)
    rank, k = len(shape), len(moments.axes)
    perm = [i for i in range(rank) if i not in moments.axes] + moments.axes
    x = builder.transpose(moments.x, perm) if perm != list(range(rank)) else moments.x
    inner = [shape[i] for i in moments.axes]
    inputs: list[ir.Value | None] = [x]
    for c, name, trivial in ((gain, "gain", 1.0), (bias, "bias", 0.0)):
        if c is None or np.allclose(c, trivial, rtol=1e-12, atol=0.0):
            inputs.append(None)
            continue
        full = np.broadcast_to(c.transpose(perm), (1,) * (rank - k) + tuple(inner)).reshape(inner)
        inputs.append(builder.constant(np.ascontiguousarray(full), name))
    if not moments.means:
        inputs.pop()
    while inputs[-1] is None:
        inputs.pop()
    op = "LayerNorm" if moments.means else "RMSNorm"
    new_shape = [shape[i] for i in perm]
    new = builder.node(op, inputs, new_shape, {"axes": k, "eps": moments.eps}, DOMAIN)
    if perm != list(range(rank)):
        new = builder.transpose(new, [int(i) for i in np.argsort(perm)])
    builder.insert_before(maker)
    replace(out, new)
