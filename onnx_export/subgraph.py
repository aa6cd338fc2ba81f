"""Parts of a model: what some outputs need, and where an embedding ends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from onnx import GraphProto, ModelProto, NodeProto, ValueInfoProto

from attn_bounds.errors import InputError

from .given import FLOATS


def _inner_names(node: NodeProto) -> Iterator[str]:
    """All values that a node reads, those in its subgraphs included."""
    yield from node.input
    for a in node.attribute:
        for g in (a.g, *a.graphs):
            for inner in g.node:
                yield from _inner_names(inner)
            yield from (o.name for o in g.output)


def check_names(graph: GraphProto, path: str | Path) -> None:
    """Raises InputError where a node reads what nothing before it makes, or a value is made twice."""
    known = {""} | {v.name for v in graph.input} | {t.name for t in graph.initializer}
    known |= {t.values.name for t in graph.sparse_initializer}
    for node in graph.node:
        label = f"{node.op_type} {node.name or ', '.join(node.output)}"
        if missing := [n for n in node.input if n not in known]:
            raise InputError(f"{path}: {label} reads {missing[0]!r}, which nothing before it makes")
        if twice := [o for o in node.output if o and o in known]:
            raise InputError(f"{path}: {label} makes {twice[0]!r}, which there is already")
        known.update(node.output)
    if unmade := [o.name for o in graph.output if o.name not in known]:
        raise InputError(f"{path}: nothing makes the output {unmade[0]!r}")


def pruned(proto: ModelProto, outputs: Sequence[ValueInfoProto], at: ValueInfoProto | None) -> ModelProto:
    """The part of a model that the outputs need, the value `at` an input if given. Tensors are copied."""
    needed = {o.name for o in outputs}
    nodes: list[NodeProto] = []
    for node in reversed(proto.graph.node):
        made = [o for o in node.output if o and (at is None or o != at.name)]
        if needed & set(made):
            nodes.append(node)
            needed.update(_inner_names(node))
    result = ModelProto()
    result.ir_version, result.producer_name = proto.ir_version, proto.producer_name
    result.opset_import.extend(proto.opset_import)
    result.functions.extend(proto.functions)
    graph = result.graph
    graph.name = proto.graph.name
    for node in reversed(nodes):
        graph.node.add().CopyFrom(node)
        if at is not None:  # a node with several outputs may still be needed for another one
            own = graph.node[-1]
            for i, o in enumerate(own.output):
                if o == at.name:
                    own.output[i] = f"{o}/before"
    graph.initializer.extend(t for t in proto.graph.initializer if t.name in needed)
    graph.sparse_initializer.extend(t for t in proto.graph.sparse_initializer if t.values.name in needed)
    graph.input.extend(v for v in proto.graph.input if v.name in needed and (at is None or v.name != at.name))
    if at is not None and at.name in needed:
        graph.input.append(at)
    graph.output.extend(outputs)
    return result


def only_shape_of(graph: GraphProto, name: str) -> bool:
    """Whether nothing but its shape is asked of a value."""
    users = [node for node in graph.node if name in _inner_names(node)]
    return all(node.op_type in ("Shape", "Size") for node in users) and all(
        o.name != name for o in graph.output
    )


def embedded(graph: GraphProto, ids: str) -> str | None:
    """The value behind the embedding of an integer input: behind the sum with other embeddings, if any."""
    users: dict[str, list[NodeProto]] = {}
    for node in graph.node:
        for name in node.input:
            users.setdefault(name, []).append(node)
    tables = {t.name for t in graph.initializer if len(t.dims) == 2 and t.data_type in FLOATS}
    todo, value = [ids], None
    while todo and value is None:
        for node in users.get(todo.pop(0), []):
            if node.op_type == "Gather" and node.input[0] in tables:
                value = node.output[0]
                break
            if node.op_type == "EmbedLayerNormalization":
                return node.output[0]
            if node.op_type in ("Cast", "Identity", "Reshape", "Unsqueeze", "Squeeze", "Transpose"):
                todo.append(node.output[0])
    outputs = {o.name for o in graph.output}
    while value is not None and value not in outputs and len(own := users.get(value, [])) == 1:
        node = own[0]
        scaled = node.op_type == "Mul" and any(_is_constant(graph, i) for i in node.input)
        if node.op_type not in ("Add", "Identity", "Cast", "Dropout") and not scaled:
            break
        value = node.output[0]
    return value


def _is_constant(graph: GraphProto, name: str) -> bool:
    made = any(name in n.output and n.op_type == "Constant" for n in graph.node)
    return made or any(t.name == name for t in graph.initializer)


def resolve(path: str | Path, graph: GraphProto, name: str) -> str:
    """A value by its own name or that of its node."""
    for node in graph.node:
        if name in node.output:
            return name
    found = [n.output[0] for n in graph.node if n.name == name]
    if len(found) == 1:
        return found[0]
    close = [o for n in graph.node for o in (n.name, *n.output) if name.lower() in o.lower()][:5]
    hint = f"; similar: {', '.join(close)}" if close else ""
    raise InputError(f"{path}: no value or node {name!r} to start from{hint}")
