"""The process that verifies a property, for `watch.py`, which watches the clock and the memory."""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import signal
import time
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from ..child import end_with_parent
from ..errors import AttnBoundsError, InputError, UnsupportedModelError
from .answer import Answer, Job, Witness

if TYPE_CHECKING:
    from ..properties import Property
    from ..results import Certificate
    from ..verifier import Verifier

MOST = 15  # helpers of one search: each holds the model
STATUS = {"verified": "unsat", "falsified": "sat", "unknown": "unknown"}


def work(connection: Connection, job: Job) -> None:
    """Sends ("partial", Answer) now and then and ("done", Answer) at the end, or ("error", exception)."""
    _settle()

    def send(kind: str, value: Any) -> None:
        connection.send_bytes(pickle.dumps((kind, value)))

    try:
        import torch

        if job.threads is not None:
            torch.set_num_threads(job.threads)
        # a limit on the memory of this process says nothing about others that it starts
        cores = torch.get_num_threads() if job.memory is None else 1
        send("done", verify(job, lambda answer: send("partial", answer), cores))
    except (AttnBoundsError, ImportError) as e:
        send("error", e)
    except (MemoryError, RuntimeError) as e:
        if isinstance(e, MemoryError) or "memory:" in str(e):
            send("limit", "the machine's memory was used up")
        else:
            send("error", RuntimeError(f"{type(e).__name__}: {e}"))
    except OSError:
        pass  # the parent hung up
    except Exception as e:
        send("error", RuntimeError(f"{type(e).__name__}: {e}"))


def _settle() -> None:
    """What every process that computes does first."""
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    os.dup2(2, 1)  # stdout is for the answer; whatever libraries print goes to stderr
    warnings.simplefilter("ignore")


def load(job: Job) -> tuple[Verifier, Property]:
    """The job's model and property."""
    import torch

    from onnx_export import joined

    from ..verifier import Verifier
    from ..vnnlib import read_vnnlib

    dtype = torch.float64 if job.dtype == "float64" else torch.float32
    options: dict[str, Any] = {"logits": False, "dtype": dtype}
    options |= {"memory": job.memory, "boundary": job.boundary}
    model, sizes = job.model, []
    if job.entry:
        options |= job.entry
    elif max(joined.counts(model)) > 1:
        target = os.path.join(job.scratch, f"joined-{os.getpid()}.onnx")
        with contextlib.suppress(UnsupportedModelError):  # masks, say: the verifier knows the usual ones
            sizes = joined.join(job.model, target)
            model = target
    try:
        verifier = Verifier(model, **options)
    except InputError as e:
        raise type(e)(str(e).replace(str(model), job.model)) from None
    original = joined.Original(job.model)
    # not of a file with a fixed batch, nor where bounds are over something else than its input
    if not job.entry and original.size == math.prod(verifier.input_shape):
        verifier.oracle = original
    prop = read_vnnlib(job.vnnlib, verifier.input_shape, verifier.outputs)
    found = [math.prod(v.shape) for v in prop.inputs]
    if sizes and found and found != sizes:
        where = f"{job.vnnlib}: declares inputs of {found} entries"
        raise InputError(f"{where}, but those of the model have {sizes}; give the property of this model")
    return verifier, prop


def verify(job: Job, report: Callable[[Answer], None], cores: int = 1) -> Answer:
    """The answer to the job's property; its seconds are left to the parent.

    Arguments:
        cores: processes that may bound parts of the input set, this one included.
    """
    from .helpers import Helpers

    verifier, prop = load(job)
    declared = tuple((v.name, v.type, v.shape) for v in (*prop.inputs, *prop.outputs))

    def answer(c: Certificate) -> Answer:
        witness = None
        if c.counterexample is not None:
            outputs = verifier.replay(c.counterexample).flatten().tolist()
            witness = Witness(c.counterexample.flatten().tolist(), outputs, declared)
        return Answer(job.name, STATUS[c.status], c.margin, c.method, 0.0, witness, c.reason, c.tried)

    left = None if job.deadline is None else max(0.0, job.deadline - time.time())
    found = verifier.certify_property(
        prop,
        time_limit=left,
        report=lambda c: report(answer(c)),
        helpers=(lambda case: Helpers(job, case, min(cores - 1, MOST))) if cores > 1 else None,
        **job.options,
    )
    return answer(found)


def bound_boxes(connection: Connection, job: Job, case: int) -> None:
    """Body of a helper: bounds boxes of one case of the property until the other side hangs up."""
    _settle()
    import torch

    from ..properties import InputSet

    torch.set_num_threads(1)
    verifier, prop = load(job)
    inputs, spec = prop.cases[case]

    def send(kind: str, value: Any) -> None:
        connection.send_bytes(pickle.dumps((kind, value)))

    with contextlib.suppress(EOFError, OSError):
        send("ready", True)
        while True:
            lower, upper, method = pickle.loads(connection.recv_bytes())
            boxes = [
                InputSet.box(*(torch.from_numpy(v[i]).reshape(inputs.center.shape) for v in (lower, upper)))
                for i in range(len(lower))
            ]
            send("rows", verifier.row_bounds(boxes, [spec] * len(boxes), method).numpy())
