"""Counterexamples by projected gradient descent, for l1, l2 and l_inf input sets."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_bounds.errors import InputError
from attn_bounds.properties import InputSet, Specification

Model = Callable[[Tensor], Tensor]

MOMENTUM = 0.75
FIRST_STEP = 1.0  # of the radius (half width of a box); more when few steps have to cross the set
SEGMENT = 32  # points tried between the centre and a counterexample, to shorten it


@dataclass
class AttackResult:
    """x: (1, *features), the point with the smallest margin found, in the input set.

    margin: the property's margin at x, evaluated on x alone. found: margin <= 0, x is a counterexample."""

    x: Tensor
    margin: float
    found: bool


def pgd(
    model: Model,
    inputs: InputSet,
    spec: Specification,
    *,
    restarts: int = 10,
    steps: int = 50,
    seed: int = 0,
    step_size: float | None = None,
    stop_early: bool = True,
    dtype: torch.dtype | None = None,
    starts: Tensor | None = None,
) -> AttackResult:
    """Search the input set for the smallest margin; a margin <= 0 refutes the property.

    All restarts run as one batch of the model, which must treat the rows of a batch independently. The
    first starts at the centre, the others at random points ever further out. Some descend on the smallest
    margin of the moment, the others each on one group of the specification, the closest groups first. Half
    step along the gradient and project, half step towards the point where the linear model of the
    moment is worst (Frank-Wolfe). Steps shrink to zero along a cosine.

    model: (rows, *features) in `dtype` to (rows, ...); output is flattened per row.
    steps: gradient steps; 0 only evaluates the starting points.
    step_size: length of the first step (l_inf: per element; l1, l2: in the l2 norm, for l1 about).
    stop_early: stop at the first counterexample instead of looking for the smallest margin.
    dtype: float32 or float64, the type the model computes in; None for that of the centre.
    starts: (k, *features), extra starting points, projected into the set; they replace random ones.

    Raises InputError for bad options, an output that does not fit the specification, and a model that
    returns NaN or inf at every point. Same seed, same result."""
    if restarts < 1 or steps < 0 or (step_size is not None and not 0 < step_size < math.inf):
        raise InputError(
            f"restarts {restarts}, steps {steps}, step_size {step_size}: needs restarts >= 1, steps >= 0, "
            "and a finite step_size > 0 or None"
        )
    dtype = inputs.center.dtype if dtype is None else dtype
    if dtype not in (torch.float32, torch.float64):
        raise InputError(f"dtype is {dtype}; it must be float32 or float64")
    generator = torch.Generator().manual_seed(seed)
    x = _starting_points(inputs, restarts, generator, dtype, starts)
    rows = torch.arange(len(x), device=x.device)
    frank_wolfe = rows % 2 == 1
    greedy = (rows % 3 == 0) | (rows <= (0 if starts is None else len(starts)))
    targets: Tensor | None = None
    momentum = torch.zeros_like(x)
    best = AttackResult(x[:1], math.inf, False)

    for step in range(steps + 1):
        with torch.set_grad_enabled(step < steps):
            x.requires_grad_(step < steps)
            groups = spec.group_margins(_row_values(model, spec, x))
        best = _better(model, spec, x.detach(), groups.detach().amin(1), best)
        if step == steps or (best.found and stop_early):
            break
        if targets is None:
            order = groups[0].detach().argsort()  # NaN sorts last: a group without a value is no target
            targets = order[(rows - rows // 3 - 1).clamp(min=0) % len(order)]
        with torch.enable_grad():
            loss = torch.where(greedy, groups.amin(1), groups.gather(1, targets[:, None])[:, 0]).sum()
        if not loss.requires_grad:
            raise InputError("the model's output has no gradient; pgd needs a differentiable torch model")
        (gradient,) = torch.autograd.grad(loss, x)
        x = x.detach()
        momentum = MOMENTUM * momentum + _normalised(gradient, generator)
        x = _step(inputs, x, momentum, frank_wolfe, step, steps, step_size)
    if best.margin == math.inf:
        raise InputError("the model returned NaN or inf at every point that was tried; check its weights")
    return best


def _row_values(model: Model, spec: Specification, x: Tensor) -> Tensor:
    return spec.margins(model(x).flatten(1))


def _starting_points(
    inputs: InputSet, restarts: int, generator: torch.Generator, dtype: torch.dtype, starts: Tensor | None
) -> Tensor:
    center = inputs.project(inputs.center.to(dtype))
    x = inputs.sample(restarts, generator).to(dtype)
    outward = torch.linspace(0, 1, restarts, dtype=dtype, device=x.device).reshape(-1, *[1] * (x.dim() - 1))
    x = center + outward * (x - center)
    if starts is not None and len(starts):
        extra = inputs.project(starts.to(x))
        x = torch.cat([x[:1], extra, x[1 + len(extra) :]])
    return inputs.project(x)


def _better(
    model: Model, spec: Specification, x: Tensor, margins: Tensor, best: AttackResult
) -> AttackResult:
    """The best of this batch if it beats `best`; evaluated once more alone, as its user will."""
    margin, row = margins.nan_to_num(nan=math.inf).min(0)
    if not margin.item() < best.margin:
        return best
    point = x[row : row + 1].clone()
    with torch.no_grad():
        alone = spec.margin(_row_values(model, spec, point)).item()
    return AttackResult(point, alone, alone <= 0) if alone < best.margin else best


def _normalised(gradient: Tensor, generator: torch.Generator) -> Tensor:
    """Gradients of l1 length 1 per row; a random direction where there is none (zero, NaN or inf)."""
    flat = gradient.flatten(1)
    flat = flat / flat.abs().amax(1, keepdim=True)
    lost = ~flat.isfinite().all(1, keepdim=True)
    if lost.any():
        noise = torch.randn(flat.shape, dtype=torch.float64, generator=generator).to(flat)
        flat = torch.where(lost, noise, flat)
    return (flat / flat.abs().sum(1, keepdim=True)).reshape(gradient.shape)


def _step(
    inputs: InputSet,
    x: Tensor,
    direction: Tensor,
    frank_wolfe: Tensor,
    step: int,
    steps: int,
    step_size: float | None,
) -> Tensor:
    """One descent step of all rows, back in the set."""
    per_row = [-1] + [1] * (x.dim() - 1)
    half_width = None
    if inputs.lower is not None and inputs.upper is not None and inputs.norm == math.inf:
        half_width = (inputs.upper.to(x) - inputs.lower.to(x)) / 2
    radius = inputs.eps
    if radius is None:
        radius = 0.0 if half_width is None else half_width.max().item()
    share = min(2.0, max(FIRST_STEP, 4 / steps))
    if step_size is not None:
        share = step_size / radius if radius > 0 else 0.0
    share *= (1 + math.cos(math.pi * step / steps)) / 2

    if half_width is not None:
        length = half_width if step_size is None else radius
        along = length * direction.sign()
    else:
        flat = direction.flatten(1)
        size = torch.linalg.vector_norm(flat, dim=1)
        if inputs.norm == 1:
            # Longer steps: the projection on an l1 ball undoes most of a dense step. The mean of the l2
            # length and of the largest element did best in trials on vision transformers.
            size = (size * flat.abs().amax(1)).sqrt()
        along = radius * direction / size.clamp(min=1e-30).reshape(per_row)
    towards = x - inputs.minimize_linear(direction)
    chosen = frank_wolfe.reshape(per_row)
    return inputs.project(x - torch.where(chosen, min(share, 1.0) * towards, share * along))


def attack_radius(
    model: Model,
    center: Tensor,
    norm: float,
    spec: Specification,
    *,
    upper: float,
    tol: float = 0.01,
    clip: tuple[float, float] | None = None,
    restarts: int = 10,
    steps: int = 50,
    seed: int = 0,
    dtype: torch.dtype | None = None,
) -> float:
    """Smallest radius, up to the relative tolerance, at which `pgd` finds a counterexample.

    An upper bound of the true robust radius around center (1, *features): at the returned radius there is
    a point, within clip, with margin <= 0. 0.0 if the centre itself is unsafe, inf if nothing is found up
    to `upper` (in the units of the input). Bisects on a logarithmic scale; each search starts from the
    counterexamples found before, too. Other parameters as in `pgd`.

    Raises InputError for a bad upper or tol, and as InputSet.ball and pgd do."""
    if not 0 < upper < math.inf or not 0 < tol < math.inf:
        raise InputError(f"upper is {upper} and tol {tol}; both must be finite numbers > 0")
    dtype = center.dtype if dtype is None else dtype
    found: list[Tensor] = []

    def shorten(x: Tensor, limit: float) -> float:
        """Distance of the closest counterexample on the segment from the centre to x; remembers it."""
        share = torch.linspace(0, 1, SEGMENT + 1, dtype=dtype, device=x.device)[1:]
        ball = InputSet.ball(center, norm, limit, clip)
        middle = center.to(dtype)
        points = middle + share.reshape(-1, *[1] * (x.dim() - 1)) * (x - middle)
        points = ball.project(points)
        with torch.no_grad():
            unsafe = spec.margin(_row_values(model, spec, points)) <= 0
            for i in unsafe.nonzero()[:, 0].tolist():
                # rounding may differ from that in the batch, so ask for the point alone
                if spec.margin(_row_values(model, spec, points[i : i + 1])).item() <= 0:
                    x = points[i : i + 1]
                    break
        found.append(x)
        away = (x.double() - center.double()).flatten()
        return min(limit, torch.linalg.vector_norm(away, ord=norm).item())

    def search(eps: float) -> float | None:
        """Distance of a counterexample within eps, or None."""
        ball = InputSet.ball(center, norm, eps, clip)
        starts = torch.cat(found[-max(1, restarts // 3) :]) if found else None
        result = pgd(model, ball, spec, restarts=restarts, steps=steps, seed=seed, dtype=dtype, starts=starts)
        return shorten(result.x, eps) if result.found else None

    if clip is not None and ((center < clip[0]) | (center > clip[1])).any():
        raise InputError(f"the centre lies outside the clip range {clip}")
    at_center = pgd(model, InputSet.ball(center, norm, 0.0), spec, restarts=1, steps=0, dtype=dtype)
    if at_center.found:
        return 0.0
    # Attacks are not monotone in the radius: steps of a large set can jump over a small unsafe region.
    high = next((r for r in map(search, (upper, upper / 4, upper / 16, upper / 64)) if r is not None), None)
    if high is None:
        return math.inf
    low = 0.0
    while low * (1 + tol) < high and high > 1e-12 * upper:
        middle = math.sqrt(low * high) if low > 0 else high / 2
        distance = search(middle)
        if distance is None:
            low = middle
        else:
            high = distance
    return high
