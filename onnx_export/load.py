"""ONNX file → torch module that auto_LiRPA can trace, checked against onnxruntime."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import Tensor, nn

from attn_bounds.errors import AttnBoundsError, InputError, UnsupportedModelError, first_line

from . import simplify
from .advice import nearest
from .attention import fuse_attention
from .build import Builder, Step, UnsupportedNode, held
from .entry import Entry, enter
from .given import Fixed, Sizes, dims, free_inputs
from .graph import opset
from .lowering import lower
from .oracle import check as check_module
from .oracle import onnx_session
from .patterns import fuse_patterns
from .rebatch import GUESSES
from .structure import Structure, structure
from .units import Attention


@dataclass(frozen=True)
class ModelInfo:
    """What `attn-bounds inspect` prints; shapes include the batch, named "batch" where it is dynamic."""

    path: str
    opset: int
    inputs: dict[str, list[int | str]]
    outputs: dict[str, list[int | str]]
    attention: list[Attention]
    unsupported: list[UnsupportedNode]
    sha256: str
    notes: list[str] = field(default_factory=list)  # what was not recognised, and why
    chosen: list[str] = field(default_factory=list)  # how inputs were chosen
    head: str = ""  # final Softmax, ArgMax, … that was taken off: the module returns the logits before it
    structure: Structure = field(default_factory=Structure)


class OnnxModule(nn.Module):
    """A loaded ONNX graph.

    Shape: (batch, *input_shape) → (batch, *output_shape). Every constant of the graph is a buffer;
    `.double()` after loading rounds them to float32 first, so ask `load` for the dtype.

    Attributes:
        info: the model's `ModelInfo`.
        steps: the nodes, in order.
        input_shape, output_shape: of one sample, without the batch.
    """

    def __init__(self, info: ModelInfo) -> None:
        super().__init__()
        self.info = info
        self.steps: list[Step] = []
        self.input_name = self.output_name = ""
        self.input_shape: tuple[int, ...] = ()
        self.output_shape: tuple[int, ...] = ()
        self._last_use: dict[str, int] = {}

    def values(self, x: Tensor, keep: bool = True) -> dict[str, Tensor]:
        """All values by their ONNX name (`keep=False`: those no longer needed are dropped on the way)."""
        env = {self.input_name: x}
        for i, step in enumerate(self.steps):
            env[step.output] = step.run(*(env[name] for name in step.inputs))
            if not keep:
                for name in step.inputs:
                    if self._last_use[name] == i:
                        env.pop(name, None)
        return env

    def __reduce__(self) -> Any:
        # the steps read the buffers of this very object: a copy would go on reading the original's
        raise TypeError("a loaded model cannot be copied or pickled; load the file again instead")

    def forward(self, x: Tensor) -> Tensor:
        return self.values(x, keep=False)[self.output_name]

    def with_head(self, y: Tensor) -> Tensor:
        """What the file itself returns, from this module's output: applies the head that was taken off."""
        heads = {
            "Softmax": lambda v: torch.softmax(v, -1),
            "LogSoftmax": lambda v: torch.log_softmax(v, -1),
            "Sigmoid": torch.sigmoid,
            "ArgMax": lambda v: v.argmax(1, keepdim=True),
        }
        return heads[self.info.head](y) if self.info.head else y

    def finish(self) -> None:
        """Compute when each value is used for the last time (once, after the steps are in place)."""
        self._last_use = {name: i for i, step in enumerate(self.steps) for name in step.inputs}
        self._last_use[self.output_name] = len(self.steps)


def _named_dims(value: onnx.ValueInfoProto) -> list[int | str]:
    found = dims(value) or []
    return ["batch" if i == 0 and isinstance(d, str) else d or "?" for i, d in enumerate(found)]


def _digest(path: str | Path) -> str:
    found = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            found.update(block)
    return found.hexdigest()


def _prepare(
    path: str | Path, dtype: torch.dtype, attention: str, logits: bool, guess: int, **choices: Any
) -> tuple[OnnxModule, Entry]:
    with _analysing(path):
        return _analysed(path, dtype, attention, logits, guess, **choices)


@contextlib.contextmanager
def _analysing(path: str | Path) -> Iterator[None]:
    """Whatever a strange file makes fail in here is about that file."""
    try:
        yield
    except AttnBoundsError:
        raise
    except Exception as e:
        if isinstance(e, MemoryError) or "allocate memory" in str(e):
            raise InputError(f"{path}: loading it needs more memory than there is") from e
        try:
            onnx_session(str(path))
        except Exception as invalid:
            raise InputError(f"{path}: onnxruntime cannot run this model ({first_line(invalid)})") from e
        raise UnsupportedModelError(
            f"{path}: the graph cannot be analysed ({type(e).__name__}: {first_line(e)}), though onnxruntime "
            "accepts it; please report this"
        ) from e


def _analysed(
    path: str | Path, dtype: torch.dtype, attention: str, logits: bool, guess: int, **choices: Any
) -> tuple[OnnxModule, Entry]:
    entry = enter(simplify.read(path), path, **choices)
    entry.guess = guess
    graph = entry.proto.graph
    in_dims = {v.name: _named_dims(v) for v in free_inputs(graph) if v.name not in entry.feeds}
    out_dims = {v.name: _named_dims(v) for v in graph.output}
    if len(out_dims) != 1:
        raise UnsupportedModelError(
            f"{path}: {len(out_dims)} outputs ({', '.join(out_dims)}); models with exactly one output are "
            "supported"
        )
    model = simplify.specialise(entry, path)
    version = opset(model)
    simplify.fold(model, path)
    while lower(model):  # a second time where shapes were known only after the first
        simplify.fold(model, path)
    head = simplify.strip_head(model) if logits else ""
    fuse_patterns(model)
    units, notes = fuse_attention(model) if attention == "operators" else ([], [])
    info = ModelInfo(
        path=str(path),
        opset=version,
        inputs=in_dims,
        outputs=out_dims,
        attention=units,
        unsupported=[],
        sha256=_digest(path),
        head=head,
        notes=notes,
        chosen=entry.notes,
    )
    module = OnnxModule(info)
    builder = Builder(module, dtype, version)
    builder.add_all(model)
    info.unsupported.extend(builder.failed)
    parts = structure(model, units, [u.node for u in builder.failed])
    module.info = info = replace(info, structure=parts)
    value_out = model.graph.outputs[0]
    module.input_name, module.output_name = entry.name, str(value_out.name)
    module.input_shape = held(entry.shape)[1:]
    if value_out.shape is not None and value_out.shape.is_static():
        module.output_shape = held(tuple(int(d) for d in value_out.shape))[1:]  # type: ignore[arg-type]
    if not info.unsupported and module.output_name not in {s.output for s in module.steps}:
        raise UnsupportedModelError(f"{path}: the output does not depend on the input")
    module.finish()
    return module.eval(), entry


def inspect(
    path: str | Path,
    *,
    logits: bool = False,
    shape: Sizes | None = None,
    fix: Fixed | None = None,
    input_node: str | None = None,
) -> ModelInfo:
    """What the file holds: shapes, attention units, and every node that `load` would refuse.

    Arguments:
        logits, shape, fix, input_node: as in `load`.

    Raises:
        InputError: the file cannot be read.
    """
    choices: dict[str, Any] = {"shape": shape, "fix": fix, "input_node": input_node}
    return _prepare(path, torch.float32, "operators", logits, 0, **choices)[0].info


def load(
    path: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    attention: str = "operators",
    logits: bool = False,
    check: bool = True,
    shape: Sizes | None = None,
    fix: Fixed | None = None,
    input_node: str | None = None,
) -> OnnxModule:
    """Load an ONNX model as a torch module with attention as operators of ours.

    Arguments:
        path: ONNX file; external data beside it is read too.
        attention: "operators" puts recognised attention into operators of ours; "decomposed" leaves MatMul
            and Softmax, as auto_LiRPA alone would see the model.
        logits: take a final Softmax, LogSoftmax, ArgMax or single Sigmoid off (`info.head` says which).
        dtype: of the parameters. Folded constants are computed in float64 and rounded once.
        check: compare the outputs on random inputs with onnxruntime's (one sample by itself, and two at
            once where the file allows it), and a batch with a loop over its samples.
        shape: sizes of dynamic dimensions besides the batch, by the dimension's name (`{"sequence": 16}`), or
            all sizes of an input by its name. There is no default.
        fix: values of the inputs that bounds are not over: arrays, numbers, "ones", "zeros", "positions" or
            paths of .npy files. By default attention_mask is "ones", token_type_ids is "zeros" and
            position_ids is "positions"; `info.chosen` says so.
        input_node: value or node inside the graph where bounds start. By default they start at the float
            input; where the input holds integers, behind their embedding (behind the sum with other
            embeddings, if there is one).

    Returns:
        Module: (batch, *input) → (batch, *output).

    Raises:
        InputError: not an ONNX file, or not one of one float input and one output.
        UnsupportedModelError: with every unsupported node; or the module disagrees with onnxruntime, with
            the first node that differs.
    """
    if attention not in ("operators", "decomposed"):
        raise InputError(f"attention must be 'operators' or 'decomposed', not {attention!r}")
    choices: dict[str, Any] = {"shape": shape, "fix": fix, "input_node": input_node}
    options: dict[str, Any] = {"dtype": dtype, "attention": attention, "logits": logits, "check": check}
    try:
        return _loaded(path, 0, choices, **options)
    except InputError as e:
        fixed = False
        with contextlib.suppress(Exception):  # what is wrong with the file has been said
            fixed = enter(simplify.read(path), path, **choices).batch > 1
        for guess in range(1, len(GUESSES) if fixed else 1):
            with contextlib.suppress(InputError):
                return _loaded(path, guess, choices, **options)
        raise e


def _loaded(
    path: str | Path,
    guess: int,
    choices: dict[str, Any],
    *,
    dtype: torch.dtype,
    attention: str,
    logits: bool,
    check: bool,
) -> OnnxModule:
    """`load` with one guess at what the shapes of a fixed batch mean."""
    module, entry = _prepare(path, dtype, attention, logits, guess, **choices)
    if nodes := module.info.unsupported:
        lines = "; ".join(f"{u.op} at {u.node}: {u.why}" for u in nodes)
        advice = dict.fromkeys(nearest(u.op, u.why) for u in nodes)
        lines += "".join(f"; {text}" for text in advice if text)
        raise UnsupportedModelError(f"{path}: {len(nodes)} unsupported nodes: {lines}")
    if check or entry.batch > 1:  # else a wrong guess would pass
        check_module(path, module, entry, dtype, **choices)
    return module
