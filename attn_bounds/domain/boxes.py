"""What the rules of elementwise errors share: a form plus errors in a box and in a ball."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .forms import NO_SYMBOLS, AffineForm, Groups, Rest
from .rules import append_identity
from .sets import BoxInBall


def with_errors(
    form: AffineForm,
    low: Tensor,
    high: Tensor,
    radius: Callable[[Tensor], Tensor],
    groups: Groups,
    label: str,
) -> AffineForm:
    """`form + e` with `low ≤ e ≤ high`, one new symbol per entry that needs one in some sample.

    Arguments:
        low, high: (batch, *shape), float64. Entries where both are 0 have no error; 0 is added to the rest.
        radius: of flat positions (k,), a bound of the l2 norm of the errors there, (batch,).
    """
    low, high = low.flatten(1), high.flatten(1)
    live = (low != 0) | (high != 0)
    index = live.any(0).nonzero().squeeze(1)
    if len(index) == 0:
        return form
    dtype = form.centre.dtype
    if groups.room(len(index)) < len(index):
        groups.folded.append((label, len(index)))
        size = torch.maximum(-low, high).clamp(min=0.0).reshape(form.centre.shape)
        rest = Rest.boxed((size * groups.growth).to(dtype)) + form.rest
        return AffineForm(form.centre, form.generators, rest)
    # the box is rounded to the form's dtype; growth is more than that
    low = (low[:, index].clamp(max=0.0) * groups.growth).to(dtype)
    high = (high[:, index].clamp(min=0.0) * groups.growth).to(dtype)
    ball = torch.minimum(
        radius(index).double(), torch.linalg.vector_norm(torch.maximum(-low, high).double(), dim=1)
    )
    start = groups.add(BoxInBall(label, low, high, (ball * groups.growth).to(dtype)))
    size = live[:, index].to(dtype)
    return AffineForm(form.centre, append_identity(form.generators, start, index, size), form.rest)


def with_symbols(x: AffineForm, groups: Groups) -> AffineForm:
    """The form with a symbol for each of its errors that has none: for rules that know symbols only."""
    if x.rest is None:
        return x
    box, norm = x.rest.box.flatten(1), torch.linalg.vector_norm(x.rest.norm.flatten(1), dim=1)
    start = groups.add(BoxInBall(NO_SYMBOLS, -box, box, norm * groups.growth))
    return AffineForm(x.centre, append_identity(x.generators, start, torch.arange(box.shape[1])))
