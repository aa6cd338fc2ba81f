"""Einsum as a product of permuted tensors."""

from __future__ import annotations

import dataclasses
import math
import string
from collections.abc import Sequence

from torch import Tensor

from .context import Context, Function, Unsupported
from .linear import matmul


def parse(equation: str, ranks: Sequence[int]) -> tuple[list[str], str]:
    """Labels of every operand and of the result; an ellipsis becomes capital letters.

    Raises:
        Unsupported: malformed, or a label twice in one operand.
    """
    text = equation.replace(" ", "")
    left, arrow, out = text.partition("->")
    terms = left.split(",")
    if len(terms) != len(ranks):
        raise Unsupported(f"equation {equation!r} for {len(ranks)} operands")
    extra = max(
        [r - len(t.replace("...", "")) for t, r in zip(terms, ranks, strict=True) if "..." in t], default=0
    )
    free = [c for c in string.ascii_uppercase if c not in text]
    dots = "".join(free[:extra])
    full = []
    for term, rank in zip(terms, ranks, strict=True):
        own = rank - len(term.replace("...", ""))
        full.append(term.replace("...", dots[extra - own :] if own else ""))
        if len(full[-1]) != rank or len(set(full[-1])) != rank:
            raise Unsupported(f"equation {equation!r}: {term!r} for an operand with {rank} dimensions")
    if arrow:
        out = out.replace("...", dots)
    else:
        once = [c for c in sorted(set("".join(full)) - set(dots)) if "".join(full).count(c) == 1]
        out = dots + "".join(once)
    if len(set(out)) != len(out) or not set(out) <= set("".join(full)):
        raise Unsupported(f"equation {equation!r}: result {out!r}")
    return full, out


def _ordered(have: str, want: str) -> list[int]:
    return [have.index(c) for c in want]


def einsum(ctx: Context) -> Function:
    """One or two operands, a constant among them or not."""
    equation = ctx.attr_string("equation", "")
    constants = ctx.constants
    moving = [i for i, c in enumerate(constants) if c is None]
    if len(constants) not in (1, 2):
        raise Unsupported(f"equation {equation!r} of {len(constants)} operands")
    if any("." in t and len(t.replace("...", "")) == 0 for t in equation.split(",")) and len(constants) == 1:
        raise Unsupported(f"equation {equation!r}")
    ranks = [len(s) - (ctx.lifted and c is None) for s, c in zip(ctx.shapes, constants, strict=True)]
    terms, out = parse(equation, ranks)
    if ctx.lifted:
        for i in moving:
            terms[i] = "*" + terms[i]
        out = "*" + out
        batch = "*"
    else:
        batch = terms[moving[0]][:1]
        fixed = [t for t, c in zip(terms, constants, strict=True) if c is not None]
        if any(terms[i][:1] != batch for i in moving) or out[:1] != batch or any(batch in t for t in fixed):
            raise Unsupported(f"equation {equation!r} moves the batch axis")
    sizes = {
        label: n
        for term, shape in zip(terms, ctx.shapes, strict=True)
        for label, n in zip(term, shape, strict=True)
    }
    if len(terms) == 1:
        return _sum_and_turn(terms[0], out)
    return _product(ctx, terms, out, batch, sizes)


def _sum_and_turn(term: str, out: str) -> Function:
    summed = [i for i, c in enumerate(term) if c not in out]
    perm = _ordered("".join(c for c in term if c in out), out)

    def run(x: Tensor) -> Tensor:
        x = x.sum(summed) if summed else x
        return x if perm == list(range(len(perm))) else x.permute(perm)

    return run


def _product(ctx: Context, terms: list[str], out: str, batch: str, sizes: dict[str, int]) -> Function:
    a, b = terms
    others = {a: set(b) | set(out), b: set(a) | set(out)}
    if any(set(t) - others[t] for t in terms):
        raise Unsupported("an axis that is summed in one operand alone")
    # a label that only one side has is not shared, even where it is the batch's
    shared = "".join(c for c in out if c in a and c in b)
    inner = "".join(c for c in a if c in b and c not in out)
    rows = "".join(c for c in a if c not in b and c != batch)
    columns = "".join(c for c in b if c not in a and c != batch)
    lead = batch + shared.replace(batch, "")
    moving = [c is None for c in ctx.constants]

    def labels(i: int) -> str:
        own = lead if moving[i] else lead.replace(batch, "")
        return own + (rows + inner if i == 0 else inner + columns)

    def size(text: str) -> int:
        return math.prod(sizes[c] for c in text)

    shared_sizes = [sizes[c] for c in lead[1:]]
    matrix = [(size(rows), size(inner)), (size(inner), size(columns))]
    constants: list[Tensor | None] = []
    shapes: list[tuple[int, ...]] = []
    turns: list[tuple[list[int], tuple[int, ...]]] = []
    for i, c in enumerate(ctx.constants):
        perm = _ordered(terms[i], labels(i))
        target = (*shared_sizes, *matrix[i])
        if c is not None:
            constants.append(c.permute(perm).reshape(target))
            shapes.append(target)
        else:
            constants.append(None)
            shapes.append((1, *target))
            turns.append((perm, target))
    result = (1, *shared_sizes, size(rows), size(columns))
    # as a product in which the batch is on top of all axes of the file
    own = dataclasses.replace(ctx, constants=constants, shapes=shapes, out_shapes=[result], lifted=True)
    run = matmul(own)
    have = lead + rows + columns
    split = [sizes[c] for c in have[1:]]
    perm_out = _ordered(have, out)

    def whole(*xs: Tensor) -> Tensor:
        parts = [x.permute(p).reshape(-1, *t) for x, (p, t) in zip(xs, turns, strict=True)]
        return run(*parts).reshape(-1, *split).permute(perm_out)

    return whole
