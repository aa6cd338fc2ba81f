"""An attention layer as its weights, and what of ours its bounds use: `key.py` has the bounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Improvements(NamedTuple):
    """What is used beyond the paper's form. Switching one on never makes the bound larger.

    Attributes:
        half: L = 1/2, the largest norm of the softmax Jacobian, instead of 1.
        local: L from the range of the probabilities over the whole set (per row if `per_row`).
        centre_values: `(P' − P) C' W = (P' − P)(C' − 1cᵀ) W`, c the mean.
        centre_keys: Δ counts up to a constant per row, so keys may be `C − 1cᵀ`.
        per_row: rows keep their own L, keys (masks) and saturation: the root of the sum of squared rows.
        stacked: all heads' moves in one norm, rows apart, beside the sum over heads (`heads.py`).
        weighted: there, keys count by their largest probability in the ball. Only with `local` and `stacked`.
    """

    half: bool = True
    local: bool = True
    centre_values: bool = True
    centre_keys: bool = True
    per_row: bool = True
    stacked: bool = True
    weighted: bool = True


PAPER = Improvements(*[False] * 7)


@dataclass(frozen=True)
class AttentionLayer:
    """Weights of a multi-head attention layer, biases included; all products act on rows, `X W`.

    Attributes:
        w_q: (d_q, heads · dk), head after head. w_k: (d_c, kv_heads · dk). w_v: (d_c, kv_heads · dv).
        w_o: (heads · dv, d_out).
        heads, kv_heads: kv_heads divides heads, default the same; head h uses keys h · kv_heads // heads.
        b_q, b_k, b_v, b_o: biases, or None. Only that of the queries has a part in the bounds.
        scale: factor of the scores; default 1/√dk.
        mask: broadcast against (…, heads, n, m); bool, True where a key may be seen, or added to the scores.
        skip: H, (n, n), added as `H X` to the output; True is the identity, False none.

    Raises:
        ValueError: shapes do not fit or a weight is not finite.
    """

    w_q: Tensor
    w_k: Tensor
    w_v: Tensor
    w_o: Tensor
    heads: int
    kv_heads: int | None = None
    b_q: Tensor | None = None
    b_k: Tensor | None = None
    b_v: Tensor | None = None
    b_o: Tensor | None = None
    scale: float | None = None
    mask: Tensor | None = None
    skip: Tensor | bool = False

    def __post_init__(self) -> None:
        groups = self.groups
        if self.heads < 1 or groups < 1 or self.heads % groups:
            raise ValueError(f"{self.heads} heads cannot share {groups} heads of keys and values")
        widths = {"w_q": self.heads, "w_k": groups, "w_v": groups}
        for name, count in widths.items():
            w = getattr(self, name)
            if w.ndim != 2 or w.shape[1] % count or w.shape[1] == 0:
                raise ValueError(f"{name} must be (features, {count} heads · width), got {tuple(w.shape)}")
        dk, dv = self.w_q.shape[1] // self.heads, self.w_v.shape[1] // groups
        if self.w_k.shape[1] != groups * dk:
            raise ValueError(f"queries have {dk} features a head, keys {self.w_k.shape[1] / groups:g}")
        if self.w_v.shape[0] != self.w_k.shape[0]:
            raise ValueError("w_k and w_v read the same context: their first sizes must agree")
        if self.w_o.ndim != 2 or self.w_o.shape[0] != self.heads * dv:
            raise ValueError(f"w_o must be ({self.heads * dv}, d_out), got {tuple(self.w_o.shape)}")
        if isinstance(self.skip, Tensor) or self.skip:
            if self.w_o.shape[1] != self.w_q.shape[0]:
                raise ValueError("a skip connection needs as many outputs as the queries' input has features")
            if isinstance(self.skip, Tensor) and (
                self.skip.ndim != 2 or self.skip.shape[0] != self.skip.shape[1]
            ):
                raise ValueError(f"skip acts on tokens, (n, n), got {tuple(self.skip.shape)}")
        for name, side in (("b_q", self.w_q), ("b_k", self.w_k), ("b_v", self.w_v), ("b_o", self.w_o)):
            bias = getattr(self, name)
            if bias is not None and bias.shape != side.shape[1:]:
                raise ValueError(f"{name} must be {tuple(side.shape[1:])}, got {tuple(bias.shape)}")
        for name in ("w_q", "w_k", "w_v", "w_o", "b_q", "b_k", "b_v", "b_o", "skip"):
            value = getattr(self, name)
            if isinstance(value, Tensor) and not bool(torch.isfinite(value).all()):
                raise ValueError(f"{name} has entries that are not finite")
        if self.mask is not None and self.mask.dtype != torch.bool:
            mask = self.mask
            if bool((mask.isnan() | (mask == torch.inf)).any()):
                raise ValueError("an additive mask holds finite numbers and −inf")

    @property
    def groups(self) -> int:
        """Heads of keys and values."""
        return self.heads if self.kv_heads is None else self.kv_heads

    def factor(self) -> float:
        """Factor of the scores."""
        return (self.w_q.shape[1] // self.heads) ** -0.5 if self.scale is None else float(self.scale)
