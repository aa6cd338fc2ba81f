"""Where a model is entered: which input bounds are over, what the others are fixed to, and all sizes.

Bounds are over one float tensor: a graph input, or with `input_node` any value inside the graph, which then
takes the place of an input. Integer inputs are indices of an embedding: bounds start behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, ValueInfoProto, helper

from attn_bounds.errors import InputError, UnsupportedModelError, first_line

from .given import FLOATS, INTEGERS, Fixed, Inputs, Sizes, free_inputs
from .subgraph import check_names, embedded, only_shape_of, pruned, resolve


@dataclass
class Entry:
    """How a model is entered.

    Attributes:
        proto: the model, cut where bounds start.
        name: of the value bounds are over, an input of `proto`.
        shape: of that value at batch 1.
        dynamic: whether the file takes any batch (as the first axis).
        batch: the fixed batch of the file where it is not dynamic.
        feeds: values of the other inputs, at that batch, or at batch 1.
        repeated: those of them whose first axis is a dynamic batch.
        is_cut: whether `proto` is not the whole file.
        ids: the integer input in front of the embedding, "" if there is none; its shape at batch 1.
        notes: what was chosen, in words.
        guess: which of `rebatch.GUESSES` says where shapes have a fixed batch.
    """

    proto: ModelProto
    name: str
    shape: tuple[int, ...]
    dynamic: bool
    batch: int = 1
    feeds: dict[str, np.ndarray] = field(default_factory=dict)
    repeated: frozenset[str] = frozenset()
    is_cut: bool = False
    ids: str = ""
    ids_shape: tuple[int, ...] = ()
    notes: list[str] = field(default_factory=list)
    guess: int = 0

    def feeds_at(self, batch: int) -> dict[str, np.ndarray]:
        """The fixed inputs for a batch of this size."""
        return {n: np.repeat(v, batch, 0) if n in self.repeated else v for n, v in self.feeds.items()}


def run(proto: ModelProto, feeds: Mapping[str, np.ndarray]) -> np.ndarray:
    """First output of a small model, by onnxruntime."""
    return run_all(proto, [feeds])[0]


def run_all(proto: ModelProto, feeds: Sequence[Mapping[str, np.ndarray]]) -> list[np.ndarray]:
    """`run` on several inputs, with one session."""
    from .oracle import onnx_session

    started = onnx_session(proto.SerializeToString())
    wanted = {i.name for i in started.get_inputs()}
    return [np.asarray(started.run(None, {n: v for n, v in f.items() if n in wanted})[0]) for f in feeds]


def enter(
    proto: ModelProto,
    path: str | Path,
    shape: Sizes | None = None,
    fix: Fixed | None = None,
    input_node: str | None = None,
) -> Entry:
    """Choose where bounds start; see `Entry`.

    Arguments:
        shape: sizes of dynamic dimensions besides the batch: by the dimension's name, or an input's sizes.
        fix: values of the inputs that bounds are not over.
        input_node: value (or node) inside the graph where bounds start.

    Raises:
        InputError: names what must be chosen, and how.
    """
    check_names(proto.graph, path)
    inputs = Inputs(path, proto.graph, shape or {}, fix or {})
    if not inputs.values:
        raise InputError(f"{path}: the model has no input")
    inputs.add_usual()
    free = [n for n in inputs.values if n not in inputs.fix]
    kinds = {n: v.type.tensor_type.elem_type for n, v in inputs.values.items()}
    if input_node is not None and input_node not in inputs.values:
        return _cut(proto, path, inputs, resolve(path, proto.graph, input_node), "chosen as the input")
    # integers may be embedded and fixed: the value is for what else is made of them, as a padding mask
    embeddable = [n for n in fix or {} if kinds[n] in INTEGERS and embedded(proto.graph, n)]
    if input_node in inputs.fix and input_node not in embeddable:
        raise InputError(f"{path}: {input_node} is fixed, so bounds cannot be over it")
    possible = free or embeddable
    name = input_node or (possible[0] if len(possible) == 1 else None)
    if name is None and not free:
        raise InputError(
            f"{path}: every input is fixed ({', '.join(inputs.fix)}); say where bounds start: --input-node "
            "NAME (input_node= in Python)"
        )
    others = [n for n in free if n != name]
    if name is None or others:
        raise InputError(
            f"{path}: {len(free)} inputs ({', '.join(free)}); bounds are over one, fix the others: "
            + " ".join(f"--fix {n}=ones|zeros|NUMBER|FILE.npy" for n in (others or free)[-1:])
            + ", or fix={...} in Python"
        )
    if kinds[name] in INTEGERS:
        value = embedded(proto.graph, name)
        if value is None:
            raise InputError(
                f"{path}: the input {name} holds integers, and no embedding of it was found; bounds are "
                "over real numbers: say where they start with --input-node NAME (input_node= in Python)"
            )
        return _cut(proto, path, inputs, value, f"the embedding of {name}", name)
    if kinds[name] not in FLOATS:
        kind = TensorProto.DataType.Name(kinds[name])
        raise InputError(f"{path}: input {name} has type {kind}; a float or double input is needed")
    sizes = inputs.shape(name)
    dynamic = inputs.has_dynamic_batch(name)
    batch = 1
    if not dynamic and len(sizes) > 1 and not inputs.batch_elsewhere(name) and not inputs.fix:
        batch, sizes = sizes[0], (1, *sizes[1:])
    feeds = {n: inputs.value(n) for n in inputs.fix}
    repeated = frozenset(n for n in feeds if inputs.has_dynamic_batch(n))
    return Entry(proto, name, sizes, dynamic, batch, feeds, repeated, notes=inputs.notes)


def _cut(proto: ModelProto, path: str | Path, inputs: Inputs, value: str, what: str, ids: str = "") -> Entry:
    """Let the model start at a value inside of it."""
    front = pruned(proto, [ValueInfoProto(name=value)], None)
    needed = {v.name for v in front.graph.input}
    feeds = {n: inputs.value(n) for n in inputs.fix}
    zeros = {}
    for name in sorted(needed - set(feeds)):
        kind = helper.tensor_dtype_to_np_dtype(inputs.values[name].type.tensor_type.elem_type)
        zeros[name] = np.zeros(inputs.shape(name), dtype=kind)
    batched = {n for n in needed if inputs.has_dynamic_batch(n)}
    at = {n: v for n, v in (feeds | zeros).items() if n in needed}
    try:
        found = run(front, at)
    except Exception as e:
        raise InputError(
            f"{path}: {value} cannot be computed ({first_line(e)}); start from another value"
        ) from None
    if found.dtype not in (np.float32, np.float64):
        raise InputError(f"{path}: {value} holds {found.dtype}; bounds start at a float value")
    dynamic = False
    if batched:
        try:
            twice = run(front, {n: np.repeat(v, 2, 0) if n in batched else v for n, v in at.items()})
            dynamic = twice.shape == (2 * found.shape[0], *found.shape[1:]) and found.shape[0] == 1
        except Exception:
            dynamic = False
    element = TensorProto.FLOAT if found.dtype == np.float32 else TensorProto.DOUBLE
    first = "batch" if dynamic else found.shape[0]
    info = helper.make_tensor_value_info(value, element, [first, *found.shape[1:]])
    rest = pruned(proto, list(proto.graph.output), info)
    left = [v.name for v in free_inputs(rest.graph) if v.name != value]
    # an input of which only the shape matters, as in a mask of ones made on the way, has any value
    feeds |= {n: np.zeros_like(v) for n, v in zeros.items() if n in left and only_shape_of(rest.graph, n)}
    unfixed = [n for n in left if n not in feeds]
    if value not in {v.name for v in rest.graph.input}:
        raise InputError(f"{path}: the output does not depend on {value}")
    if unfixed:
        raise UnsupportedModelError(
            f"{path}: besides {value} the output depends on {', '.join(unfixed)} directly; give its "
            f"value: --fix {unfixed[0]}=FILE.npy, or fix={{...}} in Python"
        )
    used = {n: v for n, v in feeds.items() if n in left}
    notes = [f"bounds are over {value}, {what}; --input-node NAME starts elsewhere", *inputs.notes]
    return Entry(
        proto=rest,
        name=value,
        shape=tuple(found.shape),
        dynamic=dynamic,
        feeds=used,
        repeated=frozenset(n for n in used if inputs.has_dynamic_batch(n)),
        is_cut=True,
        ids=ids,
        ids_shape=inputs.shape(ids) if ids else (),
        notes=notes,
    )


def embed(
    proto: ModelProto,
    entry: Entry,
    path: str | Path,
    ids: np.ndarray,
    behind: Callable[[np.ndarray], np.ndarray],
    **choices: Any,
) -> np.ndarray:
    """The value behind the embedding for integers (N, *ids_shape[1:]) → (N, *shape[1:]).

    Arguments:
        behind: what `entry` computes from such values, (N, *output).

    Raises:
        InputError: they do not fit, or are no indices of the embedding; or what else the model makes of its
            integers (a padding mask) is not what it is for those that they are fixed to.
    """
    inputs = Inputs(path, proto.graph, choices.get("shape") or {}, choices.get("fix") or {})
    inputs.add_usual()
    front = pruned(proto, [ValueInfoProto(name=entry.name)], None)
    feeds = {n: inputs.value(n) for n in inputs.fix}
    kind = helper.tensor_dtype_to_np_dtype(inputs.values[entry.ids].type.tensor_type.elem_type)
    if ids.shape[1:] != entry.ids_shape[1:]:
        raise InputError(f"{path}: {entry.ids} of shape {ids.shape}; (N, *{entry.ids_shape[1:]}) is needed")
    at = [{**feeds, entry.ids: row[None].astype(kind)} for row in ids]
    try:
        found = run_all(front, at)
    except Exception as e:
        raise InputError(f"{path}: these {entry.ids} cannot be embedded ({first_line(e)})") from None
    if entry.ids in inputs.fix:
        parts = behind(np.concatenate(found))
        for row, whole, part in zip(ids, run_all(proto, at), parts, strict=True):
            if not np.allclose(
                part.ravel(), whole.ravel(), rtol=0, atol=1e-5 * max(1.0, float(np.abs(whole).max()))
            ):
                raise InputError(
                    f"{path}: {entry.ids} {row.tolist()}: besides the embedding the model makes something "
                    f"else of them than of what they are fixed to; one command for each such row, with its "
                    f"own --fix {entry.ids}=FILE.npy"
                )
    return np.concatenate(found)
