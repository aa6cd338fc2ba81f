"""From the constraints of a VNN-LIB file, of either version, to input sets and output specifications.

Variables are numbered through: X_0, X_1, … over all inputs and Y_0, Y_1, … over all outputs, as in VNN-LIB
1.0. Numbers are exact fractions until the sets are built, and sets are rounded outwards.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import replace
from fractions import Fraction
from typing import NamedTuple, NoReturn

import numpy as np
import torch

from .errors import InputError
from .polynomials import combined
from .properties import InputSet, Specification
from .vnnlib_sides import Sides, root_up

MAX_BRANCHES = 20_000  # branches of the disjunctive normal form of one VNN-LIB file
STRICT = 1e-6  # part of the radius that counterexamples stay away from the boundary of an open l2 ball

Case = tuple[InputSet, Specification]
Terms = dict[str, Fraction]  # coefficient by variable, the constant under ""


class Atom(NamedTuple):
    """A linear constraint: sum of coefficient * variable, plus the constant, is <= 0, or < 0 if strict."""

    at: int
    terms: Terms
    strict: bool = False


class Ball(NamedTuple):
    """The sum of (X_i - center[i])^2 is <= square, or < square if strict."""

    at: int
    center: dict[int, Fraction]
    square: Fraction
    strict: bool = False


Formula = list[list["Atom | Ball"]]  # a disjunction of conjunctions


class Row(NamedTuple):
    """`a y <= b` on the outputs, or `a y < b`."""

    a: dict[int, float]
    b: float
    strict: bool


class Branch(NamedTuple):
    """One conjunction of the normal form.

    at: where it stands in the file. lower, upper: bounds of inputs. open: strict bounds by input and side
    (True for upper); they are among the others as well."""

    at: int
    lower: dict[int, float]
    upper: dict[int, float]
    open: dict[tuple[int, bool], float]
    rows: list[Row]
    balls: list[Ball]


def new_branch(at: int) -> Branch:
    return Branch(at, {}, {}, {}, [], [])


def to_float(value: Fraction) -> float:
    """Nearest float64, inf beyond the range."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


class Constraints:
    """The constraints of one file; a reader of a version extends it and calls `require` and `bound`.

    Places in the file, `at`, are whatever the reader's `line` understands."""

    def __init__(self, path: object) -> None:
        self.path = path
        self.shared = new_branch(0)  # what holds in every branch
        self.disjunctions: list[Formula] = []  # requirements with several branches

    def line(self, at: int) -> int:
        raise NotImplementedError

    def declared_at(self, i: int) -> int | None:
        """Where X_i is declared, if the reader knows."""
        return None

    def shown(self, name: str) -> str:
        """What the file calls the variable X_i or Y_j."""
        return name

    def fail(self, at: int, message: str) -> NoReturn:
        raise InputError(f"{self.path}:{self.line(at)}: {message}")

    # -- formulas ---------------------------------------------------------------------------------------

    def compare(self, at: int, sign: str, left: Terms, right: Terms) -> Formula:
        """`left sign right` for one of <, <=, >, >=, =, !=; linear."""
        below, above = combined(left, right, -1), combined(right, left, -1)
        if sign == "!=":
            return [[Atom(at, below, True)], [Atom(at, above, True)]]
        strict = sign in "<>"
        atoms: list[Atom | Ball] = []
        if sign in ("<", "<=", "="):
            atoms.append(Atom(at, below, strict))
        if sign in (">", ">=", "="):
            atoms.append(Atom(at, above, strict))
        return [atoms]

    def conjunction(self, parts: list[Formula], at: int) -> Formula:
        """Normal form of a conjunction of normal forms."""
        count = math.prod(map(len, parts))
        if count > MAX_BRANCHES:
            self.fail(at, f"disjunctions multiply to {count} cases, more than {MAX_BRANCHES}; split the file")
        common = [atom for part in parts if len(part) == 1 for atom in part[0]]
        several = [part for part in parts if len(part) > 1]
        return [list(itertools.chain(common, *choice)) for choice in itertools.product(*several)]

    def require(self, formula: Formula) -> None:
        """One assertion of the file."""
        if len(formula) == 1:
            self._add(self.shared, formula[0])
        else:
            self.disjunctions.append(formula)

    def bound(self, branch: Branch, i: int, is_upper: bool, value: float, strict: bool, at: int) -> None:
        """X_i <= value, or >=."""
        if not math.isfinite(value):
            self.fail(at, f"the bound of {self.shown(f'X_{i}')} is not a finite float64")
        if is_upper:
            branch.upper[i] = min(value, branch.upper.get(i, math.inf))
        else:
            branch.lower[i] = max(value, branch.lower.get(i, -math.inf))
        if strict:
            old = branch.open.get((i, is_upper), value)
            branch.open[i, is_upper] = min(value, old) if is_upper else max(value, old)

    def _add(self, branch: Branch, atoms: Iterable[Atom | Ball]) -> None:
        for atom in atoms:
            if isinstance(atom, Ball):
                branch.balls.append(atom)
                continue
            at, terms, strict = atom
            names = [name for name, value in terms.items() if name and value]
            constant = terms.get("", Fraction(0))
            inputs = [name for name in names if name[0] == "X"]
            if not inputs:
                row = {int(name[2:]): to_float(terms[name]) for name in names}
                if not all(map(math.isfinite, (*row.values(), to_float(constant)))):
                    self.fail(at, "a coefficient of this constraint is not a finite float64")
                branch.rows.append(Row(row, to_float(-constant), strict))
            elif len(names) > 1:
                one, other = map(self.shown, names[:2])
                self.fail(at, f"{one} and {other} in one constraint; compare an input with a constant")
            else:
                exact = -constant / terms[inputs[0]]
                value, is_upper = to_float(exact), terms[inputs[0]] > 0
                if math.isfinite(value) and Fraction(value) != exact and (value < exact) == is_upper:
                    value = math.nextafter(value, math.inf if is_upper else -math.inf)  # round outwards
                self.bound(branch, int(inputs[0][2:]), is_upper, value, strict, at)

    # -- cases ------------------------------------------------------------------------------------------

    def branches(self) -> list[Branch]:
        """The normal form of the whole file, without what holds in every branch."""
        last = self.disjunctions[-1][0][0].at if self.disjunctions else 0
        found = []
        for atoms in self.conjunction(self.disjunctions, last):
            branch = new_branch(atoms[0].at if atoms else 0)
            self._add(branch, atoms)
            found.append(branch)
        return found

    def cases(self, shape: tuple[int, ...], inputs: int, outputs: int) -> tuple[tuple[Case, ...], str]:
        """Branches with the same set become the groups of one case; cases in the order of the file.

        Arguments:
            shape: of one input without the batch axis. inputs, outputs: numbers of X and of Y.

        Returns:
            The cases, and where there is none a warning that says why.
        """
        base = Sides.of(self.shared, inputs)
        sets: dict[tuple[bytes, ...], InputSet] = {}
        found: dict[tuple[bytes, ...], list[list[Row]]] = {}
        empty = ""
        for branch in self.branches():
            sides = base.cut(branch)
            ball = self._ball(branch)
            key = (*(side.tobytes() for side in sides), repr(ball and ball[1:]).encode())
            if key not in sets:
                for name, bound in (("lower", sides.lower), ("upper", sides.upper)):
                    free = np.isinf(bound)
                    if ball is not None:
                        free[list(ball.center)] = False
                    if free.any():
                        self._unbounded(branch, int(free.argmax()), name)
            if not (self.shared.rows or branch.rows):
                message = "no constraint on the outputs, so every output would be unsafe"
                if not self.disjunctions:
                    raise InputError(f"{self.path}: {message}")
                self.fail(branch.at, f"{message} in this branch")
            if key not in sets:
                made = self._set(sides, ball, shape)
                if isinstance(made, str):
                    empty = empty or made
                    continue
                sets[key] = made
            found.setdefault(key, []).append(branch.rows)
        if not found:
            return (), f"{self.path}: no input satisfies the property, so it holds trivially: {empty}"
        cases = [(sets[key], _specification(self.shared.rows, rows, outputs)) for key, rows in found.items()]
        return tuple(cases), ""

    def _unbounded(self, branch: Branch, i: int, side: str) -> NoReturn:
        message = f"{self.shown(f'X_{i}')} has no {side} bound; every input needs a lower and an upper one"
        at = branch.at if branch.lower or branch.upper else self.declared_at(i)
        if at is None:
            raise InputError(f"{self.path}: {message}")
        self.fail(at, message)

    def _ball(self, branch: Branch) -> Ball | None:
        balls = [*self.shared.balls, *branch.balls]
        if len(balls) > 1:
            self.fail(balls[1].at, "two l2 balls restrict the inputs at once; one ball or boxes can be read")
        return balls[0] if balls else None

    def _set(self, sides: Sides, ball: Ball | None, shape: tuple[int, ...]) -> InputSet | str:
        """The set between the sides and in the ball; or why it is empty."""
        crossed = sides.lower > sides.upper
        crossed |= (sides.lower == sides.upper) & (sides.open_lower | sides.open_upper)
        if crossed.any():
            i = int(crossed.argmax())
            low, high = sides.lower[i], sides.upper[i]
            return f"{self.shown(f'X_{i}')} has lower bound {low:g} and upper bound {high:g}"
        lower, upper = sides.tensors(shape)
        inner = sides.inner(shape)
        if ball is None:
            box = InputSet.box(lower, upper)
            return box if inner is None else replace(box, inner=InputSet.box(*inner))
        if ball.square < 0 or (ball.strict and ball.square == 0):
            return f"the square of a radius is {to_float(ball.square):g}"
        if not math.isfinite(to_float(ball.square)):
            self.fail(ball.at, "the radius of the l2 ball is not a finite float64")
        center, moved = lower.clone().flatten(), Fraction(0)
        for i, exact in ball.center.items():
            center[i] = to_float(exact)
            if not math.isfinite(float(center[i])):
                self.fail(ball.at, f"the centre of {self.shown(f'X_{i}')} is not a finite float64")
            moved += (Fraction(float(center[i])) - exact) ** 2
        others = np.ones(len(sides.lower), dtype=bool)
        others[list(ball.center)] = False
        if (sides.lower < sides.upper)[others].any():
            i = int(np.flatnonzero((sides.lower < sides.upper) & others)[0])
            self.fail(
                ball.at,
                f"{self.shown(f'X_{i}')} moves, but not in this l2 ball; a ball over all inputs that move, "
                "or boxes, can be read",
            )
        outside = (center < lower.flatten()) | (center > upper.flatten())
        if outside.any():
            i = int(outside.nonzero()[0, 0])
            self.fail(ball.at, f"the centre of the l2 ball lies outside the bounds of {self.shown(f'X_{i}')}")
        eps = root_up(ball.square)
        if moved:  # the centre was rounded
            eps = math.nextafter(eps + root_up(moved), math.inf)
        center = center.reshape(lower.shape)
        if bool((lower.isfinite() | upper.isfinite()).any()):
            whole = InputSet(center, 2.0, eps, lower, upper)
        else:
            whole = InputSet(center, 2.0, eps)
        if not ball.strict and inner is None:
            return whole
        if inner is not None and bool(((center < inner[0]) | (center > inner[1])).any()):
            self.fail(ball.at, "a strict bound of an input at the centre of the l2 ball cannot be read")
        low, high = inner or (whole.lower, whole.upper)
        inside = InputSet(center, 2.0, eps * (1 - STRICT) if ball.strict else eps, low, high)
        return replace(whole, inner=inside)


def _specification(shared: list[Row], branches: list[list[Row]], outputs: int) -> Specification:
    """Rows without repetition, and one group per branch."""
    numbers: dict[tuple[tuple[tuple[int, float], ...], float, bool], int] = {}
    groups: dict[tuple[int, ...], None] = {}  # an ordered set
    for rows in branches:
        members = [
            numbers.setdefault((tuple(sorted(row.a.items())), row.b, row.strict), len(numbers))
            for row in shared + rows
        ]
        groups[tuple(dict.fromkeys(members))] = None
    A = torch.zeros(len(numbers), outputs, dtype=torch.float64)
    b = torch.zeros(len(numbers), dtype=torch.float64)
    for (row, limit, _), number in numbers.items():
        for j, value in row:
            A[number, j] = value
        b[number] = limit
    strict = tuple(key[2] for key in numbers)
    return Specification(A, b, tuple(groups), strict if any(strict) else ())
