"""Verify one property within limits: a process that computes nothing watches one that does.

Imports no torch: the clock runs from the first moment, and the verdict is written whatever happens below.
"""

from __future__ import annotations

import contextlib
import gzip
import shutil
import signal
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from ..child import Child, Stopped
from ..errors import AttnBoundsError, InputError
from ..memory import parse_memory
from ..plain import json_line
from .answer import Answer, Job

RESERVE = (0.03, 0.3)  # part of the time limit and seconds before it after which nothing new is begun


class Ended(BaseException):
    """A signal asks this process to end."""


def verify(
    model: str | Path,
    vnnlib: str | Path,
    *,
    timeout: float | None = None,
    memory: str | float | None = None,
    started: float | None = None,
    threads: int | None = None,
    dtype: str = "float32",
    boundary: bool = False,
    entry: dict[str, Any] | None = None,
    **options: Any,
) -> Answer:
    """The answer to one property, at the latest when the time limit passes.

    Arguments:
        timeout: seconds since `started` (`time.monotonic()`, default now), everything included.
        memory: "4GB" or bytes, of the process that computes.
        threads: of torch; default torch's choice, all cores.
        boundary: as in `Verifier`. options: as in `engine.prove`.
        entry: `shape`, `fix` and `input_node` of `Verifier`, by name.

    Raises:
        InputError: bad files or options.
        Ended: SIGTERM or SIGINT came, inside `ending_on_signals`; the child is gone.
    """
    if timeout is not None and not 0 < timeout < float("inf"):
        raise InputError(f"timeout is {timeout}; it must be a finite number of seconds > 0")
    if dtype not in ("float32", "float64"):
        raise InputError(f"unknown dtype {dtype!r}; known: float32, float64")
    limit = parse_memory(memory)
    started = time.monotonic() if started is None else started
    left = None if timeout is None else max(0.0, timeout - (time.monotonic() - started))
    deadline = None  # for the child
    if timeout is not None and left is not None:
        deadline = time.time() + left - (RESERVE[0] * timeout + RESERVE[1])
    with tempfile.TemporaryDirectory(prefix="attn-bounds-") as folder:
        job = Job(
            _unpacked(model, folder),
            str(vnnlib),
            folder,
            deadline,
            threads,
            dtype,
            limit,
            boundary,
            options,
            entry or {},
        )
        answer = _watch(job, left, timeout)
    if answer.status == "unknown" and deadline is not None and time.time() >= deadline:
        answer = replace(answer, status="timeout")
    return replace(answer, seconds=time.monotonic() - started)


def _unpacked(model: str | Path, folder: str) -> str:
    """The model's path, that of an unpacked copy in the folder for a file compressed with gzip."""
    try:
        with open(model, "rb") as file:
            if file.read(2) != b"\x1f\x8b":
                return str(model)
        path = Path(folder) / Path(model).name.removesuffix(".gz")
        with gzip.open(model) as source, open(path, "wb") as target:
            shutil.copyfileobj(source, target)
        return str(path)
    except (EOFError, gzip.BadGzipFile, zlib.error) as e:
        raise InputError(f"{model}: the gzip data is damaged ({e})") from None
    except OSError as e:
        raise InputError(f"{model}: cannot be read ({e.strerror or e})") from None


def _watch(job: Job, left: float | None, timeout: float | None) -> Answer:
    """Run the job in a child; what it had found when it ended or was ended."""
    last = Answer(job.name, "unknown", reason="nothing was computed")
    child = Child("attn_bounds.search.worker:work", job, memory=job.memory, may_start_others=True)
    try:
        for kind, answer in child.messages(left):
            last = answer
            if kind == "done":
                break
    except Stopped as stop:
        for _, answer in child.kill():
            last = answer if isinstance(answer, Answer) else last
        why = str(stop)
        status = "unknown" if "memory" in why else "error"
        if "time limit" in why:
            status, why = "timeout", f"time limit of {timeout:g} s passed"
        if last.status == "unknown":
            last = replace(last, status=status, reason=why)
    except AttnBoundsError:
        raise
    except (RuntimeError, ImportError) as e:
        last = replace(last, status="error", reason=str(e))
    finally:
        child.kill()
    return last


@contextlib.contextmanager
def ending_on_signals() -> Iterator[Callable[[], None]]:
    """SIGTERM and SIGINT raise `Ended` in here, once or until the function that it yields is called; then
    they are ignored, so that the answer gets out."""

    def ignore() -> None:
        for s in (signal.SIGTERM, signal.SIGINT):
            signal.signal(s, signal.SIG_IGN)

    def end(number: int, frame: FrameType | None) -> None:
        ignore()
        raise Ended(signal.Signals(number).name)

    saved = {s: signal.signal(s, end) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield ignore
    finally:
        for s, handler in saved.items():
            signal.signal(s, handler)


def run(
    model: Path,
    vnnlib: Path,
    *,
    results_file: Path | None,
    as_json: bool,
    started: float,
    shape: list[str] | None = None,
    fix: list[str] | None = None,
    input_node: str | None = None,
    **options: Any,
) -> int:
    """`attn-bounds verify`: print the answer, write the results file; returns the exit code.

    0 for any verdict, 1 for an internal error, 2 for bad input or an unwritable results file, 128 and the
    signal's number when a signal ended it."""
    name = Job("", str(vnnlib), "").name
    with ending_on_signals() as ignore:
        try:
            entry = None
            if shape or fix or input_node:
                from ..entering import choices

                entry = choices(shape, fix, input_node)
            answer = verify(model, vnnlib, started=started, entry=entry, **options)
            ignore()
            code = 1 if answer.status == "error" else 0
        except InputError as e:
            answer, code = Answer(name, "error", reason=str(e)), 2
        except Ended as e:
            answer = Answer(name, "unknown", reason=f"ended by {e}")
            code = 128 + signal.Signals[str(e)].value
        if not answer.seconds:
            answer = replace(answer, seconds=time.monotonic() - started)
        print(json_line(answer.row()) if as_json else answer.text(), flush=True)
        if answer.status == "error":
            print(f"attn-bounds: {' '.join(answer.reason.split())}", file=sys.stderr)
        if results_file is not None:
            try:
                answer.save(results_file)
            except OSError as e:
                reason = e.strerror or str(e)
                print(f"attn-bounds: {results_file}: cannot be written ({reason})", file=sys.stderr)
                code = code or 2
    return code
