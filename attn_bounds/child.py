"""A child process that answers by messages and can be ended at any moment, with a limit on time and memory.

Imports no torch, so that a process that only watches is up at once.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

POLL = 0.02  # seconds between two looks at the clock and the child's memory
ORPHAN = 0.5  # seconds between two looks of the child at whether its parent is still there


class Stopped(Exception):
    """The child was killed or died, or passed a limit; says why."""


@contextlib.contextmanager
def _main_hidden() -> Iterator[None]:
    """Children that start in here do not run the script of this process again."""
    main = sys.modules["__main__"]
    saved = {n: getattr(main, n) for n in ("__file__", "__spec__") if hasattr(main, n)}
    main.__dict__.pop("__file__", None)
    main.__spec__ = None
    try:
        yield
    finally:
        main.__dict__.update(saved)


class Child:
    """A running child.

    Arguments:
        target: a function, or "package.module:function" where importing it here would take seconds; called
            in the child with its end of the pipe and the arguments. It sends pickled (kind, value).
        arguments: of the target, picklable.
        memory: bytes of resident memory of the whole child, looked at every `POLL` seconds; or None.
        may_start_others: whether the child may have children; kill it before this process ends.
        needs_main: whether the arguments may be of classes of the script. Then that script must start its
            work below `if __name__ == "__main__":`, as everywhere with multiprocessing's "spawn".
    """

    def __init__(
        self,
        target: Callable[..., None] | str,
        *arguments: Any,
        memory: float | None = None,
        may_start_others: bool = False,
        needs_main: bool = True,
    ) -> None:
        self.memory = memory
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        if isinstance(target, str):
            arguments, target = (target, *arguments), _call
        self.process = context.Process(target=target, args=(theirs, *arguments), daemon=not may_start_others)
        with _no_interrupt(), contextlib.nullcontext() if needs_main else _main_hidden():
            self.process.start()
        theirs.close()  # so that the child's death shows as the end of the pipe

    def send(self, value: Any) -> None:
        self.connection.send_bytes(pickle.dumps(value))

    def messages(self, seconds: float | None, phase: str = "") -> Iterator[tuple[str, Any]]:
        """What the child sends, (kind, value); a value of kind "error" is raised.

        Arguments:
            seconds: from now on, or None. phase: what is being done, for the reason of a stop.

        Raises:
            Stopped: a limit was passed or the child is dead; it is not killed yet in the first case.
        """
        import psutil

        deadline = math.inf if seconds is None else time.monotonic() + seconds
        pid = self.process.pid
        assert pid is not None
        memory_of = psutil.Process(pid).memory_info
        while True:
            if time.monotonic() > deadline:
                raise Stopped(f"time limit of {seconds:g} s passed{phase}")
            with contextlib.suppress(psutil.Error):  # it died: the pipe says so next
                if self.memory is not None and memory_of().rss > self.memory:
                    raise Stopped(f"memory limit of {_in_words(self.memory)} passed{phase}")
            if not self.connection.poll(POLL):
                continue
            try:
                kind, value = pickle.loads(self.connection.recv_bytes())
            except (EOFError, ConnectionResetError):
                raise Stopped(self._death(phase)) from None
            if kind == "error":
                raise value
            if kind == "limit":
                raise Stopped(f"{value}{phase}")
            yield kind, value

    def _death(self, phase: str) -> str:
        self.process.join(5)
        code = self.process.exitcode
        if code == -signal.SIGKILL:
            return f"the child process was killed{phase}, perhaps because the machine's memory was used up"
        return f"the child process ended with exit code {code}{phase}"

    def kill(self) -> list[tuple[str, Any]]:
        """End the child at once; returns the messages that it had sent."""
        left = []
        with contextlib.suppress(ValueError):  # closed before
            self.process.kill()
            self.process.join()
            with contextlib.suppress(EOFError, OSError):
                while self.connection.poll(0):
                    left.append(pickle.loads(self.connection.recv_bytes()))
            self.process.close()
        self.connection.close()
        return left


def end_with_parent() -> None:
    """For the child: end this process soon after its parent, however that dies."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(ORPHAN)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _call(connection: Connection, target: str, *arguments: Any) -> None:
    module, _, name = target.partition(":")
    getattr(importlib.import_module(module), name)(connection, *arguments)


def _in_words(size: float) -> str:
    return f"{size / 1e9:g} GB" if size >= 1e9 else f"{size / 1e6:g} MB"


@contextlib.contextmanager
def _no_interrupt() -> Iterator[None]:
    """A process started in here ignores Ctrl-C from its first instruction on."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    saved = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, saved)
