"""torch module → ONNX file that onnxruntime and other verifiers run, checked before it is there."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, nn

from attn_bounds.errors import InputError, first_line

from . import standard, tracing
from .arguments import Arguments, Example
from .load import inspect
from .oracle import AGREEMENT, difference, onnx_session

FORMS = ("decomposed", "op23")
STANDARD_DOMAINS = ("", "ai.onnx", "ai.onnx.ml")
DEFAULT_OPSET = 18  # every runtime has it, and LayerNormalization is one node
EMBEDDED = 1_500_000_000  # bytes; protobuf ends at 2 GB, so weights of larger models go beside the file


@dataclass(frozen=True)
class Exported:
    """A file that was written.

    Attributes:
        inputs, outputs: shapes by name; "batch" where dynamic.
        exporter: "dynamo" or "torchscript".
        operators: how often each operator occurs.
        difference: the largest from torch in onnxruntime, relative to the outputs' size.
        attention: units that `onnx_export.load` finds in the file; None where that cannot be loaded as it is.
        notes: what stands in the way of loading the file again, if anything; attention that "op23" left.
    """

    path: str
    opset: int
    exporter: str
    inputs: dict[str, list[int | str]]
    outputs: dict[str, list[int | str]]
    operators: dict[str, int]
    difference: float
    attention: int | None
    notes: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Everything, as plain JSON types."""
        return asdict(self)


@dataclass(frozen=True)
class _Request:
    """What to write: the options of `export`, checked."""

    model: nn.Module
    example: Arguments
    inputs: list[str]
    outputs: list[str]
    shapes: list[list[int | str]]  # of the outputs
    opset: int
    attention: str
    exporter: str
    dynamic: bool

    @property
    def name(self) -> str:
        return type(self.model).__name__


def export(
    model: nn.Module,
    example: Example,
    path: str | Path,
    *,
    opset: int | None = None,
    attention: str = "decomposed",
    exporter: str = "auto",
    dynamic_batch: bool = True,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    domains: Sequence[str] = (),
) -> Exported:
    """Write a torch module as an ONNX file.

    The file is written to a temporary folder, run in onnxruntime and compared with the module, and only then
    moved to its place: after an error, what was at `path` is still there. The module is exported in eval
    mode, and every part of it gets its own mode back.

    Arguments:
        model: any module whose result is a tensor (or several). Attention in `nn.MultiheadAttention`,
            `F.scaled_dot_product_attention`, torch's transformer layers, functions of this package, or
            written out; operators of this package are exported as what they compute.
        example: an input (batch, …), or several in a tuple or by name. The first dimension of the first one
            is the batch, and so is that of every other one that begins with the same size.
        opset: of the file; default 18, with "op23" 23.
        attention: "decomposed" into products and a Softmax; "op23": the standard operator Attention, for
            dot-product attention.
        exporter: torch's "dynamo" (opset 18 and later), "torchscript" (opset 9 to 20), or "auto": the first
            where it can, else the second.
        dynamic_batch: any number of samples; else the example's.
        input_names, output_names: default: those of `forward`'s parameters, and "output".
        domains: further operator domains that the file may use; onnxruntime must know them.

    Raises:
        InputError: bad arguments; the module cannot be exported, with the reason of every exporter that was
            tried; the file uses other domains, does not run in onnxruntime or differs from the module by
            more than 1e-5 of the outputs' size.
    """
    path = Path(path)
    given = Arguments.of(model, example)
    with tracing.in_eval_mode(model):
        outputs = given.call(model)
        other = given.resized(given.batch + 1).call(model) if dynamic_batch else outputs
        request = _Request(
            model,
            given,
            _renamed("input", list(given.tensors), input_names),
            _renamed("output", list(outputs), output_names),
            [_dims(a, b) for a, b in zip(outputs.values(), other.values(), strict=True)],
            _check_options(path, opset, attention, exporter),
            attention,
            exporter,
            dynamic_batch,
        )
        try:
            with tempfile.TemporaryDirectory(dir=path.parent, prefix=".export-") as folder:
                file = Path(folder) / path.name
                used = _write(request, file)
                _check_domains(request, file, domains)
                gap = _largest_difference(request, file)
                result = _describe(request, file, path, used, gap)
                for part in sorted(Path(folder).iterdir(), key=lambda part: part == file):  # weights first
                    os.replace(part, path.parent / part.name)
        except OSError as e:
            raise InputError(f"{path}: cannot be written ({e.strerror or e})") from None
    return result


def _dims(a: Tensor, b: Tensor) -> list[int | str]:
    """The shape of an output, from what it is at two batch sizes."""
    return [m if m == n else "batch" for m, n in zip(a.shape, b.shape, strict=True)]


def _check_options(path: Path, opset: int | None, attention: str, exporter: str) -> int:
    if attention not in FORMS:
        raise InputError(f"unknown form of attention {attention!r}; known: {', '.join(FORMS)}")
    if exporter not in tracing.EXPORTERS:
        raise InputError(f"unknown exporter {exporter!r}; known: {', '.join(tracing.EXPORTERS)}")
    if path.suffix.lower() != ".onnx":
        raise InputError(f"{path}: the name of an ONNX file must end in .onnx")
    if not path.parent.is_dir():
        raise InputError(f"{path}: no such folder {path.parent}")
    if attention == "op23":
        if opset is not None and opset < standard.OPSET:
            raise InputError(
                f"the operator Attention begins with opset 23; opset {opset} needs attention='decomposed'"
            )
        if exporter == "torchscript":
            raise InputError("attention='op23' needs the exporter dynamo; torchscript ends at opset 20")
        return opset or standard.OPSET
    version = opset or (DEFAULT_OPSET if exporter != "torchscript" else 17)
    if not _exporters(exporter, version):
        ranges = "dynamo writes opset 18 and later, torchscript 9 to 20"
        raise InputError(f"opset {version} cannot be written by exporter {exporter!r}: {ranges}")
    return version


def _exporters(exporter: str, opset: int) -> list[str]:
    """Those that can write the opset, in the order in which they are tried."""
    known = {"dynamo": tracing.DYNAMO_OPSETS, "torchscript": tracing.TORCHSCRIPT_OPSETS}
    return [name for name, opsets in known.items() if exporter in ("auto", name) and opset in opsets]


def _renamed(what: str, names: list[str], given: Sequence[str] | None) -> list[str]:
    if given is None:
        return names
    if len(given) != len(names) or len(set(given)) != len(given):
        raise InputError(f"{what}_names holds {', '.join(given)}; {len(names)} different names are needed")
    return list(given)


def _write(request: _Request, file: Path) -> str:
    """Write the file; returns the exporter that could."""
    example = request.example
    if request.dynamic:  # torch would take a size of 1 for a constant
        example = example.resized(max(2, example.batch))
    reasons = []
    for exporter in _exporters(request.exporter, request.opset):
        try:
            tracing.run(
                request.model,
                example,
                file,
                exporter=exporter,
                opset=request.opset,
                plain=request.attention == "decomposed",
                inputs=request.inputs,
                outputs=request.outputs,
                dynamic=request.dynamic,
            )
            _finish(request, file)
            return exporter
        except tracing.ExporterError as e:
            reasons.append(f"{exporter}: {e}")
    words = ("batch", "Constraint", "specializ")  # torch's, for a size that it found to be fixed
    fixed = request.dynamic and any(word in reason for reason in reasons for word in words)
    advice = "; a model for one batch size only needs dynamic_batch=False" if fixed else ""
    why = "; ".join(reasons) + advice
    raise InputError(f"{request.name} cannot be exported at opset {request.opset}: {why}")


def _finish(request: _Request, file: Path) -> None:
    """Bring attention into the wanted form, and see that version and shapes are as they should be."""
    model = ir.load(file)
    for value, shape in zip(model.graph.outputs, request.shapes, strict=True):
        value.shape = ir.Shape(shape)
    version = model.opset_imports.get("", 1)
    if version != request.opset:
        raise tracing.ExporterError(f"torch wrote opset {version} instead")
    written = _operators(model)["Attention"]
    if request.attention == "op23":
        written += standard.use_attention_operator(model)
        if not written:
            raise InputError(
                f"{request.name}: no dot-product attention found that the operator could stand for"
            )
    elif written:
        raise tracing.ExporterError("torch wrote the operator Attention; opset 22 and below have none")
    tensors = [v.const_value for v in model.graph.initializers.values()]
    weights = sum(t.nbytes for t in tensors if t is not None)
    ir.save(model, file, external_data=f"{file.name}.data" if weights > EMBEDDED else None)


def _operators(model: ir.Model) -> Counter[str]:
    return Counter(f"{n.domain}::{n.op_type}" if n.domain else n.op_type for n in model.graph.all_nodes())


def _check_domains(request: _Request, file: Path, domains: Sequence[str]) -> None:
    allowed = {*STANDARD_DOMAINS, *domains}
    nodes = ir.load(file).graph.all_nodes()
    other = sorted({f"{n.domain}::{n.op_type}" for n in nodes if n.domain not in allowed})
    if other:
        raise InputError(
            f"{request.name} uses operators outside the ONNX standard: {', '.join(other)}; "
            "name their domains in `domains` if onnxruntime knows them"
        )


def _largest_difference(request: _Request, file: Path) -> float:
    """Largest difference between torch and onnxruntime, on random inputs of several batch sizes.

    Raises:
        InputError: it is larger than `AGREEMENT`, or onnxruntime cannot run the file.
    """
    name, batch = request.name, request.example.batch
    try:
        session = onnx_session(str(file))
    except Exception as e:
        import onnxruntime

        raise InputError(
            f"{name}: onnxruntime {onnxruntime.__version__} cannot run what was exported at opset "
            f"{request.opset} ({first_line(e)})"
        ) from e
    largest = 0.0
    sizes = sorted({1, batch, 3}) if request.dynamic else [batch]
    for sample in (request.example, *(request.example.resized(size, seed=size) for size in sizes)):
        expected = list(sample.call(request.model).values())
        wanted = {v.name for v in session.get_inputs()}  # an input that the model ignores is not in the file
        named = zip(request.inputs, sample.tensors.values(), strict=True)
        feed = {n: t.detach().cpu().numpy() for n, t in named if n in wanted}
        try:
            found = session.run(request.outputs, feed)
        except Exception as e:
            why = first_line(e)
            raise InputError(f"{name}: onnxruntime fails at batch {sample.batch} ({why})") from e
        for output, mine, theirs in zip(request.outputs, expected, found, strict=True):
            gap = difference(torch.from_numpy(theirs), mine.detach().cpu())
            if not gap <= AGREEMENT:
                raise InputError(
                    f"{name}: onnxruntime's {output} differs from torch's by {gap:.2g} of its size at batch "
                    f"{sample.batch}: what was traced is not what the module computes (control flow that "
                    "depends on the input, randomness, or a batch size written into the model)"
                )
            largest = max(largest, gap)
    return largest


def _describe(request: _Request, file: Path, path: Path, exporter: str, gap: float) -> Exported:
    model = ir.load(file)
    operators = _operators(model)
    units: int | None = None
    notes = []
    if request.attention == "op23" and (left := operators["Softmax"]):
        notes.append(f"{left} Softmax beside {operators['Attention']} Attention: not written as the operator")
    try:
        info = inspect(file)
        units = len(info.attention)
        notes += [f"{u.op} at {u.node}: {u.why}" for u in info.unsupported]
    except InputError as e:  # it is a good file all the same
        notes.append("to load it: " + str(e).replace(f"{file}: ", ""))

    def shapes(values: Sequence[ir.Value]) -> dict[str, list[int | str]]:
        dims = {str(v.name): v.shape or () for v in values}
        return {name: [d if isinstance(d, int) else str(d.value) for d in s] for name, s in dims.items()}

    return Exported(
        path=str(path),
        opset=model.opset_imports[""],
        exporter=exporter,
        inputs=shapes(model.graph.inputs),
        outputs=shapes(model.graph.outputs),
        operators=dict(sorted(operators.items())),
        difference=gap,
        attention=units,
        notes=notes,
    )
