"""`BoundContract`: what every bound operator must satisfy. Inherit it, supply `cases`, get the tests.

Bounds are attacked by projected gradient ascent in float64 (sampling at random finds nothing), over every
perturbed input at once; several perturbed inputs form a product of balls.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attn_bounds import lirpa
from attn_bounds.flat import FlatOutput as Flat
from attn_bounds.module import BoundedModule

NORMS = (1.0, 2.0, math.inf)


@dataclass
class Case:
    """A module with its inputs; `perturbed` names those in a ball of radius eps."""

    name: str
    module: nn.Module
    inputs: list[Tensor]
    perturbed: list[int]
    eps: float = 0.1
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


def project(d: Tensor, norm: float, eps: float) -> Tensor:
    """Onto the lp ball of radius eps, per row of the batch; (batch, …)."""
    if norm == math.inf:
        return d.clamp(-eps, eps)
    flat = d.flatten(1)
    if norm == 2.0:
        size = flat.norm(dim=1, keepdim=True).clamp(min=1e-300)
        return (flat * (eps / size).clamp(max=1.0)).reshape(d.shape)
    mag, sign = flat.abs(), flat.sign()
    u = mag.sort(1, descending=True).values
    excess = (u.cumsum(1) - eps) / torch.arange(1, u.shape[1] + 1, dtype=u.dtype)
    k = (u > excess).sum(1, keepdim=True).clamp(min=1)
    theta = excess.gather(1, k - 1).clamp(min=0.0)
    out = torch.where(mag.sum(1, keepdim=True) <= eps, flat, sign * (mag - theta).clamp(min=0.0))
    return out.reshape(d.shape)


def smallest(case: Case, functional: Tensor, norm: float, restarts: int = 6, steps: int = 40) -> Tensor:
    """Smallest value of each functional that projected gradient descent finds.

    functional: (spec, outputs). Returns (batch, spec). All restarts and functionals run as one batch.
    """
    spec, batch = functional.shape[0], case.inputs[case.perturbed[0]].shape[0]
    copies = spec * restarts
    generator = torch.Generator().manual_seed(0)

    def spread(x: Tensor) -> Tensor:  # (batch, …) → (batch · copies, …)
        return x.double().repeat_interleave(copies, 0)

    fixed = {i: spread(x) if i in case.perturbed else x.double() for i, x in enumerate(case.inputs)}
    rows = functional.double().repeat(restarts, 1).repeat(batch, 1)
    moves = {}
    for i in case.perturbed:
        start = torch.randn(fixed[i].shape, generator=generator, dtype=torch.float64)
        start = project(start * case.eps, norm, case.eps)
        start[::restarts] = 0.0
        moves[i] = start
    best = torch.full((batch * copies,), math.inf, dtype=torch.float64)
    for step in range(steps + 1):
        leaves = {i: d.clone().requires_grad_() for i, d in moves.items()}
        args = [fixed[i] + leaves[i] if i in leaves else fixed[i] for i in range(len(case.inputs))]
        value = (case.module(*args).flatten(1) * rows).sum(1)
        best = torch.minimum(best, value.detach())
        if step == steps:
            break
        grads = torch.autograd.grad(value.sum(), list(leaves.values()))
        rate = 1.0 - step / steps
        for (i, d), g in zip(moves.items(), grads, strict=True):
            if norm == math.inf:
                vertex = -case.eps * g.sign()
            elif norm == 2.0:
                vertex = (
                    -case.eps
                    * g
                    / g.flatten(1).norm(dim=1).clamp(min=1e-300).reshape(-1, *[1] * (g.ndim - 1))
                )
            else:
                flat = g.flatten(1)
                hot = torch.zeros_like(flat).scatter(1, flat.abs().argmax(1, keepdim=True), 1.0)
                vertex = (-case.eps * hot * flat.sign()).reshape(g.shape)
            # Frank-Wolfe steps on even restarts, projected gradient steps on the others
            even = (torch.arange(len(d)) % 2 == 0).reshape(-1, *[1] * (d.ndim - 1))
            moves[i] = torch.where(even, d + rate * (vertex - d), project(d + rate * vertex, norm, case.eps))
    return best.reshape(batch, restarts, spec).amin(1)


def bounded_inputs(case: Case, norm: float, dtype: torch.dtype) -> tuple[Any, ...]:
    out = []
    for i, x in enumerate(case.inputs):
        x = x.to(dtype)
        if i in case.perturbed:
            if norm == math.inf:
                ptb = lirpa.perturbation(norm, None, x - case.eps, x + case.eps)
            else:
                ptb = lirpa.perturbation(norm, case.eps)
            x = lirpa.BoundedTensor(x, ptb)
        out.append(x)
    return tuple(out)


def bounds(
    case: Case, functional: Tensor, norm: float, method: str, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """Lower and upper bounds of the functionals, (batch, spec)."""
    module = case.module.to(dtype)
    try:
        flat = Flat(module, functional.shape[1])
        graph = BoundedModule(flat, tuple(x.to(dtype) for x in case.inputs), dict(case.options))
        batch = case.inputs[case.perturbed[0]].shape[0]
        c = functional.to(dtype).expand(batch, *functional.shape).contiguous()
        with torch.set_grad_enabled(method == "alpha-crown"):
            low, high = graph.compute_bounds(x=bounded_inputs(case, norm, dtype), C=c, method=method)
        return low.detach().double(), high.detach().double()
    finally:
        case.module.double()


DESCENT = ("alpha-crown", "sensitivity-alpha")  # methods whose steps amplify rounding


class BoundContract:
    """Subclasses set `methods` and define `cases()`; each case is tested with every norm and method."""

    methods: tuple[str, ...] = ("IBP", "CROWN", "alpha-crown")
    spec = 3

    @staticmethod
    def cases() -> list[Case]:
        raise NotImplementedError

    def functional(self, case: Case) -> Tensor:
        with torch.no_grad():
            outputs = case.module.double()(*(x.double() for x in case.inputs)).flatten(1).shape[1]
        generator = torch.Generator().manual_seed(1)
        return torch.randn((self.spec, outputs), generator=generator, dtype=torch.float64)

    @pytest.mark.parametrize("norm", NORMS)
    def test_never_violated(self, norm: float) -> None:
        for case in self.cases():
            c = self.functional(case)
            low_found = smallest(case, c, norm)
            high_found = -smallest(case, -c, norm)
            for method in self.methods:
                low, high = bounds(case, c, norm, method)
                assert torch.isfinite(low).all() and torch.isfinite(high).all(), (str(case), method)
                room = 1e-9 * (1.0 + low_found.abs().max())
                assert (low <= low_found + room).all(), (str(case), method, norm, low, low_found)
                assert (high >= high_found - room).all(), (str(case), method, norm, high, high_found)

    def test_batch_equals_loop(self) -> None:
        for case in self.cases()[:3]:
            both = [
                torch.cat([x, 0.7 * x + 0.1]) if i in case.perturbed else x for i, x in enumerate(case.inputs)
            ]
            pair = Case(case.name, case.module, both, case.perturbed, case.eps, case.options)
            c = self.functional(case)
            for method in self.methods:
                together = torch.stack(bounds(pair, c, 2.0, method))
                for k in range(2):
                    one = [x[k : k + 1] if i in case.perturbed else x for i, x in enumerate(both)]
                    single = Case(case.name, case.module, one, case.perturbed, case.eps, case.options)
                    alone = torch.stack(bounds(single, c, 2.0, method))
                    if method in DESCENT:  # a batch shares the end of the descent, and its decay
                        assert torch.allclose(together[:, k : k + 1], alone, rtol=0.05, atol=1e-3), str(case)
                    else:
                        assert torch.allclose(together[:, k : k + 1], alone, rtol=1e-9, atol=1e-9), str(case)

    def test_float32_agrees_with_float64(self) -> None:
        for case in self.cases()[:4]:
            c = self.functional(case)
            for method in self.methods:
                double = torch.stack(bounds(case, c, math.inf, method))
                single = torch.stack(bounds(case, c, math.inf, method, torch.float32))
                scale = 1.0 + double.abs().max()
                tolerance = 2e-2 if method in DESCENT else 1e-4
                assert ((double - single).abs() <= tolerance * scale).all(), (str(case), method)


def grid(**axes: Any) -> list[dict[str, Any]]:
    """Cartesian product of named lists."""
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
