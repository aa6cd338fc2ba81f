"""What a graph is made of, as a person would draw it: blocks of attention and MLP with their residual sums.

The graph is cut at every value that all of the rest depends on and that nothing after it reaches behind. What
lies between two cuts is a chain of single nodes or a branching part; a part that ends in the sum with its own
input is a residual branch. What a part is called depends on what stands in it, not on names.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from .build import is_plain
from .graph import constant
from .ops import DOMAIN
from .units import Attention

NORMS = {
    "LayerNorm": "LayerNorm", "LayerNormalization": "LayerNorm", "SkipLayerNormalization": "LayerNorm",
    "RMSNorm": "RMSNorm", "RMSNormalization": "RMSNorm", "SimplifiedLayerNormalization": "RMSNorm",
    "SkipSimplifiedLayerNormalization": "RMSNorm", "BatchNormalization": "BatchNorm",
    "GroupNormalization": "GroupNorm", "InstanceNormalization": "InstanceNorm",
}  # fmt: skip
ACTIVATIONS = {
    "Relu": "ReLU", "LeakyRelu": "LeakyReLU", "PRelu": "PReLU", "Elu": "ELU", "Selu": "SELU", "Celu": "CELU",
    "Gelu": "GELU", "FastGelu": "GELU", "BiasGelu": "GELU", "QuickGelu": "QuickGELU", "Silu": "SiLU",
    "Swish": "SiLU", "Tanh": "tanh", "Sigmoid": "sigmoid", "Erf": "erf", "Softplus": "softplus",
    "HardSwish": "hardswish", "HardSigmoid": "hardsigmoid", "Softsign": "softsign", "Exp": "exp",
    "Softmax": "softmax",
}  # fmt: skip
LINEAR = ("MatMul", "Gemm", "Conv")
LAYOUT = {"Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Cast"}


@dataclass(frozen=True)
class Part:
    """A stretch of the graph.

    Attributes:
        kind: "attention", "mlp", "attention and mlp" side by side, or "other".
        residual: its input is added to what it computes.
        units: the attention units in it.
        norms, activations: in order; "SiLU", …
        linear: layers with constant weights: "MatMul 16→48", "Conv 3→16, 4×4".
        operators: how often each occurs, for a part of another kind.
        parameters: entries of its constants of floats.
        input, output: shapes, first the batch where it is that.
        unsupported: names of its nodes that cannot be imported.
        first, last: names of its first and last node.
    """

    kind: str
    residual: bool
    units: list[Attention]
    norms: list[str]
    activations: list[str]
    linear: list[str]
    operators: dict[str, int]
    parameters: int
    input: list[int | str]
    output: list[int | str]
    unsupported: list[str]
    first: str
    last: str


@dataclass(frozen=True)
class Structure:
    """A model's parts: what comes before the first attention, the blocks, and what comes after the last.

    A block begins with an attention part and has the parts up to the next one.
    """

    stem: list[Part] = field(default_factory=list)
    blocks: list[list[Part]] = field(default_factory=list)
    head: list[Part] = field(default_factory=list)
    parameters: int = 0


def structure(model: ir.Model, units: Sequence[Attention], unsupported: Sequence[str]) -> Structure:
    """The parts of a simplified graph.

    Arguments:
        units: its attention units, in the order of the graph.
        unsupported: names of nodes that could not be imported.
    """
    counted: set[str] = set()
    left = list(units)
    parts = [_part(nodes, source, left, set(unsupported), counted) for source, nodes in _stretches(model)]
    parts = _with_norms(parts)
    starts = [i for i, p in enumerate(parts) if "attention" in p.kind]
    if not starts:
        return Structure(stem=parts, parameters=sum(p.parameters for p in parts))
    after = parts[starts[-1] + 1 :]  # its MLP, perhaps in another layout; the rest is the head
    mlp = next((i for i, p in enumerate(after) if not set(p.operators) <= LAYOUT), len(after))
    found = mlp < len(after) and after[mlp].kind == "mlp" and after[mlp].residual
    bounds = [*starts, starts[-1] + 1 + (mlp + 1 if found else 0)]
    blocks = [parts[a:b] for a, b in itertools.pairwise(bounds)]
    return Structure(parts[: starts[0]], blocks, parts[bounds[-1] :], sum(p.parameters for p in parts))


def _stretches(model: ir.Model) -> list[tuple[ir.Value | None, list[ir.Node]]]:
    """The graph cut at its narrow places: (value that enters, nodes); chains of single nodes are one."""
    moving = {v for v in model.graph.inputs if v.name not in model.graph.initializers}
    nodes = []
    for node in model.graph:
        if any(v in moving for v in node.inputs if v is not None):
            nodes.append(node)
            moving.update(node.outputs)
    last: dict[ir.Value, int] = {v: len(nodes) for v in model.graph.outputs}
    for i, node in enumerate(nodes):
        for v in node.inputs:
            if v in moving and v is not None:
                last[v] = max(i, last.get(v, -1))
    found: list[tuple[ir.Value | None, list[ir.Node]]] = []
    source = next((v for v in model.graph.inputs if v in moving), None)
    live = {v for v in model.graph.inputs if v in moving}
    part: list[ir.Node] = []
    chain = False
    for i, node in enumerate(nodes):
        part.append(node)
        live = {v for v in (*live, *node.outputs) if last.get(v, -1) > i}
        if len(live) > 1 or (live and next(iter(live)) is not node.outputs[0]):
            continue
        if len(part) == 1 and chain:
            found[-1][1].extend(part)
        else:
            found.append((source, part))
        chain = len(part) == 1
        source, part = node.outputs[0], []
    return [*found, (source, part)] if part else found


def _part(
    nodes: list[ir.Node], source: ir.Value | None, left: list[Attention], bad: set[str], counted: set[str]
) -> Part:
    kinds = [n.op_type for n in nodes]
    own = [left.pop(0) for n in nodes if n.op_type == "AttentionAverage" and n.domain == DOMAIN and left]
    end = nodes[-1]
    residual = len(nodes) > 1 and source in _summands(end, nodes)
    linear = [text for n in nodes if (text := _weights(n))]
    activations = [ACTIVATIONS[k] for k in kinds if k in ACTIVATIONS]
    has_mlp = bool(activations) and len(linear) >= 2 + 2 * bool(own)
    kind = "attention" if own else "mlp" if has_mlp else "other"
    if own and has_mlp and residual:
        kind = "attention and mlp"
    names = [n.name or str(n.outputs[0].name) for n in nodes]
    return Part(
        kind=kind,
        residual=residual,
        units=own,
        norms=[NORMS[k] for k in kinds if k in NORMS],
        activations=activations,
        linear=linear,
        operators=dict(Counter(kinds)),
        parameters=sum(_parameters(n, counted) for n in nodes),
        input=_dims(source),
        output=_dims(end.outputs[0]),
        unsupported=[name for name in names if name in bad],
        first=names[0],
        last=names[-1],
    )


def _summands(node: ir.Node, nodes: list[ir.Node]) -> list[ir.Value | None]:
    """What a node of sums adds up, sums within these nodes taken apart."""
    if node.op_type != "Add":
        return []
    found: list[ir.Value | None] = []
    for value in node.inputs:
        inner = None if value is None else value.producer()
        found += _summands(inner, nodes) if inner in nodes and inner.op_type == "Add" else [value]
    return found


def _with_norms(parts: list[Part]) -> list[Part]:
    """Put a chain of a norm alone to the residual part before it: a block with its norms behind the sums."""
    found: list[Part] = []
    for part in parts:
        plain = set(part.operators) <= {*NORMS, "Mul", "Add"} and part.norms
        if plain and found and found[-1].residual:
            before = found[-1]
            operators = dict(Counter(before.operators) + Counter(part.operators))
            found[-1] = Part(
                **{
                    **vars(before),
                    "norms": [*before.norms, *part.norms],
                    "operators": operators,
                    "parameters": before.parameters + part.parameters,
                    "output": part.output,
                    "unsupported": [*before.unsupported, *part.unsupported],
                    "last": part.last,
                }
            )
        else:
            found.append(part)
    return found


def _weights(node: ir.Node) -> str:
    """A layer with constant weights: its operator and sizes; "" for other nodes."""
    if node.op_type not in LINEAR or len(node.inputs) < 2:
        return ""
    arrays = [constant(v) for v in node.inputs[:2]]
    weight = arrays[1] if arrays[1] is not None else arrays[0]
    if weight is None or weight.ndim < 2:
        return ""
    shape = weight.shape
    if node.op_type == "Conv":
        kernel = "×".join(map(str, shape[2:]))
        return f"Conv {shape[1] * node.attributes.get_int('group', 1)}→{shape[0]}, {kernel}"
    turned = node.op_type == "Gemm" and bool(node.attributes.get_int("transB", 0))
    a, b = shape[-2:] if arrays[1] is not None and not turned else shape[-2:][::-1]
    return f"{a}→{b}"


def _parameters(node: ir.Node, counted: set[str]) -> int:
    total = 0
    for value in node.inputs:
        name = None if value is None else str(value.name)
        if name is None or name in counted or (array := constant(value)) is None:
            continue
        counted.add(name)
        total += int(array.size) if array.dtype.kind == "f" else 0
    return total


def _dims(value: ir.Value | None) -> list[int | str]:
    if value is None or value.shape is None:
        return []
    dims: list[int | str] = [d if isinstance(d, int) else str(d.value) for d in value.shape]
    return ["batch", *dims[1:]] if value.shape.is_static() and is_plain([int(d) for d in dims]) else dims
