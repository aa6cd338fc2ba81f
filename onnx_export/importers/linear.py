"""Products with constant weights: MatMul, Gemm, Conv."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .context import Context, Function, Unsupported


def matmul(ctx: Context) -> Function:
    a, b = ctx.constants[:2]
    if b is not None:
        while b.ndim > 2 and b.shape[0] == 1:
            b = b[0]
        if b.ndim != 2:
            raise Unsupported(f"product with a constant of rank {b.ndim}")
        get = ctx.parameter(b)
        return lambda x: torch.matmul(x, get())
    if a is not None:
        while a.ndim > 2 and a.shape[0] == 1:
            a = a[0]
        if a.ndim != 2:
            raise Unsupported(f"product with a constant of rank {a.ndim}")
        get = ctx.parameter(a.T)
        return lambda x: torch.matmul(x.transpose(-2, -1), get()).transpose(-2, -1)
    if min(len(s) for s in ctx.shapes[:2]) < 3:
        raise Unsupported("product of two tensors without a batch dimension")
    return torch.matmul


def gemm(ctx: Context) -> Function:
    alpha, beta = ctx.attr_float("alpha", 1.0), ctx.attr_float("beta", 1.0)
    if ctx.attr_int("transA", 0) or ctx.constants[0] is not None:
        raise Unsupported("Gemm with a transposed or constant first operand")
    weight = ctx.constant(1, "the weight") * alpha
    weight = weight if ctx.attr_int("transB", 0) else weight.T
    w, bias = ctx.parameter(weight), ctx.optional(2)
    if bias is None:
        zero = ctx.parameter(torch.zeros(weight.shape[0], dtype=torch.float64))
        return lambda x: F.linear(x, w(), zero())
    b = ctx.parameter(torch.broadcast_to(bias * beta, (1, weight.shape[0]))[0])
    return lambda x: F.linear(x, w(), b())


def conv(ctx: Context) -> Function:
    weight = ctx.constant(1, "the weight")
    dims = weight.ndim - 2
    if dims not in (1, 2):
        raise Unsupported(f"convolution over {dims} dimensions")
    pads = ctx.attr_ints("pads") or [0] * (2 * dims)
    auto = ctx.node.attributes.get_string("auto_pad", "NOTSET")
    if auto not in ("NOTSET", "VALID") or pads[:dims] != pads[dims:]:
        raise Unsupported(f"asymmetric padding (auto_pad={auto}, pads={pads})")
    stride = ctx.attr_ints("strides") or [1] * dims
    dilation = ctx.attr_ints("dilations") or [1] * dims
    group = ctx.attr_int("group", 1)
    bias = ctx.optional(2)
    if bias is None:
        bias = torch.zeros(weight.shape[0], dtype=torch.float64)
    w, b = ctx.parameter(weight), ctx.parameter(bias)
    run = F.conv1d if dims == 1 else F.conv2d
    padding = pads[:dims]
    return lambda x: run(x, w(), b(), stride, padding, dilation, group)
