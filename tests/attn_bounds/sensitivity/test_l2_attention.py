"""L2 self-attention: Lipschitz constants against ascent on ‖J‖, the contractive variant and its inverse."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_bounds.errors import InputError
from attn_bounds.norms import spectral_norm_upper
from attn_bounds.sensitivity.baselines import kim, phi_inverse
from attn_bounds.sensitivity.l2_attention import ContractiveL2SelfAttention, L2SelfAttention

COPIES = 26
SHAPES = [(1, 2, 1), (2, 2, 1), (2, 4, 2), (3, 2, 1), (3, 4, 2), (4, 3, 3), (5, 2, 2), (8, 2, 1)]


def rand(seed: int, *shape: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def layer(x: Tensor, w_q: Tensor, w_v: Tensor, w_o: Tensor) -> Tensor:
    """L2 self-attention of one sample, by its definition: (n, d), (h, d, dk), (h, d, dk), (d, d) → (n, d)."""
    s = 1.0 / math.sqrt(w_q.shape[-1])
    heads = []
    for q, v in zip(w_q, w_v, strict=True):
        y = x @ q
        scores = -s * (y.unsqueeze(1) - y.unsqueeze(0)).square().sum(-1)
        heads.append(torch.softmax(scores, -1) @ x @ (s * q @ q.mT) @ v)
    return torch.cat(heads, 1) @ w_o


def jacobian_norms(x: Tensor, weights: tuple[Tensor, ...], p: float) -> Tensor:
    """Operator norm of the Jacobian of vec(X) ↦ vec(F(X)) for a batch with a layer each: (batch,)."""
    j = torch.func.vmap(torch.func.jacrev(layer))(x, *weights)
    size = x[0].numel()
    return torch.linalg.matrix_norm(j.reshape(len(x), size, size), p)


def configs() -> list[tuple[Tensor, tuple[Tensor, ...]]]:
    """208 layers, weights from small to large, each with three inputs around the distances that matter."""
    out = []
    for seed, (n, d, heads) in enumerate(SHAPES):
        size = 10 ** torch.linspace(-1, 1, COPIES, dtype=torch.float64)[:, None, None, None]
        shape = COPIES, heads, d, d // heads
        w_q, w_v = size * rand(seed, *shape), rand(seed + 100, *shape)
        w_o = rand(seed + 200, COPIES, d, d)
        reach = math.sqrt(1.0 + phi_inverse(n - 1.0)) / size[:, 0]
        x = torch.cat([f * reach * rand(seed + 300 + i, COPIES, n, d) for i, f in enumerate((0.1, 0.5, 1.5))])
        x[:COPIES, 0] = 0.0
        out.append((x, tuple(w.repeat(3, *[1] * (w.ndim - 1)) for w in (w_q, w_v, w_o))))
    return out


def largest(x: Tensor, weights: tuple[Tensor, ...], p: float, steps: int = 50) -> Tensor:
    """Largest ‖J‖_p over all inputs that ascent finds, (COPIES,)."""
    best = torch.zeros(len(x), dtype=torch.float64)
    scale = x.flatten(1).norm(dim=1)[:, None, None] / math.sqrt(x[0].numel())
    first = torch.zeros_like(x)
    for step in range(steps + 1):
        leaf = x.detach().requires_grad_()
        value = jacobian_norms(leaf, weights, p)
        best = torch.maximum(best, value.detach())
        if step == steps:
            break
        (g,) = torch.autograd.grad(value.clamp(min=1e-200).log().sum(), leaf)
        g = g.nan_to_num()
        first = 0.7 * first + 0.3 * g / g.flatten(1).norm(dim=1).clamp(min=1e-300)[:, None, None]
        x = x + 0.5 * (1.0 - step / steps) * scale * first
    return best.reshape(3, COPIES).amax(0)


@pytest.fixture(scope="module")
def found() -> dict[float, list[Tensor]]:
    return {p: [largest(*c, p) for c in configs()] for p in (2.0, math.inf)}


def constants(p: float, **kwargs: Any) -> list[Tensor]:
    return [
        torch.stack([kim(*(w[i] for w in weights), x.shape[1], p=p, **kwargs) for i in range(COPIES)])
        for x, weights in configs()
    ]


@pytest.mark.parametrize("p", [2.0, math.inf])
def test_kim_is_never_below(p: float, found: dict[float, list[Tensor]], record_property: Any) -> None:
    ratios = torch.cat([k / f for k, f in zip(constants(p), found[p], strict=True)])
    record_property(f"kim, p = {p}: bound over found", [float(ratios.min()), float(ratios.median())])
    assert len(ratios) >= 200 and torch.isfinite(ratios).all()
    assert ratios.min() >= 1.0 - 1e-12, float(ratios.min())
    assert ratios.min() <= 1.5 and ratios.median() <= 20.0, (float(ratios.min()), float(ratios.median()))


def test_the_square_of_the_query_weights_is_not_enough(found: dict[float, list[Tensor]]) -> None:
    """‖W_Q‖⁴ under the root, not ‖W_Q‖²: for large weights ascent passes the latter."""
    exceeded = 0
    for (x, (w_q, w_v, w_o)), f in zip(configs(), found[2.0], strict=True):
        n, dk = x.shape[1], w_q.shape[-1]
        q, v, o = (spectral_norm_upper(w[:COPIES]) for w in (w_q, w_v, w_o))
        factor = math.sqrt(n / dk) * (4.0 * phi_inverse(n - 1.0) + 1.0)
        exceeded += int((factor * (q.square() * v.square()).sum(-1).sqrt() * o < f).sum())
    assert exceeded > 20, exceeded


def test_one_token_is_linear() -> None:
    module = L2SelfAttention(4, 2).double()
    j = torch.autograd.functional.jacobian(module, rand(0, 1, 1, 4)).reshape(4, 4)
    for p in (2.0, math.inf):
        assert torch.linalg.matrix_norm(j, p) <= module.lipschitz(1, p)


def test_module_is_the_definition() -> None:
    for seed, (d, heads) in enumerate([(4, 1), (4, 2), (6, 3)]):
        torch.manual_seed(seed)
        module = L2SelfAttention(d, heads).double()
        x = rand(seed, 3, 5, d)
        expected = torch.stack([layer(row, module.w_q, module.w_v, module.w_o) for row in x])
        assert torch.allclose(module(x), expected, atol=1e-12)
    with pytest.raises(InputError, match="do not divide"):
        L2SelfAttention(4, 3)


@pytest.mark.parametrize("p", [2.0, math.inf])
def test_contraction(p: float) -> None:
    """The Lipschitz constant stays below the contraction wherever ascent starts, also after training."""
    for seed, contraction in enumerate((0.5, 0.9, 0.99)):
        torch.manual_seed(seed)
        module = ContractiveL2SelfAttention(4, 2, 3, contraction, p).double().eval()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(3):
            module.train()
            module(rand(seed, 2, 3, 4)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        module.eval()
        weights = tuple(w.detach().expand(3 * COPIES, *w.shape) for w in (module.w_q, module.w_v, module.w_o))
        start = torch.cat([f * rand(seed + 10 * i, COPIES, 3, 4) for i, f in enumerate((0.1, 0.5, 2.0))])
        assert torch.allclose(module(start), module.factor * torch.func.vmap(layer)(start, *weights))
        norm = module.factor * largest(start, weights, p, steps=40).amax()
        assert module.lipschitz(3, p) <= contraction and module.float().eval().lipschitz(3, p) <= contraction
        assert 0.01 * contraction < norm <= contraction < 1.0


@pytest.mark.parametrize("p", [2.0, math.inf])
@pytest.mark.parametrize("contraction", [0.3, 0.9])
def test_inverse(p: float, contraction: float) -> None:
    """x + G(x) is inverted to the tolerance, every step shrinks the error by the contraction at least."""
    torch.manual_seed(1)
    module = ContractiveL2SelfAttention(4, 2, 5, contraction, p).double().eval()
    with torch.no_grad():
        x = rand(2, 6, 5, 4)
        y = x + module(x)
        assert float((y - x).abs().max()) > 1e-3
        found, steps = module.inverse(y, 1e-9)

        def size(t: Tensor) -> Tensor:
            return torch.linalg.vector_norm(t.flatten(1), p, dim=1)

        assert (size(found - x) <= 1e-9).all()
        z, errors = y, [size(y - x)]
        for _ in range(steps):
            z = y - module(z)
            errors.append(size(z - x))
        for before, after in itertools.pairwise(errors):
            assert (after <= contraction * before + 1e-13).all()
        # steps shrink from the first one, ‖G(y)‖, to the length that the tolerance asks for
        stop = 1e-9 * (1.0 - contraction) / contraction
        predicted = 2 + math.log(stop / float(size(module(y)).max())) / math.log(contraction)
        assert steps <= predicted, (steps, predicted)


def test_what_the_inverse_refuses() -> None:
    torch.manual_seed(3)
    module = ContractiveL2SelfAttention(4, 1, 3).double().eval()
    y = rand(4, 1, 3, 4)
    with pytest.raises(InputError, match="after 1 steps"):
        module.inverse(y, 1e-12, max_steps=1)
    with torch.no_grad():
        module.w_o.mul_(3.0)
    with pytest.raises(InputError, match="rescale"):
        module.inverse(y)
    module.rescale()
    x, _ = module.inverse(y)
    assert torch.allclose(x + module(x), y, atol=1e-5)
    with pytest.raises(InputError, match="4 tokens"):
        module(rand(5, 1, 4, 4))
    with pytest.raises(InputError, match="contraction"):
        ContractiveL2SelfAttention(4, 1, 3, contraction=1.0)


def test_factor_follows_a_state_dict() -> None:
    torch.manual_seed(5)
    one, two = (ContractiveL2SelfAttention(4, 2, 3).eval() for _ in range(2))
    two.load_state_dict(one.state_dict())
    x = torch.randn(2, 3, 4)
    assert torch.equal(one(x), two(x)) and torch.equal(one.factor, two.factor)
