"""Upper bounds of the spectral norm of a convolution with zero padding, from its kernel alone.

The bound holds for every input size and every amount of zero (or circular) padding, because each such map is
a part of one of these:

* The matrix of the kernel, (out, in·kh·kw), applied to each patch. An input pixel lies in at most
  `⌈kh/sh⌉·⌈kw/sw⌉` patches, so the norm is at most that number's root times the matrix's norm. Where patches
  do not overlap (a patch embedding) the map is block diagonal and this is exact.
* A convolution on the infinite grid, diagonal in frequency. With stride s the input is split into its s·s
  phases (a reordering), and the stride is gone. Then the norm is `sup_θ ‖K(θ)‖₂`, `K(θ) = Σ_ab K_ab e^{i(aθ₁
  + bθ₂)}`. A supremum over a grid of N angles is below that; but `Re x*K(θ)y` is, up to a phase, a
  trigonometric polynomial of degree D = (k − 1)/2 in each angle, and such a function stays above `cos(D t)`
  of its maximum at distance t from it (M. Riesz). The nearest angle of the grid is at most π/N away: dividing
  by `cos(πD/N)` per axis gives an upper bound.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .norms import gram_norm_upper, round_up, safe_sqrt, spectral_norm_upper

ANGLES = 32  # at least, per axis; 1 % for a kernel of three


def convolution_norm_upper(
    kernel: Tensor,
    stride: int | tuple[int, int] = 1,
    dilation: int | tuple[int, int] = 1,
    groups: int = 1,
) -> Tensor:
    """`‖conv‖₂` of a two-dimensional convolution from above, for every input size. Differentiable.

    Arguments:
        kernel: (out, in / groups, kh, kw), as in `torch.nn.Conv2d`; a patch embedding has stride = (kh, kw).
        stride, dilation, groups: as in `torch.nn.Conv2d`. Padding must be zeros or circular.

    Returns:
        () in the kernel's dtype, infinite where an entry is not finite. Exact up to rounding (beyond 128 rows
        up to 1e-3) where patches do not overlap.

    Raises:
        ValueError: no such convolution.

    Source: the module's docstring.
    """
    (sh, sw), (dh, dw) = _pair(stride, "stride"), _pair(dilation, "dilation")
    if kernel.ndim != 4 or 0 in kernel.shape:
        raise ValueError(f"a kernel is (out, in / groups, kh, kw), not {tuple(kernel.shape)}")
    if groups < 1 or kernel.shape[0] % groups:
        raise ValueError(f"{kernel.shape[0]} output channels do not divide into {groups} groups")
    if not bool(torch.isfinite(kernel).all()):
        return kernel.new_tensor(torch.inf)
    k = kernel.double().unflatten(0, (groups, -1))  # groups see different channels: the largest counts
    if (dh, dw) != (1, 1):
        spread = k.new_zeros(*k.shape[:3], (k.shape[3] - 1) * dh + 1, (k.shape[4] - 1) * dw + 1)
        spread[..., ::dh, ::dw] = k
        k = spread
    kh, kw = k.shape[-2:]
    overlap = math.ceil(kh / sh) * math.ceil(kw / sw)
    by_patch = math.sqrt(overlap) * spectral_norm_upper(k.flatten(2)).amax()
    value = by_patch if overlap == 1 else torch.minimum(by_patch, _by_frequency(k, sh, sw))
    return round_up(value * (1.0 + 1e-15), kernel.dtype)


def _by_frequency(k: Tensor, sh: int, sw: int) -> Tensor:
    """k: (groups, out, in, kh, kw)."""
    kh, kw = k.shape[-2:]
    k = torch.nn.functional.pad(k, (0, -kw % sw, 0, -kh % sh))
    # phases of the input become channels: a = sh · row + phase
    k = k.unflatten(-1, (-1, sw)).unflatten(-3, (-1, sh))  # (g, out, in, kh', sh, kw', sw)
    k = k.permute(0, 1, 2, 4, 6, 3, 5).flatten(2, 4)
    kh, kw = k.shape[-2:]
    n_h, n_w = (1 if size == 1 else max(ANGLES, 8 * size) for size in (kh, kw))
    unit = k.detach().abs().amax().clamp(min=1e-300)
    spectrum = torch.fft.fft2(k / unit, s=(n_h, n_w))
    spectrum = spectrum[..., : n_w // 2 + 1]  # a real kernel: the other half is conjugate
    matrices = spectrum.permute(0, 3, 4, 1, 2)
    if matrices.shape[-2] > matrices.shape[-1]:
        matrices = matrices.mT
    gram = matrices @ matrices.mH
    # a hermitian X + iY as the real symmetric [X −Y; Y X], which has the same eigenvalues
    real = torch.cat([torch.cat([gram.real, -gram.imag], -1), torch.cat([gram.imag, gram.real], -1)], -2)
    size = gram.real.diagonal(dim1=-2, dim2=-1).sum(-1)
    rounding = 1e-14 * matrices.shape[-1] * math.log2(8 * n_h * n_w) * size.amax()
    top = safe_sqrt(gram_norm_upper(real).amax() + rounding)
    between = math.cos(math.pi * (kh - 1) / 2 / n_h) * math.cos(math.pi * (kw - 1) / 2 / n_w)
    return unit * top / between


def _pair(value: int | tuple[int, int], name: str) -> tuple[int, int]:
    pair = (value, value) if isinstance(value, int) else tuple(value)
    if len(pair) != 2 or min(pair) < 1:
        raise ValueError(f"{name} must be one or two positive numbers, not {value}")
    return pair[0], pair[1]
