"""Bound operators of one attention unit: Scores(Q, K) or L2Scores(Q, K), Weights(S), Average(S, P, V).

Each offers interval bounds, a backward pass (CROWN) and a forward pass.

Relaxations of the unit (option `attention_relaxation`):

* `lse` (default): log-sum-exp planes of the softmax and McCormick planes of the two products;
* `key`: the only slope is `P dV`, the rest is an exact range (theory.md, section 5).
* `jacobian`: the vector-Jacobian product at the centre, and the second-order remainder of the functional as
  the bias (theory.md, (7)-(9)). It needs what the forward pass of method `sensitivity` knows of the node
  (`local`, set by our BoundedModule), and is taken functional by functional where it is the tighter plane at
  the centre.

During α-CROWN they are mixed, and mixing weights, tangent points and row shifts are optimised.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import InputError
from ..lirpa import LinearBound
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
    finite_mask,
    key_lower_plane,
    log_probability_box,
    probability_box,
    softmax_planes,
    weights_lower_plane,
)
from .base import BoundOperator, Planes, batched, fit, forward_bounds, mixed, node_box, signed_product


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
            w = signed_product(y_c.unsqueeze(1), x_lw, x_uw, right)
        if y_lw is not None:
            v = signed_product(x_c.unsqueeze(1), y_lw, y_uw, left)
            w = v if w is None else w + v
        b = signed_product(y_c, x_lb, x_ub, right) + signed_product(x_c, y_lb, y_ub, left)
        return w, b - const - sign * spread

    lw, lb = side(+1)
    uw, ub = side(-1)
    return lw, uw, lb, ub


class BoundAttentionScores(BoundOperator):
    """`S = scale · Q Kᵀ + mask`; inputs Q (batch, …, n, dk), K (batch, …, m, dk), constant mask."""

    def __init__(self, attr: Any, inputs: Any, output_index: int, options: Any) -> None:
        super().__init__(attr, inputs, output_index, options)
        self.scale = float(attr["scale"])
        self.requires_input_bounds = [0, 1]

    def forward(self, q: Tensor, k: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is not None and bool((mask.amax(-1) <= FULLY_MASKED).any()):
            raise InputError("the mask of an attention excludes every key of some query")
        scores = self._scores(q, k)
        return scores if mask is None else scores + finite_mask(mask)

    def _scores(self, q: Tensor, k: Tensor) -> Tensor:
        return self.scale * (q @ k.mT)

    def _mask(self) -> Tensor | None:
        return finite_mask(node_box(self.inputs[2])[0]) if len(self.inputs) > 2 else None

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
            mask = finite_mask(v[2][0])
            lower, upper = lower + mask, upper + mask
        return lower, upper

    def lower_plane(
        self, a: Tensor, alpha: Tensor | None, mix: Tensor | None
    ) -> tuple[list[Tensor | None], Tensor]:
        q, k = self.inputs[:2]
        scaled = self.scale * a
        bias = torch.zeros(a.shape[:2], dtype=a.dtype, device=a.device)
        coefficients: list[Tensor | None]
        if q.perturbed and k.perturbed:
            plane = product_lower_plane(scaled, *node_box(q), *node_box(k), 0.5 if alpha is None else alpha)
            coefficients, bias = [fit(plane.x, q), fit(plane.y, k)], plane.bias
            if self.local is not None:
                coefficients, bias = self._or_jacobian(a, plane, coefficients, mix)
        elif q.perturbed:
            coefficients = [fit(scaled @ node_box(k)[0], q), None]
        else:
            coefficients = [None, fit(scaled.mT @ node_box(q)[0], k)]
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
        own = [fit(on_q, q), fit(on_k, k)], loss - value
        gap = value - (plane.x * q0).flatten(2).sum(-1) - (plane.y * k0).flatten(2).sum(-1) - plane.bias
        return mixed(-loss <= gap, own, (coefficients, plane.bias), mix)

    def _tangent(self, a: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Slopes of the functional on queries and keys at a point, and its value (spec, batch)."""
        scaled = self.scale * a
        return scaled @ k, scaled.mT @ q, (scaled * (q @ k.mT)).flatten(2).sum(-1)

    def bound_forward(self, dim_in: int, *x: Any) -> Any:
        q, k = self.inputs[:2]
        rank = len(self.output_shape)
        bounds = forward_bounds(q, x[0], rank), forward_bounds(k, x[1], rank)
        lw, uw, lb, ub = _forward_product(batched(q, rank), batched(k, rank), *bounds, transpose_y=True)
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
            mask = finite_mask(v[2][0])
            lower, upper = lower + mask, upper + mask
        return lower, upper

    def lower_plane(
        self, a: Tensor, alpha: Tensor | None, mix: Tensor | None
    ) -> tuple[list[Tensor | None], Tensor]:
        q, k = self.inputs[:2]
        tangent: Tensor | float = 0.0 if alpha is None else alpha - 0.5  # within half of the box
        plane = distance_lower_plane(-self.scale * a, *node_box(q), *node_box(k), tangent, self.same)
        coefficients: list[Tensor | None] = [fit(plane.x, q), fit(plane.y, k)]
        bias = plane.bias
        for i, (node, c) in enumerate(((q, plane.x), (k, plane.y))):
            if not node.perturbed:
                bias = bias + (c * node_box(node)[0]).flatten(2).sum(-1)
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
        (q_l, q_u), (k_l, k_u) = batched(q, rank), batched(k, rank)
        q_bounds, k_bounds = forward_bounds(q, x[0], rank), forward_bounds(k, x[1], rank)
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
                b = signed_product(slopes, lb, ub, product)
                total[1] = total[1] + (b.mT if turn else b)
                if lw is not None:
                    w = signed_product(slopes.unsqueeze(1), lw, uw, product)
                    w = w.mT if turn else w
                    total[0] = w if total[0] is None else total[0] + w
            return total[0], total[1]

        lw, lb = side(+1)
        uw, ub = side(-1)
        if (mask := self._mask()) is not None:
            lb, ub = lb + mask, ub + mask
        return LinearBound(lw, lb, uw, ub)


class BoundAttentionWeights(BoundOperator):
    """`P = softmax(S)` over the last axis."""

    def __init__(self, attr: Any, inputs: Any, output_index: int, options: Any) -> None:
        super().__init__(attr, inputs, output_index, options)
        self.requires_input_bounds = [0]

    def forward(self, s: Tensor) -> Tensor:
        return torch.softmax(s, -1)

    def _rows(self, t: Tensor) -> Tensor:
        """A tensor of the node's shape, other dimensions in front, with what softmax runs over as last."""
        return t

    def _back(self, t: Tensor) -> Tensor:
        """Undoes `_rows`."""
        return t

    def is_linear(self) -> bool:
        return not self.inputs[0].perturbed

    def alpha_shape(self) -> tuple[int, ...]:
        shape = tuple(self._rows(torch.empty(self.output_shape[1:], device="meta").unsqueeze(0)).shape[1:])
        return (*shape[:-1], shape[-1] + 1)  # tangent point per key, and the row's shift

    def interval_propagate(self, *v: Any) -> tuple[Tensor, Tensor]:
        low, high = probability_box(*(self._rows(t) for t in v[0][:2]))
        return self._back(low), self._back(high)

    def lower_plane(
        self, a: Tensor, alpha: Tensor | None, mix: Tensor | None
    ) -> tuple[list[Tensor | None], Tensor]:
        lower, upper = (self._rows(t) for t in node_box(self.inputs[0]))
        box = log_probability_box(lower, upper)
        shift: Tensor | float = 0.0
        if alpha is None:
            planes = softmax_planes(lower, upper, log_box=box)
        else:
            centre = lower + alpha[..., :-1] * (upper - lower)
            planes, shift = softmax_planes(lower, upper, centre, box), 0.2 * alpha[..., -1:] - 0.1
        plane = weights_lower_plane(self._rows(a), planes, shift)
        return [fit(self._back(plane.scores), self.inputs[0])], plane.bias

    def bound_forward(self, dim_in: int, *x: Any) -> Any:
        lower, upper = (self._rows(t) for t in node_box(self.inputs[0]))
        planes = softmax_planes(lower, upper)
        lw, uw, *given = forward_bounds(self.inputs[0], x[0], len(self.output_shape))
        lw, uw = (None if t is None else self._rows(t) for t in (lw, uw))
        lb, ub = self._rows(given[0]), self._rows(given[1])

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
        new_lw = None if lw is None or uw is None else combine(*lifted(low_args), lw, uw)
        new_uw = None if lw is None or uw is None else combine(*lifted(high_args), uw, lw)
        new = (None if t is None else self._back(t) for t in (new_lw, new_lb, new_uw, new_ub))
        return LinearBound(*new)


class BoundSoftmax(BoundAttentionWeights):
    """A softmax outside attention, over any axis but the batch's."""

    def __init__(self, attr: Any, inputs: Any, output_index: int, options: Any) -> None:
        super().__init__(attr, inputs, output_index, options)
        self.axis = int(attr["axis"])

    def forward(self, s: Tensor) -> Tensor:
        if self.axis % s.ndim == 0:
            raise InputError("a softmax over the batch has no bounds")
        self.last = self.axis if self.axis < 0 else self.axis - s.ndim  # counted from the end
        self.single = s.ndim == 2
        return torch.softmax(s, self.axis)

    def _rows(self, t: Tensor) -> Tensor:
        t = t.movedim(self.last, -1)
        return t.unsqueeze(-2) if self.single else t

    def _back(self, t: Tensor) -> Tensor:
        return (t.squeeze(-2) if self.single else t).movedim(-1, self.last)


class BoundAttentionAverage(BoundOperator):
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
            return node_box(p)
        low, high = probability_box(*node_box(s))
        return torch.maximum(low, p.lower).clamp(max=1.0), torch.minimum(high, p.upper).clamp(min=0.0)

    def _lse(self, a: Tensor, mix: Tensor | float) -> tuple[Tensor | None, Tensor | None, Tensor]:
        """Coefficients on P and V, and bias."""
        p, v = self.inputs[1:]
        zero = torch.zeros(a.shape[:2], dtype=a.dtype, device=a.device)
        if not p.perturbed:
            return None, fit(node_box(p)[0].mT @ a, v), zero
        if not v.perturbed:
            return fit(a @ node_box(v)[0].mT, p), None, zero
        v_l, v_u = node_box(v)
        plane = product_lower_plane(a, *self._p_box(), v_l.mT, v_u.mT, mix)
        return fit(plane.x, p), fit(plane.y.mT, v), plane.bias

    def _key(self, a: Tensor) -> tuple[Tensor | None, Tensor]:
        """Coefficients on V, and bias."""
        s, v = self.inputs[0], self.inputs[2]
        plane = key_lower_plane(a, *node_box(s), *node_box(v))
        if v.perturbed:
            return fit(plane.values, v), plane.bias
        return None, plane.bias + (plane.values * node_box(v)[0]).flatten(2).sum(-1)

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
            heads = (-1,) if len(v.output_shape) > 3 else ()  # one head needs no axis of its own
            coefficients[2] = fit(on_v.to(a).reshape(spec, batch, *heads, *on_v.shape[-2:]), v)
            bias = bias - (on_v * values).flatten(2).sum(-1)
        return coefficients, bias.to(a), loss.to(a)

    def _lse_gap(self, a: Tensor, on_p: Tensor, on_v: Tensor | None, bias: Tensor) -> Tensor:
        """What the plane of `_lse`, carried on through the softmax, loses at the centre: (spec, batch)."""
        s, _, v = self.inputs
        local = self.local
        scores = local.scores[0].to(a).reshape(-1, *s.output_shape[1:])
        planes = softmax_planes(*node_box(s))
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
            return mixed(torch.isfinite(loss), (own, own_bias), (other, bias), mix)
        better = loss <= self._lse_gap(a, other[1], other[2], bias)
        return mixed(better, (own, own_bias), (other, bias), mix)

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
        v_l, v_u = batched(v, rank)
        p_box = self._p_box() if p.perturbed else batched(p, rank)
        bounds = forward_bounds(p, x[1], rank), forward_bounds(v, x[2], rank)
        lw, uw, lb, ub = _forward_product(p_box, (v_l.mT, v_u.mT), *bounds, transpose_y=False)
        return LinearBound(lw, lb, uw, ub)
