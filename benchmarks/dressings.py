"""The ways in which a torch module becomes an ONNX file in the field. A library, not a script.

Exporters are called as their users call them, not through `onnx_export.export`, which smooths their ways.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import torch
from torch import Tensor, nn

from onnx_export import tracing

EXPORTS = ("torchscript-14", "torchscript-17", "dynamo-18", "dynamo-23")
PROCESSED = {  # what is processed, and how
    "torchscript-17+transformers": ("torchscript-17", "transformers"),
    "dynamo-18+transformers": ("dynamo-18", "transformers"),
    "torchscript-17+extended": ("torchscript-17", "extended"),
    "torchscript-17+int8": ("torchscript-17", "int8"),
    "torchscript-17+float16": ("torchscript-17", "float16"),
}
DRESSINGS = (*EXPORTS, *PROCESSED)
WORDS = {
    "torchscript-14": "`torch.onnx.export(dynamo=False)`, opset 14: LayerNorm in small operators",
    "torchscript-17": "the same, opset 17",
    "dynamo-18": "`torch.onnx.export(dynamo=True)`, opset 18",
    "dynamo-23": "the same, opset 23: attention as the operator Attention",
    "+transformers": "behind it, `onnxruntime.transformers.optimizer`",
    "+extended": "behind it, onnxruntime's graph optimiser at level extended",
    "+int8": "behind it, `onnxruntime.quantization.quantize_dynamic`",
    "+float16": "behind it, `onnxruntime.transformers.float16`",
}


class NotWritten(Exception):
    """Exporter or optimiser failed; the text is its reason, in one line."""


def export(model: nn.Module, example: Tensor, path: Path, dressing: str) -> None:
    """`torch.onnx.export` with a dynamic batch.

    Raises:
        NotWritten: the exporter fails.
    """
    exporter, _, opset = dressing.partition("-")
    options: dict[str, Any] = {"opset_version": int(opset), "input_names": ["input"]}
    options["output_names"] = ["logits"]
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
    _anonymous(path)


def process(source: Path, path: Path, how: str, kind: str, heads: int, width: int) -> None:
    """What is done to exported files: `how` is one of those in `PROCESSED`.

    Arguments:
        kind: of the model, for onnxruntime's transformer optimiser.

    Raises:
        NotWritten: it fails.
    """
    try:
        with tracing.silent():
            if how == "transformers":
                from onnxruntime.transformers.optimizer import optimize_model

                found = optimize_model(str(source), model_type=kind, num_heads=heads, hidden_size=width)
                found.save_model_to_file(str(path))
            elif how == "extended":
                options = onnxruntime.SessionOptions()
                options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
                options.optimized_model_filepath = str(path)
                onnxruntime.InferenceSession(str(source), options, providers=["CPUExecutionProvider"])
            elif how == "int8":
                from onnxruntime.quantization import quantize_dynamic

                quantize_dynamic(str(source), str(path))
            else:
                from onnxruntime.transformers.float16 import convert_float_to_float16

                onnx.save(convert_float_to_float16(onnx.load(source)), path)
    except Exception as e:
        raise NotWritten(tracing.reason(e)) from None
    _anonymous(path)


def _anonymous(path: Path) -> None:
    """Take off what says where and how the file was made: stack traces, paths."""
    model = onnx.load(path)
    graph = model.graph
    parts = (model, graph, *graph.node, *graph.value_info, *graph.input, *graph.output, *graph.initializer)
    for part in parts:
        part.ClearField("metadata_props")
        part.ClearField("doc_string")
    onnx.save(model, path)
