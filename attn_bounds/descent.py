"""Adam on a few tensors. torch's own imports its compiler, which takes longer than a whole bound."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Adam:
    """Kingma and Ba, ICLR 2015 (Algorithm 1), in place; entries whose gradient is not finite stay.

    Arguments:
        tensors: what is changed. rate: of the first step. decay: factor on the rate from step to step.
    """

    def __init__(self, tensors: Sequence[Tensor], rate: float, decay: float = 1.0) -> None:
        self.tensors, self.rate, self.decay, self.steps = tensors, rate, decay, 0
        self.moments = [(torch.zeros_like(t), torch.zeros_like(t)) for t in tensors]

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor | None]) -> None:
        """One step down; None for a tensor that nothing depended on."""
        self.steps += 1
        for t, (first, second), gradient in zip(self.tensors, self.moments, gradients, strict=False):
            if gradient is None:
                continue
            # one functional must not spoil the others
            g = gradient.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
            first.lerp_(g, 0.1)
            second.mul_(0.999).addcmul_(g, g, value=0.001)
            size = (second / (1.0 - 0.999**self.steps)).sqrt_().add_(1e-8)
            t.addcdiv_(first, size, value=-self.rate / (1.0 - 0.9**self.steps))
        self.rate *= self.decay
