"""Layer and RMS normalisation that a file spells out in small operators.

With m the mean and v the variance plus ε, `γ·x·v^−½ − γ·m·v^−½ + β` is a LayerNorm, in whatever order it is
computed; `γ·x·v^−½` with v the mean square plus ε is an RMSNorm.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from .algebra import ONE, TOLERANCE, Monomial, Polynomial, close, downstream, parse, scalar, single
from .graph import Builder, behind, constant, passes, reduced_axes, replace, sizes
from .ops import DOMAIN

REACH = 10  # nodes between a square root and the end of its pattern


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
        if not close(minus[1] * mean[2] ** 2, -growth):
            return None
        return _Moments(base, (minus[0],), axes, eps / growth, growth)
    for monomial, factor in parse(base).items():  # x − mean ?
        if len(monomial) != 1:
            continue
        ((atom, exponent),) = monomial
        mean = _mean_of(atom) if exponent == 1.0 else None
        if mean is None or mean[1] != axes or not close(scalar(np.asarray(factor) * mean[2]), -1.0):
            continue
        x = mean[0]
        own = parse(base, (x, atom))
        if set(own) == {single(x), single(atom)} and close(scalar(own[single(x)]), 1.0):
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


def fuse_normalization(graph: ir.Graph, node: ir.Node) -> None:
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
    for out in downstream(node.outputs[0], REACH):
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
