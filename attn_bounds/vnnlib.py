"""VNN-LIB 1.0 files: a fast path for the thousands of input bounds, s-expressions for the rest."""

from __future__ import annotations

import gzip
import itertools
import math
import re
import zlib
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple, NoReturn

import numpy as np
import torch

from .errors import InputError
from .properties import InputSet, Property, Specification

MAX_BRANCHES = 20_000  # branches of the disjunctive normal form of one VNN-LIB file
MAX_DEPTH = 100  # nesting of brackets in a VNN-LIB file

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
    rf"|assert\s*\(\s*([<>])=?\s+X_({_INDEX})\s+({_NUMBER})\s*\)\s*\))"
)
_IGNORED = {"set-logic", "set-info", "set-option", "check-sat", "get-model", "exit"}
_VERSION_2 = {"vnnlib-version", "declare-network", "declare-input", "declare-output", "declare-hidden"}


class _Node(NamedTuple):
    """An s-expression: a word, or a bracket with items (word == "")."""

    at: int  # offset in the text
    word: str
    items: list[_Node]


class _Atom(NamedTuple):
    """A linear constraint: sum of coefficient * variable, plus the constant under "", is <= 0."""

    at: int
    terms: dict[str, Fraction]


class _Branch(NamedTuple):
    """One conjunction of the normal form: bounds on inputs, and rows `a y <= b` on outputs."""

    at: int
    lower: dict[int, float]
    upper: dict[int, float]
    rows: list[tuple[dict[int, float], float]]


class _Reader:
    """Reads one file: commands into declarations and branches. Line numbers are found on errors only."""

    def __init__(self, path: str | Path, text: str) -> None:
        self.path = path
        self.text = text
        self.declared: dict[str, dict[int, int]] = {"X": {}, "Y": {}}  # index to offset
        self.shared = _Branch(0, {}, {}, [])  # what holds in every branch
        self.disjunctions: list[list[list[_Atom]]] = []  # asserts with several branches

    def fail(self, at: int, message: str) -> NoReturn:
        line = self.text.count("\n", 0, at) + 1
        raise InputError(f"{self.path}:{line}: {message}")

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
                self.bound(self.shared, i, comparison == "<", float(number), plain.start(4))
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
        if head in _VERSION_2:
            self.fail(node.at, "this is a VNN-LIB 2.0 file, which is not supported yet; use VNN-LIB 1.0")
        if head == "assert":
            if len(node.items) != 2:
                self.fail(node.at, "syntax error: assert takes one expression")
            branches = self.normal_form(node.items[1])
            if len(branches) == 1:
                self.add(self.shared, branches[0])
            else:
                self.disjunctions.append(branches)
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

    def bound(self, branch: _Branch, i: int, is_upper: bool, value: float, at: int) -> None:
        if not math.isfinite(value):
            self.fail(at, f"the bound of X_{i} is not a finite float64")
        if is_upper:
            branch.upper[i] = min(value, branch.upper.get(i, math.inf))
        else:
            branch.lower[i] = max(value, branch.lower.get(i, -math.inf))
        if branch is self.shared and branch.lower.get(i, -math.inf) > branch.upper.get(i, math.inf):
            self.fail(
                at,
                f"X_{i} has lower bound {branch.lower[i]} above its upper bound {branch.upper[i]}: "
                "no input satisfies the property, so it is vacuous",
            )

    def normal_form(self, node: _Node) -> list[list[_Atom]]:
        """Disjunction of conjunctions equivalent to a formula."""
        head = node.items[0].word if node.items else ""
        arguments = node.items[1:]
        if head in ("and", "or"):
            if not arguments:
                self.fail(node.at, f"({head}) without arguments")
            parts = [self.normal_form(argument) for argument in arguments]
            return self.product(parts, node.at) if head == "and" else list(itertools.chain(*parts))
        if head not in ("<=", ">=", "<", ">", "="):
            self.fail(node.at, f"cannot read {head or node.word or '()'!r} here; use and, or, <=, >= or =")
        if len(arguments) < 2:
            self.fail(node.at, f"({head}) needs two arguments")
        atoms = []
        for left, right in itertools.pairwise([self.linear(argument) for argument in arguments]):
            if head[0] in "<=":
                atoms.append(_Atom(node.at, _sum(left, right, -1)))
            if head[0] in ">=":
                atoms.append(_Atom(node.at, _sum(right, left, -1)))
        return [atoms]

    def product(self, parts: list[list[list[_Atom]]], at: int) -> list[list[_Atom]]:
        """Normal form of a conjunction of normal forms."""
        count = math.prod(map(len, parts))
        if count > MAX_BRANCHES:
            self.fail(at, f"disjunctions multiply to {count} cases, more than {MAX_BRANCHES}; split the file")
        common = [atom for part in parts if len(part) == 1 for atom in part[0]]
        several = [part for part in parts if len(part) > 1]
        return [list(itertools.chain(common, *choice)) for choice in itertools.product(*several)]

    def linear(self, node: _Node) -> dict[str, Fraction]:
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
            return _sum({}, result, -1)
        for item, other in zip(node.items[2:], values[1:], strict=True):
            if head in ("+", "-"):
                result = _sum(result, other, 1 if head == "+" else -1)
                continue
            if head == "*" and not result.keys() - {""}:
                result, other = other, result
            if other.keys() - {""}:
                self.fail(item.at, f"non-linear term in ({head} ...); only linear constraints can be read")
            factor = other.get("", Fraction(0))
            if head == "/" and factor == 0:
                self.fail(item.at, "division by zero")
            result = _sum({}, result, factor if head == "*" else 1 / factor)
        return result

    def add(self, branch: _Branch, atoms: list[_Atom]) -> None:
        """Add constraints to a branch."""
        for at, terms in atoms:
            names = [name for name, value in terms.items() if name and value]
            constant = terms.get("", Fraction(0))
            inputs = [name for name in names if name[0] == "X"]
            if not inputs:
                row = {int(name[2:]): _float(terms[name]) for name in names}
                if not all(map(math.isfinite, (*row.values(), _float(constant)))):
                    self.fail(at, "a coefficient of this constraint is not a finite float64")
                branch.rows.append((row, _float(-constant)))
            elif len(names) > 1:
                self.fail(
                    at, f"{names[0]} and {names[1]} in one constraint; compare an input with a constant"
                )
            else:
                exact = -constant / terms[inputs[0]]
                value, is_upper = _float(exact), terms[inputs[0]] > 0
                if math.isfinite(value) and Fraction(value) != exact and (value < exact) == is_upper:
                    value = math.nextafter(value, math.inf if is_upper else -math.inf)  # round outwards
                self.bound(branch, int(inputs[0][2:]), is_upper, value, at)

    def branches(self) -> list[_Branch]:
        """What each branch adds to the shared constraints."""
        last = self.disjunctions[-1][0][0].at if self.disjunctions else 0
        found = []
        for atoms in self.product(self.disjunctions, last):
            branch = _Branch(atoms[0].at if atoms else 0, {}, {}, [])
            self.add(branch, atoms)
            found.append(branch)
        return found


def _float(value: Fraction) -> float:
    """Nearest float64, inf beyond the range."""
    try:
        return float(value)
    except OverflowError:
        return math.copysign(math.inf, value)


def _sum(a: dict[str, Fraction], b: dict[str, Fraction], factor: Fraction | int) -> dict[str, Fraction]:
    """a + factor * b"""
    result = dict(a)
    for name, value in b.items():
        result[name] = result.get(name, Fraction(0)) + factor * value
    return result


def read_vnnlib(
    path: str | Path, input_shape: tuple[int, ...] | None = None, outputs: int | None = None
) -> Property:
    """Read a VNN-LIB 1.0 property, plain or compressed with gzip (told by content).

    The file describes the UNSAFE region: inputs X_0.. in a box and outputs Y_0.. that must not occur
    there. Disjunctions over inputs give several cases. Strict and non-strict comparisons are both read as
    non-strict, which can only enlarge the unsafe region. Branches that no input satisfies are left out.

    input_shape: features of one input without the batch axis, to check the number of X and to shape the
        boxes, which are float64 (1, *input_shape); None for (1, number of X).
    outputs: number of output values, to check the number of Y.

    Raises InputError that names file and line for what cannot be read or is not supported: VNN-LIB 2.0, an
    input without a bound or in a constraint with other variables, a non-linear term, an empty box."""
    reader = _Reader(path, _read_text(path))
    reader.read()
    count = {}
    for kind in "XY":
        known = reader.declared[kind]
        count[kind] = len(known)
        if not known:
            raise InputError(f"{path}: no {kind}_i is declared; is this a VNN-LIB 1.0 file?")
        if max(known) != len(known) - 1:
            missing = next(i for i in range(len(known)) if i not in known)
            reader.fail(known[max(known)], f"{kind}_{max(known)} is declared, but {kind}_{missing} is not")
    if input_shape is not None and math.prod(input_shape) != count["X"]:
        raise InputError(
            f"{path}: declares {count['X']} inputs X_i, but an input of shape {tuple(input_shape)} "
            f"has {math.prod(input_shape)} values; give the property of this model"
        )
    if outputs is not None and outputs != count["Y"]:
        raise InputError(f"{path}: declares {count['Y']} outputs Y_j, but the model has {outputs}")
    return Property(_stem(path), _cases(reader, input_shape or (count["X"],), count["X"], count["Y"]))


def _read_text(path: str | Path) -> str:
    try:
        data = Path(path).read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        return data.decode()
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InputError(f"{path}: the gzip data is damaged ({error})") from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: is neither text nor gzip; give a .vnnlib or .vnnlib.gz file") from error


def _stem(path: str | Path) -> str:
    return Path(path).name.removesuffix(".gz").removesuffix(".vnnlib")


def _cases(
    reader: _Reader, shape: tuple[int, ...], inputs: int, outputs: int
) -> tuple[tuple[InputSet, Specification], ...]:
    """Branches with the same box become the groups of one case; cases in the order of the file."""
    base_lower, base_upper = np.full(inputs, -math.inf), np.full(inputs, math.inf)
    base_lower[list(reader.shared.lower)] = list(reader.shared.lower.values())
    base_upper[list(reader.shared.upper)] = list(reader.shared.upper.values())
    boxes: dict[tuple[bytes, bytes], tuple[np.ndarray, np.ndarray]] = {}
    found: dict[tuple[bytes, bytes], list[_Branch]] = {}
    empty = None
    for branch in reader.branches():
        lower, upper = base_lower, base_upper
        if branch.lower:
            lower = lower.copy()
            at = list(branch.lower)
            lower[at] = np.maximum(lower[at], list(branch.lower.values()))
        if branch.upper:
            upper = upper.copy()
            at = list(branch.upper)
            upper[at] = np.minimum(upper[at], list(branch.upper.values()))
        for name, bound in (("lower", lower), ("upper", upper)):
            if np.isinf(bound).any():
                i = int(np.isinf(bound).argmax())
                reader.fail(
                    branch.at if branch.lower or branch.upper else reader.declared["X"][i],
                    f"X_{i} has no {name} bound; every input needs (assert (<= X_i u)) and (>= X_i l)",
                )
        if not (reader.shared.rows or branch.rows):
            message = "no constraint on the outputs Y_j, so every output would be unsafe"
            if not reader.disjunctions:
                raise InputError(f"{reader.path}: {message}")
            reader.fail(branch.at, f"{message} in this branch")
        if (lower > upper).any():
            empty = empty or (branch, int((lower > upper).argmax()))
            continue
        key = (lower.tobytes(), upper.tobytes())
        boxes[key] = (lower, upper)
        found.setdefault(key, []).append(branch)
    if empty is not None and not found:
        branch, i = empty
        message = f"X_{i} has a lower bound above its upper bound here and no other branch is possible"
        reader.fail(branch.at, f"{message}: no input satisfies the property, so it is vacuous")
    cases = []
    for key, branches in found.items():
        low, high = (torch.from_numpy(bound.copy()).reshape(1, *shape) for bound in boxes[key])
        spec = _specification(reader.shared.rows, [branch.rows for branch in branches], outputs)
        cases.append((InputSet.box(low, high), spec))
    return tuple(cases)


def _specification(
    shared: list[tuple[dict[int, float], float]],
    branches: list[list[tuple[dict[int, float], float]]],
    outputs: int,
) -> Specification:
    """Rows without repetition, and one group per branch."""
    numbers: dict[tuple[tuple[tuple[int, float], ...], float], int] = {}
    groups: dict[tuple[int, ...], None] = {}  # an ordered set
    for rows in branches:
        members = [
            numbers.setdefault((tuple(sorted(row.items())), limit), len(numbers))
            for row, limit in shared + rows
        ]
        groups[tuple(dict.fromkeys(members))] = None
    A = torch.zeros(len(numbers), outputs, dtype=torch.float64)
    b = torch.zeros(len(numbers), dtype=torch.float64)
    for (row, limit), number in numbers.items():
        for j, value in row:
            A[number, j] = value
        b[number] = limit
    return Specification(A, b, tuple(groups))
