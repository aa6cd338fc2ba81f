"""The walk over a bounded graph: every tensor's move as a form, its l2 radius wherever a branch begins.

Source: Havens, Araujo, Zhang, Hu, ICML 2024 ("LoFAST"): every layer is bounded at its clean input, for the
radius that the layers before it give, `ε_{k+1} = δ_k(X_k, ε_k)`; theory.md, section 1. Here

* linear nodes (BatchNorm, pooling, the class token) are folded into their neighbours, and whatever two
  branches make of the tensor where they part is one map (`forms.py`): attention with its skip connection;
* where branches part the tensor's radius is all that is kept, unless it is one weight away from an earlier;
* a margin moves by at most the norm of its own functional, not by that of the logits.

Beyond the paper (`lofast`): the improvements of `sensitivity.key`, and activations as a slope per feature
plus an error, `f(u') − f(u) = λ ∘ (u'−u) + e`, so that a residual MLP is `I + W₁ diag(λ) W₂` and an error.
Both ways of adding up are kept; the smaller counts. λ is taken at the centre and does not depend on ε: every
bound is monotone in ε.
"""

from __future__ import annotations

import hashlib
import math
import weakref
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..domain.nodes import AVERAGE, SCORES, is_unit, kind
from ..errors import InputError, UnsupportedModelError
from ..sensitivity.weights import LayerWeights
from .columns import Columns
from .forms import Key, Known
from .linear import Constants, gains, output_map
from .patterns import activation, normalisation, output_average
from .plan import Plan

LOFAST_METHODS = ("lofast", "lofast-paper")
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
Stamp = tuple[torch.Size, bytes]
PLANS = 64  # inputs whose plans are kept
KEPT = 25_000_000  # numbers in the tensors of the inputs whose plans are kept


class _Attention(NamedTuple):
    average: Any
    w_o: Tensor | None  # (heads · dv, d_out)


def compute_bounds(
    graph: Any, method: str, x: Sequence[Any], C: Any, bound_lower: bool = True, bound_upper: bool = True
) -> tuple[Tensor | None, Tensor | None]:
    """Bounds of functionals of the output over l2 balls, as `BoundedModule.compute_bounds`.

    Arguments:
        graph: a `BoundedModule`.
        method: "lofast" or "lofast-paper".
        x: one `BoundedTensor` (batch, *input) with an l2 perturbation; limits that cut its ball are ignored.
        C: (batch, rows, outputs), or None for the outputs themselves.

    Returns:
        lower and upper bounds (batch, rows) in the graph's dtype, rounded outwards; NaN where a value at the
        centre is not finite.

    Raises:
        InputError: another norm. UnsupportedModelError: a node without a rule, by name.
    """
    if len(x) != 1 or getattr(x[0], "ptb", None) is None:
        raise NotImplementedError("method lofast needs exactly one input, and that one perturbed")
    norm = float(x[0].ptb.norm)
    if norm != 2.0:
        raise InputError(f"method {method} bounds l2 balls only, not l{norm:g}; use sensitivity or crown")
    centre = x[0].detach().as_subclass(Tensor)
    radii = torch.as_tensor(x[0].ptb.eps, dtype=torch.float64).reshape(-1).expand(len(centre))
    walk = _walks.get(graph)
    # what is known belongs to weights and a shape, and needs a graph whose nodes know shapes and constants
    stamp = (centre.shape[1:], _stamp(graph))
    low, high = [], []
    with torch.no_grad():
        if walk is None or walk.stamp != stamp or not walk.ready():
            graph(centre)
        if walk is None or walk.stamp != stamp:
            walk = _walks[graph] = Walk(graph, stamp)
        for i in range(len(centre)):
            c = None if C is None else C[i if len(C) > 1 else 0].double().cpu()
            at, loss = walk.losses(centre[i : i + 1], float(radii[i]), c, method == "lofast-paper")
            room = torch.finfo(centre.dtype).eps * (at.abs() + loss)
            low.append((at - loss - room).to(centre))
            high.append((at + loss + room).to(centre))
    return torch.stack(low) if bound_lower else None, torch.stack(high) if bound_upper else None


class Walk:
    """What is known of one graph: which nodes are read, and by how many.

    Attributes:
        stamp: shape of an input, (*input), and which weights.
    """

    def __init__(self, graph: Any, stamp: Stamp) -> None:
        domain = graph.domain()
        self.nodes, self.moving, self.entry = domain.nodes, domain.moving, domain.entry
        self.entry_shape = torch.Size(self.entry.output_shape[1:])
        self.final_name = graph.final_name  # the graph itself would never be freed
        if sum(kind(n) == "BoundInput" for n in self.nodes) > 1:
            raise UnsupportedModelError("method lofast has no rule for several inputs")
        self._consumers: dict[str, list[Any]] = {}
        for n in self.nodes:
            for i in {i.name for i in n.inputs} if n.name in self.moving else ():
                self._consumers.setdefault(i, []).append(n)
        self.rules: dict[str, Any] = {}
        self.reads: dict[str, list[Any]] = {}
        needed = {graph.final_name}
        for n in reversed(self.nodes):
            if n.name in needed and n.name in self.moving and n is not self.entry:
                self.rules[n.name], self.reads[n.name] = self._rule(n)
                needed.update(i.name for i in self.reads[n.name])
        self.needed = needed
        self.readers = Counter(i for r in self.reads.values() for i in {n.name for n in r})
        self.uses = Counter({graph.final_name: 1})
        for n in self.nodes:
            self.uses.update(self.used_by(n))
        # where BatchNorm, or another factor per feature, follows an anchor
        own = [n for n in self.nodes if n.name in self.rules]
        self.gains = {
            n.name: gains(n, lambda n: self._consumers.get(n.name, []), self.rules, Constants(self.moving))
            for n in [self.entry, *own]
            if self.readers[n.name] > 1 or kind(n) == "BoundConv" or self.rules.get(n.name) is not None
        }
        self.stamp = stamp
        self.plans: OrderedDict[Any, Plan] = OrderedDict()
        # what belongs to the model alone: norms of its weights, attention layers, weights before activations
        self.known: Known = {}
        self.layers: dict[Any, LayerWeights] = {}
        self.columns: dict[Key, Columns] = {}

    def _rule(self, node: Any) -> tuple[Any, list[Any]]:
        """What a node is the end of, and the moving nodes whose forms that needs."""
        if (found := normalisation(node)) is not None:
            return found, [found.z]
        if (scalar := activation(node)) is not None and scalar.node.name in self.moving:
            return scalar, [scalar.node]
        if (output := output_average(node, lambda n: self._consumers.get(n.name, []))) is not None:
            weight = output_map(*output, node, Constants(self.moving))
            if weight is not None:
                return _Attention(output[0], weight), self._of_attention(output[0])
        if kind(node) == AVERAGE and is_unit(node):
            return _Attention(node, None), self._of_attention(node)
        return None, [i for i in node.inputs if i.name in self.moving]

    def used_by(self, node: Any) -> set[str]:
        """The moving nodes whose values, or forms, a node needs."""
        if node.name not in self.moving:
            return set()
        return {i.name for i in (*node.inputs, *self.reads.get(node.name, ())) if i.name in self.moving}

    def _of_attention(self, average: Any) -> list[Any]:
        scores, _, v = average.inputs
        if kind(scores) != SCORES:
            raise UnsupportedModelError(f"method lofast has no rule for {kind(scores)} at {scores.name}")
        return [i for i in (*scores.inputs[:2], v) if i.name in self.moving]

    def losses(self, x: Tensor, eps: float, c: Tensor | None, paper: bool) -> tuple[Tensor, Tensor]:
        """Functionals at the centre, and how far they move: (rows) each, float64.

        Arguments:
            x: (1, *input). c: (rows, outputs) or None.
        """
        plan = self._plan(x, paper)
        if c is None:
            c = torch.eye(plan.output.numel(), dtype=torch.float64)
        at = c @ plan.output.flatten()
        if not plan.finite:
            return at * math.nan, at * math.nan
        # what rounding in float64 does to centres, and what biases may differ by from token to token
        room = 1e-12 * (c.abs() @ plan.output.flatten().abs())
        return at, plan.losses(eps, c) * (1.0 + 1e-8) + room

    def ready(self) -> bool:
        """Whether the graph knows its shapes and constants: others may have run it, at another shape."""
        constants = (
            i for n in self.nodes if n.name in self.moving for i in n.inputs if i.name not in self.moving
        )
        return torch.Size(self.entry.output_shape[1:]) == self.entry_shape and all(
            getattr(i, "forward_value", None) is not None or hasattr(i, "value") for i in constants
        )

    def _plan(self, x: Tensor, paper: bool) -> Plan:
        """Of an input; those of the last inputs are kept, as many as are small enough together."""
        key = (x.detach().cpu().numpy().tobytes(), x.shape, paper)
        if key not in self.plans:
            one = max((p.numbers for p in self.plans.values()), default=0)
            while self.plans and (
                len(self.plans) >= PLANS or sum(p.numbers for p in self.plans.values()) + one > KEPT
            ):
                self.plans.popitem(last=False)
            self.plans[key] = Plan(self, x, paper)
        self.plans.move_to_end(key)
        return self.plans[key]


_walks: weakref.WeakKeyDictionary[Any, Walk] = weakref.WeakKeyDictionary()


def _stamp(graph: Any) -> bytes:
    """Of all weights, by their bits: versions and addresses of tensors do not tell of every change."""
    found = hashlib.blake2b()
    for w in (*torch.nn.Module.parameters(graph), *torch.nn.Module.buffers(graph)):
        bits = w.detach().cpu().contiguous().view(INTEGERS[w.element_size()]).numpy()
        bits = bits.reshape(len(bits) if bits.ndim else 1, -1)
        found.update(f"{tuple(w.shape)} {w.dtype}".encode())
        for axis in (0, 1):  # rows and columns, so that their order counts
            found.update(np.bitwise_xor.reduce(bits, axis).tobytes())
    return found.digest()
