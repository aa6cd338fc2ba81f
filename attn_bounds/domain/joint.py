"""Final functionals, all nodes at once: slopes chosen per functional, second order as one quadratic form.

Support functions add up what each error set can do to a functional, as if each had an input of its own to be
worst at. Here the error sets are taken apart again, from the last node to the first. What a set does to the
functional is written as

    loss ≤ linear in earlier symbols + constant + (quadratic in the symbols of group 0)          (11)

by a mixture of several valid bounds (a convex combination of bounds is one), until only group 0 is left. Over
an l2 ball the sum of all quadratics is maximised in one piece (`ball_maximum_upper`). The mixtures are chosen
by a few steps of gradient descent at the worst input found so far; whatever they are, the bound holds.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..descent import Adam
from ..sensitivity.quadratic import ball_maximum_upper, factored_maximum_upper
from .sets import Ball
from .steps import AttentionStep, Memo, Mode, Pulled, ReluStep, Step

if TYPE_CHECKING:
    from .forms import Groups
    from .sets import ErrorSet

CHUNK = 2**21  # entries of the matrices that are held at once: they should fit in a cache
RATE = 0.5  # of the descent in the logits of mixtures


class Effort(NamedTuple):
    """How hard to look for a good bound.

    Attributes:
        iterations: of the choice of mixtures.
        work: multiplications up to which the quadratic's matrix over an l2 ball is formed.
        attention: where none is formed, whether squares of attentions are kept beside those of ReLU.
    """

    iterations: int
    work: float
    attention: bool


QUICK, THOROUGH = Effort(8, 2e9, False), Effort(80, 1e12, True)
FACTORS = 640  # at most this many squares are kept where no matrix is formed


def joint_losses(groups: Groups, coefficients: Tensor, alone: Tensor, effort: Effort) -> list[Tensor]:
    """What each error set takes from functionals `wᵀe`: their sum is an upper bound of `−wᵀe`.

    Arguments:
        coefficients: (batch, F, K) of the functionals on all symbols.
        alone: (batch, F) loss by support functions alone; its rounding covers that of the coefficients.

    Returns:
        (batch, F) per error set, in order of creation; infinite where no bound was found.
    """
    c = coefficients.double()
    used = [s for s, start in zip(groups.sets, groups.offsets, strict=False) if start < c.shape[2]]
    walk = _Walk(used, groups.offsets, c, effort)
    z = -c[..., : used[0].size]
    z = walk.worst(z, z, z, [])
    if any(walk.mixes):
        z = _choose(walk, z, effort.iterations * (1 if walk.norm == 2.0 else 2))
    with torch.no_grad():
        return _conclude(walk, z, (groups.growth - 1.0) * alone.double())


class _Walk:
    """The error sets behind some functionals, taken apart from the last to the first.

    Attributes:
        first: group 0. norm: of its ball, 0 if it is something else.
        modes, mixes, memos: per later set, in order.
    """

    def __init__(self, used: list[ErrorSet], offsets: list[int], c: Tensor, effort: Effort) -> None:
        self.first, self.later, self.offsets, self.c = used[0], used[1:], offsets[1:], c
        self.norm = self.first.norm if isinstance(self.first, Ball) else 0.0
        steps = [s.step for s in self.later if s.step is not None]
        work = self.first.size**2 * sum(step.first.shape[2] for step in steps) * c.shape[0] * c.shape[1]
        self.dense = self.norm == 2.0 and work <= effort.work
        self.modes = self._modes(effort.attention)
        self.mixes = [
            {} if s.step is None else s.step.parameters(c.shape[1], mode)
            for s, mode in zip(self.later, self.modes, strict=True)
        ]
        self.memos: list[Memo] = [{} for _ in self.later]

    def _modes(self, attention: bool) -> list[Mode]:
        if self.dense:
            return ["none" if s.step is None else "full" for s in self.later]
        modes: list[Mode] = ["none"] * len(self.later)
        if self.norm in (0.0, 1.0):
            return modes
        left = min(FACTORS, self.first.size - 1)
        for kind in (ReluStep, AttentionStep) if attention else (ReluStep,):
            for i, s in enumerate(self.later):
                if isinstance(s.step, kind) and s.step.first.shape[2] <= left:
                    left -= s.step.first.shape[2]
                    modes[i] = "squares"
        return modes

    @property
    def quadratic(self) -> bool:
        """Whether anything but linear terms is left at the end."""
        return any(m != "none" for m in self.modes)

    def worst(
        self, gradient: Tensor, otherwise: Tensor, c: Tensor, parts: list[tuple[ErrorSet, Pulled]]
    ) -> Tensor:
        """The point of group 0 that goes furthest along a gradient, (batch, F, K0).

        Instead of a box the ellipsoid that `factored_maximum_upper` puts around it: its furthest point moves
        smoothly, and it is what the final bound maximises over.
        """
        stretch = torch.ones_like(gradient)
        if self.norm == math.inf:
            nu = c.abs() / 2
            for s, p in parts:
                if s.step is not None and p.weight is not None:
                    d = s.step.first.abs()
                    nu = nu + 0.5 * ((p.weight * d.sum(1, keepdim=True)).to(d) @ d.mT)
            eps = torch.finfo(nu.dtype)
            nu = nu + eps.eps * nu.amax(-1, keepdim=True) + eps.tiny
            stretch = (nu.sum(-1, keepdim=True) / nu).sqrt()
        direction = stretch * gradient
        size = torch.linalg.vector_norm(direction, dim=-1, keepdim=True)
        return torch.where(size > 0, stretch * direction / size.clamp(min=1e-300), otherwise)

    def pull(self, final: bool) -> tuple[Tensor, list[tuple[ErrorSet, Pulled]]]:
        """Coefficients that are left on group 0, and each later set's part, in order."""
        c, out = self.c, []
        rows = list(zip(self.later, self.offsets, self.modes, self.mixes, self.memos, strict=False))
        for s, start, mode, mix, memo in reversed(rows):
            w, c = c[..., start : start + s.size], c[..., :start]
            if s.step is None:
                pulled = Pulled(-(s.tight_range if final else s.range)(w.mT)[0])
            else:
                pulled = s.step.pull(w, mix, mode, None if final else memo)
            if pulled.linear is not None:
                c = c + torch.nn.functional.pad(pulled.linear, (0, c.shape[2] - pulled.linear.shape[2]))
            out.append((s, pulled))
        return c, out[::-1]


def _at(z: Tensor, s: ErrorSet, pulled: Pulled) -> Tensor:
    """The loss (11) at an input z, without its linear part."""
    if pulled.weight is None:
        return pulled.constant
    assert s.step is not None and pulled.rest is not None
    d = s.step.first_at(z)
    loss = pulled.constant + (((pulled.weight * d.square()).sum(-1) + 1e-300).sqrt() + pulled.rest).square()
    if pulled.cross is not None:
        assert pulled.coefficients is not None
        loss = loss - (pulled.cross * d * s.step.second_at(z, pulled.coefficients)).sum(-1)
    return loss


def _choose(walk: _Walk, z: Tensor, iterations: int) -> Tensor:
    """Improve the mixtures in place against the worst input z, which follows; returns the last z."""
    free = [t for mix in walk.mixes for t in mix.values()]
    adam = Adam(free, RATE)
    with torch.enable_grad():
        for t in free:
            t.requires_grad_()
        for _ in range(iterations):
            point = z.clone().requires_grad_()
            c, parts = walk.pull(final=False)
            if walk.quadratic:
                loss = -(c * point).sum(-1) + sum(_at(point, s, p) for s, p in parts)
            else:
                loss = -walk.first.range(c.mT)[0] + sum(p.constant for _, p in parts)
            usable = torch.isfinite(loss)
            if not bool(usable.any()):
                break
            total = torch.where(usable, loss, 0.0).sum()
            found = torch.autograd.grad(total, [*free, point], allow_unused=True)
            with torch.no_grad():
                adam.step(found[: len(free)])
                if walk.quadratic and found[-1] is not None:
                    z = walk.worst(found[-1], z, c, parts)
        for t in free:
            t.requires_grad_(False)
    return z


def _conclude(walk: _Walk, z: Tensor, slack: Tensor) -> list[Tensor]:
    """The losses for fixed mixtures."""
    c, parts = walk.pull(final=True)
    if not walk.quadratic:
        return [-walk.first.tight_range(c.mT)[0] + slack, *(p.constant for _, p in parts)]
    constant = torch.stack([p.constant for _, p in parts]).sum(0)
    forms, stretch = [], []  # (√A + rest)² ≤ (1 + t) A + (1 + 1/t) rest²
    for s, p in parts:
        if s.step is None or p.weight is None:
            continue
        assert p.rest is not None
        size = (p.weight * s.step.first_at(z).square()).sum(-1).sqrt()
        t = (p.rest / size.clamp(min=1e-12)).clamp(min=1e-6, max=1e6)
        constant = constant + (1.0 + 1.0 / t) * p.rest.square()
        forms.append((s.step, p))
        stretch.append(1.0 + t)
    maximum = _dense if walk.dense else _factored
    worst = torch.stack([maximum(walk, i, -c[i], forms, stretch, z[i]) for i in range(len(c))])
    loss = constant + worst * (1.0 + 1e-12) + slack
    shares = [_at(z, s, p) for s, p in parts]
    return [loss - torch.stack(shares).sum(0), *shares]


Forms = list[tuple[Step, Pulled]]


def _dense(walk: _Walk, sample: int, c: Tensor, forms: Forms, stretch: list[Tensor], z: Tensor) -> Tensor:
    """Maximum over the ball through the matrix of the quadratic: Σ first · rightᵀ, made symmetric.

    c: (F, K0). z: (F, K0), replaced by where the maximum is. Returns (F,).
    """
    d = torch.cat([step.first[sample] for step, _ in forms], 1)
    lengths = torch.linalg.vector_norm(d, dim=0).double()
    k = len(d)
    rows = max(1, CHUNK // (k * max(d.shape)))
    found = []
    for part in (slice(f, f + rows) for f in range(0, len(c), rows)):
        each = zip(forms, stretch, strict=True)
        right = torch.cat([step.right(sample, part, p, t[sample, part]) for (step, p), t in each], 2)
        half = (right @ d.mT).double() / 2
        # the product of rows of `right` and d errs by at most this part of that of their lengths
        error = 2.0 * (d.shape[1] + 4) * torch.finfo(d.dtype).eps
        rounding = error * torch.linalg.vector_norm(right, dim=1).double() @ lengths
        bound, z[part] = ball_maximum_upper(c[part], half + half.mT, z[part])
        found.append(bound + rounding)
    return torch.cat(found)


def _factored(walk: _Walk, sample: int, c: Tensor, forms: Forms, stretch: list[Tensor], z: Tensor) -> Tensor:
    """As `_dense`, over the ball or the box, for squares only."""
    found = []
    for f in range(len(c)):
        factors = []
        for (step, p), t in zip(forms, stretch, strict=True):
            assert p.weight is not None
            root = (t[sample, f] * p.weight[sample, f]).sqrt() * step.growth
            factors.append(step.first[sample].double() * root)
        bound, z[f] = factored_maximum_upper(c[f], torch.cat(factors, 1), box=walk.norm == math.inf)
        found.append(bound)
    return torch.stack(found)
