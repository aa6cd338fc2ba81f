"""VNN-LIB 1.0: a fast path for the thousands of input bounds, s-expressions for the rest."""

from __future__ import annotations

import itertools
import math
import re
from fractions import Fraction
from typing import NamedTuple

from .errors import InputError
from .polynomials import combined
from .vnnlib_cases import Constraints, Formula, Terms
from .vnnlib_tree import MAX_DEPTH

_SKIP = r"\s*(?:;[^\n]*(?:\n\s*|\Z))*"  # white space and comments
_INDEX = r"(?:0|[1-9][0-9]*)"
_NUMBER = r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
_VARIABLE = re.compile(rf"([XY])_({_INDEX})")
_LITERAL = re.compile(_NUMBER)
_BLANK = re.compile(_SKIP)
_TOKEN = re.compile(r'[()]|"[^"]*"|\|[^|]*\||[^\s()";|]+')
# the two commands of which a file has thousands
_PLAIN = re.compile(
    rf"{_SKIP}\(\s*(?:declare-const\s+([XY])_({_INDEX})\s+Real\s*\)"
    rf"|assert\s*\(\s*([<>]=?)\s+X_({_INDEX})\s+({_NUMBER})\s*\)\s*\))"
)
_IGNORED = {"set-logic", "set-info", "set-option", "check-sat", "get-model", "exit"}


class _Node(NamedTuple):
    """An s-expression: a word, or a bracket with items (word == "")."""

    at: int  # offset in the text
    word: str
    items: list[_Node]


class Reader(Constraints):
    """Reads one file: commands into declarations and constraints. Lines are counted on errors only."""

    def __init__(self, path: object, text: str) -> None:
        super().__init__(path)
        self.text = text
        self.declared: dict[str, dict[int, int]] = {"X": {}, "Y": {}}  # index to offset

    def line(self, at: int) -> int:
        return self.text.count("\n", 0, at) + 1

    def declared_at(self, i: int) -> int:
        return self.declared["X"][i]

    def read(self) -> None:
        at, end = 0, len(self.text)
        inputs = self.declared["X"]
        while True:
            plain = _PLAIN.match(self.text, at)
            if plain is None:
                at = self.skip(at)
                if at == end:
                    return
                node, at = self.expression(at)
                self.command(node)
                continue
            kind, index, comparison, variable, number = plain.groups()
            if comparison is None:
                self.declare(kind, int(index), plain.start(1))
            else:
                i = int(variable)
                if i not in inputs:
                    self.fail(plain.start(4), f"X_{i} is not declared")
                is_upper, strict = comparison[0] == "<", len(comparison) == 1
                self.bound(self.shared, i, is_upper, float(number), strict, plain.start(4))
            at = plain.end()

    def skip(self, at: int) -> int:
        blank = _BLANK.match(self.text, at)
        return at if blank is None else blank.end()

    def expression(self, at: int) -> tuple[_Node, int]:
        """The s-expression at `at` and the offset behind it."""
        open_nodes: list[_Node] = []
        start = at
        while True:
            at = self.skip(at)
            token = _TOKEN.match(self.text, at)
            if token is None:
                if at == len(self.text):
                    self.fail(open_nodes[-1].at if open_nodes else start, "this '(' is never closed")
                self.fail(at, f"syntax error: unexpected {self.text[at]!r}")
            word = token[0]
            node = _Node(at, "" if word == "(" else word, [])
            at = token.end()
            if word == "(":
                if len(open_nodes) >= MAX_DEPTH:
                    self.fail(node.at, f"brackets are nested more than {MAX_DEPTH} deep")
                open_nodes.append(node)
                continue
            if word == ")":
                if not open_nodes:
                    self.fail(node.at, "syntax error: ')' without '('")
                node = open_nodes.pop()
            if not open_nodes:
                return node, at
            open_nodes[-1].items.append(node)

    def command(self, node: _Node) -> None:
        head = node.items[0].word if node.items else ""
        if head == "assert":
            if len(node.items) != 2:
                self.fail(node.at, "syntax error: assert takes one expression")
            self.require(self.normal_form(node.items[1]))
        elif head in ("declare-const", "declare-fun"):
            arguments = node.items[1:]
            if head == "declare-fun" and len(arguments) == 3 and arguments[1] == (arguments[1].at, "", []):
                del arguments[1]  # no parameters: the same as declare-const
            variable = _VARIABLE.fullmatch(arguments[0].word) if len(arguments) == 2 else None
            if variable is None or arguments[1].word != "Real":
                self.fail(node.at, "cannot read this declaration; use (declare-const X_i Real), or Y_j")
            self.declare(variable[1], int(variable[2]), arguments[0].at)
        elif head not in _IGNORED:
            shown = self.text[node.at : node.at + 30].split("\n")[0]
            self.fail(node.at, f"syntax error at {shown!r}: expected (declare-const ...) or (assert ...)")

    def declare(self, kind: str, index: int, at: int) -> None:
        if index in self.declared[kind]:
            self.fail(at, f"{kind}_{index} is declared twice")
        self.declared[kind][index] = at

    def normal_form(self, node: _Node) -> Formula:
        """Disjunction of conjunctions equivalent to a formula."""
        head = node.items[0].word if node.items else ""
        arguments = node.items[1:]
        if head in ("and", "or"):
            if not arguments:
                self.fail(node.at, f"({head}) without arguments")
            parts = [self.normal_form(argument) for argument in arguments]
            return self.conjunction(parts, node.at) if head == "and" else list(itertools.chain(*parts))
        if head not in ("<=", ">=", "<", ">", "="):
            self.fail(node.at, f"cannot read {head or node.word or '()'!r} here; use and, or, <=, >= or =")
        if len(arguments) < 2:
            self.fail(node.at, f"({head}) needs two arguments")
        values = [self.linear(argument) for argument in arguments]
        parts = [self.compare(node.at, head, left, right) for left, right in itertools.pairwise(values)]
        return self.conjunction(parts, node.at)

    def linear(self, node: _Node) -> Terms:
        """A linear expression: coefficients by variable, the constant under ""; exact on float64 literals."""
        if node.word:
            variable = _VARIABLE.fullmatch(node.word)
            if variable is not None:
                if int(variable[2]) not in self.declared[variable[1]]:
                    self.fail(node.at, f"{node.word} is not declared")
                return {node.word: Fraction(1)}
            if _LITERAL.fullmatch(node.word):
                value = float(node.word)
                if not math.isfinite(value):
                    self.fail(node.at, f"{node.word} is not a finite float64")
                return {"": Fraction(value)}
            self.fail(node.at, f"{node.word} is neither a number nor a declared variable X_i or Y_j")
        head = node.items[0].word if node.items else ""
        if head not in ("+", "-", "*", "/") or len(node.items) < 2:
            self.fail(node.at, f"cannot read {head or '()'!r} as a linear expression; use +, -, * or /")
        values = [self.linear(item) for item in node.items[1:]]
        result = values[0]
        if head == "-" and len(values) == 1:
            return combined({}, result, -1)
        for item, other in zip(node.items[2:], values[1:], strict=True):
            if head in ("+", "-"):
                result = combined(result, other, 1 if head == "+" else -1)
                continue
            if head == "*" and not result.keys() - {""}:
                result, other = other, result
            if other.keys() - {""}:
                self.fail(item.at, f"non-linear term in ({head} ...); only linear constraints can be read")
            factor = other.get("", Fraction(0))
            if head == "/" and factor == 0:
                self.fail(item.at, "division by zero")
            result = combined({}, result, factor if head == "*" else 1 / factor)
        return result

    def counts(self) -> tuple[int, int]:
        """Numbers of X and of Y."""
        for kind, known in self.declared.items():
            if not known:
                raise InputError(f"{self.path}: no {kind}_i is declared; is this a VNN-LIB file?")
            if max(known) != len(known) - 1:
                missing = next(i for i in range(len(known)) if i not in known)
                self.fail(known[max(known)], f"{kind}_{max(known)} is declared, but {kind}_{missing} is not")
        return len(self.declared["X"]), len(self.declared["Y"])
