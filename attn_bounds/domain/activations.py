"""Elementwise activations: one rule for every scalar function that is described by a `Function`.

With d the move of an entry, `e = σ(c+d) − σ(c) − λd` (theory.md, section 6). Its extremes over the range of
the entry are at the ends, at the breaks of σ, or where σ' = λ; between two breaks σ' is monotone, so there is
at most one such point, found by bisection. `|e| ≤ κ|d|` bounds the errors of a whole tensor in l2.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .boxes import with_errors
from .forms import AffineForm, Groups

STEPS = 40  # of bisection; the error left is the square of what remains of the bracket
SEARCH_STEPS = 10  # of bisection and of the golden section, while a slope is looked for
EPS = torch.finfo(torch.float64).eps


def _everywhere(low: Tensor, high: Tensor) -> Tensor:
    return torch.ones_like(low, dtype=torch.bool)


@dataclass(frozen=True)
class Function:
    """A scalar function σ, in float64.

    Attributes:
        value, slope: σ and σ', elementwise.
        breaks: between two neighbours σ' is monotone and continuous.
        one_sign: whether σ is convex, or concave, on every range that `domain` allows.
        affine: whether σ is affine between the breaks.
        domain: (low, high) → where the function is defined on the whole range.
        extra: (low, high) → what the library's own function may deviate from `value` by.
    """

    value: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]
    breaks: tuple[float, ...] = ()
    one_sign: bool = False
    affine: bool = False
    domain: Callable[[Tensor, Tensor], Tensor] = _everywhere
    extra: Callable[[Tensor, Tensor], Tensor | float] = lambda low, high: 0.0

    def pieces(self, low: Tensor, high: Tensor, inside: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """[low, high] cut at the breaks; an empty piece is the point `inside`."""
        ends = (-math.inf, *self.breaks, math.inf)
        for a, b in itertools.pairwise(ends):
            left, right = low.clamp(min=a), high.clamp(max=b)
            empty = left > right
            yield torch.where(empty, inside, left), torch.where(empty, inside, right)

    def slopes(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        """σ' at both ends of a piece, from the inside."""
        if self.affine:  # a kink is no place to ask for a slope
            middle = self.slope((left + right) / 2)
            return middle, middle
        return self.slope(left), self.slope(right)


def leaky_relu(alpha: float) -> Function:
    """`max(x, 0) + alpha · min(x, 0)`."""
    return Function(
        lambda x: torch.where(x > 0, x, alpha * x),
        lambda x: torch.where(x > 0, torch.ones_like(x), torch.full_like(x, alpha)),
        breaks=(0.0,),
        one_sign=True,
        affine=True,
    )


def _of_exponentials(low: Tensor, high: Tensor) -> float:
    return EPS  # x e^−y is off by a few y units in its last place, which is less than this


def negated(f: Function) -> Function:
    """−σ."""
    return replace(f, value=lambda x: -f.value(x), slope=lambda x: -f.slope(x))


def _gelu_slope(x: Tensor) -> Tensor:
    return 0.5 * torch.erfc(-x / math.sqrt(2)) + x * torch.exp(-x.square() / 2) / math.sqrt(2 * math.pi)


def _tanh_gelu_inner(x: Tensor) -> Tensor:
    return 2.0 * math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)


def _tanh_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(_tanh_gelu_inner(x))  # ½ (1 + tanh(y/2)) would cancel on the left


def _tanh_gelu_slope(x: Tensor) -> Tensor:
    x = x.clamp(-1e3, 1e3)  # beyond, 0 or 1, and the factors overflow
    y = _tanh_gelu_inner(x)
    own = torch.sigmoid(y)
    inner = 2.0 * math.sqrt(2.0 / math.pi) * (1.0 + 3 * 0.044715 * x.square())
    return own + x * inner * own * torch.sigmoid(-y)


def swish(beta: float) -> Function:
    """`x · sigmoid(beta x)`."""

    def slope(x: Tensor) -> Tensor:
        own = torch.sigmoid(beta * x)
        return own * (1.0 + beta * x * torch.sigmoid(-beta * x))

    inflection = 2.399357280515467 / beta
    return Function(
        lambda x: x * torch.sigmoid(beta * x), slope, breaks=(-inflection, inflection), extra=_of_exponentials
    )


def _tanh_slope(x: Tensor) -> Tensor:
    e = torch.exp(-2.0 * x.abs())  # 1 − tanh² cancels where it saturates
    return 4.0 * e / (1.0 + e).square()


SQUARE = Function(torch.square, lambda x: 2.0 * x, one_sign=True)
RECIPROCAL = Function(
    torch.reciprocal,
    lambda x: -1.0 / x.square(),
    breaks=(0.0,),
    one_sign=True,
    domain=lambda low, high: (low > 0) | (high < 0),
)
TANH = Function(torch.tanh, _tanh_slope, breaks=(0.0,))
SIGMOID = Function(torch.sigmoid, lambda x: torch.sigmoid(x) * torch.sigmoid(-x), breaks=(0.0,))

ERF = Function(torch.erf, lambda x: 2.0 / math.sqrt(math.pi) * torch.exp(-x.square()), breaks=(0.0,))
# Breaks are where the second derivative vanishes: the slope is stationary there, so the digits suffice.
GELU = Function(
    lambda x: 0.5 * x * torch.erfc(-x / math.sqrt(2)),
    _gelu_slope,
    breaks=(-math.sqrt(2), math.sqrt(2)),
    extra=_of_exponentials,
)
TANH_GELU = Function(
    _tanh_gelu, _tanh_gelu_slope, breaks=(-1.418504008790828, 1.418504008790828), extra=_of_exponentials
)
SILU = swish(1.0)
QUICK_GELU = swish(1.702)

# by class name of auto_LiRPA's node
FUNCTIONS: dict[str, Function] = {
    "BoundTanh": TANH,
    "BoundSigmoid": SIGMOID,
    "BoundAtan": Function(torch.atan, lambda x: 1.0 / (1.0 + x.square()), breaks=(0.0,)),
    "BoundErf": ERF,
    "BoundGelu": GELU,
    "BoundExp": Function(torch.exp, torch.exp, one_sign=True),
    "BoundSqr": SQUARE,
    "BoundAbs": Function(torch.abs, torch.sign, breaks=(0.0,), one_sign=True, affine=True),
    "BoundReciprocal": RECIPROCAL,
    "BoundSqrt": Function(
        torch.sqrt, lambda x: 0.5 / x.sqrt(), one_sign=True, domain=lambda low, high: low >= 0
    ),
    # auto_LiRPA takes the logarithm of max(x, 1e-12)
    "BoundLog": Function(torch.log, torch.reciprocal, one_sign=True, domain=lambda low, high: low > 1e-12),
    # torch returns x itself for x > 20
    "BoundSoftplus": Function(
        lambda x: torch.logaddexp(x, torch.zeros_like(x)),
        torch.sigmoid,
        one_sign=True,
        extra=lambda low, high: 2.1e-9 * (high > 20).double(),
    ),
}


@dataclass
class Errors:
    """Range of e and bound of |e/d|, elementwise."""

    low: Tensor
    high: Tensor
    kappa: Tensor


def errors(
    f: Function, centre: Tensor, at: Tensor, slope: Tensor, low: Tensor, high: Tensor, steps: int = STEPS
) -> Errors:
    """Bounds of `e = σ(x) − at − slope (x − centre)` for x in [low, high] ∋ centre, all (…) float64.

    `kappa` bounds `|e − e(centre)| / |x − centre|`.
    """
    size = at.abs()
    bottom, top = torch.full_like(at, math.inf), torch.full_like(at, -math.inf)
    steepest = torch.zeros_like(at)
    for left, right in f.pieces(low, high, centre):
        slope_left, slope_right = f.slopes(left, right)
        g_left, g_right = slope_left - slope, slope_right - slope
        for x in (left, right):
            value = f.value(x)
            size = torch.maximum(size, value.abs())
            here = value - at - slope * (x - centre)
            bottom, top = torch.minimum(bottom, here), torch.maximum(top, here)
        rounding = 16 * EPS * (slope_left.abs() + slope_right.abs() + slope.abs())
        steepest = torch.maximum(steepest, torch.maximum(g_left.abs(), g_right.abs()) + rounding)
        if f.affine:
            continue
        turns = g_left * g_right < 0
        if not bool(turns.any()):
            continue
        # only the entries that turn: bisection is what a range costs
        a, b, rising, own = left[turns], right[turns], g_left[turns] < 0, slope[turns]
        for _ in range(steps):
            middle = (a + b) / 2
            before = (f.slope(middle) < own) == rising  # the turning point is to the right
            a, b = torch.where(before, middle, a), torch.where(before, b, middle)
        # between a and the turning point |σ' − λ| is at most what it is at a
        slope_a, value = f.slope(a), f.value(a)
        reach = ((slope_a - own).abs() + 16 * EPS * (slope_a.abs() + own.abs())) * (b - a)
        point = value - at[turns] - own * (a - centre[turns])
        bottom[turns] = torch.minimum(bottom[turns], point - reach)
        top[turns] = torch.maximum(top[turns], point + reach)
        size[turns] = torch.maximum(size[turns], value.abs())
    slack = 16 * EPS * (size + slope.abs() * (high - low)) + f.extra(low, high)
    # on a convex or concave stretch e/d is monotone: its extremes are at the ends
    kappa = steepest
    centre_value = f.value(centre)
    secant = torch.zeros_like(at)
    for end in (low, high):
        d = (end - centre).abs()
        value = f.value(end)
        err = 4 * EPS * (value.abs() + centre_value.abs()) / d + 4 * EPS * slope.abs()
        secant = torch.maximum(secant, ((value - centre_value) / (end - centre) - slope).abs() + err)
    simple = (low < centre) & (centre < high)
    if not f.one_sign:
        simple &= ~_several_pieces(f, low, high)
    kappa = torch.where(simple & (secant < kappa), secant, kappa)
    return Errors(bottom - slack, top + slack, kappa)


def _several_pieces(f: Function, low: Tensor, high: Tensor) -> Tensor:
    several = torch.zeros_like(low, dtype=torch.bool)
    for b in f.breaks:
        several |= (low < b) & (b < high)
    return several


def best_slope(f: Function, centre: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Slope λ for which the range of e is narrow; (…) float64. Any λ is valid.

    On a convex or concave stretch that is the chord's. Else the width is a convex function of λ (the largest
    minus the smallest of functions that are affine in λ), and golden section finds its minimum.
    """
    width = high - low
    narrow = width <= 1e-7 * (low.abs() + high.abs())
    chord = (f.value(high) - f.value(low)) / torch.where(narrow, torch.ones_like(width), width)
    slope = torch.where(narrow, f.slope(centre), chord)
    if f.affine:
        slope = torch.where(_several_pieces(f, low, high), slope, f.slope((low + high) / 2))
    if f.one_sign:
        return slope
    pick = (_several_pieces(f, low, high) & ~narrow & torch.isfinite(width)).nonzero(as_tuple=True)
    if len(pick[0]) == 0:
        return slope
    c, lo, hi = centre[pick], low[pick], high[pick]
    at = f.value(c)
    ends = [s for piece in f.pieces(lo, hi, c) for s in f.slopes(*piece)]
    a, b = torch.stack(ends).amin(0), torch.stack(ends).amax(0)

    def spread(s: Tensor) -> Tensor:
        found = errors(f, c, at, s, lo, hi, SEARCH_STEPS)
        return found.high - found.low

    ratio = (math.sqrt(5) - 1) / 2
    for _ in range(SEARCH_STEPS):
        left, right = b - ratio * (b - a), a + ratio * (b - a)
        smaller = spread(left) < spread(right)
        a, b = torch.where(smaller, a, left), torch.where(smaller, right, b)
    middle = (a + b) / 2
    slope[pick] = torch.where(spread(middle) < spread(chord[pick]), middle, chord[pick])
    return slope


def activation(
    x: AffineForm, f: Function, groups: Groups, label: str
) -> tuple[AffineForm, tuple[Tensor, Tensor]]:
    """An elementwise function of a form: slope from `best_slope`, error in a box and in a ball.

    Where the range is not finite, or leaves the function's domain, the result is NaN.

    Returns:
        the output, and the bounds (lower, upper) of the input.
    """
    dtype = x.centre.dtype
    ranges = groups.ranges(x.generators)
    low_d, high_d = groups.total(ranges, x.centre)
    lower, upper = x.centre + low_d, x.centre + high_d
    centre = x.centre.double()
    low, high = centre + low_d.double(), centre + high_d.double()
    known = torch.isfinite(low) & torch.isfinite(high) & f.domain(low, high)
    # a place where all goes well, for the entries that end as NaN anyway
    centre, low, high = (torch.where(known, t, torch.ones_like(t)) for t in (centre, low, high))
    slope = best_slope(f, centre, low, high).to(dtype)
    at = f.value(centre).to(dtype)
    found = errors(f, centre, at.double(), slope.double(), low, high)
    known &= torch.isfinite(found.low) & torch.isfinite(found.high) & torch.isfinite(at)
    e_low, e_high, kappa = found.low.clamp(max=0.0), found.high.clamp(min=0.0), found.kappa
    # e need not vanish at the centre, whose value is rounded; nor is torch's function quite `value`
    offset = (f.value(centre) - at.double()).abs() + f.extra(low, high)
    off = ~known
    if f.affine:
        off = off | ~_several_pieces(f, low, high)  # exactly linear there
    e_low, e_high, kappa, offset = (
        torch.where(off, torch.zeros_like(t), t) for t in (e_low, e_high, kappa, offset)
    )
    slope, at = torch.where(known, slope, torch.nan), torch.where(known, at, torch.nan)

    def radius(index: Tensor) -> Tensor:
        def part(t: Tensor) -> Tensor:
            return t.flatten(1)[:, index]

        supports = [part(torch.maximum(-down, up)) for down, up in ranges]
        weight = (part(kappa) * groups.growth).to(dtype)
        moved = groups.joint_norm(x.generators.flatten(2)[:, :, index], weight, supports)
        return moved.double() + torch.linalg.vector_norm(part(offset), dim=1)

    output = with_errors(
        AffineForm(at, x.generators * slope.unsqueeze(1)), e_low, e_high, radius, groups, label
    )
    return output, (lower, upper)
