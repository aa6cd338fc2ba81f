"""The operators of one attention, as torch functions that trace to graph nodes of their own.

`attention_scores`, `attention_weights` and `attention_average` are ordinary torch computations. What
makes them special is the `symbolic` of each: a trace of the model (auto_LiRPA makes one) keeps them as
single nodes `attn_bounds::AttentionScores`, `…Weights`, `…Average` instead of a pile of MatMul, Mul and
Softmax, so that a bound operator of our own can stand in for each. Three nodes rather than one, because
scores and weights then keep intermediate bounds of their own (one node for all of it is measurably looser).
Attention by distances (Kim et al., ICML 2021) has scores of its own, `l2_scores`, and shares the other two.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attn_bounds.sensitivity.distance import squared_distances

DOMAIN = "attn_bounds"
SCORES = f"{DOMAIN}::AttentionScores"
L2_SCORES = f"{DOMAIN}::L2Scores"
WEIGHTS = f"{DOMAIN}::AttentionWeights"
AVERAGE = f"{DOMAIN}::AttentionAverage"


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        scores = scale * (query @ key.transpose(-2, -1))
        ctx.save_for_backward(query, key)
        ctx.scale, ctx.masked = scale, mask is not None
        return scores if mask is None else scores + mask

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key = ctx.saved_tensors
        g = ctx.scale * grads[0]
        return (g @ key).sum_to_size(query.shape), (g.mT @ query).sum_to_size(key.shape), None, None

    @staticmethod
    def symbolic(g: Any, query: Any, key: Any, mask: Any, scale: float) -> Any:
        # A missing mask arrives as a prim::Constant of type None: leave it out of the node.
        inputs = (query, key) if mask is None or mask.node().mustBeNone() else (query, key, mask)
        return g.op(SCORES, *inputs, scale_f=scale).setType(query.type())


class _L2Scores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        scores = -scale * squared_distances(query, key)
        ctx.save_for_backward(query, key)
        ctx.scale = scale
        return scores if mask is None else scores + mask

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key = ctx.saved_tensors
        g = 2.0 * ctx.scale * grads[0]
        on_query = g @ key - g.sum(-1).unsqueeze(-1) * query
        on_key = g.mT @ query - g.sum(-2).unsqueeze(-1) * key
        return on_query.sum_to_size(query.shape), on_key.sum_to_size(key.shape), None, None

    @staticmethod
    def symbolic(g: Any, query: Any, key: Any, mask: Any, scale: float) -> Any:
        inputs = (query, key) if mask is None or mask.node().mustBeNone() else (query, key, mask)
        return g.op(L2_SCORES, *inputs, scale_f=scale).setType(query.type())


class _Weights(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> Tensor:
        weights = torch.softmax(scores, dim=-1)
        ctx.save_for_backward(weights)
        return weights

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (weights,) = ctx.saved_tensors
        g = grads[0] * weights
        return g - weights * g.sum(-1, keepdim=True)

    @staticmethod
    def symbolic(g: Any, scores: Any) -> Any:
        return g.op(WEIGHTS, scores).setType(scores.type())


class _Average(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, weights: Tensor, value: Tensor) -> Tensor:
        ctx.save_for_backward(weights, value)
        return weights @ value

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        weights, value = ctx.saved_tensors
        # The scores are passed for the sake of bounds only; their gradient flows through the weights.
        return (
            None,
            (grads[0] @ value.mT).sum_to_size(weights.shape),
            (weights.mT @ grads[0]).sum_to_size(value.shape),
        )

    @staticmethod
    def symbolic(g: Any, scores: Any, weights: Any, value: Any) -> Any:
        return g.op(AVERAGE, scores, weights, value).setType(value.type())


def attention_scores(query: Tensor, key: Tensor, attn_mask: Tensor | None = None, *, scale: float) -> Tensor:
    """`scale * query @ keyᵀ + attn_mask`.

    Arguments:
        query: (batch, heads, n, dk).
        key: (batch, heads, m, dk).
        attn_mask: additive, broadcastable to (batch, heads, n, m), or None. A constant of the network.
        scale: factor on the product, usually 1/√dk.

    Returns:
        (batch, heads, n, m).
    """
    return _Scores.apply(query, key, attn_mask, float(scale))


def l2_scores(query: Tensor, key: Tensor, attn_mask: Tensor | None = None, *, scale: float) -> Tensor:
    """`−scale ‖query_i − key_j‖² + attn_mask`; shapes as in `attention_scores`."""
    return _L2Scores.apply(query, key, attn_mask, float(scale))


def attention_weights(scores: Tensor) -> Tensor:
    """Softmax over the last axis; (batch, heads, n, m) → (batch, heads, n, m)."""
    return _Weights.apply(scores)


def attention_average(scores: Tensor, weights: Tensor, value: Tensor) -> Tensor:
    """`weights @ value`; the scores come along so that a bound can use all three at once.

    Arguments:
        scores: (batch, heads, n, m), the input of `attention_weights`.
        weights: (batch, heads, n, m), `attention_weights(scores)`.
        value: (batch, heads, m, dv).

    Returns:
        (batch, heads, n, dv).
    """
    return _Average.apply(scores, weights, value)


def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *, scale: float
) -> Tensor:
    """Dot-product attention through the three operators; shapes as above, → (batch, heads, n, dv).

    For models written in torch: call this where `F.scaled_dot_product_attention` would stand.
    """
    scores = attention_scores(query, key, attn_mask, scale=scale)
    return attention_average(scores, attention_weights(scores), value)


def l2_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *, scale: float
) -> Tensor:
    """Attention by squared distances, `softmax(−scale ‖query_i − key_j‖² + attn_mask) value`.

    Shapes as in `attention`. With query = key, one tensor, the scores of a token with itself are exactly 0
    and are bounded as such.
    """
    scores = l2_scores(query, key, attn_mask, scale=scale)
    return attention_average(scores, attention_weights(scores), value)
