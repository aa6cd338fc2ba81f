"""One small function per ONNX operator: node → function of tensors.

An importer sees the node, its constant inputs (None where an input is data) and the shapes of one sample;
it returns a torch function of the data inputs. What it emits is a small vocabulary (linear maps, `x * c`,
`x + c`, reshapes that keep the batch, activations, the attention operators) that every version of
auto_LiRPA bounds correctly. Constants are computed in float64 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .. import ops
from . import activations, arithmetic, attention, linear, normalization, reductions, shapes
from .context import Context, Function, Unsupported
from .folding import fold_node

__all__ = ["IMPORTERS", "Context", "Function", "Unsupported", "fold_node"]

# an importer returns one function, or a list with one per output
IMPORTERS: dict[tuple[str, str], Callable[[Context], Function | list[Function]]] = {
    ("", "Add"): arithmetic.binary,
    ("", "Sub"): arithmetic.binary,
    ("", "Mul"): arithmetic.binary,
    ("", "Div"): arithmetic.binary,
    ("", "Neg"): arithmetic.neg,
    ("", "Relu"): activations.unary(torch.relu),
    ("", "LeakyRelu"): activations.leaky_relu,
    ("", "Tanh"): activations.unary(torch.tanh),
    ("", "Sigmoid"): activations.unary(torch.sigmoid),
    ("", "MatMul"): linear.matmul,
    ("", "Gemm"): linear.gemm,
    ("", "Conv"): linear.conv,
    ("", "BatchNormalization"): normalization.batch_normalization,
    ("", "Reshape"): shapes.reshape,
    ("", "Flatten"): shapes.reshape,
    ("", "Squeeze"): shapes.reshape,
    ("", "Unsqueeze"): shapes.reshape,
    ("", "Transpose"): shapes.transpose,
    ("", "Concat"): shapes.concat,
    ("", "Gather"): shapes.gather,
    ("", "Slice"): shapes.slice_,
    ("", "Split"): shapes.split,
    ("", "ReduceMean"): reductions.reduce_mean,
    ("", "ReduceSum"): reductions.reduce_mean,
    ("", "Softmax"): activations.softmax,
    ("", "Identity"): shapes.identity,
    ("", "Dropout"): shapes.identity,
    ("", "Cast"): shapes.cast,
    (ops.DOMAIN, "AttentionScores"): attention.attention_scores,
    (ops.DOMAIN, "L2Scores"): attention.attention_scores,
    (ops.DOMAIN, "AttentionWeights"): activations.unary(ops.attention_weights),
    (ops.DOMAIN, "AttentionAverage"): activations.unary(ops.attention_average),
}
