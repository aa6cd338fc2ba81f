"""VNN-LIB 2.0's arithmetic as polynomials. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import vnnlib  # the package, not the module of that name here

from .polynomials import Monomial, combined, product


def flat_index(indices: Sequence[int], shape: Sequence[int]) -> int:
    """Position in C order."""
    index = 0
    for i, size in zip(indices, shape, strict=True):
        index = index * size + i
    return index


def expression(
    node: Any,
    variable: Callable[[Any], Monomial],
    number: Callable[[Any], Fraction],
    check: Callable[[Any, dict[Monomial, Fraction]], None],
) -> dict[Monomial, Fraction]:
    """An arithmetic expression of the syntax tree.

    Arguments:
        variable, number: of a variable and of a literal. check: called with a node and each sum or product
            on the way; raises where it is more than can be read.
    """
    one: Any = ()

    def value(n: Any) -> dict[Monomial, Fraction]:
        return expression(n, variable, number, check)

    if isinstance(node, vnnlib.Var):
        return {variable(node): Fraction(1)}
    if isinstance(node, vnnlib.Literal):
        return {one: number(node)}
    if isinstance(node, vnnlib.Negate):
        return combined({}, value(node.expr), -1)
    if isinstance(node, vnnlib.Minus):
        result = value(node.head)
        for other in node.rest:
            result = combined(result, value(other), -1)
        return result
    factors = [value(a) for a in node.args]
    result = factors[0]
    for factor in factors[1:]:
        plus = isinstance(node, vnnlib.Plus)
        result = combined(result, factor, 1) if plus else product(result, factor)
        check(node, result)
    return result
