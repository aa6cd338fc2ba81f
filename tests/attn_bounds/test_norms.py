"""Norm bounds of matrices and convolutions: against SVD, exact matrices and known answers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from attn_bounds.convolutions import convolution_norm_upper
from attn_bounds.norms import gram_norm_upper, power_iteration_lower, spectral_norm_upper


def rand(seed: int, *shape: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def with_spectrum(values: Tensor, rows: int, columns: int, seed: int) -> Tensor:
    u = torch.linalg.qr(rand(seed, rows, len(values))).Q
    v = torch.linalg.qr(rand(seed + 1, columns, len(values))).Q
    return u * values @ v.mT


SPECTRA = {
    "one": torch.ones(1, dtype=torch.float64),
    "flat": torch.ones(60, dtype=torch.float64),
    "clustered": 1.0 - 1e-5 * torch.arange(60, dtype=torch.float64),
    "two equal": torch.tensor([1.0, 1.0, 0.1], dtype=torch.float64),
    "falling": 0.5 ** torch.arange(40, dtype=torch.float64),
}


@pytest.mark.parametrize("shape", [(60, 60), (61, 400), (300, 70), (200, 250), (300, 300)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", SPECTRA)
def test_spectral_norm_of_known_spectra(shape: tuple[int, int], dtype: torch.dtype, name: str) -> None:
    m = with_spectrum(SPECTRA[name], *shape, seed=sum(shape)).to(dtype)
    for scale in (1.0, 1e-25, 1e25):
        scaled = (m.double() * scale).to(dtype)
        true = float(torch.linalg.svdvals(scaled.double())[0])
        bound = float(spectral_norm_upper(scaled))
        assert bound >= true * (1 - 1e-13), "below the norm"
        assert bound <= true * (1.01 if dtype == torch.float32 else 1.0011)
        low = float(power_iteration_lower(scaled.double(), steps=5))
        assert low <= true * (1 + 1e-13)


def test_a_batch_is_bounded_one_by_one() -> None:
    for size in (5, 150):
        m = rand(1, 4, 3, size, size + 3)
        m[0, 0] = 0.0
        m[1, 1, 0, 0] = math.nan
        m[2, 2, 1, 1] = math.inf
        bound = spectral_norm_upper(m)
        assert bound[0, 0] == 0.0 and bound[1, 1].isinf() and bound[2, 2].isinf()
        rest = torch.isfinite(bound)
        assert int(rest.sum()) == 10
        true = torch.linalg.svdvals(m[rest])[:, 0]
        assert (bound[rest] >= true * (1 - 1e-13)).all() and (bound[rest] <= true * 1.0011).all()


def test_many_matrices_in_single_precision() -> None:
    """They are bounded by Gram iteration in single precision; also where all or few values are equal."""
    for rows, columns in ((150, 200), (130, 900), (300, 300)):
        m = rand(2, 6, rows, columns).float()
        m[1] = torch.eye(rows, columns)
        m[2] = 1e-20 * m[2]
        m[3] = 1e15 * m[3][:, :1] @ m[3][:1]
        m[4] = 0.0
        m[5, 0, 0] = math.nan
        bound, true = spectral_norm_upper(m).double(), torch.linalg.svdvals(m[:5].double())[:, 0]
        assert (bound[:5] >= true * (1 - 1e-12)).all() and (bound[:5] <= 1.06 * true).all()
        assert bound[5].isinf()
        gram = m[:5].double() @ m[:5].double().mT
        top = gram_norm_upper(gram.float()).double()
        assert (top >= torch.linalg.eigvalsh(gram.float().double())[:, -1] * (1 - 1e-12)).all()


def test_large_gram_matrices_are_proved_where_proposals_fail() -> None:
    """300 nearly equal eigenvalues; and a start vector that sees nothing of the largest."""
    q = torch.linalg.qr(rand(5, 300, 300)).Q
    values = 1.0 - 0.05 * torch.rand(300, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gram = q * values @ q.mT
    assert float(values.max()) <= float(gram_norm_upper(gram)) <= 1.05 * float(values.max())
    ramp = torch.arange(1, 301, dtype=torch.float64)
    start = torch.sin(12.9898 * ramp.square())
    top = rand(6, 300)
    top = top - start * (top @ start) / (start @ start)
    top = top / top.norm()
    gram = 0.01 * torch.eye(300, dtype=torch.float64) + torch.outer(top, top)
    assert 1.01 <= float(gram_norm_upper(gram)) <= 1.01 * 1.05


@pytest.mark.parametrize("size", [(4, 6), (150, 170)])
def test_spectral_norm_has_the_gradient_of_the_norm(size: tuple[int, int]) -> None:
    m = (rand(3, *size) + 0.5).requires_grad_()
    (got,) = torch.autograd.grad(spectral_norm_upper(m), m)
    (want,) = torch.autograd.grad(torch.linalg.matrix_norm(m, 2), m)
    assert float((got - want).norm()) < 1e-5 * float(want.norm())
    zero = torch.zeros(size, dtype=torch.float64, requires_grad=True)
    assert (torch.autograd.grad(spectral_norm_upper(zero), zero)[0] == 0).all()


def conv_matrix(kernel: Tensor, size: int, stride: int, padding: int, dilation: int, groups: int) -> Tensor:
    channels = kernel.shape[1] * groups
    basis = torch.eye(channels * size * size, dtype=kernel.dtype).reshape(-1, channels, size, size)
    return torch.nn.functional.conv2d(basis, kernel, None, stride, padding, dilation, groups).flatten(1).mT


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_convolutions_against_their_matrices(size: int, stride: int) -> None:
    for seed, (out, into, padding, dilation, groups) in enumerate(
        [(1, 1, 0, 1, 1), (3, 2, 1, 1, 1), (2, 3, 2, 2, 1), (4, 2, 1, 1, 2), (4, 1, 3, 1, 4), (1, 4, 1, 1, 1)]
    ):
        for smooth in (False, True):
            kernel = rand(seed, out, into, size, size)
            kernel = kernel.abs() if smooth else kernel
            matrix = conv_matrix(kernel, 11, stride, padding, dilation, groups)
            true = float(torch.linalg.matrix_norm(matrix, 2))
            bound = float(convolution_norm_upper(kernel, stride, dilation, groups))
            assert bound >= true * (1 - 1e-13), "below the norm"
            if dilation == 1:
                assert bound <= true * 1.35, "far above the norm, which borders alone do not explain"
            if stride >= size and dilation == 1:
                assert bound <= true * (1 + 1e-12), "patches do not overlap: exact"
            assert bound <= float(convolution_norm_upper(kernel.float(), stride, dilation, groups))


def test_convolution_supremum_between_grid_angles() -> None:
    """An infinite grid reaches `sup_θ`, which a coarse grid of angles alone would miss."""
    for seed in range(30):
        kernel = rand(seed, 1, 1, 1, 6)
        angles = torch.linspace(0, 2 * math.pi, 20001, dtype=torch.float64)
        waves = torch.exp(1j * angles[:, None] * torch.arange(6))
        true = float((waves @ kernel.flatten().to(waves.dtype)).abs().max())
        bound = float(convolution_norm_upper(kernel))
        assert true * (1 - 1e-9) <= bound <= true * 1.05


def test_patch_embedding_is_exact_and_bad_convolutions_are_refused() -> None:
    kernel = rand(0, 20, 3, 4, 4)
    true = float(torch.linalg.matrix_norm(kernel.flatten(1), 2))
    assert float(convolution_norm_upper(kernel, 4)) == pytest.approx(true, rel=1e-12)
    assert float(convolution_norm_upper(kernel * math.nan, 4)) == math.inf
    with pytest.raises(ValueError, match="kernel"):
        convolution_norm_upper(kernel[0])
    with pytest.raises(ValueError, match="groups"):
        convolution_norm_upper(kernel, groups=3)
    with pytest.raises(ValueError, match="stride"):
        convolution_norm_upper(kernel, stride=0)
