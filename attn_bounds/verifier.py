"""`Verifier`: one loaded model, its graphs in auto_LiRPA, and everything that is asked of it."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from . import lirpa
from .attack import attack_radius, pgd
from .errors import InputError, UnsupportedModelError
from .flat import FlatOutput
from .memory import parse_memory
from .passes import SENSITIVITY_METHODS
from .pixels import PixelUnits
from .properties import InputSet, Property, Specification
from .results import Certificate, Explanation, Radius, digest, merge, versions
from .search.engine import prove, together

if TYPE_CHECKING:
    from .module import BoundedModule

OWN_METHODS = ("ibp", "sensitivity", "sensitivity-crown", "sensitivity-alpha", "crown", "alpha-crown")
NORM_METHODS = ("lofast", "lofast-paper")  # l2 only, and not part of `auto`
STOCK_METHODS = ("stock-ibp", "stock-crown", "stock-alpha-crown")
METHODS = (*OWN_METHODS, *NORM_METHODS, *STOCK_METHODS, "auto")
AUTO = ("ibp", "sensitivity", "sensitivity-alpha", "crown", "alpha-crown")  # cheap to tight
_LIRPA_NAME = {"ibp": "IBP", "crown": "CROWN"}  # the others are names of our BoundedModule

# Units in the last place, relative to the outputs' size, that a bound loses to our own rounding: the longest
# chain of float32 sums in a bound is a few thousand terms, whose errors add up like their root.
SLACK_ULPS = 256.0

# A limit of an input set need not be a number of the model's dtype: by so many units in the last place of the
# largest entry a counterexample may lie outside.
INPUT_ULPS = 1.0


def check_method(method: str) -> str:
    """Return the method; raises InputError with the known ones."""
    if method not in METHODS:
        raise InputError(f"unknown method {method!r}; known: {', '.join(METHODS)}")
    return method


def _kept_by_rounding(lower: Tensor, upper: Tensor) -> list[Tensor]:
    """A float32 box whose middle and half width, as auto_LiRPA computes them, still cover the given one."""
    low, high = lower, upper
    for _ in range(4):
        middle, half = ((high + low) / 2).double(), ((high - low) / 2).double()
        below, above = middle - half > lower.double(), middle + half < upper.double()
        if not bool((below | above).any()):
            break
        low = torch.where(below, torch.nextafter(low, torch.full_like(low, -math.inf)), low)
        high = torch.where(above, torch.nextafter(high, torch.full_like(high, math.inf)), high)
    return [low, high]


class Verifier:
    """One model, ready to certify many inputs: modules and auto_LiRPA graphs are built once per method.

    Arguments:
        model: path of an ONNX file, or a torch module (batch, *input) → (batch, classes): what `load`
            returns, or one whose attention is written with `onnx_export.attention`.
        input_shape: of one sample; needed for a torch module that `load` did not make.
        dtype: torch.float32 or torch.float64, for bounds and attack.
        device: where bounds are computed.
        mean, std: per channel; input sets are then in pixel units, and `x` still in the model's units.
        logits: take a final Softmax, ArgMax or single Sigmoid off, and bound the logits.
        relaxation: of attention in our methods, "lse" or "key".
        memory: "4GB" or bytes that method `sensitivity` plans to stay within; it gets looser where they do
            not suffice, and says so. A limit that is enforced, for every method, is `LimitedVerifier`'s.
        boundary: a counterexample may lie exactly on the boundary of rows that are not strict, as the
            formula says; else it must be beyond it.
        shape, fix, input_node: of a file, as in `onnx_export.load`.

    Raises:
        InputError: the model cannot be loaded.
    """

    def __init__(
        self,
        model: str | Path | nn.Module,
        *,
        input_shape: Sequence[int] | None = None,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        logits: bool = True,
        relaxation: str = "lse",
        memory: str | float | None = None,
        boundary: bool = False,
        shape: Mapping[str, int | Sequence[int]] | None = None,
        fix: Mapping[str, Any] | None = None,
        input_node: str | None = None,
    ) -> None:
        if dtype not in (torch.float32, torch.float64):
            raise InputError(f"dtype {dtype} is not supported; use float32 or float64")
        self.dtype, self.device, self.relaxation, self.logits = (
            dtype,
            torch.device(device),
            relaxation,
            logits,
        )
        self.memory, self.boundary = parse_memory(memory), boundary
        self._choices: dict[str, Any] = {"shape": shape, "fix": fix, "input_node": input_node}
        self.oracle: Any = None
        self.head = self.model_sha256 = ""
        self.path: Path | None = None
        self.chosen: list[str] = []  # how the file is entered, in words
        if isinstance(model, nn.Module):
            own: Any = getattr(model, "input_shape", None) if input_shape is None else input_shape
            if own is None:
                raise InputError("a torch module needs input_shape, the shape of one input without the batch")
            self._module: nn.Module = model
            self.input_shape = tuple(own)
        else:
            import onnx_export

            self.path = Path(model)
            loaded = onnx_export.load(self.path, dtype=dtype, logits=logits, **self._choices)
            self._module, self.input_shape = loaded, loaded.input_shape
            self.head, self.model_sha256 = loaded.info.head, loaded.info.sha256
            self.chosen = loaded.info.chosen
            self.oracle = onnx_export.Oracle(self.path, **self._choices)
        self._scaling = (mean, std) if mean is not None or std is not None else None
        self.module = self._wrap(self._module)
        with torch.no_grad():
            example = torch.zeros((1, *self.input_shape), dtype=dtype, device=self.device)
            out = self.module(example)
        if out.ndim < 2 or out.shape[0] != 1:
            raise InputError(
                f"the model returns shape {tuple(out.shape)} for batch 1; (1, outputs) is needed"
            )
        self.output_shape = tuple(out.shape[1:])
        self.outputs = out[0].numel()
        self._graphs: dict[bool, BoundedModule] = {}

    def _wrap(self, module: nn.Module) -> nn.Module:
        if self._scaling is None:
            return module.to(self.device)
        mean, std = self._scaling
        wrapped = PixelUnits(module, mean or [0.0], std or [1.0], len(self.input_shape))
        channels = self.input_shape[0]
        for name, v in (("mean", mean), ("std", std)):
            if v is not None and len(v) not in (1, channels):
                raise InputError(f"{name} has {len(v)} values; the input has {channels} channels")
        return wrapped.to(self.device, self.dtype)

    # -- input sets and specifications ------------------------------------------------------------------

    def input(self, x: Tensor) -> Tensor:
        """Check one input and give it the batch dimension. (*input) or (1, *input) → (1, *input)."""
        x = torch.as_tensor(x)
        if tuple(x.shape) == self.input_shape:
            x = x.unsqueeze(0)
        if tuple(x.shape) != (1, *self.input_shape):
            raise InputError(
                f"input has shape {tuple(x.shape)}; the model takes {self.input_shape} (one sample)"
            )
        if not bool(torch.isfinite(x).all()):
            raise InputError("the input has values that are NaN or infinite")
        return x.to(self.dtype)

    def ball(self, x: Tensor, norm: float, eps: float, clip: tuple[float, float] | None = None) -> InputSet:
        """lp ball around x (in the model's units); eps and clip are in pixel units if mean/std were given."""
        x = self.input(x)
        if isinstance(self.module, PixelUnits):
            x = self.module.to_pixels(x)
        return InputSet.ball(x, norm, eps, clip)

    def specification(
        self, label: int, targets: Sequence[int] | None = None, top_k: int = 1
    ) -> Specification:
        """Margins of the label against all other classes, some of them, or staying among the top k.

        A model with one output is binary: label 1 means the logit stays positive, label 0 negative.
        """
        if self.outputs == 1:
            if label not in (0, 1):
                raise InputError(f"label {label} out of range: a model with one output has labels 0 and 1")
            sign = 1.0 if label else -1.0
            return Specification(torch.tensor([[sign]]), torch.zeros(1), ((0,),))
        if top_k != 1:
            if targets is not None:
                raise InputError("targets and top_k cannot be combined")
            return Specification.top_k(label, self.outputs, top_k)
        return Specification.classification(label, self.outputs, targets)

    # -- bounds -----------------------------------------------------------------------------------------

    def graph(self, stock: bool) -> BoundedModule:
        """auto_LiRPA's graph: with our operators, or decomposed for its own."""
        if stock not in self._graphs:
            from .module import BoundedModule, StockModule

            module = self._module
            if stock and self.path is not None:
                import onnx_export

                module = onnx_export.load(
                    self.path,
                    dtype=self.dtype,
                    attention="decomposed",
                    logits=self.logits,
                    check=False,
                    **self._choices,
                )
            wrapped = self.module if module is self._module else self._wrap(module)
            wrapped = wrapped if len(self.output_shape) == 1 else FlatOutput(wrapped, self.outputs)
            example = torch.zeros((1, *self.input_shape), dtype=self.dtype, device=self.device)
            kind = StockModule if stock else BoundedModule
            graph = kind(wrapped, example, {"attention_relaxation": self.relaxation}, device=self.device)
            self._check_graph(graph, wrapped)
            self._graphs[stock] = graph
        return self._graphs[stock]

    def prepare(self, method: str) -> None:
        """Build the graphs that a method needs, so that the first input does not pay for them."""
        for stage in self.stages(method):
            self.graph(stage.startswith("stock-"))

    def forget(self) -> None:
        """Drop bounds kept from the last input: another method on it would get them for nothing."""
        for graph in self._graphs.values():
            graph.store.clear()

    def _check_graph(self, graph: BoundedModule, module: nn.Module) -> None:
        """auto_LiRPA builds its own graph from a trace: it must still compute the same."""
        generator = torch.Generator().manual_seed(1)
        x = torch.randn((2, *self.input_shape), generator=generator, dtype=self.dtype).to(self.device)
        with torch.no_grad(), lirpa.default_dtype(self.dtype):
            expected = module(x)
            try:
                found = graph(x)
            except RuntimeError as e:
                raise InputError(
                    f"auto_LiRPA {lirpa.version()} cannot run the model at batch 2 ({e}); where the module "
                    "reshapes, write -1 for the batch instead of x.shape[0]"
                ) from None
        scale = max(1.0, float(expected.abs().max()))
        if found.shape == expected.shape:
            same = (found == expected) | (found.isnan() & expected.isnan())  # NaN weights are found out later
            if bool((same | ((found - expected).abs() <= 1e-5 * scale)).all()):
                return
        values_of: Any = getattr(module, "values", None)
        values = [expected] if values_of is None else list(values_of(x).values())
        for node in graph.all_nodes():
            v = getattr(node, "forward_value", None)
            if (
                not node.inputs
                or not isinstance(v, Tensor)
                or not v.is_floating_point()
                or not node.from_input
            ):
                continue
            same = [w for w in values if w.shape == v.shape]
            if same and all(float((w - v).abs().max()) > 1e-5 * scale for w in same):
                raise InputError(
                    f"auto_LiRPA {lirpa.version()} does not compute what the model does; first node that "
                    f"differs: {type(node).__name__} {node.name}, shape {tuple(v.shape)}"
                )
        raise InputError(f"auto_LiRPA {lirpa.version()} does not compute what the model does")

    def row_bounds(self, inputs: Sequence[InputSet], specs: Sequence[Specification], method: str) -> Tensor:
        """Lower bounds of every row `A y − b` over each input set, rounding slack taken off.

        Arguments:
            inputs: of the same norm; one batch.
            specs: one per input, with the same number of rows.
            method: any but "auto".

        Returns:
            (batch, rows), float64; NaN or infinite values are passed on.
        """
        return functools.reduce(torch.fmax, (rows for _, rows, _ in self.row_passes(inputs, specs, method)))

    def row_passes(
        self,
        inputs: Sequence[InputSet],
        specs: Sequence[Specification],
        method: str,
        deadline: float | None = None,
    ) -> Iterator[tuple[str, Tensor, float]]:
        """`row_bounds` pass by pass, where a method has several: (name, bounds, seconds).

        Arguments:
            deadline: `time.perf_counter()` after which nothing new is begun but a first bound.
        """
        norm = inputs[0].norm
        if any(s.norm != norm for s in inputs) or len({len(s.A) for s in specs}) != 1:
            raise ValueError("inputs of one batch share the norm, and specifications their number of rows")
        begin = time.perf_counter()
        radii = {s.to(self.dtype).eps for s in inputs} if norm != math.inf else set()
        if len(radii) > 1 and method not in SENSITIVITY_METHODS:
            # auto_LiRPA's intervals broadcast radii over whatever axis has the length of the batch
            alone = [
                [*self.row_passes([i], [s], method, deadline)] for i, s in zip(inputs, specs, strict=True)
            ]
            yield method, torch.cat([rows for ((_, rows, _),) in alone]), time.perf_counter() - begin
            return
        bounded, x = self._bounded(inputs)
        functionals = torch.stack([s.A for s in specs]).to(x)
        with torch.no_grad():
            size = self.module(x).flatten(1).abs().amax(1).double().clamp(min=1.0)
        offsets = torch.stack([s.b for s in specs]).to(x.device, torch.float64)
        weight = functionals.abs().sum(-1).double()
        slack = SLACK_ULPS * torch.finfo(self.dtype).eps * (size[:, None] * weight + offsets.abs())

        def rows(lower: Tensor) -> Tensor:
            lower = lower.detach().double()
            return (lower - offsets - slack - 16 * torch.finfo(self.dtype).eps * lower.abs()).cpu()

        if method in SENSITIVITY_METHODS:
            found = self.graph(stock=False).passes(
                method, (bounded,), functionals, bound_upper=False, memory=self.memory, deadline=deadline
            )
            for p in found:
                assert p.lower is not None
                yield p.name, rows(p.lower), p.seconds
            return
        lower = rows(self._lower(bounded, functionals, method, deadline))
        yield method, lower, time.perf_counter() - begin

    def _lower(self, bounded: Any, functionals: Tensor, method: str, deadline: float | None) -> Tensor:
        """Lower bounds of functionals by one of auto_LiRPA's methods, (batch, rows)."""
        stock = method.startswith("stock-")
        graph, name = self.graph(stock), method.removeprefix("stock-")
        extra = {}
        if method == "alpha-crown" and deadline is not None:
            extra["time_limit"] = deadline - time.perf_counter()
        with torch.set_grad_enabled(name == "alpha-crown"):
            try:
                lower, _ = graph.compute_bounds(
                    x=(bounded,),
                    C=functionals,
                    method=_LIRPA_NAME.get(name, name),
                    bound_upper=name == "ibp",
                    **extra,
                )
            except AssertionError:
                if not stock:
                    raise
                # e.g. a denominator whose lower bound is zero: there is no finite bound
                return torch.full(functionals.shape[:2], math.nan)
        # what other methods left on the nodes says nothing about the norms
        for node in graph.all_nodes() if method not in NORM_METHODS else []:
            bound = getattr(node, "lower", None)
            if not isinstance(bound, Tensor) or not node.perturbed or not bound.is_floating_point():
                continue
            if not bool(torch.isfinite(bound).all()):
                # auto_LiRPA turns 0·inf into 0: an infinite intermediate bound makes the result worthless
                return torch.full_like(lower, math.nan)
        return lower

    def _bounded(self, inputs: Sequence[InputSet]) -> tuple[Any, Tensor]:
        """Input sets of one norm as one `BoundedTensor`, and its centre."""
        norm = inputs[0].norm
        sets = [s.to(self.dtype) for s in inputs]
        x = torch.cat([s.center for s in sets]).to(self.device)
        if norm == math.inf:
            limits = [torch.cat([getattr(s, n) for s in sets]).to(self.device) for n in ("lower", "upper")]
            limits = _kept_by_rounding(*limits)
            x = (limits[0] + limits[1]) / 2
            ptb = lirpa.perturbation(norm, None, *limits)
        else:
            radii = [s.eps for s in sets]
            if len(set(radii)) == 1:  # 0.7.1 propagates intervals through Conv for one common radius only
                ptb = lirpa.perturbation(norm, radii[0])
            else:
                eps = torch.tensor([[r] for r in radii], dtype=self.dtype, device=self.device)
                ptb = lirpa.perturbation(norm, eps)
            if any(s.lower is not None for s in sets):  # auto_LiRPA does not know of them
                ptb.limits = self._limits(sets)
        return lirpa.__getattr__("BoundedTensor")(x, ptb), x

    def _limits(self, sets: Sequence[InputSet]) -> tuple[Tensor, Tensor]:
        """Elementwise limits of l1 or l2 balls, infinite where there are none."""
        whole = torch.full_like(sets[0].center, math.inf)
        lower = torch.cat([-whole if s.lower is None else s.lower for s in sets])
        upper = torch.cat([whole if s.upper is None else s.upper for s in sets])
        return lower.to(self.device), upper.to(self.device)

    def explain(self, inputs: InputSet, spec: Specification) -> Explanation:
        """Which error set of method `sensitivity` takes how much of the margin that decides.

        Raises:
            UnsupportedModelError: the model has a node without a rule.
        """
        bounded, x = self._bounded([inputs])
        rows = self.row_bounds([inputs], [spec], "sensitivity")[0]
        group = min(spec.groups, key=lambda g: float(rows[list(g)].max()))
        row = max(group, key=lambda r: float(rows[r]))
        a = spec.A.to(x)[None]  # all rows, so that they are bounded as they were
        losses: dict[tuple[str, int], float] = {}
        with torch.no_grad():
            forwards = self.graph(stock=False).forward_passes((bounded,), self.memory)
            passes = [(p, *p.lower(a)) for p in forwards]
            found, _, parts = max(passes, key=lambda p: float(p[1][0, row]))
            for label, size, loss in parts:
                losses[label, size] = losses.get((label, size), 0.0) + float(loss[0, row])
            centre = float((a[0] @ found.output.centre.flatten(1).T)[row, 0]) - float(spec.b[row])
        shares = [(*key, loss) for key, loss in losses.items()]
        return Explanation(row=row, margin=float(rows[row]), centre=centre, shares=shares)

    def _finite_at(self, center: Tensor) -> bool:
        with torch.no_grad():
            return bool(torch.isfinite(self.module(center.to(self.device, self.dtype))).all())

    # -- counterexamples --------------------------------------------------------------------------------

    def violates(self, x: Tensor, spec: Specification) -> bool:
        """Whether the model's own output at x (model units) is unsafe, in onnxruntime for a file."""
        return spec.violated(spec.margins(self.replay(x).double())[0], self.boundary)

    def replay(self, x: Tensor) -> Tensor:
        """The model's own output at x (1, *input) in model units, (1, outputs); onnxruntime's for a file."""
        if self.oracle is None:
            with torch.no_grad():
                return self._module(x.to(self.dtype)).flatten(1)
        y: Tensor = self.oracle(x).flatten(1)
        if self.head == "ArgMax":
            y = torch.nn.functional.one_hot(y.long().flatten(), self.outputs)
        elif self.head == "Sigmoid":
            y = y - 0.5  # differences of probabilities and of logits have the same sign
        return y

    def confirms(self, x: Tensor, inputs: InputSet, spec: Specification) -> bool:
        """Whether x (1, *input) in model units is a counterexample: in the set and unsafe when replayed.

        A limit that is no number of x's dtype counts rounded to one: within `INPUT_ULPS` units in the last
        place of the largest entry."""
        tol = INPUT_ULPS * torch.finfo(x.dtype).eps * float(x.abs().max())
        return bool(inputs.contains(x, tol)[0]) and self.violates(x, spec)

    def falsify(
        self, inputs: InputSet, spec: Specification, *, restarts: int = 10, steps: int = 50, seed: int = 0
    ) -> Tensor | None:
        """A counterexample (1, *input) in the model's units that survives the replay, or None."""
        if not self._finite_at(inputs.center):
            return None  # nothing to descend on; the bounds say what is wrong
        inputs = inputs.inner or inputs
        for early in (True, False):  # one that the replay does not confirm may be followed by a clearer one
            result = pgd(
                self.module,
                inputs,
                spec,
                restarts=restarts,
                steps=steps,
                seed=seed,
                stop_early=early,
                dtype=self.dtype,
            )
            if not result.found:
                return None
            if isinstance(self.module, PixelUnits):
                x = self.module.to_model(result.x)
                if self.violates(x, spec):
                    return x
            elif self.confirms(result.x, inputs, spec):
                return result.x
        return None

    # -- certificates -----------------------------------------------------------------------------------

    def stages(self, method: str) -> tuple[str, ...]:
        """The methods that run for `method`, in order."""
        if check_method(method) != "auto":
            return (method,)
        gap = self.graph(stock=False).domain().gap()
        return tuple(m for m in AUTO if not (gap and m.startswith("sensitivity")))

    def not_worth(self, stage: str, sensitivity: float, left: float) -> str:
        """Why `auto` leaves out a stage on a large model, in words; "" if it should run.

        Arguments:
            sensitivity: seconds that method `sensitivity` took, 0 if it did not run.
            left: seconds until the time limit, or inf.
        """
        if not stage.endswith("crown"):
            return ""
        functionals, ratio = self.graph(stock=False).domain().crown_work()
        bytes_needed = 4.0 * functionals * torch.finfo(self.dtype).bits / 8  # coefficients, a few at a time
        if self.memory is not None and bytes_needed > self.memory:
            return f"{stage} would need about {bytes_needed / 1e9:.0f} GB"
        if ratio * sensitivity > left:
            return f"{stage} would take about {ratio * sensitivity:.0f} s"
        return ""

    def describe(self, method: str) -> dict[str, Any]:
        """Options that decide what a method computes, for the record."""
        stock = method.startswith("stock-")
        d: dict[str, Any] = {"dtype": str(self.dtype).removeprefix("torch."), **lirpa.OPTIONS}
        if "alpha" in method or method == "auto":
            d["optimize"] = lirpa.STOCK_OPTIMIZE if stock else lirpa.OPTIMIZE
        if stock:
            d["operators"] = self.graph(True).repaired
        else:
            d["operators"], d["relaxation"] = "attn_bounds", self.relaxation
        if self.head:
            d["head_taken_off"] = self.head
        return d

    def blank(self, inputs: InputSet, method: str, options: dict[str, Any]) -> Certificate:
        """The result before anything was computed; options: of the job, for the record."""
        return Certificate(
            status="unknown",
            margin=None,
            margins=None,
            rows=None,
            eps=inputs.eps,
            norm=inputs.norm,
            method=method,
            seconds=0.0,
            reason="nothing was computed",
            options={**self.describe(method), **options},
            versions=versions(),
            model_sha256=self.model_sha256,
            input_sha256=digest(inputs),
        )

    def certify_set(
        self,
        inputs: InputSet,
        spec: Specification,
        *,
        method: str = "auto",
        attack: bool = True,
        restarts: int = 10,
        steps: int = 50,
        seed: int = 0,
        time_limit: float | None = None,
        rows: list[int] | None = None,
        report: Callable[[Certificate], None] | None = None,
    ) -> Certificate:
        """Certify one input set against one specification.

        Arguments:
            time_limit: seconds after which nothing new is begun; a pass that runs is finished. A limit that
                is kept to the second is `LimitedVerifier`'s.
            report: called with the result so far, at the start and after every pass (the attack is one).
        """
        return next(
            iter(
                self.certify_batch(
                    [inputs],
                    [spec],
                    method=method,
                    attack=attack,
                    restarts=restarts,
                    steps=steps,
                    seed=seed,
                    time_limit=time_limit,
                    rows=[rows],
                    report=None if report is None else lambda _, c: report(c),
                )
            )
        )

    def certify_batch(
        self,
        inputs: Sequence[InputSet],
        specs: Sequence[Specification],
        *,
        method: str = "auto",
        attack: bool = True,
        restarts: int = 10,
        steps: int = 50,
        seed: int = 0,
        time_limit: float | None = None,
        rows: Sequence[list[int] | None] | None = None,
        report: Callable[[int, Certificate], None] | None = None,
    ) -> list[Certificate]:
        """`certify_set` for several inputs of one norm; bounds are computed in one pass per method."""
        deadline = None if time_limit is None else time.perf_counter() + time_limit
        stages = self.stages(method)
        options = {"attack": attack, "restarts": restarts, "steps": steps, "seed": seed}
        results = [
            replace(self.blank(s, method, options), rows=None if rows is None else rows[i])
            for i, s in enumerate(inputs)
        ]

        def update(i: int, **changes: Any) -> None:
            tried = changes.get("tried", results[i].tried)
            results[i] = replace(results[i], **changes, seconds=sum(t["seconds"] for t in tried))
            if report is not None:
                report(i, results[i])

        for i in range(len(results)):
            update(i)
        if attack:
            for i, (s, spec) in enumerate(zip(inputs, specs, strict=True)):
                begin = time.perf_counter()
                x = self.falsify(s, spec, restarts=restarts, steps=steps, seed=seed)
                tried = [{"method": "attack", "margin": None, "seconds": time.perf_counter() - begin}]
                if x is None:
                    update(i, tried=tried, reason="no bound was computed; the attack found nothing")
                else:
                    update(i, status="falsified", counterexample=x, method="attack", reason="", tried=tried)
        for stage in stages:
            todo = [i for i, r in enumerate(results) if r.status == "unknown"]
            left = math.inf if deadline is None else deadline - time.perf_counter()
            if not todo or left <= 0:
                break
            if method == "auto" and results[todo[0]].margin is not None:
                ran = results[todo[0]].tried
                took = sum(float(t["seconds"]) for t in ran if t["method"] == "sensitivity")
                if why := self.not_worth(stage, took * len(todo), left):
                    for i in todo:
                        update(i, reason=f"{results[i].reason}; {why}")
                    continue
            try:
                self._run_stage(stage, todo, inputs, specs, results, update, deadline)
            except UnsupportedModelError as e:  # sensitivity without the memory for its input
                if method != "auto":
                    raise
                for i in todo:
                    update(i, reason=str(e))
        for i, r in enumerate(results):
            if deadline is not None and r.status == "unknown" and time.perf_counter() >= deadline:
                update(i, reason=f"{r.reason}; time limit of {time_limit:g} s passed")
        return results

    def _run_stage(
        self,
        stage: str,
        todo: list[int],
        inputs: Sequence[InputSet],
        specs: Sequence[Specification],
        results: list[Certificate],
        update: Callable[..., None],
        deadline: float | None,
    ) -> None:
        """One method on the inputs `todo`, pass by pass, until all of them are decided."""
        graph = self.graph(stage.startswith("stock-"))
        graph.folded = None
        passes = self.row_passes([inputs[i] for i in todo], [specs[i] for i in todo], stage, deadline)
        for name, bounds, seconds in passes:
            for k, (i, row) in enumerate(zip(todo, bounds, strict=True)):
                if results[i].status != "unknown":
                    continue
                changes = merge(results[i], stage, name, row, specs[i], seconds / len(todo))
                if graph.folded is not None:
                    deciding = int((row - specs[i].margin(row)).abs().argmin())
                    changes["tried"][-1]["errors_without_symbols"] = graph.folded.errors
                    changes["tried"][-1]["margin_they_take"] = float(graph.folded.loss[k, deciding])
                update(i, **changes)
            if all(results[i].status != "unknown" for i in todo):
                break

    def certify_inputs(
        self,
        samples: Sequence[Tensor],
        labels: Sequence[int],
        *,
        norm: float,
        eps: float,
        targets: Sequence[int] | None = None,
        top_k: int = 1,
        clip: tuple[float, float] | None = None,
        batch: int = 1,
        **kwargs: Any,
    ) -> list[Certificate]:
        """Certify lp balls around several inputs, `batch` of them per pass.

        A larger batch is faster on small models and takes memory in proportion; seconds are shared.
        """
        results: list[Certificate] = []
        for first in range(0, len(samples), batch):
            part = range(first, min(first + batch, len(samples)))
            balls = [self.ball(samples[i], norm, eps, clip) for i in part]
            specs = [self.specification(labels[i], targets, top_k) for i in part]
            rows = [self.row_names(labels[i], targets) for i in part]
            results += self.certify_batch(balls, specs, rows=rows, **kwargs)
        return results

    def row_names(self, label: int, targets: Sequence[int] | None) -> list[int]:
        """The class that each row of `specification` compares the label with."""
        if self.outputs == 1:
            return [1 - label]
        return [j for j in sorted(set(targets or range(self.outputs))) if j != label]

    def check_property(self, prop: Property) -> None:
        """Raise InputError if the head was taken off: a property speaks of the file's own outputs."""
        if self.head:
            raise InputError(
                f"property {prop.name}: it speaks of the outputs behind {self.head}, but this verifier of "
                "the logits before it; build it with logits=False"
            )

    def certify_property(self, prop: Property, **kwargs: Any) -> Certificate:
        """Certify a VNN-LIB property: every case (input set and specification) must hold; see `prove`.

        Raises:
            InputError: `check_property`, or mean/std were given: the boxes are in the model's own units.
        """
        self.check_property(prop)
        if self._scaling is not None:
            raise InputError(f"property {prop.name}: its boxes are in the model's units; leave mean/std away")
        return prove(self, prop, **kwargs)

    def certify_cases(
        self, cases: Sequence[tuple[InputSet, Specification]], *, rows: Any = None, **kwargs: Any
    ) -> Certificate:
        """The worst of several `certify_set`; they hold together only if all do.

        Arguments:
            report: called with the result so far, which is not "verified" before the last case is.
        """
        report = kwargs.pop("report", None)
        return together(
            cases, lambda s, spec, told: self.certify_set(s, spec, rows=rows, report=told, **kwargs), report
        )

    # -- radii --------------------------------------------------------------------------------------------

    def certified_radius(
        self,
        x: Tensor,
        spec: Specification,
        *,
        norm: float,
        method: str = "auto",
        tol: float = 0.01,
        upper: float | None = None,
        clip: tuple[float, float] | None = None,
        attack: bool = True,
        restarts: int = 10,
        steps: int = 50,
        seed: int = 0,
        report: Callable[[Radius], None] | None = None,
    ) -> Radius:
        """Largest radius that `method` certifies around x, by bisection to `tol` (relative).

        Every radius returned was certified itself; radii between it and zero follow, the sets being
        nested. The attack's radius bounds the search from above.

        Arguments:
            upper: largest radius tried; default the size of the input (norm of the centre, at least 1).
            report: called with the result so far, at the start, after the attack and after every evaluation.
        """
        stages = self.stages(method)
        start = time.perf_counter()
        center = self.ball(x, norm, 0.0, clip).center
        if upper is None:
            upper = max(1.0, float(torch.linalg.vector_norm(center.double().flatten(), norm)))
        attacked = math.inf
        if report is not None:
            report(Radius(0.0, attacked, norm, method, time.perf_counter() - start, 0))
        if attack and self._finite_at(center):
            attacked = attack_radius(
                self.module,
                center,
                norm,
                spec,
                upper=upper,
                clip=clip,
                restarts=restarts,
                steps=steps,
                seed=seed,
                dtype=self.dtype,
            )
        result = Radius(0.0, attacked, norm, method, time.perf_counter() - start, 0)
        if report is not None:
            report(result)

        finite = False  # whether any bound was

        def certified(eps: float) -> bool:
            nonlocal result, finite
            ball = InputSet.ball(center, norm, eps, clip)
            best = None
            for stage in stages:
                try:
                    for _, (row,), _ in self.row_passes([ball], [spec], stage):
                        if not bool(torch.isfinite(row).all()):
                            continue
                        best = row if best is None else torch.maximum(best, row)
                        if float(spec.margin(best)) > 0:
                            break
                except UnsupportedModelError:
                    if method != "auto":
                        raise
                if best is not None and float(spec.margin(best)) > 0:
                    break
            finite = finite or best is not None
            ok = best is not None and float(spec.margin(best)) > 0
            result = replace(
                result,
                radius=max(result.radius, eps) if ok else result.radius,
                seconds=time.perf_counter() - start,
                evaluations=result.evaluations + 1,
            )
            if report is not None:
                report(result)
            return ok

        high = min(attacked, upper)
        if high <= 0 or not certified(0.0):
            why = (
                "the centre itself is not certified" if finite or high <= 0 else "bounds are NaN or infinite"
            )
            return replace(result, reason=why, seconds=time.perf_counter() - start)
        if attacked == math.inf and certified(upper):
            return replace(result, reason=f"certified up to the largest radius tried, {upper:g}")
        low, probe, first = 0.0, high / 4, high
        while low == 0.0 and probe > 1e-14 * first:
            if certified(probe):
                low = probe
            else:  # radii of norms through many layers may be tiny
                high, probe = probe, probe / (4 if probe > 4e-6 * first else 64)
        while low > 0 and high > low * (1 + tol):
            middle = math.sqrt(low * high)
            if certified(middle):
                low = middle
            else:
                high = middle
        return result
