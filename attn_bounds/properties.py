"""What is to be certified: input sets and output specifications."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from attn_bounds.errors import InputError

MAX_GROUPS = 5000  # k-subsets that Specification.top_k writes out


# ---------------------------------------------------------------------------------------------------------
# input sets


def _round_down(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Largest values of `dtype` that are <= x (float64)."""
    y = x.to(dtype)
    return torch.where(y.double() > x, torch.nextafter(y, torch.full_like(y, -math.inf)), y)


def _round_up(x: Tensor, dtype: torch.dtype) -> Tensor:
    return -_round_down(-x, dtype)


def _add_down(a: Tensor, b: float) -> Tensor:
    """Lower bound of the exact a + b, at most one unit in the last place below it (float64)."""
    s = a + b
    t = s - a  # two-sum of Knuth: s + error is exactly a + b
    error = (a - (s - t)) + (b - t)
    return torch.where(error < 0, torch.nextafter(s, torch.full_like(s, -math.inf)), s)


def _clamp_inside(x: Tensor, lower: Tensor, upper: Tensor, dtype: torch.dtype) -> Tensor:
    """x (float64) clamped to [lower, upper] (float64) and rounded to `dtype` without leaving it.

    Where no number of `dtype` lies between the limits the result is one of its two neighbours."""
    y = x.clamp(lower, upper).to(dtype)
    infinity = torch.full_like(y, math.inf)
    y = torch.where(y.double() < lower, torch.nextafter(y, infinity), y)
    return torch.where(y.double() > upper, torch.nextafter(y, -infinity), y)


def _scale_to_radius(size: Tensor, room: Tensor, eps: float) -> Tensor:
    """Per row the largest t with ||min(t * size, room)||_2 <= eps, exact by sorting the break points.

    size, room: (rows, n), both >= 0, room may be inf. Returns (rows, 1), at most 1e300."""
    room = torch.where(size > 0, room, torch.zeros_like(room))
    ratio = torch.where(size > 0, room / size, torch.zeros_like(room))  # the t at which each one saturates
    ratio, order = ratio.sort(dim=1)
    room2, size2 = room.gather(1, order).square(), size.gather(1, order).square()
    saturated = torch.cat([torch.zeros_like(room2[:, :1]), room2.cumsum(1)], 1)  # by number of saturated ones
    free = torch.cat([size2.flip(1).cumsum(1).flip(1), torch.zeros_like(size2[:, :1])], 1)
    at_break = saturated[:, :-1] + (ratio.square() * free[:, :-1]).nan_to_num(nan=math.inf, posinf=math.inf)
    count = (at_break < eps * eps).sum(1, keepdim=True)
    t = ((eps * eps - saturated.gather(1, count)).clamp(min=0) / free.gather(1, count)).sqrt()
    return t.nan_to_num(nan=1e300, posinf=1e300).clamp(max=1e300)


def _soft_threshold(size: Tensor, room: Tensor, eps: float) -> Tensor:
    """min(max(size - t, 0), room) with the smallest t >= 0 per row at which it sums to at most eps.

    size, room: (rows, n), both >= 0, room may be inf."""
    low = torch.zeros_like(size[:, :1])
    high = size.amax(1, keepdim=True)
    for _ in range(60):
        t = (low + high) / 2
        fits = torch.minimum((size - t).clamp(min=0), room).sum(1, keepdim=True) <= eps
        low, high = torch.where(fits, low, t), torch.where(fits, t, high)
    return torch.minimum((size - high).clamp(min=0), room)  # the end of the bracket that fits


@dataclass(frozen=True, eq=False)
class InputSet:
    """A set of inputs of one model input: a box, or an l1 or l2 ball, optionally cut by elementwise limits.

    center: (1, *features), float32 or float64, finite; for norm inf it need not lie in a clipped box.
    norm: 1.0, 2.0 or inf.
    eps: radius >= 0 in the units of the input; None for a box with its own widths.
    lower, upper: (1, *features) like center. For norm inf they are the set: [center - eps, center + eps]
        cut by the clip range, rounded outwards by less than one unit in the last place. For l1 and l2
        they are None or a range that the ball is intersected with.
    inner: a smaller set, where some limits are strict: bounds hold on the closed set, but a counterexample
        must lie in this one.

    Raises InputError for a tensor or number that does not describe a non-empty set."""

    center: Tensor
    norm: float
    eps: float | None
    lower: Tensor | None = None
    upper: Tensor | None = None
    inner: InputSet | None = None

    def __post_init__(self) -> None:
        _check_values("center", self.center)
        if self.norm not in (1, 2, math.inf):
            raise InputError(f"norm {self.norm!r} is not known; use 1.0, 2.0 or math.inf")
        object.__setattr__(self, "norm", float(self.norm))
        if self.eps is None and self.norm != math.inf:
            raise InputError(f"an l{self.norm:g} ball needs a radius eps")
        if self.eps is not None:
            if not 0 <= self.eps < math.inf:
                raise InputError(f"eps is {self.eps}; it must be a finite number >= 0")
            object.__setattr__(self, "eps", float(self.eps))
        if (self.lower is None) != (self.upper is None):
            raise InputError("lower and upper must be given both or neither")
        if self.lower is None or self.upper is None:
            if self.norm == math.inf:
                raise InputError("a set of norm inf needs lower and upper; use InputSet.ball or InputSet.box")
            return
        for name, limit in (("lower", self.lower), ("upper", self.upper)):
            if limit.shape != self.center.shape or limit.dtype != self.center.dtype:
                raise InputError(
                    f"{name} has shape {tuple(limit.shape)} and {limit.dtype}, "
                    f"center {tuple(self.center.shape)} and {self.center.dtype}; they must agree"
                )
            # an l1 or l2 ball is bounded without its limits, so they may be infinite
            if limit.isnan().any() or (self.norm == math.inf and limit.isinf().any()):
                raise InputError(f"{name} has values that are not finite")
        if (self.lower > self.upper).any():
            first = int((self.lower > self.upper).flatten().nonzero()[0, 0])
            low, high = self.lower.flatten()[first].item(), self.upper.flatten()[first].item()
            raise InputError(f"empty box: element {first} has lower {low} > upper {high}")
        outside = (self.center < self.lower) | (self.center > self.upper)
        if self.norm != math.inf and outside.any():
            raise InputError(
                f"element {int(outside.flatten().nonzero()[0, 0])} of center lies outside the clip range; "
                f"an l{self.norm:g} ball needs its centre inside"
            )

    @classmethod
    def ball(
        cls,
        center: Tensor,
        norm: float,
        eps: float,
        clip: tuple[float, float] | None = None,
        mask: Tensor | None = None,
    ) -> InputSet:
        """All x with ||x - center||_norm <= eps, and clip[0] <= x <= clip[1] elementwise if clip is given.

        center: (1, *features).
        mask: bool, broadcasts to center: the entries that may move (some tokens, some features); default all.

        Raises InputError as the class does, and for a clip range that is NaN or empty, or that misses the
        ball."""
        _check_values("center", center)
        center = center.detach().clone()
        low, high = (-math.inf, math.inf) if clip is None else (float(clip[0]), float(clip[1]))
        if not low <= high:
            raise InputError(f"clip {clip} is not a range; give (smallest, largest) allowed value")
        if norm != math.inf or not 0 <= eps < math.inf:  # the second is refused by the class
            if clip is None and mask is None:
                return cls(center, norm, eps)
            full = torch.ones_like(center, dtype=torch.float64)
            lower, upper = _round_down(low * full, center.dtype), _round_up(high * full, center.dtype)
        else:
            exact = center.double()
            lower = _round_down(_add_down(exact, -eps).clamp(min=low), center.dtype)
            upper = _round_up((-_add_down(-exact, -eps)).clamp(max=high), center.dtype)
        if mask is not None:
            try:
                moves = torch.as_tensor(mask, dtype=torch.bool).expand(center.shape)
            except RuntimeError:
                raise InputError(
                    f"mask has shape {tuple(mask.shape)}; it must broadcast to {tuple(center.shape)}"
                ) from None
            lower, upper = torch.where(moves, lower, center), torch.where(moves, upper, center)
        return cls(center, norm, eps, lower, upper)

    @classmethod
    def box(cls, lower: Tensor, upper: Tensor) -> InputSet:
        """All x with lower <= x <= upper elementwise; lower, upper: (1, *features), finite.

        The centre is the midpoint. Raises InputError as the class does."""
        _check_values("lower", lower)
        _check_values("upper", upper)
        if lower.shape != upper.shape or lower.dtype != upper.dtype:
            raise InputError(
                f"lower has shape {tuple(lower.shape)} and {lower.dtype}, "
                f"upper {tuple(upper.shape)} and {upper.dtype}; they must agree"
            )
        lower, upper = lower.detach().clone(), upper.detach().clone()
        middle = lower / 2 + upper / 2
        return cls(torch.minimum(torch.maximum(middle, lower), upper), math.inf, None, lower, upper)

    def to(self, dtype: torch.dtype) -> InputSet:
        """The set in another floating-point type, never smaller than it was.

        Limits are rounded outwards; eps grows by the distance that rounding moves the centre, if any."""
        if dtype == self.center.dtype:
            return self
        center = self.center.to(dtype)
        eps = self.eps
        if eps is not None:
            moved = self._length(center.double().flatten(1) - self.center.double().flatten(1)).item()
            eps = math.nextafter(eps + moved, math.inf) if moved > 0 else eps
        if self.lower is None or self.upper is None:
            return InputSet(center, self.norm, eps)
        lower, upper = _round_down(self.lower.double(), dtype), _round_up(self.upper.double(), dtype)
        return InputSet(center, self.norm, eps, lower, upper)

    def contains(self, x: Tensor, tol: float = 0.0) -> Tensor:
        """Whether each row of x (rows, *features) is in the set, computed in float64; bool (rows,).

        tol: absolute slack on the radius and on the limits. For norm inf only the limits count."""
        z = self._rows(x)
        inside = torch.ones(len(z), dtype=torch.bool, device=z.device)
        if self.norm != math.inf and self.eps is not None:
            inside &= self._length(z - self._center()) <= self.eps + tol
        lower, upper = self._limits()
        return inside & ((z >= lower - tol) & (z <= upper + tol)).all(1)

    @torch.no_grad()
    def project(self, x: Tensor) -> Tensor:
        """Nearest points of the set in the l2 distance; x: (rows, *features), finite. Same shape and dtype.

        The results satisfy `contains` with tol 0 and are at most eps from the centre in float64 arithmetic,
        provided the centre is representable in the dtype of x (else up to its rounding)."""
        z = self._rows(x)
        center, (lower, upper) = self._center(), self._limits()
        if self.norm == math.inf or self.eps is None:
            y = _clamp_inside(z, lower, upper, x.dtype)
            if self.eps is not None:
                # the outward rounding of the limits can exceed eps by one unit in the last place
                for _ in range(2):
                    over = (y.double() - center).abs() > self.eps
                    y = torch.where(over, torch.nextafter(y, center.to(x.dtype)), y)
                y = _clamp_inside(y.double(), lower, upper, x.dtype)
            return y.reshape(x.shape)

        # Aim below eps by the worst rounding error of a sum of n terms, so that the distance is at most eps
        # whatever the order in which somebody else adds it up.
        target = self.eps * (1 - z.shape[1] * 2.0**-52)
        delta = z.clamp(lower, upper) - center
        inside = (delta == z - center).all(1) & (self._length(delta) <= target)
        if inside.all():
            return x.clone()
        over = self._length(delta) > target
        if over.any():
            far = z[over] - center
            size, room = far.abs(), self._room(far)
            if self.norm == 2:
                short = torch.minimum(_scale_to_radius(size, room, target) * size, room)
            else:
                short = _soft_threshold(size, room, target)
            delta[over] = short.copysign(far)
        y = self._at(delta, x.dtype)
        for power in range(-30, 1):  # only a centre that x.dtype cannot represent needs this
            over = self._length(y.double() - center) > self.eps
            if not over.any():
                break
            y[over] = self._at(delta[over] * (1 - 2.0**power), x.dtype)
        return torch.where(inside[:, None], x.flatten(1), y).reshape(x.shape)

    @torch.no_grad()
    def minimize_linear(self, gradient: Tensor) -> Tensor:
        """Points of the set at which each linear function <gradient, x> is smallest, exact up to rounding.

        gradient: (rows, *features), finite. Same shape and dtype. Elements with gradient zero keep
        the centre's value, as far as the limits allow."""
        g = self._rows(gradient)
        center = self._center()
        if self.norm == math.inf or self.eps is None:
            lower, upper = self._limits()
            y = torch.where(g > 0, lower, torch.where(g < 0, upper, center))
            return self.project(y.to(gradient.dtype).reshape(gradient.shape))
        size, room = g.abs(), self._room(-g)
        if self.norm == 2:
            size = size / size.amax(1, keepdim=True).clamp(min=1e-300)  # squares must not underflow
            step = torch.minimum(_scale_to_radius(size, room, self.eps) * size, room)
        else:
            room = room.clamp(max=self.eps)
            order = size.argsort(dim=1, descending=True)
            sorted_room = room.gather(1, order)
            left = self.eps - (sorted_room.cumsum(1) - sorted_room)
            spent = torch.minimum(left.clamp(min=0), sorted_room)
            step = torch.zeros_like(size).scatter(1, order, spent) * (size > 0)
        y = (center + step.copysign(-g)).to(gradient.dtype)
        return self.project(y.reshape(gradient.shape))

    def sample(self, k: int, generator: torch.Generator | None = None) -> Tensor:
        """k points of the set, (k, *features) in the dtype of the centre.

        Uniform in a box or in a ball without limits; with limits, uniform in the ball and then projected."""
        center, (lower, upper) = self._center(), self._limits()
        n = center.shape[1]
        source = center.device if generator is None else generator.device

        def uniform(*size: int) -> Tensor:
            values = torch.rand(*size, dtype=torch.float64, generator=generator, device=source)
            return values.to(center.device)

        if self.norm == math.inf or self.eps is None:
            y = lower + uniform(k, n) * (upper - lower)
        elif self.norm == 2:
            direction = torch.randn(k, n, dtype=torch.float64, generator=generator, device=source)
            direction = direction.to(center.device)
            direction /= direction.norm(dim=1, keepdim=True).clamp(min=1e-300)
            y = center + self.eps * uniform(k, 1) ** (1 / n) * direction
        else:
            # n + 1 exponential variables over their sum are uniform on the simplex; dropping one fills it
            parts = -torch.log1p(-uniform(k, n + 1))
            parts = parts[:, :n] / parts.sum(1, keepdim=True).clamp(min=1e-300)
            y = center + self.eps * parts * (2 * (uniform(k, n) < 0.5).double() - 1)
        return self.project(y.to(self.center.dtype).reshape(k, *self.center.shape[1:]))

    def _rows(self, x: Tensor) -> Tensor:
        """x as (rows, n) in float64."""
        if x.shape[1:] != self.center.shape[1:] or x.dim() != self.center.dim():
            raise InputError(
                f"points of shape {tuple(x.shape)} do not fit the set; "
                f"it needs (rows, {', '.join(map(str, self.center.shape[1:]))})"
            )
        return x.detach().flatten(1).double()

    def _center(self) -> Tensor:
        return self.center.double().flatten(1)

    def _limits(self) -> tuple[Tensor, Tensor]:
        if self.lower is None or self.upper is None:
            infinity = torch.full_like(self._center(), math.inf)
            return -infinity, infinity
        return self.lower.double().flatten(1), self.upper.double().flatten(1)

    def _length(self, delta: Tensor) -> Tensor:
        return torch.linalg.vector_norm(delta, ord=self.norm, dim=1)

    def _room(self, direction: Tensor) -> Tensor:
        """How far each coordinate may move from the centre in the sign of `direction`, >= 0 or inf."""
        center, (lower, upper) = self._center(), self._limits()
        return torch.where(direction > 0, upper - center, center - lower)

    def _at(self, delta: Tensor, dtype: torch.dtype) -> Tensor:
        """center + delta in `dtype`, each coordinate rounded towards the centre and kept in the limits."""
        center = self._center()
        y = (center + delta).to(dtype)
        over = (y.double() - center).abs() > delta.abs()
        y = torch.where(over, torch.nextafter(y, center.to(dtype)), y)
        return _clamp_inside(y.double(), *self._limits(), dtype)


def _check_values(name: str, x: Tensor) -> None:
    if x.dtype not in (torch.float32, torch.float64):
        raise InputError(f"{name} is {x.dtype}; it must be float32 or float64")
    if x.dim() < 2 or x.shape[0] != 1 or x.numel() == 0:
        raise InputError(f"{name} has shape {tuple(x.shape)}; it must be one input, (1, *features)")
    if not x.isfinite().all():
        raise InputError(f"{name} has values that are not finite")


# ---------------------------------------------------------------------------------------------------------
# output specifications


@dataclass(frozen=True, eq=False)
class Specification:
    """The unsafe outputs: y is unsafe iff for SOME group ALL its rows satisfy A y <= b.

    A: (rows, outputs), on the flattened output. b: (rows,). groups: tuples of row numbers.
    strict: per row, whether it reads A y < b; () where none does. It counts in `violated` only: bounds are
        asked to exclude the boundary as well.

    Raises InputError for shapes that do not fit, values that are not finite, and empty or wrong groups."""

    A: Tensor
    b: Tensor
    groups: tuple[tuple[int, ...], ...]
    strict: tuple[bool, ...] = ()

    def __post_init__(self) -> None:
        if self.A.dim() != 2 or self.b.shape != self.A.shape[:1]:
            raise InputError(
                f"A has shape {tuple(self.A.shape)} and b {tuple(self.b.shape)}; "
                "they must be (rows, outputs) and (rows,)"
            )
        if not (self.A.isfinite().all() and self.b.isfinite().all()):
            raise InputError("A or b has values that are not finite")
        if not self.groups or not all(self.groups):
            raise InputError("a specification needs at least one group, and each group at least one row")
        rows = len(self.A)
        if any(not 0 <= row < rows for group in self.groups for row in group):
            raise InputError(f"a group names a row outside 0..{rows - 1}")
        if len(self.strict) not in (0, rows):
            raise InputError(f"strict has {len(self.strict)} entries for {rows} rows")

    @classmethod
    def classification(cls, label: int, classes: int, targets: Sequence[int] | None = None) -> Specification:
        """Unsafe iff some other class (some class of `targets`, if given) has a logit >= the label's.

        Rows are e_label - e_j, one group each, in increasing order of j, float64.
        Raises InputError for a label or target that is no class, or a label among the targets."""
        if not 0 <= label < classes:
            raise InputError(f"label {label} is out of range; there are classes 0..{classes - 1}")
        others = sorted(set(range(classes) if targets is None else targets))
        if targets is None:
            others.remove(label)
        for j in others:
            if not 0 <= j < classes or j == label:
                raise InputError(f"target {j} must be a class 0..{classes - 1} other than the label {label}")
        if not others:
            raise InputError("there is no class to compare the label with")
        A = torch.zeros(len(others), classes, dtype=torch.float64)
        A[:, label] = 1
        A[range(len(others)), others] = -1
        return cls(A, torch.zeros(len(others), dtype=torch.float64), tuple((i,) for i in range(len(others))))

    @classmethod
    def top_k(cls, label: int, classes: int, k: int) -> Specification:
        """Safe iff the label stays within the k largest logits; ties count against it.

        Rows as in `classification`; the groups are all k-subsets of the other classes.
        Raises InputError for a bad label, for k outside 1..classes - 1, and for over 5000 subsets."""
        rows = cls.classification(label, classes)
        if not 1 <= k < classes:
            raise InputError(f"k is {k}; with {classes} classes it must be 1..{classes - 1}")
        count = math.comb(classes - 1, k)
        if count > MAX_GROUPS:
            raise InputError(
                f"top-{k} of {classes} classes needs {count} groups, more than {MAX_GROUPS}; "
                "use a smaller k, or classification(label, classes, targets) for the classes of interest"
            )
        return cls(rows.A, rows.b, tuple(itertools.combinations(range(classes - 1), k)))

    def margins(self, y: Tensor) -> Tensor:
        """A y - b of flattened outputs y (..., outputs): (..., rows), in the dtype and on the device of y."""
        if y.shape[-1:] != self.A.shape[1:]:
            raise InputError(f"outputs have {tuple(y.shape)[-1:]} values, the property {self.A.shape[1]}")
        return y @ self.A.to(y).T - self.b.to(y)

    def group_margins(self, row_values: Tensor) -> Tensor:
        """The largest row value of each group: (..., rows) to (..., groups)."""
        return row_values[..., self._members.to(row_values.device)].amax(-1)

    def margin(self, row_values: Tensor) -> Tensor:
        """Smallest group margin, (..., rows) to (...): the property holds iff it is > 0.

        Takes exact row values, or lower bounds of them: then > 0 is sufficient."""
        return self.group_margins(row_values).amin(-1)

    def violated(self, row_values: Tensor, boundary: bool = False) -> bool:
        """Whether exact row values (rows,) are unsafe beyond doubt: all rows of a group below 0.

        boundary: a row that is not `strict` may also be exactly 0, as its formula says."""
        below = row_values < 0
        if boundary:
            strict = torch.tensor(self.strict or (False,) * len(below), device=below.device)
            below |= ~strict & (row_values == 0)
        return any(bool(below[list(group)].all()) for group in self.groups)

    @cached_property
    def _members(self) -> Tensor:
        """(groups, longest): row numbers, short groups filled up with their first row."""
        longest = max(map(len, self.groups))
        return torch.tensor([group + group[:1] * (longest - len(group)) for group in self.groups])


@dataclass(frozen=True)
class Variable:
    """A declared input or output of the network: its name, type ("float32", "real", …) and shape."""

    name: str
    type: str
    shape: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Property:
    """Input sets, each with the outputs that must not occur on it; it holds iff it holds in every case.

    cases: none if no input satisfies the property's conditions; it then holds, and `warning` says so.
    inputs, outputs: what the file declares; the sets are over all inputs one after the other, flattened
        where there are several. Empty for VNN-LIB 1.0, which knows X_0, X_1, … and Y_0, Y_1, … only.
    """

    name: str
    cases: tuple[tuple[InputSet, Specification], ...]
    inputs: tuple[Variable, ...] = ()
    outputs: tuple[Variable, ...] = ()
    warning: str = ""
