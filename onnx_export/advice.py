"""What would work in place of an operator that is not supported."""

from __future__ import annotations

import difflib

from .importers import IMPORTERS

PERIODIC = "no periodic function is supported on values that depend on the input; GELU, SiLU, tanh, ReLU are"
BEFORE = "take it off the end of the model: bounds are those of the values before it"
QUANTISED = "export the model in float32, before quantisation"
RECURRENT = "recurrent layers are not supported; MatMul, sigmoid, tanh and products of an unrolled export are"
CONTROL = "export with torch's dynamo exporter or with fixed sizes, so that no control flow is left"
STEPS = "steps and comparisons are for constants only; Max, Min, Clip, ReLU, tanh and sigmoid are supported"
INSTEAD: dict[str, str] = {
    "Sin": PERIODIC, "Cos": PERIODIC, "Tan": PERIODIC,
    "ArgMax": BEFORE, "ArgMin": BEFORE, "TopK": BEFORE, "NonMaxSuppression": BEFORE, "Hardmax": BEFORE,
    "LSTM": RECURRENT, "GRU": RECURRENT, "RNN": RECURRENT,
    "If": CONTROL, "Loop": CONTROL, "Scan": CONTROL, "NonZero": CONTROL, "SequenceAt": CONTROL,
    "SplitToSequence": CONTROL, "SequenceConstruct": CONTROL, "ConcatFromSequence": CONTROL,
    "QuantizeLinear": QUANTISED, "DequantizeLinear": QUANTISED, "DynamicQuantizeLinear": QUANTISED,
    "MatMulInteger": QUANTISED, "ConvInteger": QUANTISED, "QLinearMatMul": QUANTISED,
    "QLinearConv": QUANTISED, "MatMulNBits": QUANTISED, "QAttention": QUANTISED,
    "MaxPool": "AveragePool, or a Conv with a stride, in its place",
    "GlobalMaxPool": "GlobalAveragePool or ReduceMax in its place",
    "LpPool": "AveragePool in its place",
    "ConvTranspose": "Conv with DepthToSpace in its place",
    "Resize": "DepthToSpace, Tile or Conv in its place",
    "Upsample": "DepthToSpace, Tile or Conv in its place",
    "LRN": "LayerNormalization or BatchNormalization in its place",
    "LpNormalization": "LayerNormalization or RMSNormalization in its place",
    "Mish": "Gelu or SiLU in its place",
    "ThresholdedRelu": "Relu in its place",
    "Floor": STEPS, "Round": STEPS, "Ceil": STEPS, "Sign": STEPS, "Equal": STEPS, "Not": STEPS, "And": STEPS,
    "Or": STEPS, "Greater": STEPS, "GreaterOrEqual": STEPS, "Less": STEPS, "LessOrEqual": STEPS,
    "RotaryEmbedding": "rotary embeddings as products with constant sines and cosines (torch.onnx.export)",
}  # fmt: skip
NAMES = sorted({name for _, name in IMPORTERS})


def nearest(op: str, why: str) -> str:
    """What would work instead of a node, in words; "" where nothing can be said.

    Arguments:
        op: with its domain, "com.microsoft::FusedConv".
        why: the reason for which it was refused: one that is not about the operator says all itself.
    """
    domain, _, name = op.rpartition("::")
    if name in INSTEAD:
        return INSTEAD[name]
    if "not supported" not in why:
        return ""
    if domain.startswith("com.microsoft"):
        return "load the file from before onnxruntime's optimiser"
    if domain not in ("", "ai.onnx", "attn_bounds"):
        return "export it in operators of the standard: onnx_export.export, or attn-bounds export"
    close = difflib.get_close_matches(name, NAMES, n=1, cutoff=0.75)
    return f"{close[0]} is supported" if close and close[0] != name else ""
