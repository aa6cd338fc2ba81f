"""Bound operators of ours, by the kind of node that they stand for."""

from __future__ import annotations

from typing import Any


def operators() -> dict[str, Any]:
    """The operators of this package by node kind, for `custom_ops`."""
    from . import activation, attention, input, normalization

    return {
        "attn_bounds::AttentionScores": attention.BoundAttentionScores,
        "attn_bounds::L2Scores": attention.BoundL2Scores,
        "attn_bounds::AttentionWeights": attention.BoundAttentionWeights,
        "attn_bounds::AttentionAverage": attention.BoundAttentionAverage,
        "attn_bounds::LayerNorm": normalization.BoundLayerNorm,
        "attn_bounds::MeanSquare": normalization.BoundMeanSquare,
        "attn_bounds::RMSNorm": normalization.BoundRMSNorm,
        "attn_bounds::Erf": activation.BoundErf,
        "attn_bounds::Gelu": activation.BoundGelu,
        "attn_bounds::Silu": activation.BoundSilu,
        "attn_bounds::QuickGelu": activation.BoundQuickGelu,
        input.KIND: input.BoundInputBox,
    }


def replacements() -> dict[str, Any]:
    """Operators in the place of auto_LiRPA's own, which lack something or are wrong on some version."""
    from . import activation, attention, quotient

    return {
        "onnx::Div": quotient.BoundDiv,
        "onnx::Erf": activation.BoundErf,
        "onnx::Gelu": activation.BoundGelu,
        "onnx::Log": activation.BoundLog,
        "onnx::Reciprocal": activation.BoundReciprocal,
        "onnx::Softmax": attention.BoundSoftmax,
        "onnx::Softplus": activation.BoundSoftplus,
        "onnx::Sqrt": activation.BoundSqrt,
    }
