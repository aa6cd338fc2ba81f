"""One input of a graph: what does not depend on the radius is computed once, in the order of the nodes.

Every tensor's move becomes a form (`forms.py`), and every anchor has a step that sets its radii from those of
earlier anchors. A bound runs the steps: norms of forms, and most of attention, are known by then.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from .. import lirpa
from ..domain.nodes import kind
from ..sensitivity.heads import Moves
from ..sensitivity.key import LayerAt
from ..sensitivity.layer import PAPER, AttentionLayer, Improvements
from ..sensitivity.normalization import difference_norm, scale
from ..sensitivity.softmax import finite_mask
from ..sensitivity.weights import LayerWeights
from .forms import (
    GROW,
    Anchor,
    Form,
    FunctionalReach,
    HeadMap,
    Key,
    Reach,
    Term,
    added,
    fresh,
    product,
)
from .linear import (
    LINEAR_NODES,
    Constants,
    broadcast,
    convolution_norm,
    double,
    entry_factors,
    feature_axis,
    forward,
    gap,
    linear,
)
from .patterns import Activation, Normalised
from .scaled import Scaled

if TYPE_CHECKING:
    from .walk import Walk

WAYS = 4  # so many forms of one tensor are kept
UNIFORM = 1e-9  # relative; biases of the tokens that differ by less are the same

Forms = list[Form]  # of one tensor, each valid; the first is the plainest
# an affine map of an anchor, token by token, and what its weight is
Source = tuple[Anchor, Tensor, Key | None]


class Plan:
    """Bounds around one centre.

    Arguments:
        x: (1, *input), the centre.
        paper: in the form of the paper, without the improvements.

    Attributes:
        output: at the centre, (1, *dims), float64.
        finite: whether everything at the centre is.
        numbers: how many there are in all tensors at the centre.

    Raises:
        UnsupportedModelError: a node without a rule, by name.
    """

    def __init__(self, walk: Walk, x: Tensor, paper: bool) -> None:
        self.walk, self.paper = walk, paper
        self.use = PAPER if paper else Improvements()
        self.constants = Constants(walk.moving)
        self.values: dict[str, Tensor] = {}  # every moving tensor, float64, in which its errors do not count
        self.anchors: list[Anchor] = []
        self.steps: list[Callable[[], None]] = []
        self.forms: dict[str, Forms] = {}
        self.finite = True
        self.numbers = 0
        left, uses = Counter(walk.readers), Counter(walk.uses)
        for node in walk.nodes:
            if node.name not in walk.moving:
                continue
            with lirpa.default_dtype(torch.float64):
                self.values[node.name] = at = self._at_centre(node, x)
                self.numbers += at.numel()
                self.finite = self.finite and not (at.is_floating_point() and _has_nan_or_inf(at))
                if node.name in walk.needed and self.finite:
                    forms = self._apply(node)
                    settle = walk.readers[node.name] > 1
                    self.forms[node.name] = self._settled(node, forms) if settle else forms
                    for i in {n.name for n in walk.reads.get(node.name, [])}:
                        left[i] -= 1
                        if left[i] == 0:
                            del self.forms[i]
            self.constants.forget()
            for i in walk.used_by(node):
                uses[i] -= 1
                if uses[i] == 0:
                    del self.values[i]
        self.output = self.values[walk.final_name]
        self.functionals: tuple[Tensor, list[FunctionalReach]] | None = None  # the last, and what they need
        self.final = self.forms.get(walk.final_name, [])
        for anchor in self.anchors:
            anchor.value = None
        self.anchors, self.values, self.forms = [], {}, {}  # steps hold what they need

    def _at_centre(self, node: Any, x: Tensor) -> Tensor:
        if node is self.walk.entry:
            return cast(Tensor, double(x)).clone()  # what is kept must not change with the caller's tensor
        inputs = [
            self.values[i.name] if i.name in self.walk.moving else self.constants.of(i) for i in node.inputs
        ]
        return cast(Tensor, forward(node, inputs))

    def losses(self, eps: float, c: Tensor) -> Tensor:
        """How far functionals (rows, outputs) move within ε of the centre: (rows), float64."""
        self.entry.radius = eps
        for step in self.steps:
            step()
        if self.functionals is None or not torch.equal(self.functionals[0], c):
            self.functionals = c.clone(), [f.functional_reach(c) for f in self.final]
        return torch.stack([f.losses() for f in self.functionals[1]]).amin(0)

    # -- values, radii and anchors --------------------------------------------------------------------------

    def _value(self, node: Any) -> Tensor:
        """A node at the centre without its batch, (*dims)."""
        if node.name in self.walk.moving:
            return self.values[node.name][0]
        return torch.as_tensor(self.constants.of(node))

    def _anchor(self, value: Tensor | None, name: str, gains: Sequence[Tensor] = ()) -> Anchor:
        """An anchor; its radii are set by a step, its value goes when all is built."""
        anchor = Anchor(0.0, value, name, [(g, 0.0) for g in gains])
        self.anchors.append(anchor)
        return anchor

    def _reach(self, forms: Forms) -> Callable[[], float]:
        """The smallest of the radii of forms."""
        found = [f.reach(self.walk.known) for f in forms]
        return lambda: min(r.radius() for r in found)

    def _new(self, node: Any, radius: Callable[[], float], axis: int = -1) -> Form:
        """The node as a new anchor with a radius of its own."""
        at = self._value(node)
        anchor = self._anchor(_as_matrix(at, axis), node.name)

        def step() -> None:
            anchor.radius = radius()

        self.steps.append(step)
        return fresh(anchor, tuple(at.shape), axis)

    def _anchored(self, node: Any, forms: Forms, axis: int = -1) -> Form:
        """The node as a new anchor: its radius is all that is kept, and that behind the gains that follow."""
        at = self._value(node)
        radius = self._reach(forms)
        balls: list[tuple[Tensor, list[Reach]]] = []
        for g in self._gains(node) if axis == -1 else []:
            matrices = [x for form in forms if (x := form.matrix()) is not None]
            balls.append((g, [x.times(g).reach(self.walk.known) for x in matrices]))
        anchor = self._anchor(_as_matrix(at, axis), node.name, [g for g, _ in balls])

        def step() -> None:
            anchor.radius = radius()
            anchor.balls = [
                (g, min([float(g.amax()) * anchor.radius, *(r.radius() for r in own)])) for g, own in balls
            ]

        self.steps.append(step)
        return fresh(anchor, tuple(at.shape), axis)

    def _gains(self, node: Any) -> list[Tensor]:
        return [] if self.paper else self.walk.gains.get(node.name, [])

    def _settled(self, node: Any, forms: Forms) -> Forms:
        """Of a tensor that several nodes read: one weight away from an anchor, or an anchor itself."""
        if len(forms) == 1 and _simple(forms[0]):
            x = forms[0].matrix()
            if x is not None and self._has_one_bias(node, x):
                return forms
        return [self._anchored(node, forms)]

    def _has_one_bias(self, node: Any, x: Form, shape: Tensor | None = None) -> bool:
        """Whether the constant that a simple form leaves out is the same for every token."""
        if not _simple(x):
            return False
        ((anchor, (term,)),) = x.terms.items()
        assert anchor.value is not None
        w = term.matrix()
        own = anchor.value if w is None else anchor.value @ w
        actual = self._value(node).reshape(x.n, x.d) if shape is None else shape
        bias = actual - own
        spread = (bias - bias[:1]).abs().amax()
        return float(spread) <= UNIFORM * float(actual.abs().amax() + own.abs().amax())

    # -- one node -------------------------------------------------------------------------------------------

    def _apply(self, node: Any) -> Forms:
        walk = self.walk
        if node is walk.entry:
            at = self._value(node)
            axis = 0 if at.ndim == 3 else -1  # channels of an image
            self.entry = self._anchor(_as_matrix(at, axis), node.name)
            return [fresh(self.entry, tuple(at.shape), axis)]
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
            found = [linear(node, f, self.constants) for f in x]
            known = [f for f in found if f is not None]
            return known if len(known) == len(found) else [self._anew(node, inputs[0], x)]
        if kind(node) in ("BoundAdd", "BoundSub") and len(inputs) == 2:
            return self._sum(node, inputs)
        if kind(node) == "BoundConcat":
            parts = [self._reach(self.forms[i.name]) for i in inputs]
            return [self._new(node, lambda: math.hypot(*(r() for r in parts)) * GROW)]
        raise gap(node)

    def _sum(self, node: Any, inputs: list[Any]) -> Forms:
        negative = kind(node) == "BoundSub"
        dims = self._value(node).shape
        sides = []
        for i in inputs:
            forms = [broadcast(f, dims) for f in self.forms[i.name]]
            sides.append([f.negated() if negative and i is node.inputs[1] else f for f in forms])
        found = [added(x, y) for x, y in itertools.islice(itertools.product(*sides), WAYS)]
        if any(f is None for f in found):
            parts = [(self._reach(self.forms[i.name]), _repeats(i, node)) for i in inputs]
            return [self._new(node, lambda: sum(r() * times for r, times in parts) * GROW)]
        forms = [f for f in found if f is not None]
        return [self._anchored(node, forms)] if self.paper else forms

    def _anew(self, node: Any, source: Any, forms: Forms) -> Form:
        """A linear node behind a tensor of which only the radius is kept."""
        axis = feature_axis(node, source)
        found = linear(node, self._anchored(source, forms, axis), self.constants)
        if found is not None:
            return found
        factor = entry_factors(node, self.constants)  # every entry has a factor of its own
        if factor is None:
            raise gap(node)
        size = float(factor.abs().amax()) * _repeats(source, node)
        radius = self._reach(forms)
        return self._new(node, lambda: radius() * size * GROW)

    def _convolution(self, node: Any, source: Any, forms: Forms) -> Form:
        """A convolution is an anchor; what scales its channels is folded into the kernel."""
        gains = self._gains(node)
        ways: list[list[Reach]] = []  # for each form, without and with each gain
        for form in forms:
            image = form.matrix(0)
            if image is None or not all(len(t) == 1 and t[0].h is None for t in image.terms.values()):
                image = self._anchored(source, forms, 0)
            pairs = [(a, t.matrix()) for a, (t,) in image.terms.items()]
            ways.append(
                [Reach((a, [convolution_norm(node, w, g)]) for a, w in pairs) for g in (None, *gains)]
            )
        at = self._value(node)
        anchor = self._anchor(_as_matrix(at, 0), node.name, gains)

        def step() -> None:
            plain, *others = (
                min(sum(product(a.radius, size) for a, (size,) in own) for own in way) * GROW
                for way in zip(*ways, strict=True)
            )
            anchor.radius, anchor.balls = plain, list(zip(gains, others, strict=True))

        self.steps.append(step)
        return fresh(anchor, tuple(at.shape), 0)

    # -- nonlinear nodes ------------------------------------------------------------------------------------

    def _normalised(self, node: Any, rule: Normalised) -> Forms:
        """LayerNorm or RMSNorm behind its centring (theory.md, section 6b, last line).

        Per token `‖f(z')−f(z)‖ ≤ min(ρ/(s − ρ/√d)₊, 2√d)`, and with it at most 3ρ/s, where the two meet."""
        z, forms = self._value(rule.z), self.forms[rule.z.name]
        z = z.flatten(z.ndim - rule.axes)
        d = z.shape[-1]
        z = z.reshape(-1, d)
        ways = forms
        if rule.centre:
            z = z - z.mean(-1, keepdim=True)
            if rule.axes == 1:
                mean = torch.eye(d, dtype=torch.float64) - 1.0 / d
                ways = [
                    *forms,
                    *(x for f in forms if (x := f.along(-1, mean, f"centring of {d}")) is not None),
                ]
        reach = self._reach(ways)
        s = scale(z, rule.eps)

        def radius() -> float:
            rho = torch.tensor(reach(), dtype=torch.float64)
            alone = difference_norm(s, d, rho.expand_as(s))  # each token taking all of the radius
            slope = torch.minimum(1.0 / (s - rho / d**0.5).clamp(min=1e-300), 3.0 / s)
            slope = torch.where(s > rho / d**0.5, slope, 3.0 / s)
            slope = slope.clamp(max=rule.eps**-0.5)
            together = float(rho * slope.amax())
            return min(together, float(alone.norm())) * GROW

        return [self._new(node, radius)]

    def _activation(self, node: Any, f: Activation) -> Forms:
        forms = self.forms[f.node.name]
        radius = self._reach(forms)
        if self.paper:
            return [self._new(node, lambda: radius() * f.constant * GROW)]
        u = self._value(f.node)
        at = self._value(node)
        plain = self._anchor(_as_matrix(at, -1), node.name)
        ways: list[tuple[Anchor, Tensor, Tensor, Scaled]] = []
        sloped: Forms = []
        for i, form in enumerate(forms[: WAYS - 1]):
            x = form.matrix()
            if x is None:
                x = self._anchored(f.node, forms)
            own = u.reshape(x.n, x.d)
            slopes = f.slope(own)
            slope = (slopes.amax(0) + slopes.amin(0)) / 2
            rest = self._anchor(None, f"{node.name}/{i}")
            scaled = Scaled(x, self.walk.columns)
            ways.append((rest, own, slope, scaled))
            sloped.append(Form({**scaled.times(x, slope), rest: [Term(None, None, ())]}, x.n, x.d, x.place))

        def step() -> None:
            best = radius() * f.constant
            for rest, own, slope, scaled in ways:
                reach = scaled.entries()
                low, high = f.slopes(own, reach)
                best = min(best, scaled.radius(torch.maximum(low.abs(), high.abs()), reach, roughly=True))
                off = torch.maximum(high - slope, slope - low).clamp(min=0.0)
                rest.radius = scaled.radius(off, reach)
            plain.radius = best * GROW

        self.steps.append(step)
        return [fresh(plain, tuple(at.shape)), *sloped]

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
            if scores.inputs[2].name in self.walk.moving:  # a mask that the input decides on
                raise gap(scores)
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
        w_q, w_k, w_v = (s[1] for s in sources if s is not None)
        keys = tuple(s[2] for s in sources if s is not None)
        # columns below each other, as `LayerWeights` wants them: so it has no copy of its own
        w_q, w_k, w_v = (w.mT.contiguous().mT for w in (w_q, w_k, w_v))
        layer = AttentionLayer(w_q, w_k, w_v, w_o, **common)
        n, dims = len(q_at), self._value(node).shape
        queries = q_at.unflatten(1, (h, -1)).transpose(0, 1)
        weights, second = self._self_attention(node, anchor, layer, queries, merge, keys)
        place = torch.arange(n * w_o.shape[1])
        place = (place if merge else place.reshape(n, h, dv).transpose(0, 1)).reshape(dims)
        terms = {anchor: weights, second: [Term(None, None, ())]}
        return [Form(terms, n, w_o.shape[1], place)]

    def _self_attention(
        self,
        node: Any,
        anchor: Anchor,
        layer: AttentionLayer,
        queries: Tensor,
        merge: bool,
        keys: tuple[Key | None, ...],
    ) -> tuple[list[Term], Anchor]:
        """The linear part and what it leaves out, by the best bound of the anchor.

        Arguments:
            merge: heads overlap in what follows. keys: what the weights are, as `Term.key`.
        """
        assert anchor.value is not None
        gains = self._gains(node) if merge else []
        known = {} if None in keys else self.walk.layers
        ways: list[list[LayerAt]] = []  # for each bound of the anchor, without and with each gain behind
        for i, (g, _) in enumerate(anchor.every()):
            x, inside = anchor.value, layer
            if g is not None:  # X W = (X diag(g)) (diag(1/g) W)
                x = x * g
                w_q, w_k, w_v = (w / g[:, None] for w in (layer.w_q, layer.w_k, layer.w_v))
                inside = replace(layer, w_q=w_q, w_k=w_k, w_v=w_v)
            own = []
            for j, after in enumerate([None, *gains]):
                key = (node.name, anchor.name, i, j, keys)
                if key not in known:
                    w_o = layer.w_o if after is None else layer.w_o * after
                    known[key] = LayerWeights(replace(inside, w_o=w_o))
                own.append(LayerAt(x, known[key], use=self.use, q=queries))
            ways.append(own)
        second = self._anchor(None, node.name, gains)

        def step() -> None:
            sizes = [
                min(float(at.rest(r)) for at, (_, r) in zip(way, anchor.every(), strict=True)) * GROW
                for way in zip(*ways, strict=True)
            ]
            second.radius, second.balls = sizes[0], list(zip(gains, sizes[1:], strict=True))

        self.steps.append(step)
        first = ways[0][0]
        return [Term(p, HeadMap(first.weights, i)) for i, p in enumerate(first.p)], second

    def _heads(self, node: Any) -> tuple[Tensor, int]:
        """(tokens, heads · width) at the centre, and the number of heads, from (heads, tokens, width)."""
        at = self._value(node)
        if node.name not in self.walk.moving:
            at = at[0] if at.ndim == 4 else at
        if at.ndim not in (2, 3):
            raise gap(node)
        at = at.unsqueeze(0) if at.ndim == 2 else at
        return at.transpose(0, 1).flatten(1), len(at)

    def _source(self, node: Any, at: Tensor) -> Source | None:
        """The anchor that queries, keys or values are an affine map of, token by token."""
        if node.name not in self.walk.moving or len(self.forms[node.name]) != 1:
            return None
        form = self.forms[node.name][0]
        place = form.place if form.place.ndim == 3 else form.place.unsqueeze(0)
        x = Form(form.terms, form.n, form.d, place.transpose(0, 1).flatten(1)).matrix()
        if x is None or not _simple(x) or not self._has_one_bias(node, x, at):
            return None
        ((anchor, (term,)),) = x.terms.items()
        w = term.matrix()
        return (anchor, torch.eye(x.d, dtype=torch.float64), ()) if w is None else (anchor, w, term.key)

    def _mixed(
        self,
        q: Any,
        k: Any,
        v: Any,
        sources: Sequence[Source | None],
        heads: list[tuple[Tensor, int]],
        w_o: Tensor,
        common: dict[str, Any],
    ) -> Callable[[], float]:
        """Radius where queries, keys and values are no maps of one tensor: as of cross-attention."""
        moving = self.walk.moving

        def size(n: Any) -> Callable[[], float]:
            return self._reach(self.forms[n.name]) if n.name in moving else lambda: 0.0

        q_at, k_at, v_at = (at for at, _ in heads)
        eye = torch.eye(q_at.shape[1], dtype=torch.float64)
        eps_q = size(q)
        if sources[1] is not None and sources[2] is not None and sources[1][0] is sources[2][0]:
            anchor = sources[1][0]
            assert anchor.value is not None
            context, w_k, w_v = anchor.value, sources[1][1], sources[2][1]
            eps_c: Callable[[], float] = lambda: anchor.radius  # noqa: E731
        else:
            context = torch.cat([k_at, v_at], 1)
            both = torch.eye(context.shape[1], dtype=torch.float64)
            w_k, w_v = both[:, : k_at.shape[1]], both[:, k_at.shape[1] :]
            eps_k, eps_v = size(k), size(v)
            eps_c = lambda: math.hypot(eps_k(), eps_v()) * GROW  # noqa: E731
        context_moves = k.name in moving or v.name in moving
        moves: Moves = (
            "both" if q.name in moving and context_moves else "context" if context_moves else "queries"
        )
        layer = AttentionLayer(eye, w_k, w_v, w_o, **common)
        at = LayerAt(q_at, LayerWeights(layer), context, moves, self.use)

        def radius() -> float:
            if moves == "both":
                eps = math.hypot(eps_q(), eps_c()) * GROW
            else:
                eps = eps_c() if context_moves else eps_q()
            return float(at.bound(eps)) * GROW

        return radius


def _has_nan_or_inf(x: Tensor) -> bool:
    return not bool(torch.isfinite(x.sum())) and not bool(torch.isfinite(x).all())


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
