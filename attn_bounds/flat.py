"""Outputs as rows of numbers, which is what functionals of a network's output are given for."""

from __future__ import annotations

from torch import Tensor, nn


class FlatOutput(nn.Module):
    """The module with its output flattened: auto_LiRPA's backward and interval modes want (batch, outputs).

    Shape: as the module's, → (batch, outputs).
    """

    def __init__(self, module: nn.Module, outputs: int) -> None:
        super().__init__()
        self.module, self.outputs = module, outputs

    def forward(self, *inputs: Tensor) -> Tensor:
        flat: Tensor = self.module(*inputs).reshape(-1, self.outputs)
        return flat
