"""Bound operators of one attention unit: Scores(Q, K) or L2Scores(Q, K), Weights(S), Average(S, P, V).

Each offers interval bounds, a backward pass (CROWN) and a forward pass. The backward pass is written once,
for lower bounds; an upper bound of a functional is minus the lower bound of its negative.

Relaxations of the unit (option `attention_relaxation`):

* `lse` (default): log-sum-exp planes of the softmax and McCormick planes of the two products;
* `key`: the only slope is `P dV`, the rest is an exact range (theory.md, section 5).
* `jacobian`: the vector-Jacobian product at the centre, and the second-order remainder of the functional as
  the bias (theory.md, (7)-(9)). It needs what the forward pass of method `sensitivity` knows of the node
  (`local`, set by our BoundedModule), and is taken functional by functional where it is the tighter plane at
  the centre.

During α-CROWN they are mixed, and mixing weights, tangent points and row shifts are optimised. α exists for
the final node only: intermediate bounds keep the defaults.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError
from ..lirpa import BoundOptimizableActivation, LinearBound
from ..sensitivity.bilinear import Plane, product_lower_plane, product_range
from ..sensitivity.distance import (
    distance_lower_plane,
    distance_range,
    distance_slack,
    slope,
    squared_distances,
)
from ..sensitivity.softmax import (
    FULLY_MASKED,
    average_range,
    key_lower_plane,
    log_probability_box,
    probability_box,
    softmax_planes,
    weights_lower_plane,
)

MIX = "/mix"  # behind the name of the final node: key of the α that mixes two relaxations


def _box(node: Any) -> tuple[Tensor, Tensor]:
    """Bounds of an input node; those of an unperturbed one are its value."""
    if node.perturbed:
        return node.lower, node.upper
    value = node.forward_value if getattr(node, "forward_value", None) is not None else node.value
    return value, value


def _fit(a: Tensor | None, node: Any) -> Tensor | None:
    """Sum coefficients over the dimensions along which the input was broadcast; None if not perturbed."""
    if a is None or not node.perturbed:
        return None
    shape = (a.shape[0], a.shape[1], *node.output_shape[1:])
    return a if a.shape == shape else a.sum_to_size(shape)


class BoundAttentionOperator(BoundOptimizableActivation):
    """What the operators share: both sides from one lower plane, and the α of the final node.

    A subclass gives `requires_input_bounds`, `interval_propagate`, `bound_forward`, `lower_plane` and
    `alpha_shape`.
    """

    alpha_batch_dim = 2  # read by 0.3; α is (2, spec, batch, …): for lower and for upper bounds

    def __init__(self, attr: Any, inputs: Any, output_index: int, options: Any) -> None:
        super().__init__(attr, inputs, output_index, options)
        self.alpha_batch_dim = 2
        self.splittable = self.use_default_ibp = self.ibp_intermediate = False
        self.optimizable = True
        self.alpha: OrderedDict[str, Tensor] = OrderedDict()
        self.final_start: str | None = None  # name of the node whose α is kept; set by our BoundedModule
        self.local: Any = None  # `domain.rules.Local` of the unit, where a forward pass went before
        self.options = options or {}

    def lower_plane(
        self, a: Tensor, alpha: Tensor | None, mix: Tensor | None
    ) -> tuple[list[Tensor | None], Tensor]:
        """Lower bound of the functional `a` (spec, batch, *shape): a coefficient per input, and the bias.

        mix: (spec, batch) part that the second best of two relaxations gets, or None for 0.
        """
        raise NotImplementedError

    def alpha_shape(self) -> tuple[int, ...]:
        """Shape of α for one functional of one sample."""
        raise NotImplementedError

    def is_linear(self) -> bool:
        """Whether nothing is relaxed, so that α has no effect: at most one operand is perturbed."""
        return sum(bool(node.perturbed) for node in self.inputs) < 2

    def bound_backward(
        self, last_lA: Any, last_uA: Any, *x: Any, start_node: Any = None, **kwargs: Any
    ) -> tuple[list[tuple[Tensor | None, Tensor | None]], Any, Any]:
        alpha = mix = None
        if self.opt_stage in ("opt", "reuse") and start_node is not None:
            alpha, mix = (self.alpha.get(start_node.name + suffix) for suffix in ("", MIX))
        none: list[Tensor | None] = [None] * len(x)
        lower, upper = none, none
        lower_bias: Tensor | int = 0
        upper_bias: Tensor | int = 0
        if last_lA is not None:
            own = (None if t is None else t[0] for t in (alpha, mix))
            lower, lower_bias = self.lower_plane(last_lA, *own)
        if last_uA is not None:
            own = (None if t is None else t[1] for t in (alpha, mix))
            negated, bias = self.lower_plane(-last_uA, *own)
            upper, upper_bias = [None if c is None else -c for c in negated], -bias
        return list(zip(lower, upper, strict=True)), lower_bias, upper_bias

    def init_opt_parameters(self, start_nodes: list[Any]) -> None:
        self.alpha = OrderedDict()
        wanted = self.final_start or start_nodes[-1][0]
        for name, size, *_ in start_nodes:
            if name != wanted:
                continue
            count = (
                int(torch.Size(size).numel()) if isinstance(size, (torch.Size, list, tuple)) else int(size)
            )
            batch = next(i.lower.shape[0] for i in self.inputs if i.perturbed)
            ref = next(i.lower for i in self.inputs if i.perturbed)
            self.alpha[name] = torch.full(
                (2, count, batch, *self.alpha_shape()), 0.5, dtype=ref.dtype, device=ref.device
            ).requires_grad_()
            if self.local is not None:
                self.alpha[name + MIX] = torch.zeros((2, count, batch), dtype=ref.dtype, device=ref.device)

    def clip_alpha(self) -> None:
        for alpha in self.alpha.values():
            alpha.data.clamp_(0.0, 1.0)

    clip_alpha_ = clip_alpha  # the name that 0.3 calls

    def infer_batch_dim(self, batch_size: int, *x: Any) -> int:
        return 0

    def get_split_mask(self, lower: Tensor, upper: Tensor, input_index: int) -> Tensor:
        return torch.zeros_like(lower, dtype=torch.bool)


Planes = tuple[list[Tensor | None], Tensor]  # coefficients per input, and bias


def _mixed(first: Tensor, one: Planes, two: Planes, mix: Tensor | None) -> Planes:
    """A convex combination of two lower planes per functional; one that is not finite gets no part.

    Arguments:
        first: (spec, batch) where the first plane is the better one.
        mix: (spec, batch) part of the other one, or None for 0.
    """
    usable = [torch.isfinite(plane[1]) for plane in (one, two)]
    part = first.to(one[1]) if mix is None else torch.where(first, 1.0 - mix, mix)
    part = torch.where(usable[0], torch.where(usable[1], part, 1.0), 0.0)
    # the functionals that neither plane is finite for keep what the second one has
    weights = part, 1.0 - part
    drop = ~usable[0], ~usable[1] & usable[0]

    def add(a: Tensor | None, b: Tensor | None) -> Tensor | None:
        terms = []
        for t, weight, gone in zip((a, b), weights, drop, strict=True):
            if t is not None:
                shape = (*first.shape, *[1] * (t.ndim - 2))
                terms.append(weight.reshape(shape) * torch.where(gone.reshape(shape), 0.0, t))
        return None if not terms else terms[0] if len(terms) == 1 else terms[0] + terms[1]

    bias = add(one[1], two[1])
    assert bias is not None
    return [add(a, b) for a, b in zip(one[0], two[0], strict=True)], bias


def _forward_bounds(node: Any, bound: Any, rank: int) -> tuple[Any, Any, Tensor, Tensor]:
    """(lw, uw, lb, ub) of an input in forward mode; constants have no coefficients."""
    if node.perturbed:
        return bound.lw, bound.uw, bound.lb, bound.ub
    value = _batched(node, rank)[0]
    return None, None, value, value


def _batched(node: Any, rank: int) -> tuple[Tensor, Tensor]:
    """`_box` with as many dimensions as the operator's output (constants may lack the batch)."""
    low, high = _box(node)
    missing = (1,) * (rank - low.ndim)
    return low.reshape(missing + low.shape), high.reshape(missing + high.shape)


def _signed_product(c: Tensor, lower: Tensor, upper: Tensor, multiply: Callable[..., Tensor]) -> Tensor:
    """Lower bound of a product with the constant c, given lower and upper bounds of the other factor."""
    return multiply(c.clamp(min=0.0), lower) + multiply(c.clamp(max=0.0), upper)


def _forward_product(
    x: tuple[Tensor, Tensor], y: tuple[Tensor, Tensor], xb: Any, yb: Any, transpose_y: bool
) -> tuple[Any, Any, Tensor, Tensor]:
    """Forward bounds of `X Yᵀ` from boxes x, y and linear bounds xb, yb (midpoint McCormick planes).

    With `transpose_y` the linear bounds yb are those of Yᵀ's transpose as stored, (…, m, k).
    """
    x_c, y_c = (x[0] + x[1]) / 2, (y[0] + y[1]) / 2
    spread = ((x[1] - x[0]) / 2) @ ((y[1] - y[0]) / 2).mT
    const = x_c @ y_c.mT

    def right(c: Tensor, v: Tensor) -> Tensor:  # dX Y₀ᵀ
        return v @ c.mT

    def left(c: Tensor, v: Tensor) -> Tensor:  # X₀ dYᵀ
        return c @ (v.mT if transpose_y else v)

    def side(sign: int) -> tuple[Any, Tensor]:
        (x_lw, x_uw, x_lb, x_ub), (y_lw, y_uw, y_lb, y_ub) = xb, yb
        if sign < 0:
            x_lw, x_uw, x_lb, x_ub = x_uw, x_lw, x_ub, x_lb
            y_lw, y_uw, y_lb, y_ub = y_uw, y_lw, y_ub, y_lb
        w: Any = None
        if x_lw is not None:
            w = _signed_product(y_c.unsqueeze(1), x_lw, x_uw, right)
        if y_lw is not None:
            v = _signed_product(x_c.unsqueeze(1), y_lw, y_uw, left)
            w = v if w is None else w + v
        b = _signed_product(y_c, x_lb, x_ub, right) + _signed_product(x_c, y_lb, y_ub, left)
        return w, b - const - sign * spread

    lw, lb = side(+1)
    uw, ub = side(-1)
    return lw, uw, lb, ub


class BoundAttentionScores(BoundAttentionOperator):
    """`S = scale · Q Kᵀ + mask`; inputs Q (batch, …, n, dk), K (batch, …, m, dk), constant mask."""

    def __init__(self, attr: Any, inputs: Any, output_index: int, options: Any) -> None:
        super().__init__(attr, inputs, output_index, options)
        self.scale = float(attr["scale"])
        self.requires_input_bounds = [0, 1]

    def forward(self, q: Tensor, k: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is not None and bool((mask.amax(-1) <= FULLY_MASKED).any()):
            raise InputError("the mask of an attention excludes every key of some query")
        scores = self._scores(q, k)
        return scores if mask is None else scores + mask

    def _scores(self, q: Tensor, k: Tensor) -> Tensor:
        return self.scale * (q @ k.mT)

    def _mask(self) -> Tensor | None:
        return _box(self.inputs[2])[0] if len(self.inputs) > 2 else None

    def alpha_shape(self) -> tuple[int, ...]:
        return tuple(self.output_shape[1:])

    def interval_propagate(self, *v: Any) -> tuple[Tensor, Tensor]:
        (q_l, q_u), (k_l, k_u) = v[0][:2], v[1][:2]
        s = self.scale
        # |scale| moves into Q; a negative scale swaps Q's ends
        q_l, q_u = (s * q_l, s * q_u) if s >= 0 else (s * q_u, s * q_l)
        if q_l is q_u or k_l is k_u or not (self.inputs[0].perturbed and self.inputs[1].perturbed):
            q_c, k_c = (q_l + q_u) / 2, (k_l + k_u) / 2
            q_r, k_r = (q_u - q_l) / 2, (k_u - k_l) / 2
            mid, rad = q_c @ k_c.mT, q_r @ k_c.abs().mT + q_c.abs() @ k_r.mT
            lower, upper = mid - rad, mid + rad
        else:
            lower, upper = product_range(q_l, q_u, k_l, k_u)
        if len(v) > 2:
            lower, upper = lower + v[2][0], upper + v[2][0]
        return lower, upper

    def lower_plane(
        self, a: Tensor, alpha: Tensor | None, mix: Tensor | None
    ) -> tuple[list[Tensor | None], Tensor]:
        q, k = self.inputs[:2]
        scaled = self.scale * a
        bias = torch.zeros(a.shape[:2], dtype=a.dtype, device=a.device)
        coefficients: list[Tensor | None]
        if q.perturbed and k.perturbed:
            plane = product_lower_plane(scaled, *_box(q), *_box(k), 0.5 if alpha is None else alpha)
            coefficients, bias = [_fit(plane.x, q), _fit(plane.y, k)], plane.bias
            if self.local is not None:
                coefficients, bias = self._or_jacobian(a, plane, coefficients, mix)
        elif q.perturbed:
            coefficients = [_fit(scaled @ _box(k)[0], q), None]
        else:
            coefficients = [None, _fit(scaled.mT @ _box(q)[0], k)]
        if (mask := self._mask()) is not None:
            bias = bias + (a * mask).flatten(2).sum(-1)
            coefficients.append(None)
        return coefficients, bias

    def _or_jacobian(
        self, a: Tensor, plane: Plane, coefficients: list[Tensor | None], mix: Tensor | None
    ) -> Planes:
        """The better of the box's plane and of the tangent at the centre plus the range of what it leaves."""
        q, k = self.inputs[:2]
        q0, k0 = (
            t.reshape(-1, *n.output_shape[1:]) for t, n in ((self.local.queries, q), (self.local.keys, k))
        )
        low, high = (t.to(a.dtype).reshape(-1, *self.output_shape[1:]) for t in self.local.bilinear)
        loss = (a.clamp(min=0.0) * low + a.clamp(max=0.0) * high).flatten(2).sum(-1)
        on_q, on_k, value = self._tangent(a, q0, k0)
        # scores are of second degree: the slope times the point is twice the value
        own = [_fit(on_q, q), _fit(on_k, k)], loss - value
        gap = value - (plane.x * q0).flatten(2).sum(-1) - (plane.y * k0).flatten(2).sum(-1) - plane.bias
        return _mixed(-loss <= gap, own, (coefficients, plane.bias), mix)

    def _tangent(self, a: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Slopes of the functional on queries and keys at a point, and its value (spec, batch)."""
        scaled = self.scale * a
        return scaled @ k, scaled.mT @ q, (scaled * (q @ k.mT)).flatten(2).sum(-1)

    def bound_forward(self, dim_in: int, *x: Any) -> Any:
        q, k = self.inputs[:2]
        rank = len(self.output_shape)
        bounds = _forward_bounds(q, x[0], rank), _forward_bounds(k, x[1], rank)
        lw, uw, lb, ub = _forward_product(_batched(q, rank), _batched(k, rank), *bounds, transpose_y=True)
        s = self.scale
        if s < 0:
            lw, uw, lb, ub = uw, lw, ub, lb
        lb, ub = s * lb, s * ub
        if (mask := self._mask()) is not None:
            lb, ub = lb + mask, ub + mask
        return LinearBound(None if lw is None else s * lw, lb, None if uw is None else s * uw, ub)


class BoundL2Scores(BoundAttentionScores):
    """`S = −scale · ‖q_i − k_j‖² + mask`; inputs as those of `BoundAttentionScores`.

    A plane of its own rather than products `q · k` and squares: those forget that ‖k‖² and q · k move
    together, and lose more the farther the tokens are from 0. Where queries and keys are the same node, a
    token's distance from itself is 0.
    """

    @property
    def same(self) -> bool:
        return self.inputs[0] is self.inputs[1]

    def is_linear(self) -> bool:
        return not any(node.perturbed for node in self.inputs)

    def _scores(self, q: Tensor, k: Tensor) -> Tensor:
        return -self.scale * squared_distances(q, k)

    def interval_propagate(self, *v: Any) -> tuple[Tensor, Tensor]:
        (q_l, q_u), (k_l, k_u) = v[0][:2], v[1][:2]
        ends = distance_range(q_l, q_u, k_l, k_u, self.same)
        lower, upper = (-self.scale * t for t in (ends[::-1] if self.scale >= 0 else ends))
        if len(v) > 2:
            lower, upper = lower + v[2][0], upper + v[2][0]
        return lower, upper

    def lower_plane(
        self, a: Tensor, alpha: Tensor | None, mix: Tensor | None
    ) -> tuple[list[Tensor | None], Tensor]:
        q, k = self.inputs[:2]
        tangent: Tensor | float = 0.0 if alpha is None else alpha - 0.5  # within half of the box
        plane = distance_lower_plane(-self.scale * a, *_box(q), *_box(k), tangent, self.same)
        coefficients: list[Tensor | None] = [_fit(plane.x, q), _fit(plane.y, k)]
        bias = plane.bias
        for i, (node, c) in enumerate(((q, plane.x), (k, plane.y))):
            if not node.perturbed:
                bias = bias + (c * _box(node)[0]).flatten(2).sum(-1)
                coefficients[i] = None
        if self.local is not None and q.perturbed and k.perturbed:
            coefficients, bias = self._or_jacobian(a, plane, coefficients, mix)
        if (mask := self._mask()) is not None:
            bias = bias + (a * mask).flatten(2).sum(-1)
            coefficients.append(None)
        return coefficients, bias

    def _tangent(self, a: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scaled = -self.scale * a
        return *slope(scaled, q, k), (scaled * squared_distances(q, k)).flatten(2).sum(-1)

    def bound_forward(self, dim_in: int, *x: Any) -> Any:
        q, k = self.inputs[:2]
        rank = len(self.output_shape)
        (q_l, q_u), (k_l, k_u) = _batched(q, rank), _batched(k, rank)
        q_bounds, k_bounds = _forward_bounds(q, x[0], rank), _forward_bounds(k, x[1], rank)
        q_c, k_c = (q_l + q_u) / 2, (k_l + k_u) / 2
        # slope on q_i in score (i, j), and minus that on k_j: (batch, …, n, m, dk)
        c = -2.0 * self.scale * (q_c.unsqueeze(-2) - k_c.unsqueeze(-3))
        middle = self.scale * squared_distances(q_c, k_c)
        slack = self.scale * distance_slack((q_u - q_l) / 2, (k_u - k_l) / 2, self.same)

        def product(c: Tensor, v: Tensor) -> Tensor:  # Σ_f c_ijf v_if
            return (c @ v.unsqueeze(-1)).squeeze(-1)

        def side(sign: int) -> tuple[Any, Tensor]:
            total: list[Any] = [None, middle - (slack.clamp(min=0.0) if sign > 0 else slack.clamp(max=0.0))]
            for slopes, (lw, uw, lb, ub), turn in (
                (c, q_bounds, False),
                (-c.transpose(-3, -2), k_bounds, True),
            ):
                if sign < 0:
                    lw, uw, lb, ub = uw, lw, ub, lb
                b = _signed_product(slopes, lb, ub, product)
                total[1] = total[1] + (b.mT if turn else b)
                if lw is not None:
                    w = _signed_product(slopes.unsqueeze(1), lw, uw, product)
                    w = w.mT if turn else w
                    total[0] = w if total[0] is None else total[0] + w
            return total[0], total[1]

        lw, lb = side(+1)
        uw, ub = side(-1)
        if (mask := self._mask()) is not None:
            lb, ub = lb + mask, ub + mask
        return LinearBound(lw, lb, uw, ub)


class BoundAttentionWeights(BoundAttentionOperator):
    """`P = softmax(S)` over the last axis."""

    def __init__(self, attr: Any, inputs: Any, output_index: int, options: Any) -> None:
        super().__init__(attr, inputs, output_index, options)
        self.requires_input_bounds = [0]

    def forward(self, s: Tensor) -> Tensor:
        return torch.softmax(s, -1)

    def is_linear(self) -> bool:
        return not self.inputs[0].perturbed

    def alpha_shape(self) -> tuple[int, ...]:
        shape = tuple(self.output_shape[1:])
        return (*shape[:-1], shape[-1] + 1)  # tangent point per key, and the row's shift

    def interval_propagate(self, *v: Any) -> tuple[Tensor, Tensor]:
        return probability_box(*v[0][:2])

    def lower_plane(
        self, a: Tensor, alpha: Tensor | None, mix: Tensor | None
    ) -> tuple[list[Tensor | None], Tensor]:
        lower, upper = _box(self.inputs[0])
        box = log_probability_box(lower, upper)
        shift: Tensor | float = 0.0
        if alpha is None:
            planes = softmax_planes(lower, upper, log_box=box)
        else:
            centre = lower + alpha[..., :-1] * (upper - lower)
            planes, shift = softmax_planes(lower, upper, centre, box), 0.2 * alpha[..., -1:] - 0.1
        plane = weights_lower_plane(a, planes, shift)
        return [_fit(plane.scores, self.inputs[0])], plane.bias

    def bound_forward(self, dim_in: int, *x: Any) -> Any:
        planes = softmax_planes(*_box(self.inputs[0]))
        lw, uw, lb, ub = _forward_bounds(self.inputs[0], x[0], len(self.output_shape))

        def combine(own: Tensor, factor: Tensor, row: Tensor, low: Tensor, high: Tensor) -> Tensor:
            # own_k s_k − factor_k Σ_j row_j s_j, from below; row and factor are not negative
            diagonal = own - factor * row
            others = (row * high).sum(-1, keepdim=True) - row * high
            return diagonal.clamp(min=0.0) * low + diagonal.clamp(max=0.0) * high - factor * others

        p = planes
        low_args: tuple[Tensor, Tensor, Tensor] = p.low_own, p.low_others, p.chord
        high_args: tuple[Tensor, Tensor, Tensor] = p.high_own, p.high_own, p.weights

        def lifted(args: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
            return args[0].unsqueeze(1), args[1].unsqueeze(1), args[2].unsqueeze(1)

        def at_centre(own: Tensor, factor: Tensor, row: Tensor) -> Tensor:
            return own * p.centre - factor * (row * p.centre).sum(-1, keepdim=True)

        new_lb = combine(*low_args, lb, ub) - at_centre(*low_args) + p.low
        new_ub = combine(*high_args, ub, lb) - at_centre(*high_args) + p.high
        new_lw = None if lw is None else combine(*lifted(low_args), lw, uw)
        new_uw = None if uw is None else combine(*lifted(high_args), uw, lw)
        return LinearBound(new_lw, new_lb, new_uw, new_ub)


class BoundAttentionAverage(BoundAttentionOperator):
    """`O = P V`; inputs S, P = softmax(S) (batch, …, n, m) and V (batch, …, m, dv).

    P's bounds are what the backward pass found for it, intersected with the exact range from S's box.
    """

    def __init__(self, attr: Any, inputs: Any, output_index: int, options: Any) -> None:
        super().__init__(attr, inputs, output_index, options)
        self.requires_input_bounds = [0, 1, 2]
        self.relaxation = self.options.get("attention_relaxation", "lse")
        if self.relaxation not in ("lse", "key"):
            raise ValueError(f"attention_relaxation must be 'lse' or 'key', not {self.relaxation!r}")

    def forward(self, s: Tensor, p: Tensor, v: Tensor) -> Tensor:
        return p @ v

    def is_linear(self) -> bool:
        return not self.inputs[1].perturbed

    def alpha_shape(self) -> tuple[int, ...]:
        shape = tuple(self.output_shape[1:])
        return (
            *shape[:-1],
            shape[-1] + 1,
        )  # mix of planes per output, and the row's weight of lse against key

    def interval_propagate(self, *v: Any) -> tuple[Tensor, Tensor]:
        (s_l, s_u), p_box, (v_l, v_u) = (interval[:2] for interval in v)
        return average_range(s_l, s_u, v_l, v_u, p_box)

    def _p_box(self) -> tuple[Tensor, Tensor]:
        s, p = self.inputs[:2]
        if not p.perturbed:
            return _box(p)
        low, high = probability_box(*_box(s))
        return torch.maximum(low, p.lower).clamp(max=1.0), torch.minimum(high, p.upper).clamp(min=0.0)

    def _lse(self, a: Tensor, mix: Tensor | float) -> tuple[Tensor | None, Tensor | None, Tensor]:
        """Coefficients on P and V, and bias."""
        p, v = self.inputs[1:]
        zero = torch.zeros(a.shape[:2], dtype=a.dtype, device=a.device)
        if not p.perturbed:
            return None, _fit(_box(p)[0].mT @ a, v), zero
        if not v.perturbed:
            return _fit(a @ _box(v)[0].mT, p), None, zero
        v_l, v_u = _box(v)
        plane = product_lower_plane(a, *self._p_box(), v_l.mT, v_u.mT, mix)
        return _fit(plane.x, p), _fit(plane.y.mT, v), plane.bias

    def _key(self, a: Tensor) -> tuple[Tensor | None, Tensor]:
        """Coefficients on V, and bias."""
        s, v = self.inputs[0], self.inputs[2]
        plane = key_lower_plane(a, *_box(s), *_box(v))
        if v.perturbed:
            return _fit(plane.values, v), plane.bias
        return None, plane.bias + (plane.values * _box(v)[0]).flatten(2).sum(-1)

    def _jacobian(self, a: Tensor) -> tuple[list[Tensor | None], Tensor, Tensor]:
        """Coefficients, bias, and what is lost at the centre, (spec, batch)."""
        s, _, v = self.inputs
        local = self.local
        values, rows, average = local.values.double(), local.remainder.exact.rows, local.average
        spec, batch = a.shape[:2]
        w = a.double().reshape(spec, batch, *average.shape[1:])
        y = w @ values.mT - (w * average).sum(-1, keepdim=True)
        on_s, on_v = rows.p * y, rows.p.mT @ w
        parts = local.remainder.parts(w.flatten(2).permute(1, 2, 0))
        loss = (parts.down + parts.cross).sum((1, 2)).T  # what is bilinear in the scores is theirs
        centre = (w * average).flatten(2).sum(-1)
        bias = centre - loss - (on_s * local.scores[0]).flatten(2).sum(-1)
        coefficients: list[Tensor | None] = [on_s.to(a).reshape(spec, batch, *s.output_shape[1:]), None, None]
        if v.perturbed:
            coefficients[2] = _fit(on_v.to(a).reshape(spec, batch, -1, *on_v.shape[-2:]), v)
            bias = bias - (on_v * values).flatten(2).sum(-1)
        return coefficients, bias.to(a), loss.to(a)

    def _lse_gap(self, a: Tensor, on_p: Tensor, on_v: Tensor | None, bias: Tensor) -> Tensor:
        """What the plane of `_lse`, carried on through the softmax, loses at the centre: (spec, batch)."""
        s, _, v = self.inputs
        local = self.local
        scores = local.scores[0].to(a).reshape(-1, *s.output_shape[1:])
        planes = softmax_planes(*_box(s))
        plane = weights_lower_plane(on_p, planes, 0.0)
        value = (plane.scores * scores).flatten(2).sum(-1) + plane.bias + bias
        if on_v is not None:
            value = value + (on_v * local.values.reshape(-1, *v.output_shape[1:])).flatten(2).sum(-1)
        return (a * local.average.to(a).reshape(-1, *self.output_shape[1:])).flatten(2).sum(-1) - value

    def lower_plane(
        self, a: Tensor, alpha: Tensor | None, mix: Tensor | None
    ) -> tuple[list[Tensor | None], Tensor]:
        if self.local is None or not self.inputs[1].perturbed:
            return self._lower_plane(a, alpha)
        own, own_bias, loss = self._jacobian(a)
        other, bias = self._lower_plane(a, alpha)
        if other[1] is None:  # the key plane loses more at the centre, for all but huge moves
            return _mixed(torch.isfinite(loss), (own, own_bias), (other, bias), mix)
        better = loss <= self._lse_gap(a, other[1], other[2], bias)
        return _mixed(better, (own, own_bias), (other, bias), mix)

    def _lower_plane(self, a: Tensor, alpha: Tensor | None) -> tuple[list[Tensor | None], Tensor]:
        if alpha is None or not self.inputs[1].perturbed:
            if self.relaxation == "lse" or not self.inputs[1].perturbed:
                on_p, on_v, bias = self._lse(a, 1.0)
                return [None, on_p, on_v], bias
            on_v, bias = self._key(a)
            return [None, None, on_v], bias
        # both relaxations are positively homogeneous: weighing them is splitting the functional
        weight = alpha[..., -1:] if self.relaxation == "key" else (2.0 * alpha[..., -1:]).clamp(max=1.0)
        # α = ½ is the default plane, whose slope on V is the smallest probability: the tightest on all models
        # measured, though no plane is best everywhere
        on_p, on_v, bias = self._lse(a * weight, (2.0 * alpha[..., :-1]).clamp(max=1.0))
        key_v, key_bias = self._key(a * (1.0 - weight))
        return [None, on_p, on_v if on_v is None or key_v is None else on_v + key_v], bias + key_bias

    def bound_forward(self, dim_in: int, *x: Any) -> Any:
        _, p, v = self.inputs
        rank = len(self.output_shape)
        v_l, v_u = _batched(v, rank)
        p_box = self._p_box() if p.perturbed else _batched(p, rank)
        bounds = _forward_bounds(p, x[1], rank), _forward_bounds(v, x[2], rank)
        lw, uw, lb, ub = _forward_product(p_box, (v_l.mT, v_u.mT), *bounds, transpose_y=False)
        return LinearBound(lw, lb, uw, ub)


def operators() -> dict[str, Any]:
    """The operators of this package by node kind, for `custom_ops`."""
    from .input import KIND, BoundInputBox

    return {
        "attn_bounds::AttentionScores": BoundAttentionScores,
        "attn_bounds::L2Scores": BoundL2Scores,
        "attn_bounds::AttentionWeights": BoundAttentionWeights,
        "attn_bounds::AttentionAverage": BoundAttentionAverage,
        KIND: BoundInputBox,
    }


__all__ = [
    "BoundAttentionAverage",
    "BoundAttentionScores",
    "BoundAttentionWeights",
    "BoundL2Scores",
    "operators",
]
