"""What bounds of an attention layer need of its weights alone: made once, for all inputs and radii."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from ..head_rows import HeadRows
from ..kronecker import SQUARED_COST, forms_matrix, head_sum_norm_upper, squares
from ..norms import safe_sqrt, spectral_norm_upper, thin
from ..term_stack import TermStack
from .layer import AttentionLayer

EPS = torch.finfo(torch.float64).eps


def length(x: Tensor) -> Tensor:
    """Euclidean norm over the last axis, with gradient 0 at 0."""
    return safe_sqrt(x.square().sum(-1))


class LayerWeights:
    """A layer's weights per head, float64, and norms of theirs. Differentiable; H heads.

    Attributes:
        layer: what they are of.
        w_q: (H, d_q, dk). w_k, w_v: (H, d_c, dk or dv), those of shared heads repeated. w_o: (H, dv, d_out).
        scale: of the scores, its size.
        score_size, value_size: (H), `scale ‖W_Q‖_F ‖W_K‖_F` and `‖W_V‖_F ‖W_O‖_F`, the units of rounding in
            their products.
    """

    def __init__(self, layer: AttentionLayer) -> None:
        self.layer = layer
        repeat = layer.heads // layer.groups

        def split(w: Tensor, count: int, times: int) -> Tensor:  # rows in the order of `HeadRows`
            return w.double().mT.contiguous().unflatten(0, (count, -1)).repeat_interleave(times, 0).mT

        self.w_q = split(layer.w_q, layer.heads, 1)
        self.w_k = split(layer.w_k, layer.groups, repeat)
        self.w_v = split(layer.w_v, layer.groups, repeat)
        self.w_o = layer.w_o.double().unflatten(0, (layer.heads, -1))
        self.scale = abs(layer.factor())
        q, k, v, o = (length(w.detach().flatten(1)) for w in (self.w_q, self.w_k, self.w_v, self.w_o))
        self.key_size = k
        self.score_size, self.value_size = self.scale * q * k, v * o

    @property
    def large(self) -> bool:
        """Whether norms of the layer cost so much that one of several is chosen before any is computed."""
        return self.k_rows.large

    def rounding(self, tokens: int) -> float:
        """Relative, of the products that are formed with so many keys."""
        sizes = (self.w_q.shape[1], self.w_k.shape[1], self.w_q.shape[2], self.w_v.shape[2], tokens)
        return 32.0 * sum(sizes) * EPS

    @cached_property
    def thin_k(self) -> Tensor:
        """(H, dk, dk): `W_K` up to a change of basis of the context's features."""
        return thin(self.w_k)

    @cached_property
    def thin_v(self) -> Tensor:
        """(H, dv, dv): `W_V` up to the same."""
        return thin(self.w_v)

    @cached_property
    def thin_q(self) -> Tensor:
        """(H, dk, dk): `W_Q` up to a change of basis of the queries' features."""
        return thin(self.w_q)

    @cached_property
    def thin_o(self) -> Tensor:
        """(H, dv, dv): `W_Oᵀ` up to a change of basis of the outputs."""
        return thin(self.w_o.mT)

    @cached_property
    def score_norm(self) -> Tensor:
        """`‖A_h‖ = ‖scale W_Q W_Kᵀ‖` from above, (H), without rounding of the products."""
        return spectral_norm_upper(self.scale * self.thin_q @ self.thin_k.mT)

    @cached_property
    def value_norm(self) -> Tensor:
        """`‖W_h‖ = ‖W_V W_O‖` from above, (H), without rounding of the products."""
        return spectral_norm_upper(self.thin_v @ self.thin_o.mT)

    @cached_property
    def q_rows(self) -> HeadRows:
        """`W_Qᵀ` of the heads below each other."""
        return HeadRows(self.w_q.mT)

    @cached_property
    def k_rows(self) -> HeadRows:
        """`W_Kᵀ` of the heads below each other."""
        return HeadRows(self.w_k.mT)

    @cached_property
    def v_rows(self) -> HeadRows:
        """`W_Vᵀ` of the heads below each other."""
        return HeadRows(self.w_v.mT)

    @cached_property
    def o_rows(self) -> HeadRows:
        """`W_O` of the heads below each other."""
        return HeadRows(self.w_o)

    @cached_property
    def maps(self) -> TermStack:
        """`W_h = W_V W_O` by their factors; not differentiable."""
        return TermStack.of_heads(self.v_rows, self.o_rows)

    def sum_norm(
        self, p: Tensor, skip: bool, dense_size: int | None = None, squared_cost: float = SQUARED_COST
    ) -> Tensor | None:
        """`‖Σ_h P_h ⊗ W_hᵀ‖` from above, I ⊗ I added with `skip`, with the W_h left as products.

        None where it is cheaper or tighter to form them (`kronecker_sum_norm_upper`, its arguments), where
        rows of P do not sum to one, and where gradients are asked. Shape: (…, H, n, m) → (…), float64.
        """
        (n, m), terms = p.shape[-2:], self.layer.heads + 1
        d_c, d_out = self.w_v.shape[1], self.w_o.shape[2]
        formed = forms_matrix(terms, n * d_out, m * d_c, dense_size)
        if formed or squares(terms, max(d_c, d_out), squared_cost):
            return None
        graded = any(t.requires_grad for t in (p, self.w_v, self.w_o))
        if graded or not (self.v_rows.large and self.o_rows.large):
            return None
        if float((p.sum(-1) - 1.0).abs().amax()) > 1e-9:
            return None
        whole = (self._sum_with_skip if skip else self._sum).to(p)
        flat = p.reshape(-1, *p.shape[-3:])
        found = [head_sum_norm_upper(x, self.maps, whole * (n / m) ** 0.5, skip) for x in flat]
        return torch.stack(found).reshape(p.shape[:-3])

    def _whole(self) -> Tensor:
        """`Σ_h W_h`, (d_c, d_out)."""
        return self.w_v.transpose(0, 1).flatten(1) @ self.w_o.flatten(0, 1)

    @cached_property
    def _sum(self) -> Tensor:
        """`‖Σ_h W_h‖` from above."""
        return spectral_norm_upper(self._whole())

    @cached_property
    def _sum_with_skip(self) -> Tensor:
        """`‖I + Σ_h W_h‖` from above."""
        whole = self._whole()
        return spectral_norm_upper(whole + torch.eye(len(whole)).to(whole))
