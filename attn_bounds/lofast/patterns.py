"""What several nodes of a graph compute together: normalisations, GELU, and an attention's output map."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..domain.activations import ERF, FUNCTIONS, GELU, QUICK_GELU, SILU, TANH_GELU, Function, leaky_relu
from ..domain.linear import MOVES
from ..domain.nodes import AVERAGE, NORMALIZATIONS, PRODUCTS, is_unit, kind, value

EPS = torch.finfo(torch.float64).eps


# ---------------------------------------------------------------------------------------------------------
# normalisation


class Normalised(NamedTuple):
    """`z / √(mean(z²) + eps)` over the last axes; LayerNorm where z is centred, RMSNorm where it is not.

    Attributes:
        z: the node. centre: whether its mean is yet to be taken off. axes: how many.
    """

    z: Any
    eps: float
    centre: bool = False
    axes: int = 1


def normalisation(node: Any) -> Normalised | None:
    """The normalisation that ends at a node, in any of the ways in which exporters write it."""
    if kind(node) in NORMALIZATIONS:
        return Normalised(node.inputs[0], node.eps, node.centred, node.axes)
    if kind(node) == "BoundDiv" and kind(node.inputs[1]) == "BoundSqrt":
        return _mean_square(node.inputs[0], node.inputs[1].inputs[0])
    if kind(node) != "BoundMul":
        return None
    for z, factor in (node.inputs, node.inputs[::-1]):
        variance = _under_inverse_root(factor)
        if variance is not None and (found := _mean_square(z, variance)) is not None:
            return found
    return None


def _under_inverse_root(node: Any) -> Any:
    """x, if the node is `1/√x`."""
    name = kind(node)
    if name == "BoundReciprocal" and kind(node.inputs[0]) == "BoundSqrt":
        return node.inputs[0].inputs[0]
    if name == "BoundPow" and scalar(node.inputs[1]) == -0.5:
        return node.inputs[0]
    if name == "BoundDiv" and scalar(node.inputs[0]) == 1.0 and kind(node.inputs[1]) == "BoundSqrt":
        return node.inputs[1].inputs[0]
    if name == "BoundMul":
        for one, x in (node.inputs, node.inputs[::-1]):
            if scalar(one) == 1.0:
                return _under_inverse_root(x)
    return None


def _mean_square(z: Any, variance: Any) -> Normalised | None:
    """If `variance` is `mean(z²) + eps`."""
    if kind(variance) != "BoundAdd":
        return None
    for mean, constant in (variance.inputs, variance.inputs[::-1]):
        eps = scalar(constant)
        if eps is None or eps <= 0.0 or kind(mean) != "BoundReduceMean":
            continue
        rank = len(z.output_shape)
        if rank == 0:
            continue
        last = [a % rank for a in axes(mean)] == [rank - 1]
        if last and len(mean.output_shape) == rank and _is_square(mean.inputs[0], z):
            return Normalised(z, eps)
    return None


def _is_square(node: Any, z: Any) -> bool:
    if kind(node) == "BoundPow":
        return node.inputs[0] is z and scalar(node.inputs[1]) == 2.0
    return kind(node) in ("BoundSqr", "BoundMul") and all(i is z for i in node.inputs)


def scalar(node: Any) -> float | None:
    """Value of a constant node with one entry, else None."""
    if getattr(node, "from_input", True):
        return None
    found = value(node)
    if isinstance(found, (int, float)):
        return float(found)
    return float(found) if isinstance(found, Tensor) and found.numel() == 1 else None


def axes(node: Any) -> list[int]:
    """Axes of a reduction, batch included."""
    found = node.axis
    if isinstance(found, Tensor):
        found = found.flatten().tolist()
    return [int(a) for a in found] if isinstance(found, (list, tuple)) else [int(found)]


# ---------------------------------------------------------------------------------------------------------
# scalar functions


@dataclass(frozen=True)
class Activation:
    """`outer · σ(inner · u)` entry by entry.

    Attributes:
        node: that computes u.
        function: σ.
        lipschitz: of σ.
        relu: the slope of a ReLU (0) or leaky one on the left, None for other functions.
    """

    node: Any
    function: Function
    lipschitz: float
    relu: float | None = None
    outer: float = 1.0
    inner: float = 1.0

    @property
    def constant(self) -> float:
        """Lipschitz constant of the whole."""
        return abs(self.outer * self.inner) * self.lipschitz * (1.0 + 1e-9)

    def slope(self, u: Tensor) -> Tensor:
        """Derivative at u."""
        return self.outer * self.inner * self.function.slope(self.inner * u)

    def slopes(self, u: Tensor, reach: Tensor) -> tuple[Tensor, Tensor]:
        """Range of `(f(u') − f(u)) / (u' − u)` over |u' − u| ≤ reach, entry by entry."""
        x, r = self.inner * u, abs(self.inner) * reach
        if self.relu is not None:
            one = torch.ones_like(x)
            own = torch.where(x > 0, one, self.relu * one)
            part = (1.0 - self.relu) * x / r.clamp(min=1e-300)  # of a chord that crosses 0
            chord = torch.where(x > 0, self.relu + part, one + part)
            crosses = r * (1.0 + 1e-12) >= x.abs()
            other = torch.where(crosses, chord.clamp(min(self.relu, 1.0), max(self.relu, 1.0)), own)
            low, high = torch.minimum(own, other), torch.maximum(own, other)
        else:  # the derivative is monotone between the breaks
            # beyond 10⁶ slopes are as far from their limits as `room`
            ends = [self.function.slope((x + d).clamp(-1e6, 1e6)) for d in (-r, r)]
            low, high = torch.minimum(*ends), torch.maximum(*ends)
            for b in self.function.breaks:
                at = self.function.slope(torch.tensor(b).to(x))
                inside = (x - b).abs() <= r
                low = torch.where(inside, torch.minimum(low, at), low)
                high = torch.where(inside, torch.maximum(high, at), high)
        factor = self.outer * self.inner
        low, high = (low, high) if factor >= 0 else (high, low)
        room = abs(factor) * 1e-9 * max(1.0, self.lipschitz)
        return factor * low - room, factor * high + room


LIPSCHITZ = {
    "BoundTanh": 1.0,
    "BoundSigmoid": 0.25,
    "BoundAtan": 1.0,
    "BoundErf": 2.0 / math.sqrt(math.pi),
    "BoundGelu": float(GELU.slope(torch.tensor(math.sqrt(2.0), dtype=torch.float64))),  # 1.1289
}
SMOOTH = (ERF, GELU, TANH_GELU, SILU, QUICK_GELU)  # what operators of ours compute
SATURATING = {"BoundTanh": "tanh", "BoundErf": "erf", "BoundSigmoid": "sigmoid"}


def activation(node: Any) -> Activation | None:
    """The scalar function that ends at a node: one node, or GELU and SiLU written out."""
    name = kind(node)
    if name == "BoundRelu":
        return Activation(node.inputs[0], leaky_relu(0.0), 1.0, 0.0)
    if name == "BoundLeakyRelu" and "alpha" in node.attr:
        alpha = float(node.attr["alpha"])
        return Activation(node.inputs[0], leaky_relu(alpha), max(1.0, abs(alpha)), alpha)
    if isinstance(own := getattr(node, "function", None), Function):
        return Activation(node.inputs[0], own, _steepest(own)) if own in SMOOTH else None
    if name == "BoundGelu" and _text(node.attr.get("approximate", "none")) == "tanh":
        return Activation(node.inputs[0], TANH_GELU, _steepest(TANH_GELU))
    if name in LIPSCHITZ:
        return Activation(node.inputs[0], FUNCTIONS[name], LIPSCHITZ[name])
    return _written_out(node) if name == "BoundMul" else None


def _text(x: Any) -> str:
    return x.decode() if isinstance(x, bytes) else str(x)


def _steepest(f: Function) -> float:
    """Lipschitz constant: the slope is extreme at a break, or where the function is a line."""
    return float(f.slope(torch.tensor(f.breaks, dtype=torch.float64)).abs().max())


def _written_out(node: Any) -> Activation | None:
    """`u (1 + tanh(…))` and the like: the product as `P(u) + Q(u) T(R(u))` with polynomials P, Q, R."""
    for operand in node.inputs:
        u = operand
        while True:
            found = _expression(node, u)
            if found is not None and found.t:
                match = _match(u, found)
                if match is not None:
                    return match
            if kind(u) != "BoundMul":
                break
            factors = [i for i in u.inputs if scalar(i) is None]
            if len(factors) != 1:
                break
            u = factors[0]
    return None


class _Expression(NamedTuple):
    """`p(u) + q(u) t(r(u))`; polynomials by coefficients, lowest first."""

    p: list[float]
    q: list[float]
    t: str
    r: list[float]


def _match(u: Any, e: _Expression) -> Activation | None:
    def is_line(c: list[float]) -> bool:
        return len(c) == 2 and c[0] == 0.0

    def near(a: float, b: float) -> bool:
        return abs(a - b) <= 1e-6 * abs(b)  # constants stored in single precision

    p, q, t, r = e
    if not is_line(q) or q[1] == 0.0:
        return None
    if t == "sigmoid" and not p and is_line(r) and r[1] != 0.0:
        return Activation(u, SILU, _steepest(SILU), outer=q[1] / r[1], inner=r[1])
    if p != q:
        return None
    if t == "erf" and is_line(r) and near(r[1], math.sqrt(0.5)):
        return Activation(u, GELU, LIPSCHITZ["BoundGelu"], outer=2.0 * q[1])
    tanh = [0.0, math.sqrt(2.0 / math.pi), 0.0, 0.044715 * math.sqrt(2.0 / math.pi)]
    if t == "tanh" and len(r) == 4 and r[0] == r[2] == 0.0 and near(r[1], tanh[1]) and near(r[3], tanh[3]):
        return Activation(u, TANH_GELU, _steepest(TANH_GELU), outer=2.0 * q[1])
    return None


def _expression(node: Any, u: Any, depth: int = 12) -> _Expression | None:
    """A node as an expression in u; None if it is none of this kind."""
    if node is u:
        return _Expression([0.0, 1.0], [], "", [])
    c = scalar(node)
    if c is not None:
        return _Expression([c], [], "", [])
    name = kind(node)
    if depth == 0 or not node.inputs:
        return None
    x = _expression(node.inputs[0], u, depth - 1)
    if x is None:
        return None
    if name in SATURATING:
        return None if x.t else _Expression([], [1.0], SATURATING[name], x.p)
    if name == "BoundSqr":
        return _times(x, x)
    if name == "BoundPow":
        exponent = scalar(node.inputs[1])
        if exponent not in (2.0, 3.0):
            return None
        square = _times(x, x)
        return square if square is None or exponent == 2.0 else _times(square, x)
    if name not in ("BoundMul", "BoundAdd", "BoundDiv"):
        return None
    y = _expression(node.inputs[1], u, depth - 1)
    if y is None:
        return None
    if name == "BoundMul":
        return _times(x, y)
    if name == "BoundAdd":
        return None if x.t and y.t else _Expression(_sum(x.p, y.p), x.q or y.q, x.t or y.t, x.r or y.r)
    if y.t or len(y.p) != 1 or y.p[0] == 0.0:
        return None
    return _times(x, _Expression([1.0 / y.p[0]], [], "", []))


def _sum(a: list[float], b: list[float]) -> list[float]:
    size = max(len(a), len(b))
    return [x + y for x, y in zip(*(c + [0.0] * (size - len(c)) for c in (a, b)), strict=True)]


def _product(a: list[float], b: list[float]) -> list[float]:
    if not a or not b:
        return []
    out = [0.0] * (len(a) + len(b) - 1)
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            out[i + j] += x * y
    return out


def _times(x: _Expression, y: _Expression) -> _Expression | None:
    if x.t and y.t:
        return None
    q = _product(x.q, y.p) if x.t else _product(x.p, y.q)
    return _Expression(_product(x.p, y.p), q, x.t or y.t, x.r or y.r)


# ---------------------------------------------------------------------------------------------------------
# attention


def output_average(node: Any, readers: Callable[[Any], list[Any]]) -> tuple[Any, list[Any]] | None:
    """The attention whose output map a node is: the average, and the nodes that merge its heads.

    None if anything else reads one of them, so that the map is not all that follows.
    """
    if kind(node) not in (*PRODUCTS, "BoundLinear"):
        return None
    chain: list[Any] = []
    x = node.inputs[0]
    while kind(x) in MOVES and len(readers(x)) == 1:
        chain.append(x)
        x = x.inputs[0]
    if kind(x) != AVERAGE or not is_unit(x) or len(readers(x)) != 1:
        return None
    return x, chain[::-1]
