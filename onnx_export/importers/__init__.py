"""One small function per ONNX operator: node → function of tensors.

An importer sees the node, its constant inputs (None where an input is data) and the shapes of one sample;
it returns a torch function of the data inputs. What it emits is a small vocabulary (linear maps, `x * c`,
`x + c`, reshapes that keep the batch, activations, the operators of `ops` and `functions`) that every
version of auto_LiRPA bounds correctly. Constants are computed in float64 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from .. import functions, ops
from . import (
    activations,
    arithmetic,
    attention,
    convolution,
    linear,
    normalization,
    reductions,
    shapes,
)
from .context import Context, Function, Unsupported
from .einsum import einsum
from .folding import exact, fold_node

__all__ = ["IMPORTERS", "Context", "Function", "Unsupported", "exact", "fold_node"]

Importer = Callable[[Context], Function | list[Function]]

STANDARD: dict[str, Importer] = {
    # arithmetic
    "Add": arithmetic.add,
    "Sub": arithmetic.sub,
    "Mul": arithmetic.mul,
    "Div": arithmetic.div,
    "Neg": arithmetic.neg,
    "Pow": arithmetic.power,
    "Sum": arithmetic.total,
    "Mean": arithmetic.total,
    "Max": arithmetic.largest,
    "Min": arithmetic.largest,
    "Clip": arithmetic.clip,
    "Where": arithmetic.where,
    # functions of single entries
    "Abs": activations.unary(torch.abs),
    "Exp": activations.unary(torch.exp),
    "Log": activations.unary(torch.log),
    "Sqrt": activations.unary(torch.sqrt),
    "Reciprocal": activations.unary(torch.reciprocal),
    "Erf": activations.unary(functions.erf),
    "Relu": activations.unary(torch.relu),
    "Tanh": activations.unary(torch.tanh),
    "Sigmoid": activations.unary(torch.sigmoid),
    "LeakyRelu": activations.leaky_relu,
    "PRelu": activations.prelu,
    "Elu": activations.elu,
    "Celu": activations.celu,
    "Selu": activations.selu,
    "Softplus": activations.unary(F.softplus),
    "Softsign": activations.softsign,
    "HardSigmoid": activations.hard_sigmoid,
    "HardSwish": activations.hard_swish,
    "Gelu": activations.gelu,
    "Swish": activations.swish,
    "Softmax": activations.softmax,
    "LogSoftmax": activations.log_softmax,
    # linear layers and products
    "MatMul": linear.matmul,
    "Gemm": linear.gemm,
    "Einsum": einsum,
    "Conv": convolution.conv,
    "AveragePool": convolution.average_pool,
    "GlobalAveragePool": reductions.global_average_pool,
    # normalisation
    "BatchNormalization": normalization.batch_normalization,
    "LayerNormalization": normalization.layer_normalization,
    "RMSNormalization": normalization.rms_normalization,
    "SimplifiedLayerNormalization": normalization.rms_normalization,
    "InstanceNormalization": normalization.instance_normalization,
    "GroupNormalization": normalization.group_normalization,
    # reductions
    "ReduceMean": reductions.reduce_mean,
    "ReduceSum": reductions.reduce_mean,
    "ReduceMax": reductions.reduce_max,
    "ReduceMin": reductions.reduce_max,
    "ReduceL1": reductions.reduce_l1,
    "ReduceL2": reductions.reduce_l2,
    "ReduceSumSquare": reductions.reduce_sum_square,
    "ReduceLogSum": reductions.reduce_log_sum,
    "ReduceLogSumExp": reductions.reduce_log_sum_exp,
    # shapes
    "Reshape": shapes.reshape,
    "Flatten": shapes.reshape,
    "Squeeze": shapes.reshape,
    "Unsqueeze": shapes.reshape,
    "Transpose": shapes.transpose,
    "Expand": shapes.expand,
    "Tile": shapes.tile,
    "Concat": shapes.concat,
    "Split": shapes.split,
    "Slice": shapes.slice_,
    "Gather": shapes.gather,
    "GatherND": shapes.moved,
    "GatherElements": shapes.moved,
    "DepthToSpace": shapes.moved,
    "SpaceToDepth": shapes.moved,
    "Pad": shapes.pad,
    "Trilu": shapes.trilu,
    "CumSum": shapes.cum_sum,
    "Identity": shapes.identity,
    "Dropout": shapes.dropout,
    "Cast": shapes.cast,
}

OWN: dict[str, Importer] = {
    "AttentionScores": attention.attention_scores,
    "L2Scores": attention.attention_scores,
    "AttentionWeights": activations.unary(ops.attention_weights),
    "AttentionAverage": activations.unary(ops.attention_average),
    "LayerNorm": normalization.own_norm,
    "RMSNorm": normalization.own_norm,
    "Gelu": activations.gelu,
    "Silu": activations.unary(functions.silu),
    "QuickGelu": activations.unary(functions.quick_gelu),
    "Erf": activations.unary(functions.erf),
}

# an importer returns one function, or a list with one per output
IMPORTERS: dict[tuple[str, str], Importer] = {
    (domain, name): importer
    for domain, table in (("", STANDARD), (ops.DOMAIN, OWN))
    for name, importer in table.items()
}
