"""Bounds of other papers for one self-attention layer, to compare ours with.

The layer is `F(X) = skip · X + Σ_h P_h(X) X W_V,h W_O,h + const` with `P_h = softmax(S_h)` and
`S_h = scale · (X W_Q,h + 1 b_Qᵀ)(X W_K,h)ᵀ + mask`. A key bias only adds constants to rows of scores, a value
bias only a constant to the output: neither changes any bound. All papers but LoFAST's leave out the query
bias; where a bound needs it, what it adds is derived beside the formula and vanishes without it.

Every function takes the same tensors, and returns (…):

    x       (…, n, d)           clean input
    radius  number or (…)       of the ball `‖X' − X‖_F ≤ radius`
    w_q     (…, heads, d, dk)   and w_k the same
    w_v     (…, heads, d, dv)
    w_o     (…, heads, dv, e)
    scale   number              factor on the product of queries and keys, usually 1/√dk
    skip    number              of the residual connection: 0 without (then e may differ from d), else 1
    b_q     (…, heads, dk)      or None
    mask    (n, n) or more      additive, −inf allowed; or None

Everything is computed in float64, and moved up for what rounding does there and in the result's dtype. The
bounds are of the exact layer: what evaluating it in float32 adds is not covered.

With `df` the derivative along dX, `Cov_i` the covariance of the tokens under row i of P, `μ_i` their mean,

    df_i = [ Σ_j P_ij dx_j  +  dx_i A Cov_i  +  Σ_j P_ij ((x_i A + b) · dx_j) (x_j − μ_i) ] W,      (*)

`A = scale W_Q W_Kᵀ`, `b = scale b_Q W_Kᵀ`, `W = W_V W_O`: the Lipschitz constants below are derived from it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import InputError
from ..norms import spectral_norm_upper
from .softmax import FULLY_MASKED, finite_mask, jacobian_norm_upper, probability_box

SLACK = 1e-9  # relative: covers float64 arithmetic for scores up to about 1e5


class _Layer(NamedTuple):
    """The layer at its clean input in float64; (…, heads, …) where a head has its own."""

    x: Tensor  # (…, 1, n, d)
    radius: Tensor  # (…)
    a: Tensor  # (…, heads, d, d)
    b: Tensor  # (…, heads, 1, d)
    w: Tensor  # (…, heads, d, e)
    scores: Tensor  # (…, heads, n, n)

    @property
    def p(self) -> Tensor:
        return torch.softmax(self.scores, -1)

    @property
    def queries(self) -> Tensor:
        """`B = X A + 1 bᵀ`, (…, heads, n, d): the scores are `B Xᵀ`."""
        return self.x @ self.a + self.b

    @property
    def score_move(self) -> Tensor:
        """Bound of `‖S' − S‖_F`, (…, heads): `ε(‖A Xᵀ‖ + ‖B‖) + ε²‖A‖`."""
        e = self.radius.unsqueeze(-1)
        first = spectral_norm_upper(self.x @ self.a.mT) + spectral_norm_upper(self.queries)
        return e * first + e.square() * spectral_norm_upper(self.a)


def _layer(
    x: Tensor,
    radius: Tensor | float,
    w_q: Tensor,
    w_k: Tensor,
    w_v: Tensor,
    w_o: Tensor,
    scale: float,
    b_q: Tensor | None,
    mask: Tensor | None,
) -> _Layer:
    x, w_q, w_k, w_v, w_o = (t.double() for t in (x, w_q, w_k, w_v, w_o))
    if w_q.shape != w_k.shape or w_q.shape[-2] != x.shape[-1] or w_v.shape[-2] != x.shape[-1]:
        raise InputError(
            f"weights {tuple(w_q.shape)}, {tuple(w_k.shape)}, {tuple(w_v.shape)} do not fit an input "
            f"{tuple(x.shape)}: (heads, d, dk) and (n, d) are needed"
        )
    e = torch.as_tensor(radius, dtype=torch.float64)
    if bool((e < 0).any()):
        raise InputError("the radius must not be negative")
    a = scale * (w_q @ w_k.mT)
    b = torch.zeros_like(a[..., :1, :])
    if b_q is not None:
        b = scale * (b_q.double().unsqueeze(-2) @ w_k.mT)
    tokens = x.unsqueeze(-3)
    scores = (tokens @ a + b) @ tokens.mT
    if mask is not None:
        if bool((mask.amax(-1) <= FULLY_MASKED).any()):
            raise InputError("the mask excludes every key of some query")
        scores = scores + finite_mask(mask.double())
    return _Layer(tokens, e.expand(x.shape[:-2]), a, b, w_v @ w_o, scores)


def _up(value: Tensor, like: Tensor) -> Tensor:
    return (value * (1.0 + SLACK)).to(like) * (1.0 + 2.0 * torch.finfo(like.dtype).eps)


def lofast_naive(
    x: Tensor,
    radius: Tensor | float,
    w_q: Tensor,
    w_k: Tensor,
    w_v: Tensor,
    w_o: Tensor,
    scale: float,
    *,
    skip: float = 0.0,
    b_q: Tensor | None = None,
    mask: Tensor | None = None,
    softmax_lipschitz: float = 1.0,
) -> Tensor:
    """Bound of `‖F(X') − F(X)‖_F` with one norm per factor, summed over heads.

    Havens, Araujo, Zhang, Hu, "Fine-grained local sensitivity analysis of standard dot-product
    self-attention", ICML 2024, with its key-sensitivity term replaced by the sum of norms:
    `ε(|skip| + Σ‖P_h‖‖W_h‖) + Σ_h min(L ‖S'−S‖_F, √(2n)) (‖X W_h‖ + ε‖W_h‖)` (theory.md, section 1, (3)).

    Arguments:
        softmax_lipschitz: the paper's L is 1; ½ is the true constant, and as valid.
    """
    layer = _layer(x, radius, w_q, w_k, w_v, w_o, scale, b_q, mask)
    e = layer.radius.unsqueeze(-1)
    size = spectral_norm_upper(layer.w)
    moved = (softmax_lipschitz * layer.score_move).clamp(max=math.sqrt(2.0 * x.shape[-2]))
    second = moved * (spectral_norm_upper(layer.x @ layer.w) + e * size)
    heads = e * spectral_norm_upper(layer.p) * size + second
    return _up(layer.radius * abs(skip) + heads.sum(-1), x)


def norms_only(
    x: Tensor,
    radius: Tensor | float,
    w_q: Tensor,
    w_k: Tensor,
    w_v: Tensor,
    w_o: Tensor,
    scale: float,
    *,
    skip: float = 0.0,
    b_q: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """`lofast_naive` that knows of the input nothing but its norm: `‖P‖ ≤ √n`, products of norms elsewhere.

    `ε|skip| + Σ_h ‖W_h‖ (ε√n + min(ε(2r‖A‖ + √n‖b‖) + ε²‖A‖, √(2n)) (r + ε))`, `r = ‖X‖₂`.
    """
    layer = _layer(x, radius, w_q, w_k, w_v, w_o, scale, b_q, mask)
    e, r = layer.radius.unsqueeze(-1), spectral_norm_upper(layer.x)
    root = math.sqrt(x.shape[-2])
    a, b = spectral_norm_upper(layer.a), torch.linalg.vector_norm(layer.b, dim=(-2, -1))
    moved = (e * (2.0 * r * a + root * b) + e.square() * a).clamp(max=math.sqrt(2.0) * root)
    heads = spectral_norm_upper(layer.w) * (e * root + moved * (r + e))
    return _up(layer.radius * abs(skip) + heads.sum(-1), x)


def specformer(
    x: Tensor,
    radius: Tensor | float,
    w_q: Tensor,
    w_k: Tensor,
    w_v: Tensor,
    w_o: Tensor,
    scale: float,
    *,
    skip: float = 0.0,
    b_q: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Lipschitz constant over the ball, from norms of the weights and of the input.

    Hu, Zheng, Wang, Leung, Wu, Xie, "SpecFormer", ECCV 2024 (arXiv 2402.03317), bound of the self-attention
    layer around X: `N(N+1)(‖X‖_F+δ)²‖W_V‖‖W_Q‖‖W_K‖ + N‖W_V‖` per head.

    Written from memory, and confirmed: by (*) the three terms are at most √N, `r²‖A‖` and
    `√N (r²‖A‖ + r‖b‖)` with `r = ‖X‖_F + ε` above every row's norm. The factor `scale` is ours: without it
    the formula fails for large scales (and is looser where scale < 1). Several heads: times ‖W_O,h‖, summed.
    """
    layer = _layer(x, radius, w_q, w_k, w_v, w_o, scale, b_q, mask)
    n = x.shape[-2]
    r = (torch.linalg.matrix_norm(layer.x.squeeze(-3)) + layer.radius).unsqueeze(-1)
    key = abs(scale) * spectral_norm_upper(w_k.double())
    product = r.square() * key * spectral_norm_upper(w_q.double())
    if b_q is not None:
        product = product + r * key * torch.linalg.vector_norm(b_q.double(), dim=-1)
    heads = spectral_norm_upper(w_v.double()) * spectral_norm_upper(w_o.double())
    return _up(abs(skip) + (heads * (n * (n + 1) * product + n)).sum(-1), x)


def castin(
    x: Tensor,
    radius: Tensor | float,
    w_q: Tensor,
    w_k: Tensor,
    w_v: Tensor,
    w_o: Tensor,
    scale: float,
    *,
    skip: float = 0.0,
    b_q: Tensor | None = None,
    mask: Tensor | None = None,
    refined: bool = False,
) -> Tensor:
    """Lipschitz constant over all inputs whose tokens have norms ≤ R, here `R = max_i ‖x_i‖ + ε`.

    Castin, Ablin, Peyré, "How smooth is attention?", ICML 2024 (arXiv 2312.14820), bound on compact sets:
    `√3 ‖W‖ (‖A‖²R⁴(4n+1) + n)^½` per head.

    Written from memory, and confirmed: in (*) the squares over all rows are at most n, `‖A‖²R⁴` and
    `n (‖A‖R + ‖b‖)² R²`, and √3 adds the three up. That has n where the paper has 4n: a variance over a ball
    of radius R is at most R², while `‖x_j − μ_i‖ ≤ 2R`. An additive mask changes nothing in the derivation.

    Arguments:
        refined: n in place of 4n.
    """
    layer = _layer(x, radius, w_q, w_k, w_v, w_o, scale, b_q, mask)
    n = x.shape[-2]
    r = (torch.linalg.vector_norm(layer.x, dim=-1).amax((-2, -1)) + layer.radius).unsqueeze(-1)
    a, b = spectral_norm_upper(layer.a), torch.linalg.vector_norm(layer.b, dim=(-2, -1))
    query = a * r.square()
    key = query + b * r
    inside = query.square() + (n if refined else 4 * n) * key.square() + n
    return _up(abs(skip) + (spectral_norm_upper(layer.w) * (3.0 * inside).sqrt()).sum(-1), x)


def yudin(
    x: Tensor,
    radius: Tensor | float,
    w_q: Tensor,
    w_k: Tensor,
    w_v: Tensor,
    w_o: Tensor,
    scale: float,
    *,
    skip: float = 0.0,
    b_q: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Lipschitz constant over the ball, from the probabilities that occur in it.

    Yudin, Gaponov, Kudriashov, Rakhuba, "Pay attention to attention distribution", 2025 (arXiv 2507.07814):
    `‖J(X)‖ ≤ ‖W‖ (‖P‖ + 2‖X‖²‖A‖ max_i g(P_i))`, `g = p₍₁₎ (1 − p₍₁₎ + p₍₂₎) ≥ ‖diag(p) − ppᵀ‖₂`.

    That holds at the point X alone, and a ball around it has larger Jacobians. Each factor is bounded over
    the ball instead: `‖X'‖ ≤ ‖X‖ + ε`; g over the probabilities that scores in `S ± (ε(‖A x_j‖ + ‖B_i‖) +
    ε²‖A‖)` allow; and ‖P'‖ by the root of those probabilities' largest column sum, or `‖P‖ + max g ‖S'−S‖_F`.
    With a query bias `2‖X‖‖A‖` becomes `2‖X‖‖A‖ + √n‖b‖`.
    """
    layer = _layer(x, radius, w_q, w_k, w_v, w_o, scale, b_q, mask)
    n = x.shape[-2]
    e = layer.radius.unsqueeze(-1)
    a, b = spectral_norm_upper(layer.a), torch.linalg.vector_norm(layer.b, dim=(-2, -1))
    keys = torch.linalg.vector_norm(layer.x @ layer.a.mT, dim=-1).unsqueeze(-2)
    queries = torch.linalg.vector_norm(layer.queries, dim=-1).unsqueeze(-1)
    reach = (e[..., None, None] * (keys + queries) + (e.square() * a)[..., None, None]) * (1.0 + SLACK)
    low, high = probability_box(layer.scores - reach, layer.scores + reach)
    g = jacobian_norm_upper(low, high).amax(-1)
    p = torch.minimum(spectral_norm_upper(layer.p) + g * layer.score_move, high.sum(-2).amax(-1).sqrt())
    r = spectral_norm_upper(layer.x) + e
    heads = spectral_norm_upper(layer.w) * (p + r * (2.0 * r * a + math.sqrt(n) * b) * g)
    return _up(abs(skip) + heads.sum(-1), x)


def phi_inverse(y: float) -> float:
    """The c ≥ 0 with `c e^{c+1} = y`, y ≥ 0, from above; that is Lambert's `W₀(y/e)`.

    For N − 1 it is the largest `Σ_j p_j t_j` of weights `p_j ∝ e^{−t_j}`, `t_j ≥ 0`, one of the N being 0.
    """
    if y < 0:
        raise InputError(f"phi_inverse needs y ≥ 0, not {y}")
    c = max(1.0, math.log1p(y))
    for _ in range(60):  # Newton's method on a convex function, from above, stays above
        step = (c - y * math.exp(-c - 1.0)) / (1.0 + c)
        c = max(0.0, c - step)
    return c * (1.0 + 1e-12)


def kim(
    w_q: Tensor, w_v: Tensor, w_o: Tensor, tokens: int, scale: float | None = None, p: float = 2.0
) -> Tensor:
    """Lipschitz constant, over all inputs, of L2 self-attention (`l2_attention.L2SelfAttention`).

    Kim, Papamakarios, Mnih, "The Lipschitz constant of self-attention", ICML 2021 (arXiv 2006.04710),
    theorem 3.2. With `c = φ⁻¹(N − 1)`, D/H = dk and s = scale (theirs is 1/√dk):

        p = 2: √N s (4c + 1) √(Σ_h ‖W_Q,h‖⁴ ‖W_V,h‖²) ‖W_O‖
        p = ∞: s (4c √dk + 1) max_h ‖W_Q,h‖_∞ ‖W_Q,hᵀ‖_∞ · max_h ‖W_V,hᵀ‖_∞ · ‖W_Oᵀ‖_∞

    for the norm of vec(X), so that p = 2 is the Frobenius norm and p = ∞ the largest entry.

    Confirmed: with `u_j = √s (x_j − x_i) W_Q` and `dy = √s dx W_Q` the derivative of row i of head h is
    `√s [Σ P_j dy_j − 2 Σ P_j (u_j · (dy_j − dy_i)) (u_j − ū)] W_Qᵀ W_V`, and `Σ P_j ‖u_j‖² ≤ c`;
    Cauchy and Schwarz twice give 4c. For p = ∞, `‖u‖₁ ≤ √dk ‖u‖₂` is the factor √dk, which their scale
    cancels. From memory the constant for p = 2 had ‖W_Q‖² in place of ‖W_Q‖⁴: that is exceeded for large
    weights, as it must be, since every head carries the factor `A_h = s W_Q W_Qᵀ`.

    Arguments:
        w_q: (heads, d, dk). w_v: (heads, d, dv). w_o: (heads · dv, e).
        tokens: N; fewer are covered.
        p: 2 or inf.

    Returns:
        ().

    Raises:
        InputError: another p.
    """
    q, v, o = (t.detach().double() for t in (w_q, w_v, w_o))
    dk = q.shape[-1]
    s = 1.0 / math.sqrt(dk) if scale is None else scale
    if s < 0 or tokens < 1:
        raise InputError(f"scale {s} and {tokens} tokens: neither may be negative, nor zero tokens")
    c = phi_inverse(tokens - 1.0)

    def columns(w: Tensor) -> Tensor:  # ‖Wᵀ‖_∞
        return w.abs().sum(-2).amax(-1)

    if p == 2.0:
        heads = (spectral_norm_upper(q) ** 4 * spectral_norm_upper(v).square()).sum().sqrt()
        bound = math.sqrt(tokens) * s * (4.0 * c + 1.0) * heads * spectral_norm_upper(o)
    elif p == math.inf:
        query = (q.abs().sum(-1).amax(-1) * columns(q)).amax()
        bound = s * (4.0 * c * math.sqrt(dk) + 1.0) * query * columns(v).amax() * columns(o)
    else:
        raise InputError(f"Kim's constants are for p = 2 and inf, not {p}")
    return _up(bound, w_q.detach())
