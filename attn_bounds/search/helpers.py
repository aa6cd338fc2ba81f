"""More processes that bound boxes of the same property, one per core, for searches that take a while."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..child import Child
from .answer import Job

Bound = Callable[[Tensor, Tensor], Tensor]  # lower and upper (boxes, n) to rows (boxes, rows)


class Helpers:
    """Processes that each hold the model, and share the boxes of a batch with this one.

    One that dies is left out, and its boxes are bounded here.

    Arguments:
        job: what this process works on.
        case: the number of the property's case that is searched.
        count: of processes beside this one.
    """

    def __init__(self, job: Job, case: int, count: int) -> None:
        self.job, self.case, self.count = job, case, count
        self.starting: list[Child] = []
        self.ready: list[Child] = []
        self._begun = False

    def start(self) -> None:
        """Start the processes, once; they are used as soon as they have loaded the model."""
        if not self._begun:
            self._begun = True
            target = "attn_bounds.search.worker:bound_boxes"
            self.starting = [Child(target, self.job, self.case) for _ in range(self.count)]

    def bounds(self, lower: Tensor, upper: Tensor, method: str, own: Bound) -> Tensor:
        """Lower bounds of the rows on each box, some of them computed by the helpers.

        Arguments:
            lower, upper: (boxes, n). own: bounds boxes in this process, by the same method.
        """
        self._welcome()
        parts = list(torch.arange(len(lower)).tensor_split(len(self.ready) + 1))
        asked = []
        for child, part in zip(list(self.ready), parts[1:], strict=True):
            try:
                child.send((lower[part].numpy(), upper[part].numpy(), method))
                asked.append((child, part))
            except OSError:
                self._lose(child)
                asked.append((child, part))
        found = {0: own(lower[parts[0]], upper[parts[0]])}
        for k, (child, part) in enumerate(asked, 1):
            rows = self._receive(child, "rows")
            found[k] = own(lower[part], upper[part]) if rows is None else torch.from_numpy(rows)
        return torch.cat([found[k] for k in range(len(parts))])

    def close(self) -> None:
        """End the processes."""
        for child in (*self.starting, *self.ready):
            child.kill()
        self.starting, self.ready = [], []

    def _welcome(self) -> None:
        """Those that have loaded the model may help from now on."""
        for child in list(self.starting):
            if child.connection.poll(0):
                self.starting.remove(child)
                if self._receive(child, "ready"):
                    self.ready.append(child)

    def _receive(self, child: Child, wanted: str) -> Any:
        """What a helper sends, None for anything but what is wanted; such a helper is given up."""
        with contextlib.suppress(OSError, EOFError, ValueError):
            kind, value = pickle.loads(child.connection.recv_bytes())
            if kind == wanted:
                return value
        self._lose(child)
        return None

    def _lose(self, child: Child) -> None:
        if child in self.ready:
            self.ready.remove(child)
        with contextlib.suppress(OSError, ValueError):
            child.kill()
