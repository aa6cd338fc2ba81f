"""The ways in which a torch module becomes an ONNX file in the field. A library, not a script.

Exporters are called as their users call them, not through `onnx_export.export`, which smooths their ways.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import onnx
import onnxruntime
import torch
from torch import Tensor, nn

from onnx_export import tracing

EXPORTS = ("torchscript-14", "torchscript-17", "dynamo-18", "dynamo-23")
OPTIMISED = {  # what an optimiser is given, and which one
    "torchscript-17+transformers": ("torchscript-17", "transformers"),
    "dynamo-18+transformers": ("dynamo-18", "transformers"),
    "torchscript-17+extended": ("torchscript-17", "extended"),
}
DRESSINGS = (*EXPORTS, *OPTIMISED)


class NotWritten(Exception):
    """Exporter or optimiser failed; the text is its reason, in one line."""


def export(model: nn.Module, example: Tensor, path: Path, dressing: str) -> None:
    """`torch.onnx.export` with a dynamic batch.

    Raises:
        NotWritten: the exporter fails.
    """
    exporter, _, opset = dressing.partition("-")
    options = {"opset_version": int(opset), "input_names": ["input"], "output_names": ["logits"]}
    if exporter == "torchscript":
        options |= {"dynamo": False, "dynamic_axes": {"input": {0: "batch"}, "logits": {0: "batch"}}}
    else:
        options |= {"dynamo": True, "external_data": False, "verbose": False}
        options["dynamic_shapes"] = ({0: torch.export.Dim("batch")},)
    try:
        with tracing.silent():
            torch.onnx.export(model, (example,), str(path), **options)
    except Exception as e:
        path.unlink(missing_ok=True)
        raise NotWritten(tracing.reason(e)) from None
    plain(path)


def optimise(source: Path, path: Path, how: str, kind: str, heads: int, width: int) -> None:
    """onnxruntime's optimiser for transformers, or its graph optimiser at level "extended".

    Raises:
        NotWritten: it fails.
    """
    try:
        with tracing.silent():
            if how == "transformers":
                from onnxruntime.transformers import optimizer

                found = optimizer.optimize_model(
                    str(source), model_type=kind, num_heads=heads, hidden_size=width
                )
                found.save_model_to_file(str(path))
            else:
                options = onnxruntime.SessionOptions()
                options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
                options.optimized_model_filepath = str(path)
                options.log_severity_level = 4
                onnxruntime.InferenceSession(str(source), options, providers=["CPUExecutionProvider"])
    except Exception as e:
        raise NotWritten(tracing.reason(e)) from None
    plain(path)


def plain(path: Path) -> None:
    """Take off what says where and how the file was made: stack traces, paths."""
    model = onnx.load(path)
    for part in (model, model.graph, *model.graph.node, *model.graph.value_info, *model.graph.input,
                 *model.graph.output, *model.graph.initializer):  # fmt: skip
        part.ClearField("metadata_props")
        part.ClearField("doc_string")
    onnx.save(model, path)


@dataclasses.dataclass(frozen=True)
class Written:
    """A file, or why there is none."""

    name: str
    dressing: str
    path: Path | None
    reason: str = ""
