"""Verify one property within limits: a process that computes nothing watches one that does.

Imports no torch: the clock runs from the first moment, and the verdict is written whatever happens below.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from ..child import Child, Stopped
from ..errors import AttnBoundsError, InputError
from ..memory import parse_memory
from ..plain import json_line
from .answer import Answer

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
    **options: Any,
) -> Answer:
    """The answer to one property, at the latest when the time limit passes.

    Arguments:
        timeout: seconds since `started` (`time.monotonic()`, default now), everything included.
        memory: "4GB" or bytes, of the process that computes.
        threads: of torch; default torch's choice, all cores.
        boundary: as in `Verifier`. options: as in `engine.prove`.

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
    name = Path(vnnlib).name.removesuffix(".gz").removesuffix(".vnnlib")
    left = None if timeout is None else max(0.0, timeout - (time.monotonic() - started))
    deadline = None  # for the child
    if timeout is not None and left is not None:
        deadline = time.time() + left - (RESERVE[0] * timeout + RESERVE[1])
    job = {
        "model": str(model),
        "vnnlib": str(vnnlib),
        "name": name,
        "deadline": deadline,
        "threads": threads,
        "dtype": dtype,
        "memory": limit,
        "boundary": boundary,
        "options": options,
    }
    last = Answer(name, "unknown", reason="nothing was computed")
    child = Child("attn_bounds.search.worker:work", job, memory=limit)
    try:
        for kind, answer in child.messages(left):
            last = answer
            if kind == "done":
                break
    except Stopped as stop:
        for _, answer in child.kill():
            last = answer if isinstance(answer, Answer) else last
        if last.status == "unknown":
            status = (
                "unknown" if "memory" in str(stop) else "timeout" if "time limit" in str(stop) else "error"
            )
            last = replace(last, status=status, reason=str(stop))
    except AttnBoundsError:
        raise
    except (RuntimeError, ImportError) as e:
        last = replace(last, status="error", reason=str(e))
    finally:
        child.kill()
    if last.status == "unknown" and deadline is not None and time.time() >= deadline:
        last = replace(last, status="timeout")
    return replace(last, seconds=time.monotonic() - started)


@contextlib.contextmanager
def ending_on_signals() -> Iterator[None]:
    """SIGTERM and SIGINT raise `Ended` in here; after that they are ignored, so that the answer gets out."""

    def end(number: int, frame: FrameType | None) -> None:
        for s in (signal.SIGTERM, signal.SIGINT):
            signal.signal(s, signal.SIG_IGN)
        raise Ended(signal.Signals(number).name)

    saved = {s: signal.signal(s, end) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for s, handler in saved.items():
            signal.signal(s, handler)


def run(
    model: Path, vnnlib: Path, *, results_file: Path | None, as_json: bool, started: float, **options: Any
) -> int:
    """`attn-bounds verify`: print the answer, write the results file; returns the exit code.

    0 for any verdict, 1 for an internal error, 2 for bad input or an unwritable results file, 128 and the
    signal's number when a signal ended it."""
    code = 0
    name = vnnlib.name.removesuffix(".gz").removesuffix(".vnnlib")
    try:
        with ending_on_signals():
            answer = verify(model, vnnlib, started=started, **options)
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
