"""How final functionals take an error set apart (joint.py): one class per kind of set.

Each class bounds what its set does to a functional by a mixture of valid bounds; (11) is in joint.py.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from ..norms import gram_norm_upper
from ..sensitivity.quadratic import relu_quadratic
from ..sensitivity.remainder import psi
from ..sensitivity.softmax import softmax_planes, weights_lower_planes

if TYPE_CHECKING:
    from .forms import Groups
    from .sets import AttentionRemainder, BoxInBall

Parameters = dict[str, Tensor]
Memo = dict[str, list[Tensor]]
PLANES = -2.0  # logit of the planes' part at the start
Mode = Literal["none", "squares", "full"]  # of a step: constants and linear terms only; d²; d² and d u


class Pulled(NamedTuple):
    """One error set's part of (11), an upper bound of the loss `−wᵀe`, per functional.

    With d = `Step.first` the move that group 0 makes of the node's own quantities (scores, neurons), and u
    what it makes of the functional's values, the quadratic is `(√(Σ weight d²) + rest)² − Σ cross d u`.

    Attributes:
        constant: (batch, F).
        linear: (batch, F, K') added to the coefficients of the first K' symbols, or None.
        weight: (batch, F, R) ≥ 0, or None.
        rest: (batch, F), what the other groups add to the root.
        cross: (batch, F, R) or None. coefficients: (batch, F, size) behind u.
    """

    constant: Tensor
    linear: Tensor | None = None
    weight: Tensor | None = None
    rest: Tensor | None = None
    cross: Tensor | None = None
    coefficients: Tensor | None = None


class Step(ABC):
    """How an error set is taken apart: kept by the rule that made the set.

    Attributes:
        first: (batch, K0, R) move of the node's own quantities by group 0.
        growth: factor on its size that covers its rounding.
    """

    first: Tensor
    growth: float

    @abstractmethod
    def parameters(self, functionals: int, mode: Mode) -> Parameters:
        """Initial mixture, (batch, F, …) each."""

    @abstractmethod
    def pull(self, w: Tensor, mix: Parameters, mode: Mode, memo: Memo | None) -> Pulled:
        """Bound of the loss for coefficients w (batch, F, k), float64.

        memo: what the choice of the mixtures keeps from the first iteration on: numbers near the bound, that
            are quick to get and differentiable. None for the bound itself.
        """

    def right(self, sample: int, part: slice, pulled: Pulled, stretch: Tensor) -> Tensor:
        """The other factor of the quadratic's matrix, `first · rightᵀ`: (rows, K0, R).

        part: the functionals. stretch: (rows,) factor on the weights.
        """
        assert pulled.weight is not None
        d = self.first[sample]
        weight = stretch.unsqueeze(1) * self.growth**2 * pulled.weight[sample, part]
        return d * weight.unsqueeze(1).to(d)

    def first_at(self, z: Tensor) -> Tensor:
        """d at a point: z (batch, F, K0) → (batch, F, R)."""
        return (z.to(self.first.dtype) @ self.first).to(z)

    def second_at(self, z: Tensor, coefficients: Tensor) -> Tensor:
        """u at a point: z (batch, F, K0) → (batch, F, R)."""
        raise NotImplementedError


class ReluStep(Step):
    """ReLU with unstable neurons N: plane or chord, quadratic around the centre, or the ball of the set.

    Arguments:
        error_set: its symbols are the N neurons' errors relative to slope λ.
        generators: (batch, K, N) of the inputs. box: (batch, N) of what has no symbols, or None.
        centre, low, high, slope: (batch, N).
        live: (batch, N) 1 where a sample's neuron is unstable, else 0.
        supports: per group (batch, N), bounds of what it moves.
    """

    def __init__(
        self,
        error_set: BoxInBall,
        generators: Tensor,
        box: Tensor | None,
        centre: Tensor,
        low: Tensor,
        high: Tensor,
        slope: Tensor,
        live: Tensor,
        supports: list[Tensor],
        groups: Groups,
    ) -> None:
        self.error_set, self.generators, self.growth = error_set, generators, groups.growth
        sane = live > 0  # placeholders where nothing is unstable, so that no NaN arises
        self.live = live.double()
        self.x = torch.where(sane, centre, 0.0).double()
        self.low = torch.where(sane, low, -1.0).double()
        self.high = torch.where(sane, high, 1.0).double()
        self.slope = torch.where(sane, slope, 0.5).double()
        self.first = generators[:, : groups.sets[0].size]
        rest = sum(supports[1:], torch.zeros_like(supports[0]))
        self.rest = torch.where(sane, rest, 0.0).double()
        others = groups.parts(generators)[1:]
        self.others = [
            (w, None if s.radius is None else s.radius * groups.growth, torch.where(sane, r, 0.0))
            for (s, w), r in zip(others, supports[1:], strict=False)
        ]
        self.box = None
        if box is not None:
            self.box = torch.where(sane, box, 0.0).double() * groups.growth
            self.others.append((generators[:, :0], None, torch.where(sane, supports[-1], 0.0)))

    def parameters(self, functionals: int, mode: Mode) -> Parameters:
        batch, size = self.x.shape
        far = torch.where(self.x > 0, self.x - self.low, self.high - self.x)
        offset = ((0.05 * far - self.x.abs()) / far).clamp(min=1e-3)
        start = {
            "mix": torch.zeros((batch, functionals, 3, size), dtype=torch.float64),
            "slope": torch.where(self.x > 0, 2.0, -2.0).unsqueeze(1).repeat(1, functionals, 1).double(),
            "offset": offset.log().unsqueeze(1).repeat(1, functionals, 1),
        }
        start["mix"][:, :, 0] = -math.inf if mode == "none" else 1.0
        return start

    def pull(self, w: Tensor, mix: Parameters, mode: Mode, memo: Memo | None) -> Pulled:
        x, low, high, slope = (t.unsqueeze(1) for t in (self.x, self.low, self.high, self.slope))
        w = w * self.live.unsqueeze(1)
        by_quadratic, by_plane, by_ball = (w.unsqueeze(2) * torch.softmax(mix["mix"], 2)).unbind(2)
        at = x.clamp(min=0.0)
        rises = w < 0  # the loss is in large outputs: bounds from above; else from below
        # from below: relu(x+d) ≥ μ (x+d)
        mu = torch.sigmoid(mix["slope"])
        below = torch.where(rises, 0.0, by_quadratic + by_plane)
        linear = below * (mu - slope)
        constant = below * (at - mu * x)
        # from above: the chord, which has the slope of the set; or tangent + offset + c d²
        own = (x > 0).double()
        chord = torch.where(rises, by_plane, 0.0)
        constant = constant - chord * (slope * (x - low) - at)
        size = torch.where(rises, -by_quadratic, 0.0)
        far = torch.where(x > 0, x - low, high - x)
        offset = far * torch.exp(mix["offset"]).clamp(max=1.0)
        linear = linear - size * (own - slope)
        constant = constant + size * offset
        # rounding of the generators behind d, and of the product with them
        constant = constant + 2.0 * (self.growth - 1.0) * linear.abs() * torch.maximum(x - low, high - x)
        total = constant.sum(-1)
        if self.box is not None:
            total = total + (linear.abs() @ self.box.unsqueeze(-1)).squeeze(-1)
        if memo is None:
            total = total - self.error_set.tight_range(by_ball.mT)[0]
        else:
            assert self.error_set.radius is not None
            norm = torch.linalg.vector_norm(by_ball, dim=-1)
            total = total + self.error_set.radius.double().unsqueeze(1) * norm
        shifted = (linear.to(self.generators.dtype) @ self.generators.mT).double()
        if mode == "none":
            return Pulled(total, shifted)
        weight = size * relu_quadratic(x, low, high, offset)
        rest = (weight @ self.rest.square().unsqueeze(-1)).squeeze(-1)
        rest = (rest + 1e-300).sqrt()
        if memo is None:
            rest = torch.minimum(rest, self._rest_by_norms(weight))
        return Pulled(total, shifted, weight, rest)

    def _rest_by_norms(self, weight: Tensor) -> Tensor:
        """As `√(Σ weight d²)` for the other groups, each by its spectral norm where that is smaller."""
        total = torch.zeros_like(weight[..., 0])
        root = weight.sqrt()
        for w, radius, support in self.others:
            best = (weight @ support.double().square().unsqueeze(-1)).squeeze(-1).sqrt()
            if radius is not None and w.shape[2] <= 256:
                gram = (w.double().mT @ w.double()) * radius.double().square()[:, None, None]
                scaled = gram.unsqueeze(1) * root.unsqueeze(-1) * root.unsqueeze(-2)
                best = torch.minimum(best, gram_norm_upper(scaled).sqrt())
            total = total + best
        return total


class ScorePlanes:
    """Log-sum-exp planes of the probabilities, for scores that move far: another slope than the tangent's.

    With `s' = centre + D + b`, D linear in the symbols and |b| bounded, and planes `Σ p'_c y_c ≥ g·s' + bias`
    what is lost against the tangent `Σ p_c D_c y_c` is at most
    `−bias − g·centre + Σ |g_c| |b_c| − (g − p∘y)·D`, the last part linear in earlier symbols.

    Arguments:
        generators: (batch, K, heads, n, m) of D.
        centre: (batch, heads, n, m) scores. low, high: what D moves them by. b: bound of |b|.
        p: softmax of the centre.
        growth: factor on D's ranges for the rounding of its generators.
        use: (batch,) the samples that use them, so that none depends on the others of its batch.
    """

    def __init__(
        self,
        generators: Tensor,
        centre: Tensor,
        low: Tensor,
        high: Tensor,
        b: Tensor,
        p: Tensor,
        growth: float,
        use: Tensor,
    ) -> None:
        self.generators, self.use = generators.flatten(2), use
        # softmax does not mind a constant per row: numbers near zero lose less to rounding
        self.centre = centre - centre.amax(-1, keepdim=True)
        lower, upper = self.centre + low - b, self.centre + high + b
        self.planes = softmax_planes(lower, upper)
        self.b, self.p = b, p
        self.rounding = 2.0 * (growth - 1.0) * torch.maximum(high, -low)

    def lose(self, y: Tensor, error: Tensor) -> tuple[Tensor, Tensor]:
        """Per row: the constant part of the loss (batch, F, heads, n), and `g − p∘y` (batch, F, heads, n, m).

        Arguments:
            y: (batch, F, heads, n, m). error: (batch, F, heads, n) of the rounding in y.
        """
        plane = weights_lower_planes(y.transpose(0, 1), self.planes)
        g, bias = plane.scores.transpose(0, 1), plane.bias.transpose(0, 1)
        slope = g - self.p.unsqueeze(1) * y
        loss = (g.abs() * self.b.unsqueeze(1)).sum(-1) - (g * self.centre.unsqueeze(1)).sum(-1) - bias
        return loss + (slope.abs() * self.rounding.unsqueeze(1)).sum(-1) + 2.0 * error, slope

    def pulled(self, slope: Tensor) -> Tensor:
        """Coefficients on the symbols, (batch, F, K), of slopes on D, (batch, F, heads, n, m)."""
        return (slope.flatten(2).to(self.generators.dtype) @ self.generators.mT).double()


class AttentionStep(Step):
    """Second-order remainder of one attention: rows of scores D z, curvature and cross term as quadratics.

    The curvature loss is at most `Σ p ψ(r) (sup|ℓ| − y)⁺ Δ'²` (remainder.py). The cross term is
    `Σ p_c D_c u_c` up to third order: with `p' − p = p (Δ' + φ − Eφ)/Z` the rest is at most
    `sd_rest sd(u⁰) + sd sd(u_rest) + (1 − 1/Z) sd sd(u) + √(Σ p φ²) sd(u)`. Where scores move far, planes
    take over a part of the curvature and of the bilinear term.

    Arguments:
        scores: (batch, K0, heads, n, m) centred generators of group 0.
        values: (batch, K0, heads, m, dv) generators of V in group 0, or None where V does not move.
        other_sd, other_sd_psi: (batch, heads, n) bounds of `√(Σ p Δ_rest²)`, `√(Σ p ψ Δ_rest²)`, Δ_rest what
            the other groups and the bilinear part add to Δ'. other_r: (batch, heads, n, m) of |Δ_rest|.
        planes: where the scores move far, else None.
    """

    def __init__(
        self,
        error_set: AttentionRemainder,
        scores: Tensor,
        values: Tensor | None,
        other_sd: Tensor,
        other_sd_psi: Tensor,
        other_r: Tensor,
        growth: float,
        planes: ScorePlanes | None = None,
    ) -> None:
        self.error_set, self.first, self.values = error_set, scores.flatten(2), values
        self.growth, self.planes = growth, planes
        # with the functionals' dimension; what does not depend on them is computed once
        self.other_sd, self.other_square = other_sd.unsqueeze(1), other_r.square().unsqueeze(1)
        self.other_psi_square = other_sd_psi.square().unsqueeze(1)
        rows = error_set.exact.rows
        psi_r = psi(rows.r)
        self.density, self.square = (rows.p * psi_r).unsqueeze(1), rows.r.square().unsqueeze(1)
        self.p, self.sd, sd_psi = rows.p.unsqueeze(1), rows.sd.unsqueeze(1), rows.sd_psi.unsqueeze(1)
        # bound of √(Σ p φ²)
        phi = torch.minimum(
            sd_psi * (psi_r.sqrt() * rows.r).amax(-1).unsqueeze(1),
            ((psi_r * rows.r.square()).square() * rows.p).sum(-1).sqrt().unsqueeze(1),
        )
        # 1 − 1/Z ≤ Σ p φ; and the rounding of the generators of D and u
        self.third = (sd_psi.square().clamp(max=1.0) + 2.0 * (growth**2 - 1.0)) * self.sd + phi

    def parameters(self, functionals: int, mode: Mode) -> Parameters:
        batch, heads, n, _ = self.error_set.exact.average.shape

        def start(value: float) -> Tensor:
            return torch.full((batch, functionals, heads, n), value, dtype=torch.float64)

        mix = {} if self.planes is None else {"planes": start(PLANES)}
        if mode != "none":
            mix |= {"curvature": start(1.0), "cross": start(0.0 if self._crosses(mode) else -math.inf)}
        return mix

    def _crosses(self, mode: Mode) -> bool:
        return mode == "full" and self.values is not None

    def pull(self, w: Tensor, mix: Parameters, mode: Mode, memo: Memo | None) -> Pulled:
        if memo is not None and "smaller" not in memo:
            with torch.no_grad():
                memo["smaller"] = self.error_set.shrinkage(w.mT)
        # (batch, heads, n, F, …)
        parts = self.error_set.parts(w.mT, None if memo is None else memo["smaller"])

        def first(t: Tensor) -> Tensor:  # functionals in front
            return t.permute(0, 3, 1, 2, *range(4, t.ndim))

        constant, linear = first(parts.scores), None
        taken = torch.zeros_like(constant)  # by the planes
        if self.planes is not None:
            loss, slope = self.planes.lose(first(parts.y), first(parts.error))
            known = (
                torch.isfinite(loss) & torch.isfinite(slope).all(-1) & self.planes.use[:, None, None, None]
            )
            taken = torch.where(known, torch.sigmoid(mix["planes"]), 0.0)
            constant = (1.0 - taken) * constant + taken * torch.where(known, loss, 0.0)
            slope = torch.where(known.unsqueeze(-1), taken.unsqueeze(-1) * slope, 0.0)
            linear = self.planes.pulled(slope)
        left, down, cross = 1.0 - taken, first(parts.down), first(parts.cross)
        if mode == "none":
            return Pulled((constant + left * down + cross).sum((2, 3)), linear)
        g = (first(parts.slope).unsqueeze(-1) - first(parts.y)).clamp(min=0.0)
        weight = self.density * g
        # where scores move very far the quadratic is useless, and its numbers are out of scale
        worst = (weight * self.square).sum(-1)
        known = torch.isfinite(worst) & (worst <= 1e3 * down + 1e-9)
        part = left * torch.where(known, torch.sigmoid(mix["curvature"]), 0.0)
        weight = torch.where(known.unsqueeze(-1), part.unsqueeze(-1) * weight, 0.0)
        rest = (weight * self.other_square).sum(-1)
        by_norm = part * g.amax(-1) * self.other_psi_square
        rest = torch.minimum(rest, torch.where(known, by_norm, 0.0))
        constant = constant + (left - part) * down
        root = (rest.sum((2, 3)) + 1e-300).sqrt()
        if not self._crosses(mode):
            return Pulled((constant + cross).sum((2, 3)), linear, weight.flatten(2), root)
        u_first, u = first(parts.sd_u_first), first(parts.sd_u)
        third = self.other_sd * u_first + self.sd * (u - u_first) + self.third * u
        known = torch.isfinite(third)
        part = torch.where(known, torch.sigmoid(mix["cross"]), 0.0)
        constant = constant + part * torch.where(known, third, 0.0) + (1.0 - part) * cross
        products = (part.unsqueeze(-1) * self.p).flatten(2)
        return Pulled(constant.sum((2, 3)), linear, weight.flatten(2), root, products, w)

    def right(self, sample: int, part: slice, pulled: Pulled, stretch: Tensor) -> Tensor:
        right = super().right(sample, part, pulled, stretch)
        if pulled.cross is None:
            return right
        assert self.values is not None and pulled.coefficients is not None
        _, heads, n, dv = self.error_set.exact.average.shape
        a = pulled.coefficients[sample, part].reshape(-1, 1, heads, n, dv)
        u = (a @ self.values[sample].double().mT).flatten(2)  # in float64: functionals may cancel here
        return right - (pulled.cross[sample, part].unsqueeze(1) * u).to(right)

    def second_at(self, z: Tensor, coefficients: Tensor) -> Tensor:
        assert self.values is not None
        batch, heads, n, dv = self.error_set.exact.average.shape
        v = (z.to(self.values.dtype) @ self.values.flatten(2)).to(z)
        v = v.reshape(batch, -1, heads, self.values.shape[3], dv)
        return (coefficients.reshape(batch, -1, heads, n, dv) @ v.mT).flatten(2)
