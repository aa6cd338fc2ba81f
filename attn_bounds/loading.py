"""Models in whatever form they come: an ONNX file, or a torch module that is exported on the way."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from .errors import InputError

if TYPE_CHECKING:
    from onnx_export import OnnxModule
    from onnx_export.arguments import Example


def load(model: str | Path | nn.Module, example: Example | None = None, **options: Any) -> OnnxModule:
    """A model as a torch module whose attention is recognised and which auto_LiRPA can trace.

    A torch module is exported to a temporary file (`onnx_export.export`) and loaded from there; so its
    attention may be in any of the forms that a file may have. It is left as it was, and what is returned
    does not follow later changes of its weights.

    Arguments:
        model: path of an ONNX file, or a torch module.
        example: for a torch module: an input (batch, …).
        options: of `onnx_export.load`: dtype, attention, logits, check, and how the model is entered (shape,
            fix, input_node).

    Raises:
        InputError: the file cannot be read, or the module cannot be exported.
        UnsupportedModelError: with every unsupported node.
    """
    import onnx_export

    if not isinstance(model, nn.Module):
        if example is not None:
            raise InputError("an example is for a torch module; an ONNX file says itself what it takes")
        return onnx_export.load(model, **options)
    if isinstance(model, onnx_export.OnnxModule):
        raise InputError(f"{model.info.path}: this module is already loaded")
    if example is None:
        name = type(model).__name__
        raise InputError(f"{name}: a torch module needs an example, one input (batch, …)")
    with exported(model, example) as path:
        loaded = onnx_export.load(path, **options)
    loaded.info = replace(loaded.info, path=type(model).__name__)
    return loaded


@contextlib.contextmanager
def exported(model: nn.Module, example: Example) -> Iterator[Path]:
    """The module as an ONNX file that is there for a while; errors name the class in place of the file."""
    import onnx_export

    with tempfile.TemporaryDirectory(prefix="attn-bounds-") as folder:
        path = Path(folder) / f"{type(model).__name__}.onnx"
        try:
            try:  # takes a tenth of a second where dynamo takes seconds
                onnx_export.export(model, example, path, exporter="torchscript")
            except InputError:
                onnx_export.export(model, example, path, exporter="dynamo")
            yield path
        except InputError as e:
            raise type(e)(str(e).replace(str(path), type(model).__name__)) from e


def example_for(model: nn.Module, x: Tensor) -> Tensor:
    """One sample as a batch of one, in the type and on the device of the module's weights."""
    own = next((t for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()), None)
    x = x if own is None else x.to(own)
    return x.detach().unsqueeze(0)
