"""A VNN-LIB 2.0 query: networks, variables, the box of inputs, and a formula over polynomials."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, NoReturn

import vnnlib  # the package, not the module of that name in this one

from ..errors import InputError, UnsupportedModelError
from ..polynomials import combined
from ..vnnlib_expression import expression, flat_index
from ..vnnlib_tree import line_of, parse
from .arithmetic import Interval
from .inputs import Inputs, Variable, enclosed
from .network import Network, Port
from .node import FLOATS

TYPES = {
    "Real": "real", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64", "Bool": "bool",
    **{f"I{b}": f"int{b}" for b in (8, 16, 32, 64)}, **{f"U{b}": f"uint{b}" for b in (8, 16, 32, 64)},
}  # fmt: skip
SIGNS = {
    vnnlib.LessThan: "<",
    vnnlib.LessEqual: "<=",
    vnnlib.GreaterThan: ">",
    vnnlib.GreaterEqual: ">=",
    vnnlib.Equal: "=",
    vnnlib.NotEqual: "!=",
}
MAX_TERMS = 5000  # of all constraints together

_ISOMORPHIC = re.compile(r"\(\s*declare-network\s+(\w+)\s*\(\s*isomorphic-to\s+(\w+)\s*\)")

Entry = tuple[int, int]  # number of a variable, and of one of its values
Polynomial = dict[tuple[Entry, ...], Fraction]


@dataclass(frozen=True)
class Atom:
    """A polynomial compared with 0.

    Attributes:
        exact: its terms. terms: the same with coefficients as intervals of one number, which hold the
            decimal number that was written and its rounded forms.
        sign: <, <=, = or !=.
    """

    exact: Polynomial
    terms: tuple[tuple[tuple[Entry, ...], Interval], ...]
    sign: str


@dataclass(frozen=True)
class All:
    """All of its parts hold."""

    parts: tuple[Any, ...]


@dataclass(frozen=True)
class Some:
    """One of its parts holds at least."""

    parts: tuple[Any, ...]


Formula = Atom | All | Some


class Query:
    """One query and its networks.

    Attributes:
        variables: as declared, in order.
        uses: the network of each declaration; two may share one.
        inputs: the variables of kind input, and their box.
        formula: the assertions without what the box says.
        floats: element types of floating point values; () for real numbers.
    """

    def __init__(self, path: str | Path, text: str, files: Mapping[str, Path]) -> None:
        self.path = path
        # the package wants isomorphic networks to have the same types, which the standard does not
        self._isomorphic = dict(_ISOMORPHIC.findall(text))
        tree = parse(path, _ISOMORPHIC.sub(_blank, text))
        self.uses: list[Network] = []
        self.variables: list[Variable] = []
        self._numbers: dict[str, int] = {}
        self._declare(tree.networks, files)
        self.floats = tuple(sorted({t for use in self.uses for t in use.floats}))
        self.inputs = Inputs([v for v in self.variables if v.kind == "input"], self.floats)
        self.formula: Formula = All(tuple(self._beside([self._formula(a.expr) for a in tree.assertions])))
        self.inputs.close()

    @property
    def simple(self) -> bool:
        """Whether it is about one network's inputs and outputs, each constraint linear and on one side."""
        return (
            len(self.uses) == 1
            and all(v.kind != "hidden" and v.type in ("real", "float32", "float64") for v in self.variables)
            and self._simple(self.formula)
        )

    def _simple(self, formula: Formula) -> bool:
        if not isinstance(formula, Atom):
            return all(map(self._simple, formula.parts))
        kinds = [self.variables[number].kind for monomial in formula.exact for number, _ in monomial]
        linear = all(len(monomial) <= 1 for monomial in formula.exact)
        return linear and (len(kinds) <= 1 or "input" not in kinds)

    # -- declarations -----------------------------------------------------------------------------------

    def _declare(self, networks: Sequence[Any], files: Mapping[str, Path]) -> None:
        known: dict[str, Network] = {}
        loaded: dict[Path, Network] = {}
        needed = [n.name for n in networks if not n.equal_to]
        if set(files) != set(needed):
            missing = sorted(set(needed) - set(files))
            spare = sorted(set(files) - set(needed))
            what = f"no file for the network {missing[0]}" if missing else f"no network is called {spare[0]}"
            raise InputError(f"{self.path}: {what}; give --network NAME=FILE for each of {', '.join(needed)}")
        first = 0
        for number, declared in enumerate(networks):
            if declared.equal_to:
                network = known[declared.equal_to]
            else:
                file = files[declared.name]
                network = loaded.setdefault(file, None) or Network(file)  # type: ignore[arg-type]
                loaded[file] = network
            known[declared.name] = network
            twin = self._isomorphic.get(declared.name) or declared.isometric_to
            if twin:
                self._same(known, twin, declared.name)
            self.uses.append(network)
            ports = (
                ("input", declared.inputs, network.inputs),
                ("output", declared.outputs, network.outputs),
            )
            for kind, definitions, available in ports:
                if len(definitions) != len(available):
                    raise InputError(
                        f"{self.path}: network {declared.name} declares {len(definitions)} {kind}s, "
                        f"{network.path} has {len(available)}"
                    )
                for d, port in zip(definitions, available, strict=True):
                    v = self._variable(d, kind, number, port, first)
                    first += v.size if kind == "input" else 0
            for d in declared.hidden:
                tensor = _unquoted(d.onnx_name)
                if not any(tensor in n.output for n in network.model.graph.node):
                    raise InputError(f"{self.path}: {network.path} has no tensor {tensor!r}")
                kind = TYPES.get(str(d.dtype).removeprefix("DType."), "")
                self._add(Variable(d.name, "hidden", kind, tuple(d.shape), number, tensor, ""))
        order = [d.name for n in networks for d in (*n.inputs, *n.hidden, *n.outputs)]
        self.variables.sort(key=lambda v: order.index(v.name))
        self._numbers = {v.name: i for i, v in enumerate(self.variables)}
        self._types()

    def _variable(self, d: Any, kind: str, use: int, port: Port, first: int) -> Variable:
        network = self.uses[use]
        name = str(d.dtype).removeprefix("DType.")
        if name not in TYPES:
            raise InputError(f"{self.path}: {d.name} has type {name}, which is not supported")
        shape = network.shape_of(port, tuple(d.shape))
        both = TYPES[name] in FLOATS and port.type in FLOATS  # bounds hold for both types then
        lenient = both and d.network_name in self._isomorphic
        if TYPES[name] not in ("real", port.type) and not lenient:
            raise InputError(
                f"{self.path}: {d.name} is declared {TYPES[name]}, "
                f"but {port.name} of {network.path} is {port.type}"
            )
        return self._add(Variable(d.name, kind, TYPES[name], shape, use, port.name, port.type, first))

    def _add(self, variable: Variable) -> Variable:
        self.variables.append(variable)
        return variable

    def _same(self, known: Mapping[str, Network], twin: str, name: str) -> None:
        """Whether two networks are isomorphic: the same operators between ports of the same shapes."""
        if twin not in known or twin == name:
            raise InputError(f"{self.path}: {name} is isomorphic to {twin}, which is not declared before it")
        one, other = known[twin], known[name]
        for what, get in (
            ("operators", lambda n: [node.op_type for node in n.model.graph.node]),
            ("shapes", lambda n: [port.shape for port in (*n.inputs, *n.outputs)]),
        ):
            if get(one) != get(other):
                raise InputError(f"{self.path}: {name} is not isomorphic to {twin}: {what} differ")

    def _types(self) -> None:
        """Each network stands for real numbers if all its floating point ports are declared so; else for
        the types of the file and of the declarations."""
        stored = {id(use): set(use.floats) for use in self.uses}
        real = {id(use): True for use in self.uses}
        for v in self.variables:
            if v.type in FLOATS:
                stored[id(self.uses[v.use])].add(v.type)
                real[id(self.uses[v.use])] = False
        for use in self.uses:
            use.prepare(() if real[id(use)] else sorted(stored[id(use)]))

    # -- formulas ---------------------------------------------------------------------------------------

    def fail(self, at: int, message: str) -> NoReturn:
        raise InputError(f"{self.path}:{at}: {message}")

    def _formula(self, node: Any) -> Formula:
        if isinstance(node, vnnlib.And):
            return All(tuple(self._formula(a) for a in node.args))
        if isinstance(node, vnnlib.Or):
            return Some(tuple(self._formula(a) for a in node.args))
        sign = SIGNS[type(node)]
        left, right = self._polynomial(node.lhs), self._polynomial(node.rhs)
        if sign[0] == ">":
            left, right, sign = right, left, "<" + sign[1:]
        exact = combined(left, right, -1)
        exact = {m: c for m, c in exact.items() if c}
        if len(exact) > MAX_TERMS:
            self.fail(line_of(node), f"a constraint of {len(exact)} terms; {MAX_TERMS} can be read")
        return Atom(exact, tuple((m, self._number(c, line_of(node))) for m, c in exact.items()), sign)

    def _number(self, exact: Fraction, at: int) -> Interval:
        try:
            return enclosed(exact, self.floats)
        except OverflowError:
            self.fail(at, "a number beyond the range of float64")

    def _polynomial(self, node: Any) -> Polynomial:
        return expression(node, self._entry, lambda literal: Fraction(literal.lexeme), self._check_terms)

    def _entry(self, node: Any) -> tuple[Entry]:
        number = self._numbers[node.name]
        return ((number, flat_index(node.indices, self.variables[number].shape)),)

    def _check_terms(self, node: Any, result: Polynomial) -> None:
        if len(result) > MAX_TERMS:
            self.fail(line_of(node), f"a polynomial of more than {MAX_TERMS} terms")

    def _beside(self, parts: Sequence[Formula]) -> list[Formula]:
        """Puts bounds of single inputs into the box; returns the rest."""
        rest: list[Formula] = []
        for part in parts:
            if isinstance(part, All):
                rest += self._beside(part.parts)
            elif not isinstance(part, Atom) or not self._bound(part):
                rest.append(part)
        return rest

    def _bound(self, atom: Atom) -> bool:
        names = [m for m in atom.exact if m]
        if len(names) != 1 or len(names[0]) != 1 or atom.sign == "!=":
            return False
        ((number, index),) = names[0]
        v = self.variables[number]
        if v.kind != "input":
            return False
        factor = atom.exact[names[0]]
        limit = -atom.exact.get((), Fraction(0)) / factor
        if atom.sign == "=" or factor > 0:
            self.inputs.bound(v.first + index, limit, True, atom.sign == "<")
        if atom.sign == "=" or factor < 0:
            self.inputs.bound(v.first + index, limit, False, atom.sign == "<")
        return True


def _blank(match: re.Match[str]) -> str:
    """A declaration without its relation to another network, lines kept."""
    text = match[0]
    begin = text.index("(", 1)
    return text[:begin] + "".join(c if c == "\n" else " " for c in text[begin:])


def _unquoted(name: str | None) -> str:
    return (name or "").strip('"')


__all__ = ["All", "Atom", "Formula", "Query", "Some", "UnsupportedModelError", "Variable"]
