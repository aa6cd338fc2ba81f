"""Normalisation layers, by the operators of `functions`."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .. import functions
from .context import Context, Function, Unsupported


def batch_normalization(ctx: Context) -> Function:
    """Inference mode, any rank: x * scale + shift over axis 1."""
    if ctx.attr_int("training_mode", 0):
        raise Unsupported("training_mode=1; export the model in eval mode")
    if ctx.opset < 7 or not ctx.attr_int("spatial", 1):
        raise Unsupported("the operator before opset 7, or spatial=0")
    weight, bias, mean, var = (ctx.constant(i, "its parameter") for i in range(1, 5))
    scale = weight / torch.sqrt(var + ctx.attr_float("epsilon", 1e-5))
    shape = (-1,) + (1,) * (ctx.rank - 2)
    if len(scale) != ctx.shapes[0][1 + ctx.lifted]:
        raise Unsupported(f"{len(scale)} scales for a value of shape {ctx.shapes[0]}")
    s, t = ctx.parameter(scale.reshape(shape)), ctx.parameter((bias - mean * scale).reshape(shape))
    return lambda x: x * s() + t()


def _norm(
    ctx: Context, axis: int, gain: Tensor | None, bias: Tensor | None, eps: float, centred: bool
) -> Function:
    """Layer or RMS normalisation over all axes of input 0 from this one on."""
    first = ctx.axis(axis)
    sizes = ctx.shapes[0][first:]

    def of_these_axes(c: Tensor | None) -> Callable[[], Tensor | None]:
        if c is None:
            return lambda: None
        try:
            return ctx.parameter(c.reshape(c.shape[max(0, c.ndim - len(sizes)) :]).expand(sizes))
        except RuntimeError:
            raise Unsupported(f"a gain or bias of shape {tuple(c.shape)} for axes of sizes {sizes}") from None

    g, b = of_these_axes(gain), of_these_axes(bias)
    axes = len(sizes)
    if centred:
        return lambda x: functions.layer_norm(x, g(), b(), axes=axes, eps=eps)
    if bias is None:
        return lambda x: functions.rms_norm(x, g(), axes=axes, eps=eps)
    shift = ctx.parameter(bias)
    return lambda x: functions.rms_norm(x, g(), axes=axes, eps=eps) + shift()


def layer_normalization(ctx: Context) -> Function:
    """LayerNormalization."""
    eps = ctx.attr_float("epsilon", 1e-5)
    return _norm(ctx, ctx.attr_int("axis", -1), ctx.optional(1), ctx.optional(2), eps, True)


def rms_normalization(ctx: Context) -> Function:
    """RMSNormalization, and SimplifiedLayerNormalization of onnxruntime."""
    eps = ctx.attr_float("epsilon", 1e-5)
    return _norm(ctx, ctx.attr_int("axis", -1), ctx.optional(1), ctx.optional(2), eps, False)


def own_norm(ctx: Context) -> Function:
    """LayerNorm and RMSNorm of `functions`: over the last `axes` dimensions, gain and bias optional."""
    axis = -ctx.attr_int("axes", 1)
    centred = ctx.node.op_type == "LayerNorm"
    return _norm(ctx, axis, ctx.optional(1), ctx.optional(2), ctx.attr_float("eps", 0.0), centred)


def instance_normalization(ctx: Context) -> Function:
    """Layer normalisation of every channel over the axes behind it."""
    gain, bias = ctx.constant(1, "the scale"), ctx.constant(2, "the bias")
    return _grouped(ctx, len(gain), gain, bias)


def group_normalization(ctx: Context) -> Function:
    """Layer normalisation of every group of channels and the axes behind them (opset 21; 18 by groups)."""
    groups = ctx.attr_int("num_groups", 1)
    gain, bias = ctx.constant(1, "the scale"), ctx.constant(2, "the bias")
    channels = ctx.shapes[0][ctx.axis(1)]
    if ctx.opset < 21:
        gain, bias = (c.repeat_interleave(channels // groups) for c in (gain, bias))
    return _grouped(ctx, groups, gain, bias)


def _grouped(ctx: Context, groups: int, gain: Tensor, bias: Tensor) -> Function:
    axis = ctx.axis(1)
    shape = ctx.shapes[0]
    channels, behind = shape[axis], shape[axis + 1 :]
    if channels % groups or len(gain) != channels:
        raise Unsupported(f"{groups} groups of {channels} channels, {len(gain)} scales")
    inner = (-1, *shape[1:axis], groups, channels // groups * math.prod(behind))
    eps = ctx.attr_float("epsilon", 1e-5)
    flat = (-1,) + (1,) * len(behind)
    g, b = ctx.parameter(gain.reshape(flat)), ctx.parameter(bias.reshape(flat))
    outer = (-1, *shape[1:])

    def run(x: Tensor) -> Tensor:
        y = functions.layer_norm(x.reshape(inner), None, None, axes=1, eps=eps)
        return y.reshape(outer) * g() + b()

    return run
