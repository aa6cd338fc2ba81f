"""What an importer sees of its node, and small helpers that several importers share.

Every value of a loaded model has the batch as its first dimension, whatever it is in the file. A file at
batch 1 computes values of shapes S for one sample. Where S starts with an axis of size 1, that axis is the
batch's ("plain"); else a batch axis is put in front of all of S ("lifted"). A node whose values are all
plain is imported so; where that fails, as for a transpose that moves the first axis, and where a value does
not start with 1 (heads merged into the batch, the sequence first), its values are lifted: then no axis of
the file is the batch, and the module computes for every sample what the file does at batch 1.
"""

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
    """What an importer may know about its node.

    Attributes:
        constants: per input: float64 (or integer, bool) tensor, or None for data and absent ones.
        present: per input, whether it is given at all.
        shapes: per input, as the module holds it, with batch 1; of a constant its own.
        out_shapes: per output, as the module holds it, with batch 1.
        lifted: whether the batch axis comes on top of the axes of the file.
        parameter: stores a constant in the module and returns its getter.
    """

    node: ir.Node
    opset: int
    constants: list[Tensor | None]
    present: list[bool]
    shapes: list[tuple[int, ...]]
    out_shapes: list[tuple[int, ...]]
    lifted: bool
    parameter: Callable[[Tensor], Callable[[], Tensor]]

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

    def attr_string(self, name: str, default: str) -> str:
        return str(self.node.attributes.get_string(name, default))

    def constant(self, i: int, what: str) -> Tensor:
        c = self.optional(i)
        if c is None:
            raise Unsupported(f"{what} must be a constant")
        return c

    def optional(self, i: int) -> Tensor | None:
        """Constant input i, or None if it is not given. Raises Unsupported if it is data."""
        if i < len(self.constants) and self.constants[i] is None and self.present[i] and i > 0:
            raise Unsupported(f"its input {i} must be a constant")
        return self.constants[i] if i < len(self.constants) else None

    def ints(self, i: int, name: str) -> list[int] | None:
        """Integers given as an attribute (old opsets) or as constant input i (newer ones)."""
        if (value := self.attr_ints(name)) is not None:
            return value
        if i < len(self.present) and self.present[i]:
            return [int(v) for v in self.constant(i, name).flatten()]
        return None

    @property
    def rank(self) -> int:
        """Of input 0 in the file."""
        return len(self.shapes[0]) - self.lifted

    def axis(self, axis: int) -> int:
        """Axis of input 0 in the file → axis of what the module holds; refuses the batch axis."""
        if not -self.rank <= axis < self.rank:
            raise Unsupported(f"axis {axis} does not exist: the input has {self.rank} dimensions")
        axis %= self.rank
        if axis == 0 and not self.lifted:
            raise Unsupported("acts on the batch axis")
        return axis + self.lifted

    def unbatched(self, c: Tensor) -> Tensor:
        """A constant without a batch dimension of its own (auto_LiRPA wants constants so)."""
        if c.ndim > 0 and c.ndim == len(self.out_shape):
            if c.shape[0] != 1:
                raise Unsupported(f"a constant of shape {tuple(c.shape)} varies over the batch")
            c = c[0]
        return c

    def stored(self, c: Tensor) -> Callable[[], Tensor]:
        """Getter of a constant that is broadcast against data."""
        return self.parameter(self.unbatched(c))

    def aligned(self, f: Function) -> Function:
        """f of the data inputs, these brought to the rank of the result, as broadcasting wants it."""
        rank = len(self.out_shape)
        shapes = [s for s, c in zip(self.shapes, self.constants, strict=True) if c is None]
        if all(len(s) == rank for s in shapes):
            return f
        targets = [None if len(s) == rank else (-1, *[1] * (rank - len(s)), *s[1:]) for s in shapes]

        def run(*xs: Tensor) -> Tensor:
            return f(*(x if t is None else x.reshape(t) for x, t in zip(xs, targets, strict=True)))

        return run


def reshape_to(shape: Sequence[int]) -> Function:
    """Reshape that keeps the batch; shape as the module holds it, with batch 1."""
    target = (-1, *shape[1:])
    return lambda x: x.reshape(target)


def linear_map(axis: int, rank: int, matrix: Callable[[], Tensor]) -> Function:
    """x → x with `matrix` (n, m) applied along one axis (an operation that every version bounds exactly)."""
    last = rank - 1
    perm = list(range(rank))
    perm[axis], perm[last] = last, axis
    if axis == last:
        return lambda x: torch.matmul(x, matrix())
    return lambda x: torch.matmul(x.permute(perm), matrix()).permute(perm)


def placement(indices: Sequence[int], size: int) -> Tensor:
    """The 0/1 matrix (size, len(indices)) that picks entries."""
    pick = torch.zeros(size, len(indices), dtype=torch.float64)
    pick[torch.tensor(indices, dtype=torch.long), torch.arange(len(indices))] = 1.0
    return pick


def select(ctx: Context, axis: int, indices: Sequence[int]) -> Function:
    """Entries of one axis of input 0, as a product with a 0/1 matrix."""
    size = ctx.shapes[0][axis]
    if list(indices) == list(range(size)):
        return lambda x: x
    if not indices:
        raise Unsupported("selects nothing: the result is empty")
    return linear_map(axis, len(ctx.shapes[0]), ctx.parameter(placement(indices, size)))
