"""What the commands of `cli.py` do, with their options already parsed by typer."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

import onnx_export

from . import entering, factories, inputs, inspection, parallel, report
from .errors import InputError
from .jobs import Item, Jobs
from .limits import LimitedVerifier, check_timeout
from .memory import parse_memory
from .parallel import Recipe
from .results import Certificate
from .verifier import check_method


@dataclass
class Session:
    """What the commands that bound something share.

    Attributes:
        jobs: answers about the model, in this process or within limits in a child; recipe: builds it.
        items: the inputs.
        out: where results go.
        model: its file name, for titles.
        norm: of the balls.
        given: options that describe sets and specifications: clip, targets, top_k.
        attack: options of the attack: restarts, steps, seed.
    """

    jobs: Jobs | LimitedVerifier
    recipe: Recipe
    items: list[Item]
    out: report.Output
    model: str
    norm: float
    given: dict[str, Any]
    attack: dict[str, Any]

    def ball(self, eps: float | None) -> dict[str, Any]:
        """Options of a job about balls; without eps, about properties as they are."""
        return {} if eps is None else {"norm": self.norm, "eps": eps, **self.given}

    def title(self, what: str) -> str:
        """Title of a table."""
        return f"{self.model}: {what}"

    def note(self) -> str:
        """What balls are over, what labels count, and what becomes of the boxes of properties; or ""."""
        shape, n = self.jobs.output_shape, self.jobs.outputs
        words = list(self.jobs.chosen)
        if self.items[0].prop is not None:
            name = report.norm_name(self.norm)
            words.append(f"each property's box is replaced by the {name} ball around its centre")
        elif len(shape) > 1:
            words.append(f"the output has shape {shape}; labels are places in it, 0 to {n - 1}")
        return "; ".join(words)


@contextlib.contextmanager
def _session(
    *,
    model: Path,
    data: Path | None,
    index: list[int] | None,
    count: int | None,
    vnnlib: list[Path] | None,
    shape: list[str] | None,
    fix: list[str] | None,
    input_node: str | None,
    norm: str | None,
    clip: tuple[float, float] | None,
    mean: str | None,
    std: str | None,
    target: list[int] | None,
    top_k: int,
    dtype: str,
    device: str,
    threads: int | None,
    restarts: int,
    steps: int,
    seed: int,
    timeout: float | None,
    memory: str | None,
    as_json: bool,
    enforced: bool = True,
) -> Iterator[Session]:
    """Check the options, load the model, read the inputs.

    enforced: whether limits are kept by a child process; else method sensitivity plans for the memory, alone.

    Meanwhile stdout is `Session.out`'s: what libraries print goes to stderr.
    """
    if (data is None) == (not vnnlib):
        raise InputError("give the inputs either with --data or with --vnnlib")
    if vnnlib and (index or count is not None):
        raise InputError("--index and --count choose from --data; they do not go with --vnnlib")
    if vnnlib and (target or top_k != 1):
        raise InputError("--target and --top-k are for --data; a property says itself what must hold")
    number = inputs.parse_norm(norm or "inf")
    check_timeout(timeout)
    parse_memory(memory)
    given = entering.choices(shape, fix, input_node)
    options: dict[str, Any] = {
        "dtype": inputs.parse_dtype(dtype),
        "device": inputs.parse_device(device),
        "mean": inputs.parse_floats("--mean", mean),
        "std": inputs.parse_floats("--std", std),
        "logits": not vnnlib,  # a property speaks of the file's own outputs
        **given,
    }
    out = report.Output(sys.stdout, as_json)
    with contextlib.redirect_stdout(sys.stderr), inputs.quiet(threads), contextlib.ExitStack() as stack:
        recipe = Recipe(str(model), timeout, memory, enforced, options)
        jobs = recipe.build()
        if isinstance(jobs, LimitedVerifier):
            stack.enter_context(jobs)
        if data is not None:
            embed = functools.partial(entering.embedded, model, given=given)
            items = inputs.read_data(data, jobs.input_shape, jobs.outputs, index or (), count, embed)
        else:
            items = inputs.read_properties(vnnlib or (), jobs.input_shape, jobs.outputs)
        yield Session(
            jobs=jobs,
            recipe=recipe,
            items=items,
            out=out,
            model=model.name,
            norm=number,
            given={"clip": clip, "targets": target or None, "top_k": top_k},
            attack={"restarts": restarts, "steps": steps, "seed": seed},
        )


def _check_set(eps: float | None, options: dict[str, Any]) -> None:
    """Raise InputError for options that need eps without it, and for a bad eps."""
    if eps is not None:
        inputs.parse_eps(eps)
        return
    if options["data"] is not None:
        raise InputError("--data needs --eps, the radius of the ball around each input")
    for name in ("norm", "clip", "mean", "std"):
        if options[name] is not None:
            raise InputError(f"--{name} needs --eps; without it a property is checked as it is")


def _announce(session: Session, note: str) -> None:
    # in the table it is a line of its own
    if note and session.out.as_json:
        print(f"attn-bounds: {note}", file=sys.stderr)


@contextlib.contextmanager
def _naming(item: Item) -> Iterator[None]:
    """Errors in here are about this input: say so."""
    try:
        yield
    except InputError as e:
        raise InputError(f"{item.key} {item.name}: {e}") from None


def inspect(
    model: Path,
    as_json: bool,
    shape: list[str] | None = None,
    fix: list[str] | None = None,
    input_node: str | None = None,
) -> None:
    """`attn-bounds inspect`."""
    given = entering.choices(shape, fix, input_node)
    row = inspection.inspect_row(onnx_export.inspect(model, logits=True, **given))
    out = report.Output(sys.stdout, as_json)
    out.add(row)
    out.show(*inspection.inspect_parts(row))


def export(
    *,
    factory: str,
    out: Path,
    shape: list[str] | None,
    opset: int | None,
    attention: str,
    exporter: str,
    dynamic_batch: bool,
    as_json: bool,
) -> None:
    """`attn-bounds export`."""
    output = report.Output(sys.stdout, as_json)
    with contextlib.redirect_stdout(sys.stderr), inputs.quiet(None):  # the user's code may print
        model, example = factories.make(factory, shape or ())
        done = onnx_export.export(
            model,
            example,
            out,
            opset=opset,
            attention=attention,
            exporter=exporter,
            dynamic_batch=dynamic_batch,
        )
    row = done.as_dict()
    output.add(row)
    output.show(*inspection.export_parts(row))


def certify(
    *,
    eps: float | None,
    method: str,
    attack: bool,
    batch: int,
    jobs: int,
    save: Path | None,
    cluster: str | None,
    **options: Any,
) -> int:
    """`attn-bounds certify`; returns the exit code."""
    check_method(method)
    _check_set(eps, options)
    limited = options["timeout"] is not None or options["memory"] is not None
    if batch > 1 and (options["vnnlib"] or limited):
        raise InputError("--batch is for --data without limits, which are per input")
    many = jobs > 1 or save is not None or cluster is not None
    if batch > 1 and many:
        raise InputError("--batch does not go with --jobs, --save and --cluster")
    with _session(**options) as s:
        job = {**s.ball(eps), "method": method, "attack": attack, **s.attack}
        note = "" if eps is None else s.note()
        _announce(s, note)
        parts = [] if many else [s.items[i : i + batch] for i in range(0, len(s.items), batch)]
        if many:
            threads = parallel.threads_each(jobs, options["threads"])
            works = [parallel.Work.of(s.recipe, item, job, note, threads) for item in s.items]
            rows: list[dict[str, Any]] = [{}] * len(works)
            with report.progress(len(works)) as begin:
                for i, row in parallel.certify_all(works, jobs, save, cluster):
                    begin(f"{method}: {row['status']} {works[i].item.name}")
                    rows[i] = row
                    if s.out.as_json:
                        s.out.add(row)
            if not s.out.as_json:
                s.out.rows.extend(rows)  # in their order
        with report.progress(len(parts)) as begin:
            if parts:
                s.jobs.prepare(method)
            for part in parts:
                begin(f"{method} on {part[0].name}")
                if batch > 1 and isinstance(s.jobs, Jobs):
                    found = s.jobs.certify_batch(part, **job)
                else:
                    with _naming(part[0]):
                        found = [s.jobs.certify(part[0], **job)]
                for item, c in zip(part, found, strict=True):
                    s.out.add(report.certificate_row(item, c, note))
        what = "VNN-LIB properties" if eps is None else f"{report.norm_name(s.norm)} balls of radius {eps:g}"
        s.out.show(*report.certify_table(s.title(f"{what}, {method}"), s.out.rows))
        if note:
            s.out.show(f"note: {note}")
    return 0 if all(r["status"] == "verified" for r in s.out.rows) else 1


def radius(*, method: str, attack: bool, tol: float, upper: float | None, **options: Any) -> None:
    """`attn-bounds radius`."""
    check_method(method)
    if not 1e-6 <= tol <= 1:
        raise InputError(f"--tol is {tol}; it must lie between 1e-6 and 1")
    if upper is not None and not 0 < upper < math.inf:
        raise InputError(f"--upper is {upper}; it must be a finite number > 0")
    with _session(**options) as s:
        job = {"norm": s.norm, **s.given, "method": method, "attack": attack, **s.attack}
        note = s.note()
        _announce(s, note)
        with report.progress(len(s.items)) as begin:
            s.jobs.prepare(method)
            for item in s.items:
                begin(f"radius of {item.name}")
                with _naming(item):
                    found = s.jobs.radius(item, tol=tol, upper=upper, **job)
                s.out.add(report.radius_row(item, found, note))
        what = f"certified {report.norm_name(s.norm)} radii, {method}"
        s.out.show(*report.radius_table(s.title(what), s.out.rows))
        if note:
            s.out.show(f"note: {note}")


def compare(*, eps: list[float] | None, methods: str, attack: bool, **options: Any) -> None:
    """`attn-bounds compare`."""
    names = list(dict.fromkeys(check_method(m.strip()) for m in methods.split(",")))
    radii: list[float | None] = list(dict.fromkeys(eps or [])) or [None]
    for e in radii:
        _check_set(e, options)
    with _session(**options) as s:
        note = s.note() if eps else ""
        _announce(s, note)
        words = ""  # what stock methods are
        with report.progress(len(s.items) * len(radii) * len(names)) as begin:
            for m in names:
                s.jobs.prepare(m)
            for item, e in itertools.product(s.items, radii):
                ball = s.ball(e)
                with _naming(item):
                    x = s.jobs.falsify(item, **ball, **s.attack) if attack else None
                for m in names:
                    begin(f"{m} on {item.name}")
                    c = s.jobs.certify(item, **ball, method=m, attack=False, fresh=True, **s.attack)
                    if x is not None:
                        c = _falsified(c, x, item)
                    words = c.options.get("operators", "") if m.startswith("stock-") else words
                    s.out.add({**report.certificate_row(item, c, note), "method": m})
        what = f"{len(s.items)} {'VNN-LIB properties' if not eps else report.norm_name(s.norm) + ' balls'}"
        s.out.show(*report.compare_table(s.title(what), s.out.rows, names, words))
        if note:
            s.out.show(f"note: {note}")


def explain(*, eps: float | None, plot: Path | None, **options: Any) -> None:
    """`attn-bounds explain`."""
    _check_set(eps, options)
    unused: dict[str, Any] = {"timeout": None, "enforced": False, "restarts": 1, "steps": 0, "seed": 0}
    with _session(**options, **unused) as s:
        note = "" if eps is None else s.note()
        _announce(s, note)
        assert isinstance(s.jobs, Jobs)
        with report.progress(len(s.items)) as begin:
            for item in s.items:
                begin(f"sensitivity on {item.name}")
                with _naming(item):
                    found = s.jobs.explain(item, **s.ball(eps))
                rows = item.rows(s.jobs.verifier, options["target"])
                against = None if rows is None else rows[found.row]
                s.out.add(report.explain_row(item, found, against, eps, s.norm))
        what = "VNN-LIB properties" if eps is None else f"{report.norm_name(s.norm)} balls of radius {eps:g}"
        title = s.title(f"{what}, where the margin of method sensitivity goes")
        s.out.show(*report.explain_table(title, s.out.rows))
        if note:
            s.out.show(f"note: {note}")
        if plot is not None:
            report.explain_plot(str(plot), title, s.out.rows)


def _falsified(c: Certificate, x: Tensor, item: Item) -> Certificate:
    """A bound's result in the light of a counterexample."""
    if c.verified:
        print(
            f"attn-bounds: CONTRADICTION: {c.method} verifies {item.name}, but there is a counterexample. "
            "This is a bug; please report it",
            file=sys.stderr,
        )
    return replace(c, status="falsified", counterexample=x, reason="the attack found a counterexample")
