"""L2 self-attention (Kim, Papamakarios, Mnih, ICML 2021): attention that is Lipschitz on all inputs.

Scores are squared distances, `S_ij = −s ‖x_i W_Q − x_j W_Q‖²`: queries and keys share their weights. A head
gives `P X A_h W_V,h` with `A_h = s W_Q,h W_Q,hᵀ`; without that factor a null space of W_Q would let values
grow where scores do not, and the layer would not be Lipschitz.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ..errors import InputError
from .baselines import kim


class L2SelfAttention(nn.Module):
    """`F(X) = concat_h(softmax(S_h) X A_h W_V,h) W_O`; (batch, n, dim) → (batch, n, dim).

    Written in operations that ONNX exporters keep apart, so that `onnx_export.load` recognises it.

    Arguments:
        dim: width d of a token. heads: number of heads, a divisor of dim.
        scale: s; default 1/√(dim/heads).

    Attributes:
        w_q, w_v: (heads, dim, dim/heads). w_o: (dim, dim).

    Raises:
        InputError: heads does not divide dim.
    """

    def __init__(self, dim: int, heads: int = 1, scale: float | None = None) -> None:
        super().__init__()
        if dim % heads:
            raise InputError(f"{heads} heads do not divide a width of {dim}")
        dk = dim // heads
        self.dim, self.heads = dim, heads
        self.scale = 1.0 / math.sqrt(dk) if scale is None else float(scale)
        self.w_q = nn.Parameter(torch.randn(heads, dim, dk) / math.sqrt(dim))
        self.w_v = nn.Parameter(torch.randn(heads, dim, dk) / math.sqrt(dim))
        self.w_o = nn.Parameter(torch.randn(dim, dim) / math.sqrt(dim))

    def forward(self, x: Tensor) -> Tensor:
        n, dk = x.shape[1], self.dim // self.heads
        # (heads, dim, dk) → (dim, heads · dk): one product for all heads
        w_q = self.w_q.permute(1, 0, 2).reshape(self.dim, self.dim)
        w_v = (self.scale * (self.w_q @ (self.w_q.transpose(1, 2) @ self.w_v))).permute(1, 0, 2)

        def split(w: Tensor) -> Tensor:
            return torch.matmul(x, w).reshape(-1, n, self.heads, dk).permute(0, 2, 1, 3)

        q, v = split(w_q), split(w_v.reshape(self.dim, self.dim))
        square = (q * q).sum(-1, keepdim=True)
        distance = square - 2.0 * torch.matmul(q, q.transpose(2, 3)) + square.transpose(2, 3)
        weights = torch.softmax(distance * -self.scale, -1)
        heads = torch.matmul(weights, v).permute(0, 2, 1, 3).reshape(-1, n, self.dim)
        return torch.matmul(heads, self.w_o)

    def lipschitz(self, tokens: int, p: float = 2.0) -> Tensor:
        """Upper bound of the Lipschitz constant, for inputs of so many tokens and all of them; see `kim`."""
        return kim(self.w_q, self.w_v, self.w_o, tokens, self.scale, p)


class ContractiveL2SelfAttention(L2SelfAttention):
    """`G(X) = factor · F(X)` with Lipschitz constant at most `contraction` < 1: `X + G(X)` is invertible.

    Kim et al., section 4: divide by the bound of the Lipschitz constant. The factor is a buffer; it follows
    the weights in training mode and at every change of mode. Gradients take it for a constant.

    Arguments:
        tokens: largest number of tokens.
        contraction: bound of the Lipschitz constant, in (0, 1).
        p: 2 (Frobenius norm of X) or inf (largest entry).

    Raises:
        InputError: a contraction outside (0, 1).
    """

    factor: Tensor

    def __init__(
        self,
        dim: int,
        heads: int,
        tokens: int,
        contraction: float = 0.9,
        p: float = 2.0,
        scale: float | None = None,
    ) -> None:
        super().__init__(dim, heads, scale)
        if not 0.0 < contraction < 1.0:
            raise InputError(f"contraction must be in (0, 1), not {contraction}")
        self.tokens, self.contraction, self.p = tokens, contraction, p
        self.register_buffer("factor", torch.ones(()))
        self.rescale()

    def rescale(self) -> None:
        """Set the factor for the present weights: `contraction` over the Lipschitz constant, at most 1."""
        with torch.no_grad():
            bound = super().lipschitz(self.tokens, self.p).double()
            factor = self.contraction / bound.clamp(min=self.contraction)
            # the factor itself and the product with it are rounded
            self.factor.copy_(factor * (1.0 - 4.0 * torch.finfo(self.factor.dtype).eps))

    def lipschitz(self, tokens: int, p: float = 2.0) -> Tensor:
        """Of G, with the factor as it stands: at most `contraction` for its own `tokens` and p."""
        rounding = 1.0 + 2.0 * torch.finfo(self.factor.dtype).eps
        return super().lipschitz(tokens, p) * self.factor * rounding

    def train(self, mode: bool = True) -> ContractiveL2SelfAttention:
        super().train(mode)
        self.rescale()
        return self

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > self.tokens:
            raise InputError(f"{x.shape[1]} tokens, but the contraction holds for {self.tokens} at most")
        if self.training:
            self.rescale()
        return super().forward(x) * self.factor

    @torch.no_grad()
    def inverse(self, y: Tensor, tolerance: float = 1e-6, max_steps: int = 10_000) -> tuple[Tensor, int]:
        """The x with `x + G(x) = y`, by the fixed point iteration `x ← y − G(x)`.

        A step shrinks the distance to the solution by `contraction`, so a step of length t ends within
        `t · contraction / (1 − contraction)` of it (Banach): the iteration stops where that is at most
        `tolerance`, in the norm p of each sample. The tolerance has to be above the rounding of y's dtype.

        Arguments:
            y: (batch, n, dim).

        Returns:
            x (batch, n, dim), and the number of steps.

        Raises:
            InputError: the weights were changed since the factor was set (`rescale`), or the tolerance is not
                reached within `max_steps`.
        """
        bound = float(self.lipschitz(self.tokens, self.p))
        if bound > self.contraction:
            raise InputError(f"the weights allow a Lipschitz constant of {bound:.4g}: call rescale()")
        q, x = self.contraction, y
        for step in range(1, max_steps + 1):
            new = y - self(x)
            moved = torch.linalg.vector_norm((new - x).flatten(1), self.p, dim=1).amax()
            x = new
            if float(moved) * q / (1.0 - q) <= tolerance:
                return x, step
        raise InputError(
            f"the inverse is not within {tolerance} after {max_steps} steps; the last one: {float(moved):.3g}"
        )
