"""Time and memory limits: bounds are computed in a child process that can be killed at any moment."""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import signal
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .child import Child, Stopped, end_with_parent
from .errors import AttnBoundsError, InputError
from .jobs import Item, Jobs
from .memory import parse_memory
from .properties import Property, Specification
from .results import Certificate, Radius, versions
from .verifier import AUTO, Verifier, check_method

LOAD_SECONDS = 600.0  # for building the model, and again for the graph of a method
GRACE = 0.97  # part of the time limit after which the child begins nothing new


def check_timeout(timeout: float | None) -> float | None:
    """Seconds, or None for no limit; raises InputError."""
    if timeout is not None and not 0 < timeout < math.inf:
        raise InputError(f"timeout is {timeout}; it must be a finite number of seconds > 0")
    return timeout


# ---------------------------------------------------------------------------------------------------------
# the child


def _child(connection: Connection, model: str, threads: int, kwargs: dict[str, Any]) -> None:
    """Body of the child process: build the verifier, then answer jobs until the parent hangs up."""
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    os.dup2(2, 1)  # stdout is for results; whatever auto_LiRPA prints goes to stderr
    warnings.simplefilter("ignore")
    torch.set_num_threads(threads)

    def send(kind: str, value: Any) -> None:
        # plain pickle: multiprocessing's would share tensors by file descriptors that die with this process
        connection.send_bytes(pickle.dumps((kind, value)))

    def failed(e: Exception) -> None:
        if isinstance(e, (AttnBoundsError, ImportError)):
            send("error", e)
        elif isinstance(e, MemoryError) or (isinstance(e, RuntimeError) and "memory:" in str(e)):
            send("limit", "the machine's memory was used up")
        else:
            send("error", RuntimeError(f"{type(e).__name__} in the child process: {e}"))

    with contextlib.suppress(EOFError, OSError):  # the parent hung up
        try:
            jobs = Jobs(Verifier(model, **kwargs), lambda result: send("partial", result))
        except Exception as e:
            failed(e)
            return
        send("ready", (jobs.input_shape, jobs.output_shape, jobs.chosen))
        while True:
            name, arguments = pickle.loads(connection.recv_bytes())
            try:
                if "method" in arguments:
                    jobs.prepare(arguments["method"])
                send("begin", None)
                send("done", getattr(jobs, name)(**arguments))
            except OSError:
                raise
            except Exception as e:
                failed(e)


# ---------------------------------------------------------------------------------------------------------
# the parent


class LimitedVerifier:
    """A `Verifier` in a child process, with limits on every job.

    The child is started for the first job and kept; after a limit was hit it is killed and a new one is
    started for the next job. A result that a limit cut short is the one of the last finished stage with
    status "unknown" (or "falsified"), and its reason names the limit and the stage that it hit.

    Arguments:
        model_path: ONNX file.
        timeout: seconds per job, or None. The clock starts when model and graph are built, since they are
            kept for later jobs; building each may take `LOAD_SECONDS` at most.
        memory: "4GB", "500MB" or bytes, or None: resident memory of the whole child, in which Python and
            torch alone take about 400 MB. It is looked at every `child.POLL` seconds; a short peak can pass.
            Method sensitivity plans to stay below it: errors that there is no memory for get no symbols.
        verifier_kwargs: of `Verifier`.

    A script that uses this must start its work below `if __name__ == "__main__":`, as everywhere with
    multiprocessing's "spawn".

    Raises:
        InputError: a malformed limit at once; the model's own errors when the child first needs it.
    """

    def __init__(
        self,
        model_path: str | Path,
        *,
        timeout: float | None = None,
        memory: str | float | None = None,
        **verifier_kwargs: Any,
    ) -> None:
        self.model, self.kwargs = str(model_path), verifier_kwargs
        self.timeout, self.memory = check_timeout(timeout), parse_memory(memory)
        self.kwargs["memory"] = self.memory
        self._child: Child | None = None
        self._found: tuple[tuple[int, ...], tuple[int, ...], list[str]] | None = None

    def __enter__(self) -> LimitedVerifier:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill the child."""
        if self._child is not None:
            self._child.kill()
            self._child = None

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Of one sample; loads the model. Raises InputError also when a limit does not let it load."""
        return self._loaded()[0]

    @property
    def output_shape(self) -> tuple[int, ...]:
        """As `input_shape`."""
        return self._loaded()[1]

    @property
    def outputs(self) -> int:
        """Number of outputs; as `input_shape`."""
        return math.prod(self.output_shape)

    @property
    def chosen(self) -> list[str]:
        """How the file is entered, in words; as `input_shape`."""
        return self._loaded()[2]

    def _loaded(self) -> tuple[tuple[int, ...], tuple[int, ...], list[str]]:
        if self._found is None:
            try:
                self._start()
            except Stopped as e:
                raise InputError(f"{self.model}: {e}") from None
        assert self._found is not None
        return self._found

    def prepare(self, method: str) -> None:
        """Nothing: the child prepares what a job needs before its clock starts."""

    # -- jobs -------------------------------------------------------------------------------------------

    def certify_input(self, x: Tensor, label: int, **job: Any) -> Certificate:
        """Certify an lp ball around x (*input); norm=, eps= and further options as in `Jobs.certify`."""
        return self.certify(Item(0, torch.as_tensor(x), int(label)), **job)

    def certify_property(self, prop: Property, **job: Any) -> Certificate:
        """Certify a property, or with norm= and eps= the balls around the centres of its boxes."""
        return self.certify(Item(prop.name, prop=prop), **job)

    def certified_radius(self, x: Tensor, spec: int | Specification, **job: Any) -> Radius:
        """As `Verifier.certified_radius`, the specification or a label; at a limit the radius so far."""
        x = torch.as_tensor(x)
        return self.radius(Item(0, x, label=spec) if isinstance(spec, int) else Item(0, x, spec=spec), **job)

    def certify(self, item: Item, **job: Any) -> Certificate:
        """`Jobs.certify` within the limits."""
        method = check_method(job.setdefault("method", "auto"))
        norm, eps = job.get("norm"), job.get("eps")
        blank = Certificate("unknown", None, None, None, eps, math.inf if norm is None else norm, method, 0.0)
        if self.timeout is not None:  # what would take longer is not begun, and what runs ends in time
            job.setdefault("time_limit", GRACE * self.timeout)
        result, why, seconds = self._run("certify", {"item": item, **job}, blank)
        if not why:
            return result
        result = replace(result, seconds=seconds, versions=result.versions or versions())
        if result.status != "unknown":  # its last stage had finished
            return result
        if result.options:  # the child had got so far as to report
            ran = [t["method"] for t in result.tried]
            planned = AUTO if method == "auto" else (method,)
            stages = ["attack", *planned][not job.get("attack", True) :]
            why += next((f" during {s}" for s in stages if s not in ran), "")
        return replace(result, reason=why)

    def falsify(self, item: Item, **job: Any) -> Tensor | None:
        """`Jobs.falsify` within the limits; None too when a limit was hit."""
        return self._run("falsify", {"item": item, **job}, None)[0]

    def radius(self, item: Item, **job: Any) -> Radius:
        """`Jobs.radius` within the limits."""
        method = job.setdefault("method", "auto")
        blank = Radius(0.0, math.inf, job["norm"], method, 0.0, 0)
        result, why, seconds = self._run("radius", {"item": item, **job}, blank)
        return replace(result, seconds=seconds, reason=why) if why else result

    # -- the child --------------------------------------------------------------------------------------

    def _run(self, name: str, arguments: dict[str, Any], blank: Any) -> tuple[Any, str, float]:
        """Run a job: (its result or the last one reported, why it was cut short or "", seconds)."""
        last, begin = blank, None
        try:
            self._start()
            assert self._child is not None
            self._child.send((name, arguments))
            next(self._messages(LOAD_SECONDS, " while the bounds were prepared"))
            begin = time.monotonic()
            for kind, value in self._messages(self.timeout, ""):
                last = value
                if kind == "done":
                    break
            return last, "", time.monotonic() - begin
        except Stopped as e:
            for kind, value in [] if self._child is None else self._child.kill():
                last = value if kind in ("partial", "done") else last
            self._child = None
            return last, str(e), 0.0 if begin is None else time.monotonic() - begin
        except (BrokenPipeError, ConnectionResetError):
            self.close()
            return blank, "the child process died", 0.0
        except (AttnBoundsError, ImportError):
            raise  # the child answered and goes on
        except BaseException:
            self.close()  # e.g. Ctrl-C: the answer to this job must not be taken for the next one's
            raise

    def _start(self) -> None:
        """Start a child unless one is there, and wait until its model is loaded.

        Raises:
            Stopped: a limit was passed. InputError, ImportError: the model cannot be loaded.
        """
        if self._child is not None and self._child.process.is_alive():
            return
        self.close()
        arguments = (self.model, torch.get_num_threads(), self.kwargs)
        self._child = Child(_child, *arguments, memory=self.memory, needs_main=False)
        try:
            _, self._found = next(self._messages(LOAD_SECONDS, " while the model was loaded"))
        except BaseException:
            self.close()
            raise

    def _messages(self, seconds: float | None, phase: str) -> Iterator[tuple[str, Any]]:
        """What the child sends, until a limit is passed or it sends an error; `Child.messages`."""
        assert self._child is not None
        return self._child.messages(seconds, phase)
