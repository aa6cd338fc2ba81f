"""VNN-LIB 2.0: the syntax tree of the package `vnnlib`, walked for linear constraints and l2 balls."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import Any

import vnnlib  # the package, not the module of that name here

from .errors import InputError
from .polynomials import combined
from .properties import Variable
from .vnnlib_cases import Ball, Constraints, Formula, Terms
from .vnnlib_expression import expression, flat_index
from .vnnlib_tree import line_of, parse

# the words of the standard for the types that can be read, by the package's names
_TYPES = {"Real": "real", "F32": "float32", "F64": "float64"}
_SIGNS = {
    vnnlib.LessThan: "<",
    vnnlib.LessEqual: "<=",
    vnnlib.GreaterThan: ">",
    vnnlib.GreaterEqual: ">=",
    vnnlib.Equal: "=",
    vnnlib.NotEqual: "!=",
}

Polynomial = dict[tuple[str, ...], Fraction]  # coefficient by monomial, a sorted tuple of variables


class Reader(Constraints):
    """Reads one file of one network with inputs and outputs only. Places are line numbers.

    Attributes:
        inputs, outputs: as declared, in order.
    """

    def __init__(self, path: object, text: str) -> None:
        super().__init__(path)
        query = parse(path, text)
        if len(query.networks) != 1:
            names = ", ".join(n.name for n in query.networks)
            raise InputError(f"{path}: {len(query.networks)} networks ({names}); only one can be verified")
        network = query.networks[0]
        if network.hidden:
            names = ", ".join(h.name for h in network.hidden)
            raise InputError(f"{path}: hidden nodes ({names}) are not supported, only inputs and outputs")
        self.inputs, self.outputs = self._declared(network.inputs), self._declared(network.outputs)
        self._first: dict[str, tuple[str, int, tuple[int, ...]]] = {}  # name to kind, first index, shape
        for kind, variables in (("X", self.inputs), ("Y", self.outputs)):
            first = 0
            for v in variables:
                self._first[v.name] = (kind, first, v.shape)
                first += math.prod(v.shape)
        for assertion in query.assertions:
            if not self._plain_bound(assertion.expr):
                self.require(self._formula(assertion.expr))

    def line(self, at: int) -> int:
        return at

    @staticmethod
    def count(variables: tuple[Variable, ...]) -> int:
        """Numbers that the variables hold together."""
        return sum(math.prod(v.shape) for v in variables)

    def shown(self, name: str) -> str:
        i = int(name[2:])
        for known, (kind, first, shape) in self._first.items():
            if kind == name[0] and first <= i < first + math.prod(shape):
                index, rest = [], i - first
                for size in reversed(shape):
                    index.append(str(rest % size))
                    rest //= size
                return f"{known}[{','.join(reversed(index))}]" if shape else known
        return name

    def _declared(self, definitions: Any) -> tuple[Variable, ...]:
        found = []
        for d in definitions:
            kind = str(d.dtype).removeprefix("DType.")
            if kind not in _TYPES:
                raise InputError(
                    f"{self.path}: {d.name} has type {kind}; real, float32 and float64 are supported"
                )
            found.append(Variable(d.name, _TYPES[kind], tuple(d.shape)))
        return tuple(found)

    def _plain_bound(self, node: Any) -> bool:
        """Reads `input <= number` and the like, of which a file has thousands; False for anything else."""
        sign = _SIGNS.get(type(node), "")
        if sign[:1] not in ("<", ">") or not isinstance(node.lhs, vnnlib.Var):
            return False
        if not isinstance(node.rhs, vnnlib.Literal) or self._first[node.lhs.name][0] != "X":
            return False
        ((name,),) = self._polynomial(node.lhs)
        value = float(node.rhs.lexeme)
        self.bound(self.shared, int(name[2:]), sign[0] == "<", value, len(sign) == 1, node.lhs.line)
        return True

    def _formula(self, node: Any) -> Formula:
        """Disjunction of conjunctions equivalent to a formula."""
        if isinstance(node, (vnnlib.And, vnnlib.Or)):
            parts = [self._formula(argument) for argument in node.args]
            if isinstance(node, vnnlib.Or):
                return list(itertools.chain(*parts))
            return self.conjunction(parts, line_of(node))
        sign, at = _SIGNS[type(node)], line_of(node)
        left, right = self._polynomial(node.lhs), self._polynomial(node.rhs)
        degree = max(map(len, [*left, *right]), default=0)
        if degree > 1:
            left = combined(left, right, -1)
            return [[self._quadratic(at, sign, left)]]
        return self.compare(at, sign, _linear(left), _linear(right))

    def _quadratic(self, at: int, sign: str, p: Polynomial) -> Ball:
        """The l2 ball that `p sign 0` says."""
        if sign in (">", ">="):
            p, sign = combined({}, p, -1), {">": "<", ">=": "<="}[sign]
        p = {m: c for m, c in p.items() if c}
        squares = {m: c for m, c in p.items() if len(m) > 1}
        names = {m[0] for m in squares}
        why = ""
        if any(len(m) > 2 or m[0] != m[1] for m in squares):
            bad = next(m for m in squares if len(m) > 2 or m[0] != m[1])
            why = f"it has the product {' * '.join(map(self.shown, bad))}"
        elif any(n[0] == "Y" for n in names):
            why = f"it has the square of the output {self.shown(next(n for n in names if n[0] == 'Y'))}"
        elif sign not in ("<", "<=") or min(squares.values(), default=1) <= 0:
            why = "it is not an upper limit of the squares"
        elif len(set(squares.values())) > 1:
            why = "its squares have different coefficients"
        elif any(m[0] not in names for m in p if len(m) == 1):
            bad = next(m for m in p if len(m) == 1 and m[0] not in names)
            why = f"it has {self.shown(bad[0])} outside the squares"
        if why or not squares:
            self.fail(
                at,
                "non-linear constraint that is not an l2 ball, the sum of (x - c)^2 over inputs <= r^2: "
                + (why or "all its squares cancel"),
            )
        scale = next(iter(squares.values()))
        center = {int(n[2:]): -p.get((n,), Fraction(0)) / (2 * scale) for n in names}
        square = sum((c * c for c in center.values()), Fraction(0)) - p.get((), Fraction(0)) / scale
        return Ball(at, center, square, sign == "<")

    def _polynomial(self, node: Any) -> Polynomial:
        """An arithmetic expression; exact on float64 literals."""
        return expression(node, self._entry, self._number, self._check_degree)

    def _entry(self, node: Any) -> tuple[str]:
        kind, first, shape = self._first[node.name]
        return (f"{kind}_{first + flat_index(node.indices, shape)}",)

    def _number(self, node: Any) -> Fraction:
        value = float(node.lexeme)
        if not math.isfinite(value):
            self.fail(node.line, f"{node.lexeme} is not a finite float64")
        return Fraction(value)

    def _check_degree(self, node: Any, result: Polynomial) -> None:
        if any(len(m) > 2 for m in result):
            self.fail(line_of(node), "a product of three variables; only linear constraints can be read")


def _linear(p: Polynomial) -> Terms:
    return {monomial[0] if monomial else "": value for monomial, value in p.items()}
