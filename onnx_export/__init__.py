"""ONNX in and out: load transformers as torch modules whose attention is recognised."""

from .export import Exported, export
from .load import ModelInfo, OnnxModule, inspect, load
from .ops import (
    attention,
    attention_average,
    attention_scores,
    attention_weights,
    l2_attention,
    l2_scores,
)
from .oracle import Oracle
from .units import Attention

__all__ = [
    "Attention",
    "Exported",
    "ModelInfo",
    "OnnxModule",
    "Oracle",
    "attention",
    "attention_average",
    "attention_scores",
    "attention_weights",
    "export",
    "inspect",
    "l2_attention",
    "l2_scores",
    "load",
]
