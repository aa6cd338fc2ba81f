"""onnxruntime as the judge of what a file computes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import torch
from torch import Tensor

from attn_bounds.errors import InputError, UnsupportedModelError, first_line

from . import simplify
from .entry import Entry, embed, enter
from .given import Fixed, Sizes

if TYPE_CHECKING:
    from .load import OnnxModule

AGREEMENT = 1e-5  # largest difference from onnxruntime, relative to the size of the output


def onnx_session(model: bytes | str) -> Any:
    """An onnxruntime session with as many threads as torch has."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = torch.get_num_threads()
    options.enable_cpu_mem_arena = False  # keeps what the largest batch took
    options.add_session_config_entry("session.disable_prepacking", "1")  # a second copy of all weights
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


class Oracle:
    """onnxruntime on the file itself: what the model computes.

    Arguments:
        path: ONNX file.
        shape, fix, input_node: as in `load`.
        entry: how the model is entered, where that is known already.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        shape: Sizes | None = None,
        fix: Fixed | None = None,
        input_node: str | None = None,
        entry: Entry | None = None,
    ) -> None:
        self.choices: dict[str, Any] = {"shape": shape, "fix": fix, "input_node": input_node}
        self.path = path
        if entry is None:
            entry = enter(simplify.read(path), path, **self.choices)
        self.entry, self.dynamic = entry, entry.dynamic
        self.aligned: bool | None = None  # whether row i of a batch's result is that of sample i
        model = entry.proto.SerializeToString() if entry.is_cut else str(path)
        entry.proto = onnx.ModelProto()  # the session will have the weights
        try:
            self.session = onnx_session(model)
        except Exception as e:
            raise InputError(f"{path}: onnxruntime cannot run this model ({first_line(e)})") from None
        inputs = {i.name: i for i in self.session.get_inputs()}
        if entry.name not in inputs:
            raise InputError(f"{path}: onnxruntime knows no input {entry.name}")
        self.dtype = np.float64 if "double" in inputs[entry.name].type else np.float32

    def __call__(self, x: Tensor) -> Tensor:
        """(batch, *input) → (batch, *output); in parts where the file has a fixed batch.

        Raises:
            InputError: onnxruntime fails on a single sample.
        """
        array = x.detach().cpu().numpy().astype(self.dtype)
        if len(array) > 1 and (found := self.at_once(array)) is not None:
            if self.aligned is None:
                alone = torch.cat([self._alone(array[i : i + 1]) for i in (0, len(array) - 1)])
                self.aligned = found.ndim > 0 and found.shape == (len(array), *alone.shape[1:])
                self.aligned = self.aligned and difference(found[[0, -1]], alone) <= AGREEMENT
            if self.aligned:
                return found
        return self.one_by_one(x)

    def one_by_one(self, x: Tensor) -> Tensor:
        """As a call, with each sample by itself, or in parts of the file's fixed batch."""
        array = x.detach().cpu().numpy().astype(self.dtype)
        n = self.entry.batch
        try:
            if n == 1:
                return torch.cat([self._alone(array[i : i + 1]) for i in range(len(array))])
            padded = np.concatenate([array, np.repeat(array[-1:], -len(array) % n, 0)])
            parts = [self._run(padded[i : i + n]) for i in range(0, len(padded), n)]
        except Exception as e:
            raise InputError(f"{self.path}: onnxruntime fails on this model ({first_line(e)})") from None
        if any(len(p) != n for p in parts):
            raise InputError(f"{self.path}: its output does not have the fixed batch {n} as first dimension")
        return torch.cat(parts)[: len(array)]

    def at_once(self, array: np.ndarray) -> Tensor | None:
        """What the file returns for a batch; None where it takes none."""
        if not self.dynamic:
            return None
        try:
            return self._run(array)
        except Exception:  # a graph may declare a dynamic batch and then not support it
            self.dynamic = False
            return None

    def _alone(self, array: np.ndarray) -> Tensor:
        """One sample, (1, *output) as the module holds it."""
        plain = len(array.shape) == len(self.entry.shape)
        found = self._run(array if plain else array[0])
        return found if found.ndim >= 2 and len(found) == 1 else found.unsqueeze(0)

    def _run(self, array: np.ndarray) -> Tensor:
        feeds = {self.entry.name: array, **self.entry.feeds_at(len(array) if self.dynamic else 1)}
        return torch.from_numpy(np.asarray(self.session.run(None, feeds)[0]))

    def embed(self, ids: np.ndarray) -> Tensor:
        """The values behind the embedding, (N, *input), of integer inputs (N, …).

        Raises:
            InputError: the model takes no integers, or not these.
        """
        if not self.entry.ids:
            raise InputError(f"{self.path}: the model takes real numbers, there is nothing to embed")
        shape = (len(ids), *self.entry.shape[1:])

        def behind(values: np.ndarray) -> np.ndarray:
            return self.one_by_one(torch.from_numpy(values.reshape(shape))).numpy()

        found = embed(simplify.read(self.path), self.entry, self.path, ids, behind, **self.choices)
        return torch.from_numpy(found.reshape(shape))


def difference(a: Tensor, b: Tensor) -> float:
    """Largest difference relative to the size of b (not below 1), of what is finite in both.

    inf for other shapes, and where only one is finite. (NaN in both is agreement: it is the model's own.)"""
    finite = torch.isfinite(b)
    if a.shape != b.shape or not torch.equal(torch.isfinite(a), finite):
        return float("inf")
    x, y = a[finite].double(), b[finite].double()
    return float((x - y).abs().max() / y.abs().max().clamp(min=1.0)) if len(y) else 0.0


def check(path: str | Path, module: OnnxModule, entry: Entry, dtype: torch.dtype, **choices: Any) -> None:
    """Compare a loaded module with onnxruntime, and a batch with a loop over its samples.

    Raises:
        UnsupportedModelError: they differ; names the first node that does.
        InputError: onnxruntime cannot run the file.
    """
    oracle = Oracle(path, entry=entry)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((max(entry.batch, 2), *module.input_shape), generator=generator).to(dtype)
    with torch.no_grad():
        expected = oracle.one_by_one(x)
        try:
            mine = torch.cat([module(row) for row in x.split(1)])
            together = module(x)
        except Exception as e:
            raise UnsupportedModelError(
                f"{path}: the loaded module cannot be evaluated ({first_line(e)}); onnxruntime returns "
                f"shape {tuple(expected.shape)}"
            ) from e
        with_head = module.with_head(mine)
        if with_head.numel() == expected.numel():
            with_head = with_head.reshape(expected.shape)
        if difference(with_head, expected) > AGREEMENT:
            raise UnsupportedModelError(
                f"{path}: the loaded module does not compute what onnxruntime does at batch {entry.batch}; "
                + _first_difference(path, module, x[: entry.batch], **choices)
            )
        whole = oracle.at_once(x.numpy().astype(oracle.dtype))
        if whole is not None and not _made_of(whole, expected):
            raise UnsupportedModelError(
                f"{path}: samples influence each other in what onnxruntime returns at batch {len(x)}; "
                + _first_difference(path, module, x, **choices)
            )
        if difference(together, mine) > AGREEMENT:
            raise UnsupportedModelError(
                f"{path}: samples of one batch influence each other; it cannot be bounded in batches"
            )


def _made_of(whole: Tensor, alone: Tensor) -> bool:
    """Whether the result of a batch is made of those of its samples, wherever the batch stands in it."""
    batch = len(alone)
    if whole.numel() != alone.numel():
        return False
    for axis, size in enumerate(whole.shape):
        if size % batch:
            continue
        for sizes, at in (((batch, size // batch), axis), ((size // batch, batch), axis + 1)):
            parts = whole.reshape(*whole.shape[:axis], *sizes, *whole.shape[axis + 1 :]).movedim(at, 0)
            if difference(parts.reshape(alone.shape), alone) <= AGREEMENT:
                return True
    return False


def _first_difference(path: str | Path, module: OnnxModule, x: Tensor, **choices: Any) -> str:
    """Name the first node whose value differs from onnxruntime's, for an error message."""
    entry = enter(simplify.read(path), path, **choices)
    proto = entry.proto
    known = {o for node in proto.graph.node for o in node.output}
    mine = module.values(x)
    names = [s.output for s in module.steps if s.output in known]
    present = {o.name for o in proto.graph.output}
    proto.graph.output.extend(onnx.ValueInfoProto(name=n) for n in names if n not in present)
    try:
        started = onnx_session(proto.SerializeToString())
        dtype = np.float64 if "double" in started.get_inputs()[0].type else np.float32
        feeds = {entry.name: x.numpy().astype(dtype), **entry.feeds_at(len(x) if entry.dynamic else 1)}
        values = started.run(names, feeds)
    except Exception as e:
        return f"the first node that differs could not be found ({first_line(e)})"
    producer = {s.output: s for s in module.steps}
    for name, value in zip(names, values, strict=True):
        expected, own = torch.from_numpy(np.asarray(value)), mine[name]
        gap = difference(own.reshape(expected.shape) if own.numel() == expected.numel() else own, expected)
        if gap > AGREEMENT:
            step = producer[name]
            return f"first node that differs: {step.op} {step.name} (by {gap:.2g}, shape {tuple(own.shape)})"
    return "no single node differs by more than the tolerance: the error builds up by rounding; try float64"
