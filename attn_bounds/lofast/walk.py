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

import itertools
import math
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import lirpa
from ..domain.nodes import AVERAGE, SCORES, is_unit, kind, value
from ..errors import InputError, UnsupportedModelError
from ..sensitivity.heads import Moves
from ..sensitivity.key import Parts, layer_bound, layer_parts
from ..sensitivity.layer import PAPER, AttentionLayer, Improvements
from ..sensitivity.normalization import difference_norm, scale
from ..sensitivity.softmax import finite_mask
from .forms import GROW, Anchor, Form, Term, added, fresh, product
from .linear import (
    LINEAR_NODES,
    broadcast,
    convolution_norm,
    double,
    entry_factors,
    feature_axis,
    forward,
    gains,
    gap,
    linear,
    output_map,
)
from .patterns import Activation, Normalised, activation, normalisation, output_average

LOFAST_METHODS = ("lofast", "lofast-paper")
WAYS = 4  # so many forms of one tensor are kept
UNIFORM = 1e-9  # relative; biases of the tokens that differ by less are the same

Forms = list[Form]  # of one tensor, each valid; the first is the plainest


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
    if walk is None:
        walk = _walks[graph] = Walk(graph)
    low, high = [], []
    with torch.no_grad():
        graph(centre)  # shapes and constants
        for i in range(len(centre)):
            c = None if C is None else C[i if len(C) > 1 else 0].double().cpu()
            at, loss = walk.losses(centre[i : i + 1], float(radii[i]), c, method == "lofast-paper")
            room = torch.finfo(centre.dtype).eps * (at.abs() + loss)
            low.append((at - loss - room).to(centre))
            high.append((at + loss + room).to(centre))
    return torch.stack(low) if bound_lower else None, torch.stack(high) if bound_upper else None


class Walk:
    """What is known of one graph: which nodes are read, and by how many."""

    def __init__(self, graph: Any) -> None:
        domain = graph.domain()
        self.graph, self.nodes, self.moving, self.entry = graph, domain.nodes, domain.moving, domain.entry
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
        # where BatchNorm, or another factor per feature, follows an anchor
        own = [n for n in self.nodes if n.name in self.rules]
        self.gains = {
            n.name: gains(n, lambda n: self._consumers.get(n.name, []), self.rules, self.moving)
            for n in [self.entry, *own]
            if self.readers[n.name] > 1 or kind(n) == "BoundConv" or self.rules.get(n.name) is not None
        }
        self._centre: tuple[Any, ...] | None = None
        self.values: dict[str, Tensor] = {}
        self.norms: dict[Any, list[list[float]]] = {}

    def _rule(self, node: Any) -> tuple[Any, list[Any]]:
        """What a node is the end of, and the moving nodes whose forms that needs."""
        if (found := normalisation(node)) is not None:
            return found, [found.z]
        if (scalar := activation(node)) is not None and scalar.node.name in self.moving:
            return scalar, [scalar.node]
        if (output := output_average(node, lambda n: self._consumers.get(n.name, []))) is not None:
            weight = output_map(*output, node, self.moving)
            if weight is not None:
                return _Attention(output[0], weight), self._of_attention(output[0])
        if kind(node) == AVERAGE and is_unit(node):
            return _Attention(node, None), self._of_attention(node)
        return None, [i for i in node.inputs if i.name in self.moving]

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
        key = (x.detach().cpu().numpy().tobytes(), x.shape)
        if key != self._centre:
            self._centre, self.values, self.norms = key, _values(self, x), {}
        out = self.values[self.graph.final_name]
        if c is None:
            c = torch.eye(out.numel(), dtype=torch.float64)
        at = c @ out.flatten()
        finite = all(bool(torch.isfinite(v).all()) for v in self.values.values() if v.is_floating_point())
        if not finite:
            return at * math.nan, at * math.nan
        forms = _Pass(self, eps, paper).run()
        loss = torch.stack([f.functionals(c) for f in forms]).amin(0)
        # what rounding in float64 does to centres, and what biases may differ by from token to token
        return at, loss * (1.0 + 1e-8) + 1e-12 * (c.abs() @ out.flatten().abs())


_walks: weakref.WeakKeyDictionary[Any, Walk] = weakref.WeakKeyDictionary()


def _values(walk: Walk, x: Tensor) -> dict[str, Tensor]:
    """Every tensor at the centre, (1, *dims), float64, in which its errors do not count."""
    found: dict[str, Tensor] = {}
    with lirpa.default_dtype(torch.float64):
        for node in walk.nodes:
            if node.name not in walk.moving:
                continue
            if node is walk.entry:
                found[node.name] = double(x)
                continue
            found[node.name] = forward(
                node, [found[i.name] if i.name in walk.moving else double(value(i)) for i in node.inputs]
            )
    return found


class _Pass:
    """One ball around one centre."""

    def __init__(self, walk: Walk, eps: float, paper: bool) -> None:
        self.walk, self.eps, self.paper = walk, eps, paper
        self.use = PAPER if paper else Improvements()
        self.forms: dict[str, Forms] = {}

    def run(self) -> Forms:
        walk = self.walk
        left = Counter(walk.readers)
        for node in walk.nodes:
            if node.name not in walk.needed or node.name not in walk.moving:
                continue
            with lirpa.default_dtype(torch.float64):
                forms = self._apply(node)
            self.forms[node.name] = self._settled(node, forms) if walk.readers[node.name] > 1 else forms
            for i in {n.name for n in walk.reads.get(node.name, [])}:
                left[i] -= 1
                if left[i] == 0:
                    del self.forms[i]
        return self.forms[walk.graph.final_name]

    # -- values and radii -----------------------------------------------------------------------------------

    def _value(self, node: Any) -> Tensor:
        """A node at the centre without its batch, (*dims)."""
        if node.name in self.walk.moving:
            return self.walk.values[node.name][0]
        found = torch.as_tensor(double(value(node)))
        return found

    def _radius(self, form: Form, key: tuple[Any, ...]) -> float:
        """`form.radius()`; norms of the maps depend on the centre only and are kept."""
        if all(ts == [Term(None, None)] for ts in form.terms.values()):
            return form.radius()  # of an anchor itself: the node has had another form before
        key = (*key, self.paper)
        if key not in self.walk.norms:
            self.walk.norms[key] = form.norms()
        return form.radius(self.walk.norms[key])

    def _smallest(self, node: Any, forms: Forms) -> float:
        return min(self._radius(f, (node.name, i)) for i, f in enumerate(forms))

    def _anchored(self, node: Any, forms: Forms, axis: int = -1) -> Form:
        """The node as a new anchor: its radius is all that is kept, and that behind the gains that follow."""
        anchor = Anchor(self._smallest(node, forms), _as_matrix(self._value(node), axis), node.name)
        for k, g in enumerate(self._gains(node) if axis == -1 else []):
            radii = [float(g.amax()) * anchor.radius]
            for i, form in enumerate(forms):
                if (x := form.matrix()) is not None:
                    radii.append(self._radius(x.times(g), (node.name, i, k)))
            anchor.balls.append((g, min(radii)))
        return fresh(anchor, tuple(self._value(node).shape), axis)

    def _gains(self, node: Any) -> list[Tensor]:
        return [] if self.paper else self.walk.gains.get(node.name, [])

    def _settled(self, node: Any, forms: Forms) -> Forms:
        """Of a tensor that several nodes read: one weight away from an anchor, or an anchor itself."""
        if len(forms) == 1 and _simple(forms[0]):
            x = forms[0].matrix()
            if x is not None and self._bias(node, x) is not None:
                return forms
        return [self._anchored(node, forms)]

    def _bias(self, node: Any, x: Form, shape: Any = None) -> Tensor | None:
        """The constant that a simple form leaves out, (d), if it is the same for every token."""
        if not _simple(x):
            return None
        ((anchor, (term,)),) = x.terms.items()
        assert anchor.value is not None
        own = anchor.value if term.w is None else anchor.value @ term.w
        actual = self._value(node).reshape(x.n, x.d) if shape is None else shape
        bias = actual - own
        spread = (bias - bias[:1]).abs().amax()
        return bias[0] if float(spread) <= UNIFORM * float(actual.abs().amax() + own.abs().amax()) else None

    # -- one node -------------------------------------------------------------------------------------------

    def _apply(self, node: Any) -> Forms:
        walk = self.walk
        if node is walk.entry:
            at = self._value(node)
            axis = 0 if at.ndim == 3 else -1  # channels of an image
            return [fresh(Anchor(self.eps, _as_matrix(at, axis), node.name), tuple(at.shape), axis)]
        rule = walk.rules[node.name]
        if isinstance(rule, Normalised):
            return self._normalised(node, rule)
        if isinstance(rule, Activation):
            return self._activation(node, rule)
        if rule is not None:
            return self._attention(node, rule.average, rule.w_o)
        inputs = walk.reads[node.name]
        if len(inputs) == 1 and kind(node) in LINEAR_NODES:
            x = self.forms[inputs[0].name]
            if kind(node) == "BoundConv":
                return [self._convolution(node, inputs[0], x)]
            found = [linear(node, f, walk.moving) for f in x]
            known = [f for f in found if f is not None]
            return known if len(known) == len(found) else [self._anew(node, inputs[0], x)]
        if kind(node) in ("BoundAdd", "BoundSub") and len(inputs) == 2:
            return self._sum(node, inputs)
        if kind(node) == "BoundConcat":
            radius = math.hypot(*(self._smallest(i, self.forms[i.name]) for i in inputs)) * GROW
            return [self._new(node, radius)]
        raise gap(node)

    def _new(self, node: Any, radius: float, axis: int = -1) -> Form:
        at = self._value(node)
        return fresh(Anchor(radius, _as_matrix(at, axis), node.name), tuple(at.shape), axis)

    def _sum(self, node: Any, inputs: list[Any]) -> Forms:
        negative = kind(node) == "BoundSub"
        dims = self._value(node).shape
        sides = []
        for i in inputs:
            forms = [broadcast(f, dims) for f in self.forms[i.name]]
            sides.append([f.negated() if negative and i is node.inputs[1] else f for f in forms])
        found = [added(x, y) for x, y in itertools.islice(itertools.product(*sides), WAYS)]
        if any(f is None for f in found):
            radius = sum(self._smallest(i, self.forms[i.name]) * _repeats(i, node) for i in inputs)
            return [self._new(node, radius * GROW)]
        forms = [f for f in found if f is not None]
        return [self._anchored(node, forms)] if self.paper else forms

    def _anew(self, node: Any, source: Any, forms: Forms) -> Form:
        """A linear node behind a tensor of which only the radius is kept."""
        axis = feature_axis(node, source)
        found = linear(node, self._anchored(source, forms, axis), self.walk.moving)
        if found is not None:
            return found
        factor = entry_factors(node, self.walk.moving)  # every entry has a factor of its own
        if factor is None:
            raise gap(node)
        size = float(factor.abs().amax()) * _repeats(source, node)
        return self._new(node, self._smallest(source, forms) * size * GROW)

    def _convolution(self, node: Any, source: Any, forms: Forms) -> Form:
        """A convolution is an anchor; what scales its channels is folded into the kernel."""
        radii: list[list[float]] = []
        gains = self._gains(node)
        for form in forms:
            image = form.matrix(0)
            if image is None or not all(len(t) == 1 and t[0].h is None for t in image.terms.values()):
                image = self._anchored(source, forms, 0)
            pairs = [(a.radius, t.w) for a, (t,) in image.terms.items()]
            radii.append(
                [sum(product(r, convolution_norm(node, w, g)) for r, w in pairs) for g in (None, *gains)]
            )
        plain, *others = (min(r) * GROW for r in zip(*radii, strict=True))
        found = self._new(node, plain, axis=0)
        (anchor,) = found.terms
        anchor.balls.extend(zip(gains, others, strict=True))
        return found

    # -- nonlinear nodes ------------------------------------------------------------------------------------

    def _normalised(self, node: Any, rule: Normalised) -> Forms:
        """LayerNorm or RMSNorm behind its centring (theory.md, section 6b, last line).

        Per token `‖f(z')−f(z)‖ ≤ min(ρ/(s − ρ/√d)₊, 2√d)`, and with it at most 3ρ/s, where the two meet."""
        z, forms = self._value(rule.z), self.forms[rule.z.name]
        z = z.flatten(z.ndim - rule.axes)
        d = z.shape[-1]
        z = z.reshape(-1, d)
        reach = self._smallest(rule.z, forms)
        if rule.centre:
            z = z - z.mean(-1, keepdim=True)
            if rule.axes == 1:
                mean = torch.eye(d, dtype=torch.float64) - 1.0 / d
                centred = [x for f in forms if (x := f.along(-1, mean)) is not None]
                radii = (self._radius(f, (node.name, "centred", i)) for i, f in enumerate(centred))
                reach = min([reach, *radii])
        s = scale(z, rule.eps)
        rho = torch.tensor(reach, dtype=torch.float64)
        alone = difference_norm(s, d, rho.expand_as(s))  # each token taking all of the radius
        slope = torch.minimum(1.0 / (s - rho / d**0.5).clamp(min=1e-300), 3.0 / s)
        slope = torch.where(s > rho / d**0.5, slope, 3.0 / s)
        slope = slope.clamp(max=rule.eps**-0.5)
        together = float(rho * slope.amax())
        return [self._new(node, min(together, float(alone.norm())) * GROW)]

    def _activation(self, node: Any, f: Activation) -> Forms:
        forms = self.forms[f.node.name]
        radius = self._smallest(f.node, forms)
        plain = radius * f.constant
        if self.paper:
            return [self._new(node, plain * GROW)]
        sloped: Forms = []
        for i, form in enumerate(forms[: WAYS - 1]):
            x = form.matrix()
            if x is None:
                x = self._anchored(f.node, forms)
            u, reach = self._value(f.node).reshape(x.n, x.d), x.entries().reshape(x.n, x.d)
            low, high = f.slopes(u, reach)
            at = f.slope(u)
            slope = (at.amax(0) + at.amin(0)) / 2
            largest = torch.maximum(low.abs(), high.abs())
            plain = min(plain, _scaled_radius(x, largest, reach))
            rest = _scaled_radius(x, torch.maximum(high - slope, slope - low).clamp(min=0.0), reach)
            terms = dict(x.times(slope).terms)
            terms[Anchor(rest, None, f"{node.name}/{i}")] = [Term(None, None)]
            sloped.append(Form(terms, x.n, x.d, x.place))
        return [self._new(node, plain * GROW), *sloped]

    def _attention(self, node: Any, average: Any, w_o: Tensor | None) -> Forms:
        """Attention, with the output map that follows it where there is one."""
        scores, _, v = average.inputs
        q, k = scores.inputs[:2]
        heads = [self._heads(n) for n in (q, k, v)]
        (q_at, h), (_, h_k), (v_at, h_v) = heads
        if h_k != h_v or h % h_k:
            raise gap(average)
        merge, dv = w_o is not None, v_at.shape[1] // h_v
        w_o = torch.eye(h * dv, dtype=torch.float64) if w_o is None else w_o
        mask = None
        if len(scores.inputs) > 2:
            mask = finite_mask(self._value(scores.inputs[2]))
            while mask.ndim > 3 or (mask.ndim == 3 and mask.shape[0] == 1):
                if mask.shape[0] != 1:
                    raise gap(scores)
                mask = mask[0]
        common = {"heads": h, "kv_heads": h_k, "scale": scores.scale, "mask": mask}
        sources = [self._source(n, at) for n, (at, _) in zip((q, k, v), heads, strict=True)]
        anchors = {s[0] for s in sources if s is not None}
        if len(anchors) != 1 or any(s is None for s in sources):
            return [self._new(node, self._mixed(q, k, v, sources, heads, w_o, common))]
        (anchor,) = anchors
        (w_q, b_q), (w_k, _), (w_v, _) = (s[1:] for s in sources if s is not None)
        layer = AttentionLayer(w_q, w_k, w_v, w_o, b_q=b_q, **common)
        parts, second = self._self_attention(node, anchor, layer, merge)
        n, dims = len(q_at), self._value(node).shape
        place = torch.arange(n * w_o.shape[1])
        place = (place if merge else place.reshape(n, h, dv).transpose(0, 1)).reshape(dims)
        terms = {
            anchor: [Term(p, w) for p, w in zip(parts.p, parts.w, strict=True)],
            second: [Term(None, None)],
        }
        return [Form(terms, n, w_o.shape[1], place)]

    def _self_attention(
        self, node: Any, anchor: Anchor, layer: AttentionLayer, merge: bool
    ) -> tuple[Parts, Anchor]:
        """The linear part and what it leaves out, by the best bound of the anchor; merge: heads overlap."""
        assert anchor.value is not None
        gains = self._gains(node) if merge else []
        sizes = [math.inf] * (1 + len(gains))
        for g, radius in anchor.every():
            x, inside = anchor.value, layer
            if g is not None:  # X W = (X diag(g)) (diag(1/g) W)
                x = x * g
                w_q, w_k, w_v = (w / g[:, None] for w in (layer.w_q, layer.w_k, layer.w_v))
                inside = replace(layer, w_q=w_q, w_k=w_k, w_v=w_v)
            for i, after in enumerate([None, *gains]):
                scaled = inside if after is None else replace(inside, w_o=layer.w_o * after)
                parts = layer_parts(x, radius, scaled, self.use)
                sizes[i] = min(sizes[i], float(parts.rest.sum() if merge else parts.rest.norm()) * GROW)
                if g is None and after is None:
                    first = parts
        balls = list(zip(gains, sizes[1:], strict=True))
        return first, Anchor(sizes[0], None, node.name, balls)

    def _heads(self, node: Any) -> tuple[Tensor, int]:
        """(tokens, heads · width) at the centre, and the number of heads, from (heads, tokens, width)."""
        at = self._value(node)
        if node.name not in self.walk.moving:
            at = at[0] if at.ndim == 4 else at
        if at.ndim not in (2, 3):
            raise gap(node)
        at = at.unsqueeze(0) if at.ndim == 2 else at
        return at.transpose(0, 1).flatten(1), len(at)

    def _source(self, node: Any, at: Tensor) -> tuple[Anchor, Tensor, Tensor] | None:
        """The anchor that queries, keys or values are an affine map of, token by token; weight and bias."""
        if node.name not in self.walk.moving or len(self.forms[node.name]) != 1:
            return None
        form = self.forms[node.name][0]
        place = form.place if form.place.ndim == 3 else form.place.unsqueeze(0)
        x = Form(form.terms, form.n, form.d, place.transpose(0, 1).flatten(1)).matrix()
        if x is None or not _simple(x):
            return None
        bias = self._bias(node, x, at)
        if bias is None:
            return None
        ((anchor, (term,)),) = x.terms.items()
        return anchor, torch.eye(x.d, dtype=torch.float64) if term.w is None else term.w, bias

    def _mixed(
        self,
        q: Any,
        k: Any,
        v: Any,
        sources: list[tuple[Anchor, Tensor, Tensor] | None],
        heads: list[tuple[Tensor, int]],
        w_o: Tensor,
        common: dict[str, Any],
    ) -> float:
        """Radius where queries, keys and values are no maps of one tensor: as of cross-attention."""
        moving = self.walk.moving

        def size(n: Any) -> float:
            return self._smallest(n, self.forms[n.name]) if n.name in moving else 0.0

        q_at, k_at, v_at = (at for at, _ in heads)
        eye = torch.eye(q_at.shape[1], dtype=torch.float64)
        x, w_q, b_q, eps_q = q_at, eye, None, size(q)
        if sources[1] is not None and sources[2] is not None and sources[1][0] is sources[2][0]:
            anchor = sources[1][0]
            assert anchor.value is not None
            context, w_k, w_v, eps_c = anchor.value, sources[1][1], sources[2][1], anchor.radius
        else:
            context = torch.cat([k_at, v_at], 1)
            eye = torch.eye(context.shape[1], dtype=torch.float64)
            w_k, w_v = eye[:, : k_at.shape[1]], eye[:, k_at.shape[1] :]
            eps_c = math.hypot(size(k), size(v)) * GROW
        context_moves = k.name in moving or v.name in moving
        moves: Moves = (
            "both" if q.name in moving and context_moves else "context" if context_moves else "queries"
        )
        eps = math.hypot(eps_q, eps_c) * GROW if moves == "both" else eps_c if context_moves else eps_q
        layer = AttentionLayer(w_q, w_k, w_v, w_o, b_q=b_q, **common)
        return float(layer_bound(x, eps, layer, context, moves, self.use)) * GROW


def _simple(x: Form) -> bool:
    """One anchor with a value, times one weight."""
    if len(x.terms) != 1:
        return False
    ((anchor, terms),) = x.terms.items()
    return anchor.value is not None and len(terms) == 1 and terms[0].h is None


def _as_matrix(x: Tensor, axis: int) -> Tensor:
    """(*dims) → (other axes, axis)."""
    moved = x.movedim(axis, -1)
    return moved.reshape(-1, moved.shape[-1])


def _repeats(source: Any, node: Any) -> float:
    """By what broadcasting multiplies the l2 norm."""
    sizes = (math.prod(n.output_shape[1:]) for n in (node, source))
    after, before = sizes
    return math.sqrt(after / max(before, 1)) if after > before else 1.0


def _scaled_radius(x: Form, factor: Tensor, reach: Tensor) -> float:
    """Bound of `‖factor ∘ move‖`: by the largest factor of each feature, or entry by entry."""
    by_norm = x.times(factor.amax(0)).radius()
    return min(by_norm, float((factor * reach).norm()) * GROW) if by_norm > 0.0 else 0.0
