"""What the bound operators of this package share: both sides from one lower plane, and their α.

The backward pass is written once, for lower bounds; an upper bound of a functional is minus the lower bound
of its negative. α exists for the final node only: intermediate bounds keep the defaults.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..lirpa import BoundOptimizableActivation

MIX = "/mix"  # behind the name of the final node: key of the α that mixes two relaxations


def node_box(node: Any) -> tuple[Tensor, Tensor]:
    """Bounds of an input node; those of an unperturbed one are its value."""
    if node.perturbed:
        return node.lower, node.upper
    value = node.forward_value if getattr(node, "forward_value", None) is not None else node.value
    return value, value


def fit(a: Tensor | None, node: Any) -> Tensor | None:
    """Sum coefficients over the dimensions along which the input was broadcast; None if not perturbed."""
    if a is None or not node.perturbed:
        return None
    shape = (a.shape[0], a.shape[1], *node.output_shape[1:])
    return a if a.shape == shape else a.sum_to_size(shape)


class BoundOperator(BoundOptimizableActivation):
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


def mixed(first: Tensor, one: Planes, two: Planes, mix: Tensor | None) -> Planes:
    """A convex combination of two lower planes per functional; one that is not finite gets no part.

    Arguments:
        first: (spec, batch), or with further dimensions of the planes, where the first one is the better one.
        mix: (spec, batch, …) part of the other one, or None for 0.
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
                shape = (*first.shape, *[1] * (t.ndim - first.ndim))
                terms.append(weight.reshape(shape) * torch.where(gone.reshape(shape), 0.0, t))
        return None if not terms else terms[0] if len(terms) == 1 else terms[0] + terms[1]

    bias = add(one[1], two[1])
    assert bias is not None
    return [add(a, b) for a, b in zip(one[0], two[0], strict=True)], bias


def forward_bounds(node: Any, bound: Any, rank: int) -> tuple[Any, Any, Tensor, Tensor]:
    """(lw, uw, lb, ub) of an input in forward mode; constants have no coefficients."""
    if node.perturbed:
        return bound.lw, bound.uw, bound.lb, bound.ub
    value = batched(node, rank)[0]
    return None, None, value, value


def batched(node: Any, rank: int) -> tuple[Tensor, Tensor]:
    """`node_box` with as many dimensions as the operator's output (constants may lack the batch)."""
    low, high = node_box(node)
    missing = (1,) * (rank - low.ndim)
    return low.reshape(missing + low.shape), high.reshape(missing + high.shape)


def signed_product(c: Tensor, lower: Tensor, upper: Tensor, multiply: Callable[..., Tensor]) -> Tensor:
    """Lower bound of a product with the constant c, given lower and upper bounds of the other factor."""
    return multiply(c.clamp(min=0.0), lower) + multiply(c.clamp(max=0.0), upper)
