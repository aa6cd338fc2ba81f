"""`BoundedModule`: a drop-in for auto_LiRPA's, with the attention operators and what they need."""

from __future__ import annotations

import copy
import functools
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from . import lirpa
from .alpha import Bounds, better, optimise
from .domain.forms import NO_SYMBOLS
from .errors import UnsupportedModelError, first_line
from .lirpa import (
    BoundConv,
    BoundLinear,
    BoundMatMul,
    BoundReshape,
    BoundTranspose,
)
from .lirpa import (
    BoundedModule as LirpaModule,
)
from .lofast import LOFAST_METHODS
from .lofast import compute_bounds as lofast_bounds
from .operators import operators, replacements
from .operators.base import BoundOperator
from .operators.input import KIND as INPUT_KIND
from .operators.input import BehindInputBox
from .operators.quotient import BoundDiv
from .operators.repairs import repairs
from .passes import SENSITIVITY_METHODS, Pass, sensitivity_passes

ALPHA_METHODS = ("alpha-crown", "crown-optimized")


class Folded(NamedTuple):
    """What a memory budget did to method `sensitivity`.

    Attributes:
        errors: how many errors got no symbols.
        loss: (batch, spec) what they take from the lower bounds.
    """

    errors: int
    loss: Tensor

    @classmethod
    def of(cls, folded: list[tuple[str, int]], shares: list[Any], like: Tensor) -> Folded:
        losses = [s.loss for s in shares if s.label == NO_SYMBOLS]
        total = torch.stack(losses).sum(0) if losses else torch.zeros_like(like)
        return cls(sum(count for _, count in folded), total)


class NodeStore:
    """Per-node data that outlives auto_LiRPA's own: it clears its nodes whenever an input is set.

    Keyed by the perturbed input; data of another input is forgotten.
    """

    def __init__(self) -> None:
        self._key: Any = None
        self._data: dict[str, dict[str, Any]] = {}

    def clear(self) -> None:
        """Forget everything."""
        self._key, self._data = None, {}

    @staticmethod
    def key(x: Sequence[Any]) -> Any:
        parts: list[Any] = []
        for t in x:
            ptb = getattr(t, "ptb", None)
            tensors = [t, *(getattr(ptb, n, None) for n in ("x_L", "x_U", "eps"))]
            tensors += getattr(ptb, "limits", None) or ()
            parts.append(getattr(ptb, "norm", None))
            for v in tensors:
                parts.append(v.detach().cpu().numpy().tobytes() if isinstance(v, Tensor) else v)
        return parts

    def of(self, x: Sequence[Any]) -> dict[str, dict[str, Any]]:
        """Data for this input by node name; empty for an input not seen last."""
        key = self.key(x)
        if key != self._key:
            self._key, self._data = key, {}
        return self._data


class BoundedModule(LirpaModule):
    """auto_LiRPA's `BoundedModule` with attention operators of ours; same arguments, same methods.

    Differences: options that the operators need are set (those given in `bound_opts` win); operators of
    auto_LiRPA that are unsound in the installed version are repaired; where a nonlinear operator would meet
    an l1/l2 input directly, an identity with a correct box stands in between; `compute_bounds` accepts the
    method `alpha-crown`, which pays for the intermediate bounds once and optimises for the final node only;
    a failed run leaves the module usable.

    Arguments:
        model: torch module; its attention in terms of `onnx_export.attention` or loaded by
            `onnx_export.load`.
        global_input: example input(s), (batch, …) each.
        bound_opts: options for auto_LiRPA; `attention_relaxation` ("lse", "key") is ours.
        custom_ops: further operators by node kind.

    Raises:
        UnsupportedModelError: auto_LiRPA knows some operator neither by itself nor from us.
    """

    OPTIMIZE = lirpa.OPTIMIZE
    OWN_OPERATORS = True
    _running = False

    def __init__(
        self,
        model: nn.Module,
        global_input: Any,
        bound_opts: dict[str, Any] | None = None,
        device: Any = "auto",
        verbose: bool = False,
        custom_ops: dict[str, Any] | None = None,
    ) -> None:
        replaced, repaired = repairs()
        opts = {**lirpa.OPTIONS, **copy.deepcopy(bound_opts or {})}
        opts["optimize_bound_args"] = {**self.OPTIMIZE, **opts.get("optimize_bound_args", {})}
        if self.OWN_OPERATORS:
            replaced = {**replaced, **replacements()}
        ops = {**replaced, **operators(), **(custom_ops or {})}
        example = global_input[0] if isinstance(global_input, (tuple, list)) else global_input
        if device == "auto":
            device = next((t.device for t in (*model.parameters(), *model.buffers())), example.device)
        modes = {m: m.training for m in model.modules()}
        with lirpa.tracing(), lirpa.default_dtype(example.dtype), torch.no_grad():
            try:
                super().__init__(model.eval(), global_input, opts, device, verbose, ops)
            except (NotImplementedError, TypeError) as e:  # the latter from operators it takes for others
                raise UnsupportedModelError(
                    f"{type(model).__name__}: {first_line(e)} (auto_LiRPA); torch modules are "
                    "taken apart by attn_bounds.load(module, example), which returns one to use here"
                ) from e
            if self._nonlinear_on_input():
                for name in list(self.__dict__):
                    del self.__dict__[name]
                super().__init__(BehindInputBox(model).eval(), global_input, opts, device, verbose, ops)
        for part, mode in modes.items():  # `model.train` would set them all alike
            part.training = mode
        if self.OWN_OPERATORS:
            self._constant_factors_need_no_bounds()
        self.store = NodeStore()
        self.repaired = repaired if self.OWN_OPERATORS else repaired + self._operators_of_ours()
        self.dtype = example.dtype
        self._running = False
        self._domain: Any = None
        self.folded: Folded | None = None  # of the last bounds by method `sensitivity`
        self.eval()

    def _operators_of_ours(self) -> str:
        """Words for what auto_LiRPA lacks or spells out, and what bounds even a stock graph meets as ours."""
        names = {kind: cls for kind, cls in operators().items() if kind.startswith("attn_bounds::")}
        used = {type(n) for n in self.all_nodes()}
        found = [kind.split("::")[1] for kind, cls in names.items() if cls in used and kind != INPUT_KIND]
        return f"; {', '.join(found)} as operators of ours" if found else ""

    def _constant_factors_need_no_bounds(self) -> None:
        """Products with a constant, and quotients by one, relax nothing; some versions bound their inputs."""
        for node in self.all_nodes():
            product = isinstance(node, BoundMatMul) and not all(i.from_input for i in node.inputs)
            if product or (isinstance(node, BoundDiv) and not node.inputs[1].from_input):
                node.requires_input_bounds = []

    def _nonlinear_on_input(self) -> bool:
        """Whether some input reaches anything but linear layers (through reshapes at most)."""
        todo = [n for n in self.all_nodes() if type(n).__name__ == "BoundInput"]
        while todo:
            node = todo.pop()
            for name in node.output_name:
                consumer = self._modules[name]
                if type(consumer).__name__ == "BoundShape":
                    continue  # reads no value
                if isinstance(consumer, (BoundReshape, BoundTranspose)):
                    todo.append(consumer)
                    continue
                weighted = any(getattr(i, "from_input", False) for i in consumer.inputs[1:])
                if weighted or not isinstance(consumer, (BoundLinear, BoundConv, BoundMatMul)):
                    return True
        return False

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """As torch's; never empty, since 0.3 takes its dtype from the first one."""
        found = False
        for parameter in super().parameters(recurse):
            found = True
            yield parameter
        if not found and lirpa.is_old():
            yield nn.Parameter(torch.zeros((), dtype=torch.get_default_dtype()), requires_grad=False)

    def all_nodes(self) -> list[Any]:
        """Every node of the graph, on every version."""
        return list(self._modules.values())

    def compute_bounds(
        self,
        x: Any = None,
        aux: Any = None,
        C: Any = None,
        method: Any = "backward",
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """As auto_LiRPA's; further methods are `alpha-crown`, `SENSITIVITY_METHODS` and `LOFAST_METHODS`.

        Those carry slack for the rounding of generators, but none for that of the output itself, which
        `Verifier.row_bounds` takes off.

        Arguments:
            x: tuple of inputs, `BoundedTensor`s where perturbed, (batch, …).
            C: (batch, spec, outputs) functionals of the output, or None for the outputs themselves.
            time_limit: (keyword, `alpha-crown` and `SENSITIVITY_METHODS`) seconds after which nothing new
                is begun but a first bound; the best bound so far is returned.

        Returns:
            lower and upper bounds (batch, spec).
        """
        if isinstance(x, Tensor):
            x = (x,)
        name = str(method).lower()
        if x is not None and lirpa.is_old() and not self._running and name not in LOFAST_METHODS:
            self(*x)  # ReduceMax keeps the index of its maximum from the last forward pass
        if self._running:  # auto_LiRPA's optimisation calls this method for every iteration
            return super().compute_bounds(x, aux, C, method, *args, **kwargs)
        perturbed = sum(getattr(v, "ptb", None) is not None for v in x or ())
        if "forward" in name and perturbed > 1 and not lirpa.is_old():
            raise NotImplementedError(
                f"auto_LiRPA {lirpa.version()} returns wrong bounds in forward mode for several perturbed "
                "inputs; use CROWN, or one input"
            )
        if name in SENSITIVITY_METHODS:
            if (limit := kwargs.pop("time_limit", None)) is not None:
                kwargs["deadline"] = time.perf_counter() + limit
            found = self.passes(name, x, C, **kwargs)
            return functools.reduce(better, ((p.lower, p.upper) for p in found))
        self._running = True
        try:
            with lirpa.default_dtype(self.dtype):
                if name in LOFAST_METHODS:
                    return lofast_bounds(self, name, x, C, **kwargs)
                if name in ALPHA_METHODS:
                    if (
                        self.OWN_OPERATORS
                        and kwargs.get("final_node_name") is None
                        and x is not None
                        and not args
                    ):
                        return self._alpha_crown(x, C, **kwargs)
                    method = "CROWN-Optimized"
                try:
                    result = super().compute_bounds(x, aux, C, method, *args, **kwargs)
                except NotImplementedError as e:
                    if str(e):
                        raise
                    raise NotImplementedError(
                        f"auto_LiRPA {lirpa.version()} has no way to bound this model by method {method!r}; "
                        f"ours are alpha-crown, {', '.join((*SENSITIVITY_METHODS, *LOFAST_METHODS))}"
                    ) from e
                if x is not None and name in ("crown", "backward") and not (args or kwargs.get("IBP")):
                    self._remember(x)
                return result
        finally:
            self._running = False
            self._reset_stages()

    def _reset_stages(self) -> None:
        # a failed optimised run leaves its stage behind, and the next call dies on it
        for node in self.all_nodes():
            if getattr(node, "opt_stage", None) is not None:
                node.opt_stage = None

    def _node_bounds(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Bounds that the last pass left on the nodes between input and output."""
        found = {}
        for node in self.all_nodes():
            lower, upper = getattr(node, "lower", None), getattr(node, "upper", None)
            if not isinstance(lower, Tensor) or not isinstance(upper, Tensor):
                continue
            if node.perturbed and node.inputs and lower.shape == node.output_shape:
                found[node.name] = lower.detach(), upper.detach()
        found.pop(self.final_name, None)
        return found

    def _remember(self, x: Sequence[Any]) -> None:
        data = self.store.of(x)
        for name, bounds in self._node_bounds().items():
            data.setdefault(name, {})["bounds"] = bounds

    def intermediate_bounds(self, x: Sequence[Any]) -> dict[str, tuple[Tensor, Tensor]]:
        """Bounds of the nodes that relaxations need, from the last CROWN pass on this input (else empty)."""
        return {n: d["bounds"] for n, d in self.store.of(x).items() if "bounds" in d}

    def domain(self) -> Any:
        """The affine-form domain of this graph (`attn_bounds.domain`), built on first use."""
        from .domain.propagate import Domain

        if self._domain is None:
            self._domain = Domain(self)
        return self._domain

    def propagate(
        self,
        x: Sequence[Any],
        memory: float | None = None,
        reduce: bool = True,
        backward: bool = False,
        refine: frozenset[str] = frozenset(),
    ) -> Any:
        """One forward pass in affine forms with error sets: every tensor's form, error sets and ranges.

        Arguments:
            x: one `BoundedTensor` (batch, *input). Limits that an l1 or l2 ball is cut by are read from an
                attribute `limits` of its perturbation, (lower, upper), (batch, *input) each.
            memory: bytes that the whole process should stay within, or None; see `Domain.run`.
            reduce, backward, refine: see `Domain.run`.

        Returns:
            `attn_bounds.domain.propagate.Propagation`.

        Raises:
            UnsupportedModelError: a node without a rule.
        """
        if len(x) != 1 or getattr(x[0], "ptb", None) is None:
            raise NotImplementedError("method sensitivity needs exactly one input, and that one perturbed")
        value, ptb = x[0].detach().as_subclass(Tensor), x[0].ptb
        batch = value.shape[0]
        norm = float(ptb.norm)
        limits = None
        if norm == math.inf:
            lower = value - ptb.eps if ptb.x_L is None else ptb.x_L
            upper = value + ptb.eps if ptb.x_U is None else ptb.x_U
            value = (lower + upper) / 2
            radius = torch.maximum(upper - value, value - lower)  # the centre is rounded
        else:
            radius = torch.as_tensor(ptb.eps, dtype=value.dtype).reshape(-1).expand(batch)
            if (given := getattr(ptb, "limits", None)) is not None:
                lower, upper = (t.to(value) - value for t in given)
                limits = lower.clamp(max=0.0), upper.clamp(min=0.0)
        with torch.no_grad():
            return self.domain().run(value, norm, radius, memory, limits, reduce, backward, refine)

    def is_cut(self, x: Sequence[Any]) -> bool:
        """Whether limits cut an l2 or l1 ball: a pass keeps them or reduces the ball, neither is better."""
        ptb = x[0].ptb
        if getattr(ptb, "limits", None) is None or float(ptb.norm) == math.inf:
            return False
        value = x[0].detach().as_subclass(Tensor)
        eps = torch.as_tensor(ptb.eps, dtype=value.dtype).reshape(-1, *[1] * (value.ndim - 1))
        lower, upper = (t.to(value) for t in ptb.limits)
        moves = lower < upper
        return bool((moves & ((lower > value - eps) | (upper < value + eps))).any())

    def forward_passes(
        self, x: Sequence[Any], memory: float | None = None, backward: bool = False
    ) -> Iterator[Any]:
        """`propagate`, and again with the limits kept where they cut the ball."""
        yield self.propagate(x, memory, backward=backward)
        if self.is_cut(x):
            yield self.propagate(x, memory, reduce=False)

    def note_folded(self, found: Any, shares: list[Any], bounds: Tensor) -> None:
        """Keep what a memory budget did to a pass with these bounds, for reports."""
        self.folded = Folded.of(found.groups.folded, shares, bounds)

    def passes(self, method: str, x: Sequence[Any], C: Any = None, **kwargs: Any) -> Iterator[Pass]:
        """A sensitivity method pass by pass, see `passes.sensitivity_passes`."""
        passes = sensitivity_passes(self, method, x, C, **kwargs)
        while True:
            self._running = True  # between the passes the caller has the module to itself
            try:
                with lirpa.default_dtype(self.dtype):
                    found = next(passes, None)
            finally:
                self._running = False
                self._reset_stages()
            if found is None:
                return
            yield found

    def backward_bounds(
        self,
        found: Any,
        x: Sequence[Any],
        C: Tensor,
        bound_lower: bool = True,
        bound_upper: bool = True,
        iterations: int = 0,
        deadline: float | None = None,
    ) -> Bounds | None:
        """A backward pass with the bounds and Jacobians of a forward pass; None where they are not finite.

        Arguments:
            found: `Propagation` with `backward`. C: (batch, spec, outputs).
            iterations: of the descent in the α of activations, of planes and of the mixtures.
            deadline: see `alpha.optimise`.
        """
        if not all(bool(torch.isfinite(t).all()) for bounds in found.bounds.values() for t in bounds):
            return None  # auto_LiRPA takes 0 · ∞ for 0
        averages = [n for n in self.all_nodes() if n.name in found.local]
        given = dict(found.bounds)
        sides = {"bound_lower": bound_lower, "bound_upper": bound_upper}
        compute = super().compute_bounds
        complete = False

        def bound() -> Bounds:
            nonlocal complete
            argument = {lirpa.interm_bounds_argument(): given}
            low, high = compute(x=x, C=C, method="CROWN", **sides, **argument)[:2]
            if not complete:  # what auto_LiRPA wants to know besides has no α of its own
                given.update({n: b for n, b in self._node_bounds().items() if n not in given})
                complete = True
            return low, high

        try:
            for node in averages:
                node.local = node.inputs[0].local = found.local[node.name]
            with torch.no_grad():
                if iterations == 0:
                    return bound()
                self(*x)  # marks which nodes are perturbed
            nodes = self._optimised_nodes()
            return optimise(bound, nodes, self.final_name, C.shape[1], iterations, deadline)
        finally:
            for node in averages:
                node.local = node.inputs[0].local = None

    def _optimised_nodes(self) -> list[Any]:
        if lirpa.is_old():
            nodes = [n for n in self.optimizable_activations if n.perturbed]
        else:
            self._set_used_nodes(self.final_node())
            nodes = list(self.get_enabled_opt_act())
        return [n for n in nodes if not (isinstance(n, BoundOperator) and n.is_linear())]

    def _alpha_crown(
        self,
        x: Sequence[Any],
        C: Any,
        bound_lower: bool = True,
        bound_upper: bool = True,
        time_limit: float | None = None,
        **kwargs: Any,
    ) -> Bounds:
        begin = time.perf_counter()
        argument = lirpa.interm_bounds_argument()
        given = dict(kwargs.pop(argument, None) or self.intermediate_bounds(x))
        sides = {"bound_lower": bound_lower, "bound_upper": bound_upper}
        compute = super().compute_bounds

        def bound() -> Bounds:
            nonlocal given
            found = compute(x=x, C=C, method="CROWN", **sides, **{argument: given or None}, **kwargs)
            if not given:  # the first pass pays for the intermediate bounds
                self._remember(x)
                given = self.intermediate_bounds(x)
            return found[0], found[1]

        with torch.no_grad():
            self(*x)  # marks which nodes are perturbed
        size = self.final_node().output_shape[1:].numel() if C is None else C.shape[1]
        iterations = self.bound_opts["optimize_bound_args"]["iteration"]
        deadline = None if time_limit is None else begin + time_limit
        return optimise(bound, self._optimised_nodes(), self.final_name, size, iterations, deadline)


class StockModule(BoundedModule):
    """auto_LiRPA's own operators and α-CROWN on a decomposed model: what ours is compared with.

    Only `operators.repairs` and the identity behind l1/l2 inputs are added, so that its bounds are bounds.
    """

    OPTIMIZE = lirpa.STOCK_OPTIMIZE
    OWN_OPERATORS = False
