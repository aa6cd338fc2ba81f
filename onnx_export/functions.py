"""Normalisations and activations as torch functions that trace to graph nodes of their own.

As in `ops.py`, the `symbolic` of each keeps it one node in a trace, so that a bound operator of ours can
stand in for it. Gain and bias of a normalisation stay outside the node: they are linear, and bounded exactly
as such. Its mean square, `mean(z²) + eps`, is passed to it only to have bounds of its own, which are better
than those that follow from the bounds of z.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .ops import DOMAIN

LAYER_NORM = f"{DOMAIN}::LayerNorm"
MEAN_SQUARE = f"{DOMAIN}::MeanSquare"
RMS_NORM = f"{DOMAIN}::RMSNorm"
GELU = f"{DOMAIN}::Gelu"
SILU = f"{DOMAIN}::Silu"
QUICK_GELU = f"{DOMAIN}::QuickGelu"
ERF = f"{DOMAIN}::Erf"
QUICK = 1.702  # the slope of QuickGELU's sigmoid


class _Unary(torch.autograd.Function):
    """A function of one tensor, given by a plain formula which also gives the gradient.

    A subclass sets `formula` and `symbolic`; what the formula takes besides the tensor is passed to `apply`,
    and so is what a bound wants to know besides, through which no gradient flows.
    """

    formula: Callable[..., Tensor]

    @classmethod
    def forward(cls, ctx: Any, x: Tensor, *options: Any) -> Tensor:
        ctx.save_for_backward(x)
        ctx.formula, ctx.options = cls.formula, options
        return cls.formula(x, *options)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        again = torch.is_grad_enabled()  # whether a gradient of the gradient is wanted
        with torch.enable_grad():
            point = x if again else x.detach().requires_grad_()
            value = ctx.formula(point, *ctx.options)
        (found,) = torch.autograd.grad(value, point, grads[0], create_graph=again)
        return found, *[None] * len(ctx.options)


def _mean_square(x: Tensor, axes: int, eps: float, centred: bool) -> Tensor:
    dims = tuple(range(-axes, 0))
    z = x - x.mean(dims, keepdim=True) if centred else x
    return z.square().mean(dims, keepdim=True) + eps


def _layer_norm(x: Tensor, mean_square: Tensor | None, axes: int, eps: float) -> Tensor:
    sizes = [int(n) for n in x.shape[x.ndim - axes :]]  # constants also where an exporter traces shapes
    return F.layer_norm(x, sizes, eps=eps)


def _rms_norm(x: Tensor, mean_square: Tensor | None, axes: int, eps: float) -> Tensor:
    return x / _mean_square(x, axes, eps, False).sqrt()


def _gelu(x: Tensor, approximate: str) -> Tensor:
    return F.gelu(x, approximate=approximate)


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(QUICK * x)


class _MeanSquare(_Unary):
    formula = staticmethod(_mean_square)

    @staticmethod
    def symbolic(g: Any, x: Any, axes: int, eps: float, centred: bool) -> Any:
        return g.op(MEAN_SQUARE, x, axes_i=axes, eps_f=eps, centred_i=int(centred)).setType(x.type())


class _LayerNorm(_Unary):
    formula = staticmethod(_layer_norm)

    @staticmethod
    def symbolic(g: Any, x: Any, mean_square: Any, axes: int, eps: float) -> Any:
        return g.op(LAYER_NORM, x, mean_square, axes_i=axes, eps_f=eps).setType(x.type())


class _RMSNorm(_Unary):
    formula = staticmethod(_rms_norm)

    @staticmethod
    def symbolic(g: Any, x: Any, mean_square: Any, axes: int, eps: float) -> Any:
        return g.op(RMS_NORM, x, mean_square, axes_i=axes, eps_f=eps).setType(x.type())


class _Gelu(_Unary):
    formula = staticmethod(_gelu)

    @staticmethod
    def symbolic(g: Any, x: Any, approximate: str) -> Any:
        return g.op(GELU, x, approximate_s=approximate).setType(x.type())


class _Silu(_Unary):
    formula = staticmethod(F.silu)

    @staticmethod
    def symbolic(g: Any, x: Any) -> Any:
        return g.op(SILU, x).setType(x.type())


class _QuickGelu(_Unary):
    formula = staticmethod(_quick_gelu)

    @staticmethod
    def symbolic(g: Any, x: Any) -> Any:
        return g.op(QUICK_GELU, x).setType(x.type())


class _Erf(_Unary):
    formula = staticmethod(torch.erf)

    @staticmethod
    def symbolic(g: Any, x: Any) -> Any:
        return g.op(ERF, x).setType(x.type())


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    if weight is not None:
        x = x * weight
    return x if bias is None else x + bias


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, *, axes: int = 1, eps: float) -> Tensor:
    """`(x − mean) / √(var + eps) · weight + bias`, over the last `axes` dimensions.

    Arguments:
        x: (batch, …, d₁, …, d_axes).
        weight, bias: (d₁, …, d_axes), constants of the network, or None.

    Returns:
        as x.
    """
    mean_square = _MeanSquare.apply(x, int(axes), float(eps), True)
    return _affine(_LayerNorm.apply(x, mean_square, int(axes), float(eps)), weight, bias)


def rms_norm(x: Tensor, weight: Tensor | None, *, axes: int = 1, eps: float) -> Tensor:
    """`x / √(mean(x²) + eps) · weight`, over the last `axes` dimensions; shapes as in `layer_norm`."""
    mean_square = _MeanSquare.apply(x, int(axes), float(eps), False)
    return _affine(_RMSNorm.apply(x, mean_square, int(axes), float(eps)), weight, None)


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """`x Φ(x)`, or with approximate="tanh" `x/2 (1 + tanh(√(2/π) (x + 0.044715 x³)))`."""
    return _Gelu.apply(x, approximate)


def silu(x: Tensor) -> Tensor:
    """`x σ(x)`, σ the sigmoid."""
    return _Silu.apply(x)


def quick_gelu(x: Tensor) -> Tensor:
    """`x σ(1.702 x)`."""
    return _QuickGelu.apply(x)


def erf(x: Tensor) -> Tensor:
    """The error function."""
    return _Erf.apply(x)
