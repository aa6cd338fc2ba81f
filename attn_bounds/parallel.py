"""Many inputs or properties: on several processes or a cluster, and finished ones kept in a file."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from . import inputs, report
from .errors import InputError
from .jobs import Item, Jobs
from .limits import LimitedVerifier
from .plain import json_line, jsonable
from .results import digest
from .verifier import Verifier

DEATHS = 2  # of worker processes without a result between them, after which inputs go one at a time

Row = dict[str, Any]


@dataclass(frozen=True)
class Recipe:
    """How to build what answers about a model, in any process.

    Attributes:
        model: path. timeout, memory: of each job. options: of `Verifier`.
        enforced: whether limits are kept by a child process.
    """

    model: str
    timeout: float | None = None
    memory: str | None = None
    enforced: bool = True
    options: dict[str, Any] = field(default_factory=dict)

    def build(self) -> Jobs | LimitedVerifier:
        if self.enforced and (self.timeout is not None or self.memory is not None):
            return LimitedVerifier(self.model, timeout=self.timeout, memory=self.memory, **self.options)
        return Jobs(Verifier(self.model, memory=self.memory, **self.options))

    @property
    def key(self) -> str:
        """The same for the same file and options."""
        sha256 = hashlib.sha256(Path(self.model).read_bytes()).hexdigest()
        return json.dumps([sha256, self.timeout, self.memory, repr(sorted(self.options.items()))])


@dataclass(frozen=True)
class Work:
    """One item to certify, somewhere.

    Attributes:
        job: options of `Jobs.certify`. note: for the row. threads: of torch.
        key: tells whether a row in a file is this item's.
    """

    recipe: Recipe
    item: Item
    job: dict[str, Any]
    note: str
    threads: int
    key: str

    @classmethod
    def of(cls, recipe: Recipe, item: Item, job: dict[str, Any], note: str, threads: int) -> Work:
        h = hashlib.sha256(json.dumps([recipe.key, str(item.name), item.label, jsonable(job)]).encode())
        for inputs_set, spec in () if item.prop is None else item.prop.cases:
            h.update(repr((digest(inputs_set), spec.A.tolist(), spec.b.tolist(), spec.groups)).encode())
        if item.x is not None:
            h.update(item.x.numpy().tobytes())
        return cls(recipe, item, job, note, threads, h.hexdigest()[:16])

    def row(self, status: str, reason: str) -> Row:
        """A row without a bound."""
        what: Row = {self.item.key: self.item.name}
        if self.item.label is not None:
            what["label"] = self.item.label
        return {**what, "status": status, "margin": None, "method": "", "seconds": 0.0, "reason": reason}


_BUILT: dict[str, Jobs | LimitedVerifier] = {}  # of this process, one at a time


def certify(work: Work) -> Row:
    """The row of one item; what it needs of the model is kept for the next one."""
    key = repr(work.recipe)
    with contextlib.redirect_stdout(sys.stderr), inputs.quiet(work.threads):
        if key not in _BUILT:
            for old in _BUILT.values():
                if isinstance(old, LimitedVerifier):
                    old.close()
            _BUILT.clear()
            _BUILT[key] = work.recipe.build()
        try:
            found = _BUILT[key].certify(work.item, **work.job)
        except InputError as e:
            return work.row("error", str(e))
    return report.certificate_row(work.item, found, work.note)


class Saved:
    """A file of JSON lines, one per finished item, each with the `key` of its work.

    Arguments:
        path: is created if it is not there; a line cut off at the end, by a kill, is removed.

    Raises:
        InputError: it cannot be read or written, or is no file of this kind.
    """

    def __init__(self, path: Path) -> None:
        self.rows: dict[str, Row] = {}
        try:
            data = path.read_bytes() if path.exists() else b""
            *lines, last = data.split(b"\n")
            for number, line in enumerate(lines, 1):
                try:
                    row = json.loads(line)
                except ValueError:
                    raise InputError(f"{path}:{number}: is no line of JSON; give another file") from None
                self.rows[row["key"]] = row
            self.file = open(path, "ab")  # noqa: SIM115
            self.file.truncate(len(data) - len(last))  # a line that was cut off
        except (TypeError, KeyError):
            raise InputError(f"{path}: holds something else than saved results; give another file") from None
        except OSError as e:
            raise InputError(f"{path}: cannot be written ({e.strerror or e})") from None

    def add(self, key: str, row: Row) -> None:
        """Append a line, on the disk before anything else happens."""
        row = {"key": key, **row}
        self.rows[key] = row
        self.file.write(json_line(row).encode() + b"\n")
        self.file.flush()
        os.fsync(self.file.fileno())


def certify_all(
    works: Sequence[Work], jobs: int = 1, save: Path | None = None, cluster: str | None = None
) -> Iterator[tuple[int, Row]]:
    """Numbers and rows of all works, as they are finished.

    Arguments:
        jobs: processes on this machine, or on the cluster.
        save: file of rows; those that it has are not computed again.
        cluster: address of a dask scheduler whose workers have this package and see the same files.
    """
    saved = None if save is None else Saved(save)
    todo = []
    for i, work in enumerate(works):
        if saved is not None and work.key in saved.rows:
            yield i, {k: v for k, v in saved.rows[work.key].items() if k != "key"}
        else:
            todo.append(i)
    for i, row in _spread(works, todo, jobs, cluster):
        if saved is not None:
            saved.add(works[i].key, row)
        yield i, row


def _spread(
    works: Sequence[Work], todo: list[int], jobs: int, cluster: str | None
) -> Iterator[tuple[int, Row]]:
    """Compute the rows; a worker process that dies costs nothing but time."""
    if jobs == 1 and cluster is None:
        for i in todo:
            yield i, certify(works[i])
        return
    from joblib.externals.loky.process_executor import BrokenProcessPool

    deaths, left = 0, list(todo)
    while left:
        alone = deaths >= DEATHS  # find the one that kills its worker
        try:
            for i, row in _pool(works, left[:1] if alone else left, jobs, cluster):
                left.remove(i)
                deaths = 0 if not alone else deaths
                yield i, row
        except BrokenProcessPool:
            deaths += 1
            if alone:
                i = left.pop(0)
                yield i, works[i].row("unknown", "the worker process died, perhaps for lack of memory")


def _numbered(i: int, work: Work) -> tuple[int, Row]:
    return i, certify(work)


def _pool(
    works: Sequence[Work], numbers: list[int], jobs: int, cluster: str | None
) -> Iterator[tuple[int, Row]]:
    import joblib

    calls = (joblib.delayed(_numbered)(i, works[i]) for i in numbers)
    if cluster is None:
        # two at least: with one joblib would compute in this process, which must survive
        yield from joblib.Parallel(n_jobs=max(2, jobs), return_as="generator_unordered")(calls)
        return
    try:
        from distributed import Client
    except ImportError:
        raise InputError(
            "--cluster needs the package distributed: pip install 'attn-bounds[cluster]'"
        ) from None
    try:
        client = Client(cluster, timeout="30s")
    except OSError as e:
        raise InputError(f"no dask scheduler answers at {cluster} ({e})") from None
    with client, joblib.parallel_config(backend="dask"):
        yield from joblib.Parallel(n_jobs=jobs if jobs > 1 else -1, return_as="generator_unordered")(calls)


def threads_each(jobs: int, wanted: int | None) -> int:
    """Threads of torch in each of several processes."""
    return wanted or max(1, torch.get_num_threads() // jobs)
