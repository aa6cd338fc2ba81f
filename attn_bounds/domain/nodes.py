"""Which rule a node of a graph gets, by the class name of the node; auto_LiRPA itself is not needed here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedModelError
from ..sensitivity.softmax import finite_mask
from .activations import FUNCTIONS, SQUARE, Function, activation, leaky_relu
from .forms import AffineForm, Groups
from .normalization import layer_norm
from .products import concatenate, divide, matmul, multiply, subtract
from .softmax import softmax

SCORES, WEIGHTS, AVERAGE = "BoundAttentionScores", "BoundAttentionWeights", "BoundAttentionAverage"
L2_SCORES = "BoundL2Scores"
NORMALIZATIONS = {"BoundLayerNorm", "BoundRMSNorm"}
PRODUCTS = {"BoundMatMul", "RepairedMatMul"}
SOFTMAX = {"BoundSoftmax", "RepairedSoftmax", WEIGHTS}

Bounds = dict[str, tuple[Tensor, Tensor]]


def kind(node: Any) -> str:
    """Class name of a node."""
    return type(node).__name__


def value(node: Any) -> Any:
    """Value of a constant node."""
    found = getattr(node, "forward_value", None)
    return node.value if found is None else found


def is_unit(average: Any) -> bool:
    """Whether an average, its weights and their scores belong together: then they are bounded as one."""
    scores, weights, _ = average.inputs
    return kind(scores) in (SCORES, L2_SCORES) and kind(weights) == WEIGHTS and weights.inputs[0] is scores


def split_softmax(node: Any) -> tuple[Any, int] | None:
    """The input and axis of a softmax that 0.3 has taken apart, given its last node; else None.

    `Div(e, Sum(e))`, `e = Exp(x − Unsqueeze(Max(x)))`: the maximum is a shift and no maximum is bounded.
    """
    if kind(node) != "BoundDiv":
        return None
    e, total = node.inputs
    if kind(e) != "BoundExp" or kind(total) != "BoundReduceSum" or total.inputs[0] is not e:
        return None
    difference = e.inputs[0]
    if kind(difference) != "BoundSub" or kind(difference.inputs[1]) != "BoundUnsqueeze":
        return None
    x, top = difference.inputs[0], difference.inputs[1].inputs[0]
    if kind(top) not in ("BoundReduceMax", "RepairedReduceMax") or top.inputs[0] is not x:
        return None
    rank = len(x.output_shape)
    axes = {_axis(a, rank) for n in (total, top) for a in _listed(n.axis)}
    shape = list(x.output_shape)
    if len(axes) != 1 or list(node.output_shape) != shape:
        return None
    axis = axes.pop()
    shape[axis] = 1
    kept = list(total.output_shape) == shape and list(difference.inputs[1].output_shape) == shape
    return (x, axis) if kept else None


def _listed(axis: Any) -> list[int]:
    return [int(a) for a in axis] if isinstance(axis, (list, tuple)) else [int(axis)]


def _axis(axis: Any, rank: int) -> int:
    return int(axis) % rank


def reads(node: Any) -> list[Any]:
    """The nodes whose forms a node needs: its inputs, but for what is bounded as one at its last node."""
    if kind(node) == AVERAGE:
        scores, weights, v = node.inputs
        return [*scores.inputs, v] if is_unit(node) else [weights, v]
    if (whole := split_softmax(node)) is not None:
        return [whole[0]]
    if kind(node) in NORMALIZATIONS:
        return [node.inputs[0]]
    return list(node.inputs)


def _function(node: Any) -> Function | None:
    """The scalar function of an elementwise node, if it has a rule; operators of ours name it themselves."""
    name = kind(node)
    if isinstance(own := getattr(node, "function", None), Function):
        return own
    if name == "BoundLeakyRelu":
        return leaky_relu(float(node.attr["alpha"])) if "alpha" in node.attr else None
    if name == "BoundPow":
        exponent = value(node.inputs[1])
        two = isinstance(exponent, (int, float, Tensor)) and torch.as_tensor(exponent).numel() == 1
        return SQUARE if two and float(exponent) == 2.0 else None
    if name == "BoundMul" and node.inputs[0] is node.inputs[1]:
        return SQUARE
    if name == "BoundGelu" and _text(node.attr.get("approximate", "none")) != "none":
        return None
    return FUNCTIONS.get(name)


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def handles(node: Any, moving: list[Any]) -> bool:
    """Whether this module has a rule for a node, of whose `reads` those in `moving` have forms."""
    name = kind(node)
    if _function(node) is not None:
        return all(i is node.inputs[0] for i in moving)
    if name in NORMALIZATIONS:
        return True
    if name in SOFTMAX:
        return name == WEIGHTS or _axis(node.axis, len(node.output_shape)) != 0
    if (whole := split_softmax(node)) is not None:
        return whole[1] != 0
    if name in (SCORES, L2_SCORES):
        return aligned(node, moving)
    if name == AVERAGE:
        return not is_unit(node) and aligned(node, moving)
    if name == "BoundDiv":
        return aligned(node, moving)
    if len(moving) < 2:
        return False  # linear
    if name == "BoundConcat":
        return _axis(node.axis, len(node.output_shape)) != 0
    if name in PRODUCTS:
        return len(node.output_shape) >= 3 and aligned(node, moving)
    return name in ("BoundMul", "BoundSub") and aligned(node, moving)


def aligned(node: Any, moving: list[Any]) -> bool:
    """Whether all forms have the rank of the result; else they would broadcast over the batch."""
    return all(len(i.output_shape) == len(node.output_shape) for i in moving)


def apply(
    node: Any,
    form: Callable[[Any], AffineForm],
    is_moving: Callable[[Any], bool],
    groups: Groups,
    layers: Counter[str],
    bounds: Bounds,
) -> AffineForm:
    """The form of a node that `handles` accepts.

    Arguments:
        form: of an input; of a constant one too, with the rank of this node.
        is_moving: whether an input has a form of its own.
        layers: counts the nodes of each kind, for labels.
        bounds: receives the ranges of inputs (of probabilities, for a softmax) by node name.
    """
    name = kind(node)
    title = "Softmax" if name in SOFTMAX or split_softmax(node) else name.removeprefix("Bound")
    title = "MatMul" if name in PRODUCTS or name == AVERAGE else title.removeprefix("Attention")
    layers[title] += 1
    label = f"{title} {layers[title]}"
    if (function := _function(node)) is not None:
        output, bounds[node.inputs[0].name] = activation(form(node.inputs[0]), function, groups, label)
        return output
    if name in NORMALIZATIONS:
        return _normalized(node, form(node.inputs[0]), groups, label, bounds)
    whole = split_softmax(node)
    if whole is not None or name in SOFTMAX:
        x, axis = whole if whole is not None else (node.inputs[0], getattr(node, "axis", -1))
        axis = _axis(axis, len(node.output_shape))
        turned = form(x).linear(lambda t: t.transpose(axis, -1))
        output, (low, high) = softmax(turned, groups, label)
        bounds[node.name] = low.transpose(axis, -1), high.transpose(axis, -1)
        return output.linear(lambda t: t.transpose(axis, -1))
    if name in (SCORES, L2_SCORES):
        q, k = form(node.inputs[0]), form(node.inputs[1])
        factor = node.scale if name == SCORES else 2.0 * node.scale
        scores = matmul(q.linear(lambda t: factor * t), k.linear(lambda t: t.mT), groups, label)
        if name == L2_SCORES:  # −‖q − k‖² = 2 q·k − ‖q‖² − ‖k‖²
            for x, turn in ((q, False), (k, True)):
                squares, _ = activation(x, SQUARE, groups, f"{label} squares")
                shape = scores.centre.shape[1:]

                def spread(t: Tensor, turn: bool = turn, shape: torch.Size = shape) -> Tensor:
                    norms = -node.scale * t.sum(-1, keepdim=True)
                    return (norms.mT if turn else norms).expand(len(t), *shape)

                scores = scores + squares.linear(spread)
        if len(node.inputs) > 2:
            mask = finite_mask(value(node.inputs[2])).to(scores.centre)
            scores = AffineForm(scores.centre + mask, scores.generators)
        return scores
    if name == "BoundDiv":
        x, y = node.inputs
        if not is_moving(y):
            top, divisor = form(x), form(y).centre
            return AffineForm(top.centre / divisor, top.generators / divisor.unsqueeze(1))
        output, bounds[y.name] = divide(form(x), form(y), groups, label)
        return output
    if name == "BoundConcat":
        return concatenate([form(i) for i in node.inputs], _axis(node.axis, len(node.output_shape)))
    x, y = (form(i) for i in (node.inputs[1:] if name == AVERAGE else node.inputs))
    if name == "BoundMul":
        return multiply(x, y, groups, label)
    if name == "BoundSub":
        return subtract(x, y)
    if name in PRODUCTS or name == AVERAGE:
        return matmul(x, y, groups, label)
    raise UnsupportedModelError(f"method sensitivity has no rule for {name} at {node.name}")


def _normalized(node: Any, x: AffineForm, groups: Groups, label: str, bounds: Bounds) -> AffineForm:
    low, high = groups.total(groups.ranges(x.generators, x.rest), x.centre)
    bounds[node.inputs[0].name] = x.centre + low, x.centre + high
    shape, rank = x.centre.shape, x.centre.ndim
    rows = x.linear(lambda t: t.flatten(rank - node.axes))
    output, squares = layer_norm(rows, groups, label, node.eps, node.centred)
    square = node.inputs[1]
    bounds[square.name] = outward(*squares, x.centre.dtype, tuple(square.output_shape[1:]))
    return output.linear(lambda t: t.reshape(len(t), *shape[1:]))


def outward(low: Tensor, high: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Bounds in another dtype, rounded outwards, (batch, *shape)."""
    room = 2.0 * torch.finfo(dtype).eps
    low, high = low - room * low.abs(), high + room * high.abs()
    return low.to(dtype).reshape(-1, *shape), high.to(dtype).reshape(-1, *shape)
