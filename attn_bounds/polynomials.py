"""Sums and products of polynomials with exact coefficients."""

from __future__ import annotations

import itertools
from fractions import Fraction
from typing import Any, TypeVar

Key = TypeVar("Key")
Monomial = TypeVar("Monomial", bound="tuple[Any, ...]")


def combined(a: dict[Key, Fraction], b: dict[Key, Fraction], factor: Fraction | int) -> dict[Key, Fraction]:
    """a + factor * b"""
    result = dict(a)
    for key, value in b.items():
        result[key] = result.get(key, Fraction(0)) + factor * value
    return result


def product(a: dict[Monomial, Fraction], b: dict[Monomial, Fraction]) -> dict[Monomial, Fraction]:
    """a * b; a monomial is a sorted tuple of its variables."""
    result: dict[Monomial, Fraction] = {}
    for (m, x), (n, y) in itertools.product(a.items(), b.items()):
        key: Any = tuple(sorted(m + n))
        result[key] = result.get(key, Fraction(0)) + x * y
    return result
