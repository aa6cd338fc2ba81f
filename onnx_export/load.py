"""ONNX file → torch module that auto_LiRPA can trace, checked against onnxruntime."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor, nn

from attn_bounds.errors import InputError, UnsupportedModelError

from . import simplify
from .attention import Attention, fuse_attention
from .build import Builder, Step, UnsupportedNode, held
from .graph import opset
from .lowering import lower
from .patterns import fuse_patterns

AGREEMENT = 1e-5  # largest difference from onnxruntime, relative to the size of the output


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
    head: str = ""  # final Softmax, ArgMax, … that was taken off: the module returns the logits before it


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


def _session(model: bytes | str) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = torch.get_num_threads()
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


class Oracle:
    """onnxruntime on the file itself: what the model computes.

    Arguments:
        path: ONNX file.
    """

    def __init__(self, path: str | Path) -> None:
        try:
            self.session = _session(str(path))
        except Exception as e:
            raise InputError(
                f"{path}: onnxruntime cannot run this model ({str(e).splitlines()[0]})"
            ) from None
        self.path, self.input = path, self.session.get_inputs()[0]
        self.dynamic = not isinstance(self.input.shape[0], int)

    def __call__(self, x: Tensor) -> Tensor:
        """(batch, *input) → (batch, *output); sample by sample where the file takes only batch 1.

        Raises:
            InputError: onnxruntime fails on a single sample.
        """
        array = x.detach().cpu().numpy().astype(np.float64 if "double" in self.input.type else np.float32)
        if self.dynamic and len(array) > 1:
            try:
                return self._run(array)
            except Exception:  # a graph may declare a dynamic batch and then not support it
                self.dynamic = False
        try:
            return torch.cat([self._run(array[i : i + 1]) for i in range(len(array))])
        except Exception as e:
            reason = str(e).splitlines()[0]
            raise InputError(f"{self.path}: onnxruntime fails on this model ({reason})") from None

    def _run(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(self.session.run(None, {self.input.name: array})[0])


def _named_dims(value: ir.Value) -> list[int | str]:
    return [d if isinstance(d, int) else "batch" for d in value.shape] if value.shape is not None else []


def _prepare(path: str | Path, dtype: torch.dtype, attention: str, logits: bool) -> tuple[OnnxModule, bool]:
    model = simplify.read(path)
    version = opset(model)
    in_dims = {str(v.name): _named_dims(v) for v in simplify.data_inputs(model)}
    out_dims = {str(v.name): _named_dims(v) for v in model.graph.outputs}
    dynamic = simplify.fix_input_shapes(model, path)
    if len(model.graph.outputs) != 1:
        raise UnsupportedModelError(
            f"{path}: {len(model.graph.outputs)} outputs ({', '.join(out_dims)}); models with exactly one "
            "output are supported"
        )
    simplify.fold(model)
    if lower(model):
        simplify.fold(model)
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
        sha256=hashlib.sha256(Path(path).read_bytes()).hexdigest(),
        head=head,
        notes=notes,
    )
    module = OnnxModule(info)
    builder = Builder(module, dtype, version)
    builder.add_all(model)
    info.unsupported.extend(builder.failed)
    value_in, value_out = simplify.data_inputs(model)[0], model.graph.outputs[0]
    module.input_name, module.output_name = str(value_in.name), str(value_out.name)
    module.input_shape = held(tuple(int(d) for d in value_in.shape or ()))[1:]  # type: ignore[arg-type]
    if value_out.shape is not None and value_out.shape.is_static():
        module.output_shape = held(tuple(int(d) for d in value_out.shape))[1:]  # type: ignore[arg-type]
    if not info.unsupported and module.output_name not in {s.output for s in module.steps}:
        raise UnsupportedModelError(f"{path}: the output does not depend on the input")
    module.finish()
    return module.eval(), dynamic


def inspect(path: str | Path, *, logits: bool = False) -> ModelInfo:
    """What the file holds: shapes, attention units, and every node that `load` would refuse.

    Arguments:
        logits: as in `load`.

    Raises:
        InputError: the file cannot be read.
    """
    return _prepare(path, torch.float32, "operators", logits)[0].info


def load(
    path: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    attention: str = "operators",
    logits: bool = False,
    check: bool = True,
) -> OnnxModule:
    """Load an ONNX model as a torch module with attention as operators of ours.

    Arguments:
        path: ONNX file; external data beside it is read too.
        attention: "operators" puts recognised attention into operators of ours; "decomposed" leaves MatMul
            and Softmax, as auto_LiRPA alone would see the model.
        logits: take a final Softmax, LogSoftmax, ArgMax or single Sigmoid off (`info.head` says which).
        dtype: of the parameters. Folded constants are computed in float64 and rounded once.
        check: compare the outputs on random inputs with onnxruntime's (at batch 1, and 3 where the file
            allows it), and with a loop over the samples.

    Returns:
        Module: (batch, *input) → (batch, *output).

    Raises:
        InputError: not an ONNX file, or not one of one float input and one output.
        UnsupportedModelError: with every unsupported node; or the module disagrees with onnxruntime, with
            the first node that differs.
    """
    if attention not in ("operators", "decomposed"):
        raise InputError(f"attention must be 'operators' or 'decomposed', not {attention!r}")
    module, dynamic = _prepare(path, dtype, attention, logits)
    if module.info.unsupported:
        lines = "; ".join(f"{u.op} at {u.node}: {u.why}" for u in module.info.unsupported)
        raise UnsupportedModelError(f"{path}: {len(module.info.unsupported)} unsupported nodes: {lines}")
    if check:
        _check(path, module, dtype, batches=(1, 3) if dynamic else (1,))
    return module


def _difference(a: Tensor, b: Tensor) -> float:
    """Largest difference relative to the size of b (not below 1), of what is finite in both.

    inf for other shapes, and where only one is finite. (NaN in both is agreement: it is the model's own.)"""
    finite = torch.isfinite(b)
    if a.shape != b.shape or not torch.equal(torch.isfinite(a), finite):
        return float("inf")
    x, y = a[finite].double(), b[finite].double()
    return float((x - y).abs().max() / y.abs().max().clamp(min=1.0)) if len(y) else 0.0


def _check(path: str | Path, module: OnnxModule, dtype: torch.dtype, batches: tuple[int, ...]) -> None:
    oracle = Oracle(path)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for batch in batches:
            x = torch.randn((batch, *module.input_shape), generator=generator).to(dtype)
            expected = oracle(x)
            mine = module.with_head(module(x)).reshape(expected.shape)
            if _difference(mine, expected) > AGREEMENT:
                raise UnsupportedModelError(
                    f"{path}: the loaded module does not compute what onnxruntime does at batch {batch}; "
                    + _first_difference(path, module, x)
                )
        x = torch.randn((3, *module.input_shape), generator=generator).to(dtype)
        loop = torch.cat([module(x[i : i + 1]) for i in range(3)])
        if _difference(module(x), loop) > AGREEMENT:
            raise UnsupportedModelError(
                f"{path}: samples of one batch influence each other; it cannot be bounded in batches"
            )


def _first_difference(path: str | Path, module: OnnxModule, x: Tensor) -> str:
    """Name the first node whose value differs from onnxruntime's, for an error message."""
    import onnx

    proto = onnx.load(str(path))
    known = {o for node in proto.graph.node for o in node.output}
    mine = module.values(x)
    names = [s.output for s in module.steps if s.output in known]
    present = {o.name for o in proto.graph.output}
    proto.graph.output.extend(onnx.ValueInfoProto(name=n) for n in names if n not in present)
    try:
        session = _session(proto.SerializeToString())
        dtype = np.float64 if "double" in session.get_inputs()[0].type else np.float32
        values = session.run(names, {session.get_inputs()[0].name: x.numpy().astype(dtype)})
    except Exception as e:
        return f"the first node that differs could not be found ({str(e).splitlines()[0]})"
    producer = {s.output: s for s in module.steps}
    for name, value in zip(names, values, strict=True):
        gap = _difference(mine[name], torch.from_numpy(np.asarray(value)))
        if gap > AGREEMENT:
            step = producer[name]
            shape = tuple(mine[name].shape)
            return f"first node that differs: {step.op} {step.name} (by {gap:.2g}, shape {shape})"
    return "no single node differs by more than the tolerance: the error builds up by rounding; try float64"
