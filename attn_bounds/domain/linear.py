"""Linear nodes: the node's own forward maps the centre and all generators at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .forms import Rest
from .nodes import kind as kind_of
from .nodes import value as value_of

# Affine in their one perturbed input: the node's own forward maps the centre and all generators at once.
LINEAR = {
    "BoundAdd",
    "BoundConcat",
    "BoundConv",
    "BoundFlatten",
    "BoundGather",
    "BoundInputBox",
    "BoundLinear",
    "BoundMatMul",
    "BoundMul",
    "BoundNeg",
    "BoundReduceMean",
    "BoundReduceSum",
    "BoundReshape",
    "BoundSlice",
    "BoundSplit",
    "BoundSqueeze",
    "BoundSub",
    "BoundTranspose",
    "BoundUnsqueeze",
    "RepairedMatMul",
}


# Only move, copy or drop entries; concatenation with constants does as far as errors go.
MOVES = {
    "BoundConcat",
    "BoundFlatten",
    "BoundGather",
    "BoundInputBox",
    "BoundReshape",
    "BoundSlice",
    "BoundSplit",
    "BoundSqueeze",
    "BoundTranspose",
    "BoundUnsqueeze",
}


def maps(node: Any, position: int) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """A linear node as a map of its input at this position, with and without the constant that it adds."""
    kind = kind_of(node)
    values = [None if p == position else value_of(i) for p, i in enumerate(node.inputs)]
    # inputs that are added to the result, not multiplied with the data
    added = {"BoundLinear": [2], "BoundConv": [2], "BoundAdd": [0, 1], "BoundSub": [0, 1]}.get(kind, [])
    if kind == "BoundConcat":
        added = list(range(len(values)))
    zeros = [torch.zeros_like(v) if p in added and isinstance(v, Tensor) else v for p, v in enumerate(values)]

    def apply(x: Tensor, others: list[Any]) -> Any:
        if kind == "BoundReshape":  # its shape may hold the batch size of the example
            return x.reshape(len(x), *node.output_shape[1:])
        if kind == "BoundConcat":  # nothing broadcasts there
            others = [v if v is None else v.expand(len(x), *v.shape[1:]) for v in others]
        return node.forward(*[x if p == position else v for p, v in enumerate(others)])

    def f(x: Tensor) -> Any:
        return apply(x, values)

    def homogeneous(x: Tensor) -> Any:
        return apply(x, zeros)

    return f, homogeneous


def image(rest: Rest, node: Any, position: int, homogeneous: Callable[[Tensor], Tensor]) -> Rest:
    """What a linear node makes of errors without symbols."""
    kind = kind_of(node)
    if kind in MOVES:
        return rest.moved(homogeneous)
    if kind in ("BoundAdd", "BoundSub", "BoundNeg"):
        return rest
    others = [value_of(i) for p, i in enumerate(node.inputs) if p != position]
    if kind == "BoundMul":
        return rest.scaled(others[0])
    rank, d = rest.box.ndim, rest.box.shape[-1]
    right = kind == "BoundLinear" or (kind in ("BoundMatMul", "RepairedMatMul") and position == 0)
    if right and others[0].ndim == 2:
        weight = homogeneous(torch.eye(d, dtype=rest.box.dtype).reshape(d, *[1] * (rank - 2), d))
        return rest.through(weight.reshape(d, -1))
    if kind in ("BoundReduceMean", "BoundReduceSum"):
        whole = homogeneous(rest.box)
        kept = whole.shape[-1] == d and whole.ndim > 1
        last = {int(a) % rank for a in (node.axis if isinstance(node.axis, (list, tuple)) else [node.axis])}
        return rest.summed(homogeneous) if kept and rank - 1 not in last else Rest.boxed(whole)
    values = [value_of(i) for i in node.inputs]
    sizes = [v.abs() if isinstance(v, Tensor) else v for v in values]
    if kind == "BoundConv" and len(sizes) > 2:
        sizes[2] = torch.zeros_like(sizes[2])
    sizes[position] = rest.box
    return Rest.boxed(node.forward(*sizes))
