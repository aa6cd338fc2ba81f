"""The walk over a bounded graph: every tensor as an affine form, freed as soon as nothing needs it."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import UnsupportedModelError
from ..sensitivity.softmax import finite_mask
from . import nodes as rules_of
from .attention import Local, attention
from .boxes import with_symbols
from .forms import NO_SYMBOLS, AffineForm, Groups
from .inputs import Input
from .joint import QUICK, Effort, joint_losses
from .linear import LINEAR, image, maps
from .nodes import AVERAGE, L2_SCORES, is_unit, reads
from .nodes import kind as _kind
from .nodes import value as _value
from .rules import relu
from .sets import Ball

OVERHEAD = 6e8  # bytes that Python and the libraries take
COPIES = 3  # of the generators of the largest tensor that a rule holds at once


class Share(NamedTuple):
    """What one error set takes from lower bounds.

    Attributes:
        symbols: how many it has.
        loss: (batch, rows).
    """

    label: str
    symbols: int
    loss: Tensor


@dataclass
class Propagation:
    """Result of a pass.

    Attributes:
        output: form of the graph's output.
        groups: the error sets.
        bounds: (lower, upper) by node name, for the nodes whose ranges the pass needed.
        local: by name of an attention's average, if a backward pass was announced.
    """

    output: AffineForm
    groups: Groups
    bounds: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    local: dict[str, Local] = field(default_factory=dict)

    def lower(self, a: Tensor, effort: Effort = QUICK) -> tuple[Tensor, list[Share]]:
        """Lower bounds of functionals of the output, and what each error set takes from them.

        Arguments:
            a: (batch, rows, outputs).
            effort: for the joint bound.

        Returns:
            (batch, rows), and the shares in order of creation.
        """
        centre, losses = self._losses(a, effort)
        named = [(s.label, s.size) for s in self.groups.sets[: len(losses)]]
        if self.output.rest is not None:
            named[len(losses) - 1 :] = [(NO_SYMBOLS, 0)]
        shares = [Share(*n, loss) for n, loss in zip(named, losses, strict=True)]
        return centre - torch.stack(losses).sum(0).to(centre), shares

    @staticmethod
    def is_better(joint: Tensor, alone: Tensor) -> Tensor:
        """Which of two losses counts; NaN never does if the other is a number."""
        return joint < alone

    def _losses(self, a: Tensor, effort: Effort) -> tuple[Tensor, list[Tensor]]:
        """Values at the centre, and per error set what it takes: the better of two ways to add up."""
        centre = (a @ self.output.centre.flatten(1).unsqueeze(2)).squeeze(2)
        generators = self.output.generators.flatten(2) @ a.mT  # (batch, K, rows)
        alone = [-low for low, _ in self.groups.ranges(generators, tight=True)]
        total = torch.stack(alone).sum(0)
        joint = joint_losses(self.groups, generators.mT, total, effort)
        better = self.is_better(torch.stack(joint).sum(0), total)
        losses = [torch.where(better, j.to(x), x) for j, x in zip(joint, alone, strict=True)]
        if (rest := self.output.rest) is not None:
            rows = a.reshape(*a.shape[:2], *rest.box.shape[1:])
            by_norm = torch.linalg.vector_norm(rows, dim=-1) * rest.norm.unsqueeze(1)
            by_box = (rows.abs() * rest.box.unsqueeze(1)).flatten(2).sum(-1)
            by_norm = by_norm.reshape(*a.shape[:2], -1).sum(-1)
            losses.append(torch.minimum(by_box, by_norm) * self.groups.growth)
        return centre, losses


class Domain:
    """Affine-form propagation over one auto_LiRPA graph; what depends on the model only is kept.

    Arguments:
        graph: a `BoundedModule` with one input, its attention in operators of ours.
    """

    def __init__(self, graph: Any) -> None:
        self.graph = graph
        self.nodes = _topological(graph)
        self._first: dict[str, Tensor] = {}  # factor of the first linear layer, by node name
        self.entry = next(n for n in self.nodes if _kind(n) == "BoundInput")
        self.moving = {self.entry.name}  # names of the nodes that depend on the input
        self.needed = {graph.final_name}  # names of the nodes that are bounded by themselves
        self._gap = ""
        if sum(_kind(n) == "BoundInput" for n in self.nodes) > 1:
            self._gap = "several inputs"
        for node in reversed(self.nodes):
            self.needed.update(i.name for i in self._reads(node))
        for node in self.nodes:
            if all(i.name not in self.moving for i in node.inputs) or _kind(node) == "BoundShape":
                continue  # a constant, as a shape is
            self.moving.add(node.name)
            if not self._gap and node.name in self.needed and not self._has_rule(node):
                self._gap = f"{_kind(node)} at {node.name}, shape {tuple(node.output_shape)}"

    def _reads(self, node: Any) -> list[Any]:
        """The nodes whose forms a node reads; none, if it is bounded as a part of another."""
        return reads(node) if node.name in self.needed else []

    def gap(self) -> str:
        """The first node without a rule, in words; "" if the whole graph can be bounded."""
        return self._gap

    def _has_rule(self, node: Any) -> bool:
        """Whether there is a rule for a node that depends on the network's input."""
        kind = _kind(node)
        inputs = [i for i in self._reads(node) if i.name in self.moving]
        if kind == "BoundRelu" or (kind == AVERAGE and is_unit(node)):
            return True
        if kind == "BoundAdd" and len(inputs) == 2:
            return rules_of.aligned(node, inputs)
        return rules_of.handles(node, inputs) or (len(inputs) == 1 and kind in LINEAR)

    def run(
        self,
        centre: Tensor,
        norm: float,
        radius: Tensor,
        memory: float | None = None,
        limits: tuple[Tensor, Tensor] | None = None,
        reduce: bool = True,
        backward: bool = False,
        refine: frozenset[str] = frozenset(),
    ) -> Propagation:
        """Propagate a batch of balls or boxes. Entries that cannot move get no symbol.

        Arguments:
            centre: (batch, *input).
            norm: 1, 2 or inf.
            radius: (batch,) of an l1 or l2 ball; (batch, *input) half widths of a box.
            limits: smallest and largest move of each entry, (batch, *input), which cut an l1 or l2 ball.
            reduce: shrink an l2 ball to the rank of the first linear layer, and forget limits but those of
                entries that cannot move; else keep the limits.
            refine: labels of layers whose unstable neurons are bounded over all earlier nodes at once.
            backward: also find what a backward pass needs: bounds of everything around an attention.
            memory: bytes for the whole process. Where they do not suffice, errors of later layers get no
                symbols, which is sound and looser (`Groups.folded`).

        Raises:
            UnsupportedModelError: a node for which there is no rule, or memory that the input's own symbols
                do not fit in.
        """
        dtype = centre.dtype
        # rounding of generators that are sums of products of up to a few thousand terms
        growth = 1.0 + 64 * torch.finfo(dtype).eps
        groups = Groups(growth, backward=backward, refine=refine)
        if self._gap:
            raise UnsupportedModelError(f"method sensitivity has no rule for {self._gap}")
        if memory is not None:
            groups.limit, groups.spare = self._symbols(memory, len(centre), dtype)
        box = Input(centre, norm, radius, limits, reduce)
        # a shape reads nothing of a form, and is computed already
        uses = Counter(i.name for n in self.nodes if n.name in self.moving for i in self._reads(n))
        forms: dict[str, AffineForm] = {}
        layers: Counter[str] = Counter()
        bounds: dict[str, tuple[Tensor, Tensor]] = {}
        local: dict[str, Local] = {}
        self.graph(centre)  # shapes and values of constants
        entry = self.entry
        readers = [n for n in self.nodes if n.name in self.moving and any(i is entry for i in self._reads(n))]
        # then its only reader starts the pass, and may shrink an l2 ball
        alone = uses[entry.name] == 1 and _kind(readers[0]) in LINEAR
        if not alone:
            forms[entry.name] = self._input(box, groups)
        for node in self.nodes:
            kind = _kind(node)
            if node is entry or node.name not in self.moving or node.name not in self.needed:
                continue  # a constant; or part of another, as scores are of an attention unit
            moving = [i for i in self._reads(node) if i.name in forms]
            if alone and any(i is entry for i in node.inputs):
                forms[node.name] = self._start(node, box, groups)
            elif kind == AVERAGE and is_unit(node):
                layers["attention"] += 1
                label = f"attention {layers['attention']}"
                forms[node.name] = self._attention(node, forms, groups, bounds, local, label)
            elif kind == "BoundRelu":
                layers["ReLU"] += 1
                label = f"ReLU {layers['ReLU']}"
                forms[node.name], bounds[node.inputs[0].name] = relu(forms[moving[0].name], groups, label)
            elif rules_of.handles(node, moving):
                rank = len(node.output_shape)
                form = partial(self._with_symbols, forms=forms, groups=groups, rank=rank)
                forms[node.name] = rules_of.apply(node, form, self._moves, groups, layers, bounds)
            elif len(moving) == 2:
                forms[node.name] = forms[moving[0].name] + forms[moving[1].name]
            else:
                forms[node.name] = self._linear(node, forms)
            for i in self._reads(node):
                uses[i.name] -= 1
                if uses[i.name] == 0 and i.name in forms:
                    del forms[i.name]
        return Propagation(forms[self.graph.final_name], groups, bounds, local)

    def _symbols(self, memory: float, batch: int, dtype: torch.dtype) -> tuple[int, int]:
        """How many symbols fit in so many bytes, and how many numbers are left for the final functionals."""
        moving = [n for n in self.nodes if n.name in self.moving and n.name in self.needed]
        largest = max(math.prod(n.output_shape[1:]) for n in moving)
        numbers = max(0.0, memory - OVERHEAD) / torch.finfo(dtype).bits * 8
        return int(0.6 * numbers / (COPIES * batch * largest)), int(0.15 * numbers)

    def _fits(self, groups: Groups, symbols: int, batch: int, dtype: torch.dtype) -> None:
        if groups.limit is not None and symbols > groups.limit:
            per_symbol = OVERHEAD / max(1, self._symbols(2 * OVERHEAD, batch, dtype)[0])
            needed = OVERHEAD + per_symbol * symbols
            raise UnsupportedModelError(
                f"method sensitivity needs about {needed / 1e9:.1f} GB for the {symbols} symbols of the "
                f"input (batch {batch}); the memory limit leaves room for {groups.limit}"
            )

    def _input(self, given: Input, groups: Groups) -> AffineForm:
        """The input itself: one symbol per entry that can move."""
        centre, size = given.centre, given.centre[0].numel()
        self._fits(groups, given.symbols, len(centre), centre.dtype)
        eye = torch.eye(size, dtype=centre.dtype)[given.alive].reshape(1, -1, *centre.shape[1:])
        groups.add(given.error_set())
        return AffineForm(centre, eye * given.sizes(centre.ndim))

    def _start(self, node: Any, given: Input, groups: Groups) -> AffineForm:
        """The first node, linear or the input box: an l2 ball shrinks to the layer's rank at no loss."""
        centre, size = given.centre, given.centre[0].numel()
        f, homogeneous = maps(node, node.inputs.index(self.entry))
        if node.name not in self._first:
            matrix = homogeneous(torch.eye(size, dtype=centre.dtype).reshape(size, *centre.shape[1:]))
            self._first[node.name] = matrix
        out, matrix = f(centre), self._first[node.name]
        whole = given.symbols == size
        if given.shrinks and matrix[0].numel() < given.symbols:
            name = f"{node.name}/l2"
            if whole and name in self._first:
                matrix = self._first[name]
            else:  # W = U diag(s) Zᵀ: the image of a ball is that of a smaller ball
                rows = matrix[given.alive].flatten(1).double()
                u, s, _ = torch.linalg.svd(rows.T, full_matrices=False)
                matrix = (u * s).T.reshape(-1, *matrix.shape[1:]).to(matrix.dtype)
                if whole:
                    self._first[name] = matrix
            groups.add(Ball("input", len(matrix), 2.0, len(centre), centre))
            self._fits(groups, len(matrix), len(centre), centre.dtype)
            return AffineForm(out, matrix.unsqueeze(0) * given.radius.reshape(-1, *[1] * out.ndim))
        self._fits(groups, given.symbols, len(centre), centre.dtype)
        groups.add(given.error_set())
        return AffineForm(out, matrix[given.alive].unsqueeze(0) * given.sizes(out.ndim))

    def crown_work(self) -> tuple[float, float]:
        """How large a backward pass (CROWN) for all intermediate bounds is.

        Returns:
            entries of its largest matrix of coefficients, and how much longer it takes than a forward pass:
            functionals to be bounded over symbols of the forms, about one and a half times.
        """
        moving = [n for n in self.nodes if n.name in self.moving and n.inputs]
        read = {i.name for n in moving if _kind(n) not in LINEAR for i in n.inputs}
        sizes = [math.prod(n.output_shape[1:]) for n in moving if n.name in read]
        symbols = math.prod(self.entry.output_shape[1:])
        symbols += sum(math.prod(n.output_shape[1:]) for n in moving if _kind(n) == AVERAGE)
        widest = max((math.prod(n.output_shape[1:]) for n in moving), default=1)
        return float(max(sizes, default=1)) * widest, 1.5 * sum(sizes) / symbols

    def invariances(self) -> Tensor:
        """Orthonormal basis of the input directions that the first linear layer sends to zero.

        Returns:
            (k, *input), float64; k may be 0.

        Raises:
            UnsupportedModelError: something else than one linear layer reads the input.
        """
        example = (
            self.graph.global_input[0]
            if isinstance(self.graph.global_input, tuple)
            else self.graph.global_input
        )
        first = [n for n in self.nodes if any(i is self.entry for i in n.inputs)]
        if len(first) != 1 or _kind(first[0]) not in LINEAR:
            raise UnsupportedModelError("invariances need a model whose input goes into one linear layer")
        self.graph(example)
        with torch.no_grad():
            shape = example.shape[1:]
            eye = torch.eye(shape.numel(), dtype=example.dtype).reshape(-1, *shape)
            w = maps(first[0], first[0].inputs.index(self.entry))[1](eye).flatten(1)
        u, s, _ = torch.linalg.svd(w.double(), full_matrices=True)
        rank = int((s > 1e-12 * s[0]).sum()) if len(s) else 0
        return u[:, rank:].T.reshape(-1, *shape)

    def _linear(self, node: Any, forms: dict[str, AffineForm]) -> AffineForm:
        position = next(p for p, i in enumerate(node.inputs) if i.name in forms)
        form = forms[node.inputs[position].name]
        f, homogeneous = maps(node, position)
        return form.linear(f, homogeneous, lambda rest: image(rest, node, position, homogeneous))

    def _attention(
        self,
        node: Any,
        forms: dict[str, AffineForm],
        groups: Groups,
        bounds: dict[str, tuple[Tensor, Tensor]],
        local: dict[str, Local],
        label: str,
    ) -> AffineForm:
        scores_node, weights_node, value_node = node.inputs
        query, key = scores_node.inputs[:2]
        rank = len(scores_node.output_shape)
        mask = finite_mask(_value(scores_node.inputs[2])) if len(scores_node.inputs) > 2 else None
        given = {n.name: self._form(n, forms, groups, rank) for n in (query, key, value_node)}
        q, k, v = (_as_heads(given[n.name]) for n in (query, key, value_node))
        distance = _kind(scores_node) == L2_SCORES
        output, box, found = attention(q, k, v, scores_node.scale, mask, groups, label, distance)
        shape = weights_node.output_shape[1:]
        dtype = q.centre.dtype
        bounds[weights_node.name] = rules_of.outward(box[0], box[1], dtype, shape)
        if found is not None:
            local[node.name] = found
            bounds[scores_node.name] = rules_of.outward(found.scores[1], found.scores[2], dtype, shape)
            for name, form in given.items():
                if name in self.moving:
                    ranges = groups.ranges(form.generators, form.rest)
                    low, high = groups.total(ranges, form.centre)
                    bounds[name] = form.centre + low, form.centre + high
        return output.linear(lambda t: t.reshape(-1, *node.output_shape[1:]))

    def _moves(self, node: Any) -> bool:
        return node.name in self.moving

    def _with_symbols(self, node: Any, forms: dict[str, AffineForm], groups: Groups, rank: int) -> AffineForm:
        return with_symbols(self._form(node, forms, groups, rank), groups)

    def _form(self, node: Any, forms: dict[str, AffineForm], groups: Groups, rank: int) -> AffineForm:
        """The form of a node; a constant, which may lack the batch dimension, has no symbols."""
        if node.name in forms:
            return forms[node.name]
        assert node.name not in self.moving, f"the form of {node.name} was given up too early"
        like = next(iter(forms.values()))
        value = _value(node).to(like.centre)
        value = value.reshape((1,) * (rank - value.ndim) + value.shape)
        value = value.expand(like.centre.shape[0], *value.shape[1:])
        return AffineForm(value, value.new_zeros((value.shape[0], groups.sets[0].size, *value.shape[1:])))


def _as_heads(form: AffineForm) -> AffineForm:
    """(batch, …, n, d) → (batch, heads, n, d), with one head where there is no such dimension."""
    n, d = form.centre.shape[-2:]
    return form.linear(lambda t: t.reshape(len(t), -1, n, d))


def _topological(graph: Any) -> list[Any]:
    seen: set[str] = set()
    order: list[Any] = []
    stack = [(graph.final_node(), False)]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
        elif node.name not in seen:
            seen.add(node.name)
            stack.append((node, True))
            stack.extend((i, False) for i in reversed(node.inputs))
    return order
