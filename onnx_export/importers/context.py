"""What an importer sees of its node, and small helpers that several importers share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import onnx_ir as ir
import torch
from torch import Tensor

Function = Callable[..., Tensor]


class Unsupported(Exception):
    """Raised by an importer: this node cannot be imported, with the reason."""


@dataclass
class Context:
    """What an importer may know about its node."""

    node: ir.Node
    opset: int
    constants: list[Tensor | None]  # per input: float64 (or integer) tensor, or None for data and absent ones
    present: list[bool]  # per input: given at all
    out_shapes: list[tuple[int, ...]]  # per output, with batch 1
    shapes: list[tuple[int, ...]]  # per input, with batch 1
    parameter: Callable[[Tensor], Callable[[], Tensor]]  # stores a constant in the module, returns its getter

    @property
    def out_shape(self) -> tuple[int, ...]:
        return self.out_shapes[0]

    def attr_int(self, name: str, default: int) -> int:
        return int(self.node.attributes.get_int(name, default))

    def attr_ints(self, name: str) -> list[int] | None:
        value = self.node.attributes.get_ints(name, None)
        return None if value is None else [int(v) for v in value]

    def attr_float(self, name: str, default: float) -> float:
        return float(self.node.attributes.get_float(name, default))

    def constant(self, i: int, what: str) -> Tensor:
        c = self.constants[i] if i < len(self.constants) else None
        if c is None:
            raise Unsupported(f"{what} must be a constant")
        return c

    def optional(self, i: int) -> Tensor | None:
        return self.constants[i] if i < len(self.constants) else None

    def ints(self, i: int, name: str) -> list[int] | None:
        """Integers given as an attribute (old opsets) or as constant input i (newer ones)."""
        if (value := self.attr_ints(name)) is not None:
            return value
        if i < len(self.present) and self.present[i]:
            return [int(v) for v in self.constant(i, name).flatten()]
        return None

    def axis(self, axis: int) -> int:
        """Non-negative axis of input 0; refuses the batch axis."""
        axis = axis + len(self.shapes[0]) if axis < 0 else axis
        if axis == 0:
            raise Unsupported("acts on the batch axis")
        return axis

    def unbatched(self, c: Tensor) -> Tensor:
        """A constant without a batch dimension of its own (auto_LiRPA wants constants so)."""
        if c.ndim == len(self.out_shape) and c.ndim > 0:
            if c.shape[0] != 1:
                raise Unsupported(f"a constant of shape {tuple(c.shape)} varies over the batch")
            c = c[0]
        return c


def reshape_to(shape: Sequence[int]) -> Function:
    if len(shape) < 2 or shape[0] != 1:
        raise Unsupported(
            f"result shape {tuple(shape)} (for batch 1) does not keep the batch as first dimension"
        )
    target = (-1, *shape[1:])
    return lambda x: x.reshape(target)


def select(ctx: Context, axis: int, indices: list[int], keep: bool) -> Function:
    """Entries of one axis, as a product with a 0/1 matrix (an operation every version bounds exactly)."""
    size, last = ctx.shapes[0][axis], len(ctx.shapes[0]) - 1
    pick = torch.zeros(size, len(indices), dtype=torch.float64)
    pick[torch.tensor(indices), torch.arange(len(indices))] = 1.0
    get = ctx.parameter(pick)
    perm = list(range(last + 1))
    perm[axis], perm[last] = last, axis
    shape = (-1, *ctx.out_shape[1:])

    def run(x: Tensor) -> Tensor:
        y = torch.matmul(x.permute(perm), get()).permute(perm)  # perm is the identity for the last axis
        return y if keep else y.reshape(shape)

    return run
