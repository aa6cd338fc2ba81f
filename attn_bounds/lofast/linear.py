"""Nodes that are affine in their one moving input, on forms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..convolutions import convolution_norm_upper
from ..domain.linear import LINEAR, MOVES
from ..domain.nodes import PRODUCTS, kind, value
from ..errors import UnsupportedModelError
from .forms import Anchor, Form, Term, fresh
from .patterns import axes

LINEAR_NODES = {*LINEAR, "BoundBatchNormalization", "BoundDiv"}
GAIN_STEPS = 40  # nodes that are looked at for the gains that follow a tensor
GAINS = 2  # of them that are kept
FACTORS = {"BoundMul", "BoundDiv", "BoundBatchNormalization"}


def gap(node: Any) -> UnsupportedModelError:
    """What to raise for a node without a rule."""
    shape = tuple(node.output_shape)
    return UnsupportedModelError(f"method lofast has no rule for {kind(node)} at {node.name}, shape {shape}")


def double(x: Any) -> Any:
    """A constant in float64; other values as they are."""
    return x.detach().double().cpu() if isinstance(x, Tensor) and x.is_floating_point() else x


class Constants:
    """Values of constant nodes in float64, each converted once until they are forgotten.

    Attributes:
        moving: names of the nodes that are none.
    """

    def __init__(self, moving: set[str]) -> None:
        self.moving = moving
        self._known: dict[str, Any] = {}

    def of(self, node: Any) -> Any:
        """The value of a node."""
        if node.name not in self._known:
            self._known[node.name] = double(value(node))
        return self._known[node.name]

    def beside(self, node: Any) -> tuple[int, list[Any]]:
        """Position of a node's moving input, and the values of the others."""
        position = next(p for p, i in enumerate(node.inputs) if i.name in self.moving)
        return position, [None if p == position else self.of(i) for p, i in enumerate(node.inputs)]

    def forget(self) -> None:
        """Of weights in float64 no more should be kept than are in use."""
        self._known.clear()


def forward(node: Any, inputs: list[Any]) -> Any:
    """A node's own forward, where it is right."""
    name = kind(node)
    if name == "BoundInputBox":
        return inputs[0]
    if name == "BoundReshape":  # its shape may hold the batch size of the example
        return inputs[0].reshape(len(inputs[0]), *node.output_shape[1:])
    if name == "BoundDiv":  # 0.3 takes every a / √b for a layer normalisation
        return inputs[0] / inputs[1]
    if name == "BoundConcat":
        if any(not torch.equal(i, i[:1].expand_as(i)) for i in inputs):
            raise gap(node)  # constants that differ from sample to sample
        inputs = [i[:1] for i in inputs]
    return node.forward(*inputs)


def linear(node: Any, x: Form, constants: Constants) -> Form | None:
    """The node's form, but for convolutions; None where x is ordered in a way that does not fit.

    Raises:
        UnsupportedModelError: no ordering would.
    """
    name, dims, rank = kind(node), tuple(node.output_shape[1:]), x.place.ndim
    position, others = constants.beside(node)
    if name == "BoundInputBox":
        return x
    if name in MOVES:
        # constants become 0, and entries count from 1
        zeros = [torch.zeros_like(v) if name == "BoundConcat" and v is not None else v for v in others]
        zeros[position] = (x.place + 1).double().unsqueeze(0)
        return Form(x.terms, x.n, x.d, forward(node, zeros)[0].long() - 1)
    if name == "BoundAdd" or (name == "BoundSub" and position == 0):
        return broadcast(x, dims)
    if name in ("BoundSub", "BoundNeg"):
        return broadcast(x.negated(), dims)
    if name in FACTORS:
        factor = entry_factors(node, constants)
        if factor is None:
            raise gap(node)
        return broadcast(x, dims).scaled(factor, node.name)
    if name == "BoundLinear" and position == 0:
        zeros = [torch.zeros_like(v) if p == 2 else v for p, v in enumerate(others)]
        zeros[0] = torch.eye(x.place.shape[-1], dtype=torch.float64)
        return x.along(-1, node.forward(*zeros), node.name)
    if name in PRODUCTS and rank > 0:
        other = others[1 - position]
        if other.ndim > 2 and other.numel() == other.shape[-1] * other.shape[-2]:
            other = other.reshape(other.shape[-2:])
        if other.ndim == 2 and position == 0:
            return x.along(-1, other, node.name)
        if other.ndim == 2 and rank > 1:
            return x.along(-2, other.T)
    if name in ("BoundReduceMean", "BoundReduceSum"):
        return _reduced(node, x, dims)
    raise gap(node)


def _reduced(node: Any, x: Form, dims: tuple[int, ...]) -> Form | None:
    found: Form | None = x
    rank = x.place.ndim + 1
    for axis in sorted((a % rank for a in axes(node)), reverse=True):
        if axis == 0:
            raise gap(node)
        size = x.place.shape[axis - 1]
        each = 1.0 / size if kind(node) == "BoundReduceMean" else 1.0
        found = (
            None
            if found is None
            else found.along(axis - 1, torch.full((size, 1), each, dtype=torch.float64), node.name)
        )
    return None if found is None else Form(found.terms, found.n, found.d, found.place.reshape(dims))


def broadcast(x: Form, dims: tuple[int, ...] | torch.Size) -> Form:
    """The form of a tensor that is repeated to a shape."""
    return x if tuple(x.place.shape) == tuple(dims) else Form(x.terms, x.n, x.d, x.place.expand(dims))


def entry_factors(node: Any, constants: Constants) -> Tensor | None:
    """What a node multiplies each entry with, (*dims); None if it is not of that kind."""
    name, dims = kind(node), tuple(node.output_shape[1:])
    position, others = constants.beside(node)
    if name == "BoundBatchNormalization" and position == 0 and all(v is not None for v in others[1:]):
        factor = others[1] / (others[4] + float(node.eps)).sqrt()  # of each channel, the first axis
        return factor.reshape(-1, *[1] * (len(dims) - 1)).expand(dims)
    if name not in ("BoundMul", "BoundDiv") or (name == "BoundDiv" and position != 0):
        return None
    factor = torch.as_tensor(others[1 - position], dtype=torch.float64)
    return (1.0 / factor if name == "BoundDiv" else factor).expand(1, *dims)[0]


def feature_axis(node: Any, source: Any) -> int:
    """Along which axis of its input a linear node mixes entries."""
    name = kind(node)
    if name in PRODUCTS and node.inputs[1] is source:
        return -2
    if name in ("BoundReduceMean", "BoundReduceSum"):
        axis = axes(node)[-1]
        return axis - 1 if axis > 0 else axis
    return -1


def convolution_norm(node: Any, channels: Tensor | None, gain: Tensor | None) -> float:
    """Norm of a convolution from above, channels (c, in) acting on each pixel before and gain (out) after it.

    Raises:
        UnsupportedModelError: not a two-dimensional convolution with a constant kernel.
    """
    kernel = double(value(node.inputs[1]))
    if not isinstance(kernel, Tensor) or kernel.ndim != 4 or len(node.output_shape) != 4:
        raise gap(node)
    stride, dilation, groups = tuple(node.stride), tuple(node.dilation), int(node.groups)
    size = 1.0
    if gain is not None:
        kernel = kernel * gain[:, None, None, None]
    if channels is not None and groups == 1:
        kernel = torch.einsum("oihw,ji->ojhw", kernel, channels)
    elif channels is not None:
        from ..norms import spectral_norm_upper

        size = float(spectral_norm_upper(channels))
    return size * float(convolution_norm_upper(kernel, stride, dilation, groups))


def gains(
    node: Any, consumers: Callable[[Any], list[Any]], rules: dict[str, Any], constants: Constants
) -> list[Tensor]:
    """Factors of the features that come next to a node on each way, (d), each divided by its largest.

    Arguments:
        rules: what a node is part of by name, None for a node by itself.
    """
    dims = tuple(node.output_shape[1:])
    axis = 0 if kind(node) == "BoundConv" else -1
    todo = [(node, fresh(Anchor(0.0, None, ""), dims, axis))]
    found: list[Tensor] = []
    for _ in range(GAIN_STEPS):
        if not todo:
            break
        x, form = todo.pop()
        for c in consumers(x):
            if rules.get(c.name) is not None or c.name not in rules:
                continue
            if kind(c) == "BoundAdd" and all(i.name in constants.moving for i in c.inputs):
                todo.append((c, form))  # a branch joins
            elif (
                kind(c) in LINEAR_NODES - {"BoundConv"}
                and sum(i.name in constants.moving for i in c.inputs) == 1
            ):
                try:
                    after = linear(c, form, constants)
                except UnsupportedModelError:
                    continue
                ((term,),) = after.terms.values() if after is not None else ((Term(None, None),),)
                if after is not None and term.w is None:
                    todo.append((c, after))
                elif (g := term.diagonal()) is not None and kind(c) in FACTORS:
                    g = g.abs() / g.abs().amax().clamp(min=1e-300)
                    useful = 1e-9 < float(g.amin()) < 0.9
                    if useful and not any(torch.allclose(g, o) for o in found):
                        found.append(g)
    return found[:GAINS]


def output_map(average: Any, chain: list[Any], node: Any, constants: Constants) -> Tensor | None:
    """The weight of an attention's output map, (heads · dv, d_out), rows in the order of the heads.

    Arguments:
        chain: the nodes between the average and the map; None is returned where they do not just merge heads.
    """
    if any(i.name in constants.moving for i in node.inputs[1:]):
        return None
    dims = tuple(average.output_shape[1:])
    if len(dims) not in (2, 3):
        return None
    heads, n, dv = (1, *dims) if len(dims) == 2 else dims
    place = torch.arange(n * heads * dv).reshape(n, heads, dv).transpose(0, 1).reshape(dims)
    form: Form | None = Form({Anchor(0.0, None, ""): [Term(None, None)]}, n, heads * dv, place)
    for step in (*chain, node):
        form = None if form is None else linear(step, form, constants)
    if form is None or not form.ordered() or form.n != n:
        return None
    ((term,),) = form.terms.values()
    return term.matrix() if term.h is None else None
