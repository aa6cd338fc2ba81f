"""One rule per kind of nonlinear node: forms of the inputs → form of the output, with a new error set.

Linear nodes need no rule of their own: `AffineForm.linear` maps the centre and all generators at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .forms import AffineForm, Groups, Rest
from .joint import QUICK, ReluStep, joint_losses
from .sets import BoxInBall


def append_identity(form: Tensor, start: int, index: Tensor, size: Tensor | float = 1.0) -> Tensor:
    """Generators (batch, K, *shape) with a new symbol per flat position in `index`, numbered from `start`.

    size: (batch, len(index)), 0 where a sample does not use the symbol.
    """
    batch, symbols = form.shape[:2]
    new = form.new_zeros((batch, start - symbols + len(index), form[0, 0].numel()))
    new[:, torch.arange(start - symbols, start - symbols + len(index)), index] = size
    return torch.cat([form, new.reshape(batch, -1, *form.shape[2:])], 1)


def relu(x: AffineForm, groups: Groups, label: str) -> tuple[AffineForm, tuple[Tensor, Tensor]]:
    """ReLU (theory.md, section 6): slope of the chord, error in a box and in a ball.

    With d the move of a neuron, `e = relu(x+d) − relu(x) − λd` is convex in d with e(0) = 0: it is largest at
    an end of the range and smallest at the kink, and `|e| ≤ κ|d|` with κ the largest difference between λ and
    the slopes to the ends and at 0.

    Returns:
        the output, and the bounds (lower, upper) of the input.
    """
    ranges = groups.ranges(x.generators, x.rest)
    low_d, high_d = groups.total(ranges, x.centre)
    if label in groups.refine:
        low_d, high_d = _refined(x, low_d, high_d, groups)
    low, high = x.centre + low_d, x.centre + high_d
    at = x.centre.clamp(min=0.0)
    # a range that is not finite must not pass for a stable neuron: NaN then reaches the final bound
    known = torch.isfinite(low) & torch.isfinite(high)
    unstable = (low < 0) & (high > 0)
    width = (high - low).clamp(min=torch.finfo(low.dtype).tiny)
    slope = torch.where(unstable, high / width, (low >= 0).to(low.dtype))
    e_low_end = -at - slope * low_d  # relu is 0 at the lower end
    e_high_end = high - at - slope * high_d
    e_kink = -at + slope * x.centre
    e_up = torch.maximum(e_low_end, e_high_end).clamp(min=0.0)
    e_down = e_kink.clamp(max=0.0)
    own = (x.centre > 0).to(low.dtype)  # slope at the centre
    to_low = (-at / low_d.clamp(max=-1e-30) - slope).abs()
    to_high = ((high - at) / high_d.clamp(min=1e-30) - slope).abs()
    kappa = torch.maximum(torch.maximum(to_low, to_high), (own - slope).abs())
    slope = torch.where(known, slope, torch.nan)
    output = AffineForm(at, x.generators * slope.unsqueeze(1), x.rest and x.rest.scaled(slope))
    index = unstable.flatten(1).any(0).nonzero().squeeze(1)
    if (room := groups.room(len(index))) < len(index):  # the largest errors get the symbols
        size = torch.where(unstable, torch.maximum(e_up, -e_down), 0.0)
        kept = index[size.flatten(1).amax(0)[index].topk(room).indices].sort().values
        groups.folded.append((label, len(index) - len(kept)))
        left = size.flatten(1).index_fill(1, kept, 0.0).reshape(size.shape) * groups.growth
        weight = torch.where(left > 0, kappa, 0.0)
        rest = Rest(left, groups.row_norms(x, weight) * groups.growth) + output.rest
        output = AffineForm(at, output.generators, rest)
        index = kept
    if len(index) == 0:
        return output, (low, high)

    def pick(t: Tensor) -> Tensor:
        return torch.where(unstable, t, torch.zeros_like(t)).flatten(1)[:, index]

    def of(t: Tensor) -> Tensor:
        return t.flatten(1)[:, index]

    supports = [of(torch.maximum(-down, up)) for down, up in ranges]
    generators = x.generators.flatten(2)[:, :, index]
    rest_norm = None if x.rest is None else torch.linalg.vector_norm(x.rest.norm.flatten(1), dim=1)
    radius = groups.joint_norm(generators, pick(kappa), supports, rest_norm)
    live = of(unstable).to(low.dtype)
    errors = BoxInBall(label, pick(e_down) * groups.growth, pick(e_up) * groups.growth, radius)
    if groups.keep(generators.numel()):
        box = None if x.rest is None else of(x.rest.box)
        errors.step = ReluStep(
            errors, generators, box, of(x.centre), of(low), of(high), of(slope), live, supports, groups
        )
    start = groups.add(errors)
    generators = append_identity(output.generators, start, index, live)
    return AffineForm(at, generators, output.rest), (low, high)


def _refined(x: AffineForm, low: Tensor, high: Tensor, groups: Groups) -> tuple[Tensor, Tensor]:
    """Bounds of the moves of neurons, those that may be unstable bounded over all earlier nodes at once."""
    unstable = (x.centre + low < 0) & (x.centre + high > 0)
    index = unstable.flatten(1).any(0).nonzero().squeeze(1)
    if len(index) == 0 or len(groups.sets) == 1 or x.rest is not None:
        return low, high
    w = x.generators.flatten(2)[:, :, index].mT
    own_low, own_high = low.flatten(1).clone(), high.flatten(1).clone()
    alone = torch.cat([-own_low[:, index], own_high[:, index]], 1)
    losses = joint_losses(groups, torch.cat([w, -w], 1), alone, QUICK)
    found = torch.stack(losses).sum(0)
    found = torch.where(found < alone, found, alone).to(low)
    own_low[:, index], own_high[:, index] = -found[:, : len(index)], found[:, len(index) :]
    return own_low.reshape(low.shape), own_high.reshape(high.shape)
