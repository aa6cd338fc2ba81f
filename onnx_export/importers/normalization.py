"""Normalisation layers."""

from __future__ import annotations

import torch

from .context import Context, Function, Unsupported


def batch_normalization(ctx: Context) -> Function:
    """Inference mode, any rank: x * scale + shift over axis 1."""
    if ctx.attr_int("training_mode", 0):
        raise Unsupported("training_mode=1; export the model in eval mode")
    weight, bias, mean, var = (ctx.constant(i, "its parameter") for i in range(1, 5))
    scale = weight / torch.sqrt(var + ctx.attr_float("epsilon", 1e-5))
    shape = (-1,) + (1,) * (len(ctx.out_shape) - 2)
    s, t = ctx.parameter(scale.reshape(shape)), ctx.parameter((bias - mean * scale).reshape(shape))
    return lambda x: x * s() + t()
