"""What is known about a query's formula on boxes: where it may hold, and where it surely does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .arithmetic import Interval, total
from .dual import FLOAT, Dual, added, scaled
from .functions import LARGEST
from .network import seeds
from .query import All, Atom, Formula, Query

Array = np.ndarray[Any, Any]


@dataclass
class Judgement:
    """Per box.

    Attributes:
        possible: (boxes,) False where no point of the box satisfies the formula.
        certain: (boxes,) True where all points do.
        score: (boxes,) how far inside the formula the middles of the constraints' ranges are; < 0: outside.
        effect: (boxes, n) how much each input moves the constraints that are not decided; 0 without
            derivatives.
    """

    possible: Array
    certain: Array
    score: Array
    effect: Array


class Judge:
    """Judges boxes of one query.

    Arguments:
        query: networks and formula.
        axes: the inputs that move and by which derivatives are taken; () for none.
    """

    def __init__(self, query: Query, axes: Array) -> None:
        self.query, self.axes = query, axes
        # a point of the real function is one of the network's own only if that has no rounding
        self.sharp = not query.floats

    def __call__(self, lower: Array, upper: Array, derivatives: bool = True) -> Judgement:
        """Boxes (boxes, n)."""
        derivatives = derivatives and bool(len(self.axes))
        values, fits = self._run(lower, upper, self.axes if derivatives else None)
        middle = None
        if derivatives and self.sharp:
            point = np.clip(lower / 2 + upper / 2, lower, upper)
            if np.isfinite(point).all():
                offsets = Interval(lower, upper) - Interval.of(point)
                middle = (self.values(point, point, None), offsets[:, self.axes])
        effect = np.zeros((len(lower), lower.shape[1]))
        width = upper - lower
        possible, certain, score = self._formula(self.query.formula, values, middle, effect, width)
        possible, certain, score = (np.broadcast_to(v, (len(lower),)) for v in (possible, certain, score))
        return Judgement(possible | ~fits, certain & fits, score, effect)

    def values(self, lower: Array, upper: Array, axes: Array | None = None) -> list[Dual]:
        """One per variable, flat: (boxes, size)."""
        return self._run(lower, upper, axes)[0]

    def _run(self, lower: Array, upper: Array, axes: Array | None) -> tuple[list[Dual], Array]:
        """The values, and (boxes,) where nothing can overflow in the networks' types, for beyond infinity
        and NaN bounds say nothing about an implementation. Real numbers do not overflow."""
        query = self.query
        whole, d = seeds(lower, upper, axes)
        fits = np.ones(len(lower), dtype=bool)
        found: dict[tuple[int, str], Dual] = {}
        for number, network in enumerate(query.uses):
            given = {}
            for v in query.inputs.variables:
                if v.use == number:
                    part = slice(v.first, v.first + v.size)
                    kind = FLOAT if v.stored.startswith(("float", "bfloat", "real")) else v.stored
                    given[v.tensor] = Dual(
                        whole[:, part].reshape(-1, *v.shape),
                        None if d is None else d[:, :, part].reshape(*d.shape[:2], *v.shape),
                        kind,
                    )
            with np.errstate(all="ignore"):
                values = network([given[p.name] for p in network.inputs])
            if network.floats:
                limit = min(LARGEST[name] for name in network.floats)
                for value in values.values():
                    if value.kind == FLOAT:
                        fits &= (value.v.largest() <= limit).reshape(len(value.v.lo), -1).all(1)
            for v in query.variables:
                if v.use == number:
                    value = values[v.tensor]
                    if value.shape != v.shape:
                        query.fail(
                            0, f"{v.name} has shape {list(v.shape)}, {v.tensor} has {list(value.shape)}"
                        )
                    found[number, v.name] = value.mapped(lambda x: x.reshape(x.shape[0], -1))
        return [found[v.use, v.name] for v in query.variables], fits

    def _formula(
        self, formula: Formula, values: list[Dual], middle: Any, effect: Array, width: Array
    ) -> tuple[Array, Array, Array]:
        if isinstance(formula, Atom):
            return self._atom(formula, values, middle, effect, width)
        parts = [self._formula(p, values, middle, effect, width) for p in formula.parts]
        # of a conjunction the least counts, of a disjunction the most; False < True
        every = isinstance(formula, All)
        result: Any = (np.asarray(every), np.asarray(every), np.asarray(np.inf if every else -np.inf))
        for part in parts:
            fold = np.minimum if every else np.maximum
            result = tuple(fold(a, b) for a, b in zip(result, part, strict=True))
        return result

    def _atom(
        self, atom: Atom, values: list[Dual], middle: Any, effect: Array, width: Array
    ) -> tuple[Array, Array, Array]:
        p = polynomial(atom, values)
        x = p.v
        if p.d is not None and middle is not None:
            at, offsets = middle
            # the mean value theorem: p(x) is in p(m) + p'(box) (x - m)
            x = x.meet(polynomial(atom, at).v + total(p.d * offsets, -1))
        with np.errstate(all="ignore"):
            possible, certain = _decided(x, atom.sign)
            centre = x.lo / 2 + x.hi / 2
        centre = np.where(np.isnan(centre), 0.0, centre)
        if p.d is not None:
            with np.errstate(all="ignore"):
                size = np.where(p.d.largest() > 0, p.d.largest() * width[:, self.axes], 0.0)
            open_ = (possible & ~certain)[:, None]
            effect[:, self.axes] += np.where(open_, np.nan_to_num(size, posinf=1e300), 0.0)
        score = -abs(centre) if atom.sign == "=" else abs(centre) if atom.sign == "!=" else -centre
        return possible, certain, score


def polynomial(atom: Atom, values: list[Dual]) -> Dual:
    """The constraint's left side, with v (boxes,) and d (boxes, axes)."""
    result: Dual | None = None
    for monomial, factor in atom.terms:
        term = Dual(factor.reshape(1))
        powers = {entry: monomial.count(entry) for entry in monomial}
        for (number, index), n in powers.items():
            x = values[number]
            one = Dual(x.v[:, index], None if x.d is None else x.d[:, :, index])
            slope = (
                None
                if one.d is None
                else scaled(one.d, one.v.power(n - 1) * Interval.of(float(n)))
                if n > 1
                else one.d
            )
            power = Dual(one.v.power(n), slope)
            term = Dual(term.v * power.v, added(scaled(power.d, term.v), scaled(term.d, power.v)))
        result = term if result is None else Dual(result.v + term.v, added(result.d, term.d))
    return result or Dual(Interval.of(np.zeros(1)))


def _decided(x: Interval, sign: str) -> tuple[Array, Array]:
    """Where `x sign 0` may hold, and where it surely does."""
    if sign == "<=":
        return x.lo <= 0, x.hi <= 0
    if sign == "<":
        return x.lo < 0, x.hi < 0
    zero = (x.lo == 0) & (x.hi == 0)
    apart = (x.lo > 0) | (x.hi < 0)
    return (~apart, zero) if sign == "=" else (~zero, apart)
