"""Identity behind the network's input, so that a nonlinear operator never meets an l1/l2 root directly.

For l1 and l2 balls auto_LiRPA gives the root node the box `lower = upper = x`, of width zero: an operator
that relaxes over its input's box (attention on Q, K, V, `relu(x)`, even `Linear(x + b)` in interval mode)
is then unsound. This operator's own box is right: it is computed as for every other intermediate node.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..lirpa import Bound, Interval, LinearBound

KIND = "attn_bounds::InputBox"


class _InputBox(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]

    @staticmethod
    def symbolic(g: Any, x: Any) -> Any:
        return g.op(KIND, x).setType(x.type())


class BehindInputBox(nn.Module):
    """`model` with an input box in front of each input."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Tensor) -> Any:
        return self.model(*(_InputBox.apply(x) for x in inputs))


class BoundInputBox(Bound):
    """Identity; interval bounds of an lp ball are its bounding box."""

    def __init__(self, attr: Any, inputs: Any, output_index: int, options: Any) -> None:
        super().__init__(attr, inputs, output_index, options)
        self.requires_input_bounds: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        return x

    def interval_propagate(self, *v: Any) -> Any:
        x = v[0]
        if isinstance(x, Interval) and x.ptb is not None and x.ptb.norm != float("inf"):
            eps = torch.as_tensor(x.ptb.eps).to(x[0])
            eps = eps.reshape(eps.shape + (1,) * (x[0].ndim - eps.ndim)) if eps.ndim == 1 else eps
            while 0 < eps.ndim < x[0].ndim:
                eps = eps.unsqueeze(-1)
            return x[0] - eps, x[1] + eps
        return x[0], x[1]

    def bound_backward(self, last_lA: Any, last_uA: Any, *x: Any, **kwargs: Any) -> Any:
        return [(last_lA, last_uA)], 0, 0

    def bound_forward(self, dim_in: int, *x: Any) -> Any:
        # a new object: the root's carries its zero-width box along
        return LinearBound(x[0].lw, x[0].lb, x[0].uw, x[0].ub)

    def infer_batch_dim(self, batch_size: int, *x: Any) -> Any:
        return x[0]
