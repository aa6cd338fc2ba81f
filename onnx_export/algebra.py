"""Values of a graph as polynomials in other values: what a subgraph computes, however it is spelled.

A polynomial maps monomials to constant coefficients. A monomial is a set of (value, exponent); coefficients
are arrays that broadcast against the values, as the nodes themselves would. `x·(½ + ½ erf y)`,
`½x·(1 + erf y)` and `½(x + x erf y)` are one polynomial in x and `erf y`; `(x − m) / √v · γ + β` is
`γ x v^−½ − γ m v^−½ + β`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator

import numpy as np
import onnx_ir as ir

from .graph import behind, constant, passes

Monomial = frozenset[tuple[ir.Value, float]]
Polynomial = dict[Monomial, np.ndarray]
ONE: Monomial = frozenset()
MAX_TERMS = 12
MAX_DEPTH = 24
TOLERANCE = 5e-7  # relative, of constants: what float32 files and short decimals differ by
ARITHMETIC = ("Add", "Sub", "Mul", "Div", "Neg", "Reciprocal", "Sqrt", "Pow")


def single(value: ir.Value, exponent: float = 1.0) -> Monomial:
    return frozenset({(value, exponent)})


class _TooLarge(Exception):
    pass


def parse(value: ir.Value, stops: Collection[ir.Value] = ()) -> Polynomial:
    """The value as a polynomial; values in `stops`, and those that no arithmetic made, stay as they are."""
    return _parse(value, {id(behind(s)) for s in stops}, MAX_DEPTH)


def _parse(value: ir.Value, stops: set[int], depth: int) -> Polynomial:
    value = behind(value)
    if id(value) in stops:
        return {single(value): np.float64(1.0)}
    if (c := constant(value)) is not None:
        return {ONE: c.astype(np.float64)} if c.dtype.kind in "fiu" else {single(value): np.float64(1.0)}
    node = value.producer()
    if depth > 0 and node is not None and node.domain in ("", "ai.onnx"):
        try:
            found = _of_node(node, stops, depth - 1)
        except _TooLarge:
            found = None
        if found is not None and len(found) <= MAX_TERMS:
            return found
    return {single(value): np.float64(1.0)}


def _of_node(node: ir.Node, stops: set[int], depth: int) -> Polynomial | None:
    op, inputs = node.op_type, list(node.inputs)
    if op == "Where":
        return _where(inputs, stops, depth)
    if op not in ARITHMETIC or any(v is None for v in inputs):
        return None
    first = inputs[0]
    assert first is not None
    if op == "Sqrt":
        return _power(first, 0.5, stops, depth)
    if op == "Pow":
        exponent = constant(inputs[1])
        return (
            None if exponent is None or exponent.size != 1 else _power(first, exponent.item(), stops, depth)
        )
    terms = [_parse(v, stops, depth) for v in inputs if v is not None]
    if op == "Neg":
        return scaled(terms[0], -1.0)
    if op == "Reciprocal":
        return _inverse(terms[0])
    if op == "Add":
        return _sum(terms[0], terms[1])
    if op == "Sub":
        return _sum(terms[0], scaled(terms[1], -1.0))
    if op == "Div":
        inverse = _inverse(terms[1])
        return None if inverse is None else _product(terms[0], inverse)
    return _product(terms[0], terms[1])


def _where(inputs: list[ir.Value | None], stops: set[int], depth: int) -> Polynomial | None:
    """Where with a constant condition: a sum with coefficients 0 and 1; −inf counts only where taken."""
    condition = constant(inputs[0])
    if condition is None:
        return None
    total: Polynomial = {}
    for branch, taken in ((inputs[1], condition.astype(bool)), (inputs[2], ~condition.astype(bool))):
        if branch is None:
            return None
        part = {m: np.where(taken, c, 0.0) for m, c in _parse(branch, stops, depth).items()}
        total = _sum(total, part)
    return total


def _power(base: ir.Value, exponent: float, stops: set[int], depth: int) -> Polynomial | None:
    inside = _parse(base, stops, depth)
    if exponent in (1.0, 2.0, 3.0):
        result = inside
        for _ in range(int(exponent) - 1):
            result = _product(result, inside)
        return result
    if exponent not in (0.5, -0.5, -1.0):
        return None
    if exponent == -1.0 and (inverse := _inverse(inside)) is not None:
        return inverse
    if len(inside) == 1:  # √(1/v): powers of a single positive value
        ((monomial, c),) = inside.items()
        ((atom, power), *rest) = monomial or ((None, 0.0),)
        if atom is not None and not rest and power == -1.0 and np.all(c == 1.0):
            return {single(atom, power * exponent): np.float64(1.0)}
    return {single(behind(base), exponent): np.float64(1.0)}


def scaled(p: Polynomial, factor: float | np.ndarray) -> Polynomial:
    return {m: c * factor for m, c in p.items()}


def _sum(p: Polynomial, q: Polynomial) -> Polynomial:
    total = dict(p)
    for monomial, c in q.items():
        c = c + total[monomial] if monomial in total else c
        if np.any(np.isnan(c)):
            raise _TooLarge
        if np.any(c != 0.0) or monomial == ONE:
            total[monomial] = c
        else:
            total.pop(monomial, None)
    return total


def _product(p: Polynomial, q: Polynomial) -> Polynomial:
    if len(p) * len(q) > MAX_TERMS * 4:
        raise _TooLarge
    total: Polynomial = {}
    for m1, c1 in p.items():
        for m2, c2 in q.items():
            powers: dict[ir.Value, float] = dict(m1)
            for atom, exponent in m2:
                powers[atom] = powers.get(atom, 0.0) + exponent
            with np.errstate(invalid="ignore", over="ignore"):
                c = np.asarray(c1) * c2
            if np.any(np.isnan(c)):
                raise _TooLarge
            total = _sum(total, {frozenset((a, e) for a, e in powers.items() if e): c})
    return total


def _inverse(p: Polynomial) -> Polynomial | None:
    if len(p) != 1:
        return None
    ((monomial, c),) = p.items()
    if np.any(c == 0.0) or not np.all(np.isfinite(c)):
        return None
    return {frozenset((a, -e) for a, e in monomial): 1.0 / c}


def scalar(c: np.ndarray) -> float | None:
    """The number that all entries of a coefficient are, or None."""
    flat = np.asarray(c).reshape(-1)
    return float(flat[0]) if flat.size and np.all(flat == flat[0]) else None


def downstream(value: ir.Value, reach: int) -> Iterator[ir.Value]:
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


def close(a: float | None, b: float) -> bool:
    return a is not None and math.isclose(a, b, rel_tol=TOLERANCE)
