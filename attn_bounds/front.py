"""The solver `attn-bounds-vnnlib`: the command line that the VNN-LIB 2.0 standard asks of a solver.

Small networks are decided by intervals, in a fraction of a second and without torch; everything else, and
what intervals leave open, is given to the engine behind `attn-bounds verify`.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from . import __version__
from .errors import InputError, UnsupportedModelError
from .vnnlib_tree import is_version_2, read_text

NAME = "attn-bounds"
RESERVE = (0.04, 0.25)  # part of the time limit, and seconds, that are kept for the end of the process
SHARE = 0.3  # part of the time for intervals if the other engine can follow
OTHER = 4.0  # seconds that the other engine needs at least
MANY = 2.0  # seconds for intervals on networks with many inputs

Assignment = tuple[str, str, Any]  # name, declared type, array


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit code: 0 for a verdict, 2 for what cannot be read, 1 without memory.

    The time limit counts from the start of the process if arguments are those of the process (None)."""
    spent = time.time() - psutil.Process().create_time() if arguments is None else 0.0
    started = time.monotonic() - max(0.0, spent)
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.name:
        print(NAME)
        return 0
    if options.command is None:
        parser.print_usage(sys.stderr)
        return 2
    try:
        if options.command == "supports":
            print("\n".join(capability(options.capability)))
            return 0
        return verify(options, _Clock(options.timeout, started))
    except (InputError, ImportError) as error:
        _note(str(error))
        return 2
    except MemoryError:
        _note("the machine's memory was used up")
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="attn-bounds-vnnlib", description=__doc__)
    parser.add_argument("--name", action="store_true", help="print the solver's name")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command")
    run = commands.add_parser("verify", help="whether an assignment satisfies a query")
    run.add_argument("query", type=Path)
    run.add_argument("--network", action="append", default=[], metavar="NAME=FILE")
    run.add_argument("--timeout", type=float, help="seconds, start-up included")
    run.add_argument("--serialise-assignments", type=Path, metavar="FOLDER")
    ask = commands.add_parser("supports", help="what the solver can do")
    group = ask.add_mutually_exclusive_group(required=True)
    for name in CAPABILITIES:
        group.add_argument(f"--{name}", dest="capability", action="store_const", const=name)
    return parser


# -- supports -------------------------------------------------------------------------------------------


def _operators() -> list[str]:
    """Of both engines; the second one needs torch, and without it the first one stands alone."""
    from .intervals.table import OPERATORS

    names = set(OPERATORS)
    with contextlib.suppress(ImportError):
        from onnx_export.importers import STANDARD

        names |= set(STANDARD)
    return sorted(names)


def _opsets() -> list[str]:
    from .intervals.table import MAX_OPSET, MIN_OPSET

    return [str(MIN_OPSET), str(MAX_OPSET)]


CAPABILITIES: dict[str, Any] = {
    "onnx-operators": _operators,
    "onnx-opset-versions": _opsets,
    "onnx-element-types": ["real", "float16", "float32", "float64", "int32", "int64", "bool"],
    "vnnlib-versions": ["1.0", "2.0"],
    "hidden-node-theories": ["NH", "H"],
    "multiple-input-output-theories": ["SIO", "MIO"],
    "multiple-network-theories": ["SNET", "MENET", "MINET", "MNET"],
    "multiple-node-comparison-theories": ["SNC", "MNC"],
    "arithmetic-complexity-theories": ["BND", "OUTC", "LIN", "POLY"],
    "optimised-disjunctive-reasoning": ["false"],
    "serialise-assignments": ["true"],
    "unsat-proofs": ["false"],
}


def capability(name: str) -> list[str]:
    """The lines that answer `supports --name`."""
    answer = CAPABILITIES[name]
    lines: list[str] = answer() if callable(answer) else answer
    return lines


# -- verify ---------------------------------------------------------------------------------------------


class _Clock:
    """Seconds until the process must end."""

    def __init__(self, timeout: float | None, started: float) -> None:
        if timeout is not None and not 0 < timeout < math.inf:
            raise InputError(f"timeout is {timeout}; it must be a finite number of seconds > 0")
        self.end = math.inf
        if timeout is not None:
            self.end = started + timeout - RESERVE[0] * timeout - RESERVE[1]

    @property
    def left(self) -> float:
        return max(0.0, self.end - time.monotonic())


def verify(options: argparse.Namespace, clock: _Clock) -> int:
    """The verdict on one query; returns the exit code."""
    files = _networks(options.network)
    text = read_text(options.query)
    found = _Found(other=len(files) == 1)
    if is_version_2(text):
        try:
            with _ended_at(clock.end):
                intervals(options.query, text, files, clock, found)
        except UnsupportedModelError as error:
            if not found.other:
                raise
            found.reason = str(error)
        except TimeoutError:
            found.status = "timeout"
    elif not found.other:
        raise InputError(f"{options.query}: version 1.0 knows one network; give --network N=FILE once")
    if found.status in ("unknown", "timeout") and found.other and clock.left > OTHER:
        _note(f"{found.reason}; the other engine follows, which bounds real arithmetic".lstrip("; "))
        try:
            engine(options.query, next(iter(files.values())), clock.left, found)
        except InputError as error:
            if not found.read:
                raise
            found.reason = str(error)
    _note(found.reason)
    print({"timeout": "timed-out"}.get(found.status, found.status), flush=True)
    if found.assignments is not None:
        if options.serialise_assignments is not None:
            _serialise(options.serialise_assignments, found.assignments)
        else:
            print("\n".join(_lines(found.assignments)), flush=True)
    return 0


@dataclass
class _Found:
    """What is known so far; other: whether the other engine may know more; read: intervals were for it."""

    other: bool
    read: bool = False
    status: str = "unknown"
    reason: str = ""
    assignments: list[Assignment] | None = None


def intervals(query: Path, text: str, files: dict[str, Path], clock: _Clock, found: _Found) -> None:
    """What intervals say; raises UnsupportedModelError for what they are not made for."""
    from .intervals.query import Query
    from .intervals.solve import MAX_MOVING, Solver

    known = Query(query, text, files)
    found.other = found.other and known.simple
    solver = Solver(known)
    now = time.monotonic()
    solver.deadline = clock.end
    if found.other and clock.left > 2 * OTHER:
        solver.deadline = now + SHARE * min(clock.left, 600.0)
        if len(solver.moving) > MAX_MOVING:
            solver.deadline = min(solver.deadline, now + MANY)
    outcome = solver.run()
    found.read = True
    found.status, found.reason = outcome.status, outcome.reason
    if outcome.witness is not None:
        w = outcome.witness
        found.assignments = [(v.name, v.type, a) for v, a in zip(w.variables, w.values, strict=True)]


def engine(query: Path, model: Path, seconds: float, found: _Found) -> None:
    """What the engine behind `attn-bounds verify` says; it bounds real arithmetic."""
    import numpy as np

    from .search.watch import verify as search

    answer = search(model, query, timeout=seconds if seconds < math.inf else None)
    if answer.status == "error":
        raise InputError(answer.reason)
    found.status, found.reason = answer.status, answer.reason
    if answer.witness is None:
        return
    w, at = answer.witness, 0
    values = np.asarray([*w.inputs, *w.outputs])
    found.assignments = []
    variables = w.variables or (("X", "real", (len(w.inputs),)), ("Y", "real", (len(w.outputs),)))
    for name, kind, shape in variables:
        size = math.prod(shape)
        stored = np.float64 if kind == "float64" else np.float32
        found.assignments.append((name, kind, values[at : at + size].reshape(shape).astype(stored)))
        at += size


def _networks(given: Sequence[str]) -> dict[str, Path]:
    files: dict[str, Path] = {}
    for text in given:
        name, equals, file = text.partition("=")
        if not (name and equals and file):
            raise InputError(f"--network {text}: write NAME=FILE")
        if name in files:
            raise InputError(f"--network {name} is given twice")
        files[name] = Path(file)
    if not files:
        raise InputError("no network is given; write --network NAME=FILE")
    return files


@contextlib.contextmanager
def _ended_at(end: float) -> Iterator[None]:
    """Raises TimeoutError in here at a time of `time.monotonic()`, whatever is being computed."""

    def late(number: int, frame: Any) -> None:
        raise TimeoutError

    saved = signal.signal(signal.SIGALRM, late)
    if end < math.inf:
        signal.setitimer(signal.ITIMER_REAL, max(end - time.monotonic(), 1e-3))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, saved)


def _note(reason: str) -> None:
    if reason:
        print(f"attn-bounds-vnnlib: {' '.join(reason.split())}", file=sys.stderr)


def _lines(assignments: Sequence[Assignment]) -> Iterator[str]:
    """The standard's form for the command line: name, type and shape, then one value a line."""
    for name, kind, array in assignments:
        yield f"{name} {kind} [{','.join(map(str, array.shape))}]"
        for value in array.ravel():
            yield str(value)


def _serialise(folder: Path, assignments: Sequence[Assignment]) -> None:
    """One TensorProto per variable."""
    from onnx import numpy_helper

    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, _, array in assignments:
            (folder / f"{name}.pb").write_bytes(numpy_helper.from_array(array, name).SerializeToString())
    except OSError as error:
        raise InputError(f"{folder}: cannot be written ({error.strerror or error})") from error


if __name__ == "__main__":
    sys.exit(main())
