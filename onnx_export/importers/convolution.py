"""Convolutions and average pooling, with any padding."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .context import Context, Function, Unsupported


def _pads(ctx: Context, dims: int, kernel: list[int], stride: list[int]) -> list[tuple[int, int]]:
    """(before, after) per spatial axis; kernel with its dilation."""
    auto = ctx.attr_string("auto_pad", "NOTSET")
    if auto == "VALID":
        return [(0, 0)] * dims
    if auto in ("SAME_UPPER", "SAME_LOWER"):
        pads = []
        for size, k, s in zip(ctx.shapes[0][2:], kernel, stride, strict=True):
            needed = max((math.ceil(size / s) - 1) * s + k - size, 0)
            small, large = needed // 2, needed - needed // 2
            pads.append((small, large) if auto == "SAME_UPPER" else (large, small))
        return pads
    if auto != "NOTSET":
        raise Unsupported(f"auto_pad={auto}")
    pads_list = ctx.attr_ints("pads") or [0] * (2 * dims)
    if len(pads_list) != 2 * dims or min(pads_list) < 0:
        raise Unsupported(f"pads={pads_list}")
    return list(zip(pads_list[:dims], pads_list[dims:], strict=True))


def _symmetric(
    weight: Tensor, pads: list[tuple[int, int]], dilation: list[int]
) -> tuple[Tensor, list[int], list[int]]:
    """The same convolution with equal padding on both sides: zeros are put on the kernel instead."""
    padding = [max(p) for p in pads]
    if all(a == b for a, b in pads):
        return weight, padding, dilation
    for i, d in enumerate(dilation):  # zeros between the entries, so that any number can be put outside
        if d > 1:
            axis = i + 2
            size = list(weight.shape)
            size[axis] = (size[axis] - 1) * d + 1
            wide = weight.new_zeros(size)
            index = [slice(None)] * weight.ndim
            index[axis] = slice(None, None, d)
            wide[tuple(index)] = weight
            weight = wide
    sides: list[int] = []
    for before, after in reversed(pads):
        sides += [max(after - before, 0), max(before - after, 0)]
    return F.pad(weight, sides), padding, [1] * len(pads)


def _convolution(ctx: Context, weight: Tensor, bias: Tensor | None, group: int) -> Function:
    dims = weight.ndim - 2
    if dims not in (1, 2) or ctx.lifted or len(ctx.shapes[0]) != dims + 2:
        raise Unsupported(f"convolution over {dims} dimensions of a value of shape {ctx.shapes[0]}")
    if weight.shape[1] * group != ctx.shapes[0][1]:
        raise Unsupported(f"{ctx.shapes[0][1]} channels for a weight of shape {tuple(weight.shape)}")
    stride = ctx.attr_ints("strides") or [1] * dims
    dilation = ctx.attr_ints("dilations") or [1] * dims
    if min(*stride, *dilation) < 1 or len(stride) != dims or len(dilation) != dims:
        raise Unsupported(f"strides={stride}, dilations={dilation}")
    kernel = [(k - 1) * d + 1 for k, d in zip(weight.shape[2:], dilation, strict=True)]
    weight, padding, dilation = _symmetric(weight, _pads(ctx, dims, kernel, stride), dilation)
    if bias is None:
        bias = torch.zeros(weight.shape[0], dtype=torch.float64)
    b = ctx.parameter(bias)
    if dims == 2:
        w = ctx.parameter(weight)
        return lambda x: F.conv2d(x, w(), b(), stride, padding, dilation, group)
    # over one axis of size 1 more: every version bounds the convolution over two
    w = ctx.parameter(weight.unsqueeze(2))
    channels, length = ctx.shapes[0][1:]
    target = ctx.out_shape[1:]

    def run(x: Tensor) -> Tensor:
        x = x.reshape(-1, channels, 1, length)
        y = F.conv2d(x, w(), b(), [1, *stride], [0, *padding], [1, *dilation], group)
        return y.reshape(-1, *target)

    return run


def conv(ctx: Context) -> Function:
    return _convolution(ctx, ctx.constant(1, "the weight"), ctx.optional(2), ctx.attr_int("group", 1))


def average_pool(ctx: Context) -> Function:
    """As a convolution of every channel with a constant; only where all windows have the same size."""
    kernel = ctx.attr_ints("kernel_shape") or []
    padded = any(ctx.attr_ints("pads") or []) or ctx.attr_string("auto_pad", "NOTSET") not in (
        "NOTSET",
        "VALID",
    )
    if (padded and not ctx.attr_int("count_include_pad", 0)) or ctx.attr_int("ceil_mode", 0):
        raise Unsupported("windows of several sizes (padding that does not count, or ceil_mode)")
    channels = ctx.shapes[0][1]
    weight = torch.full((channels, 1, *kernel), 1.0 / math.prod(kernel), dtype=torch.float64)
    return _convolution(ctx, weight, None, channels)
