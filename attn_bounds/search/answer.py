"""The question about one property and its answer, which is data, text and a results file of VNN-COMP.

Imports no torch.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

STATUSES = ("unsat", "sat", "unknown", "timeout", "error")

Declared = tuple[tuple[str, str, tuple[int, ...]], ...]  # name, type, shape


@dataclass(frozen=True)
class Job:
    """What the process that computes is asked.

    Attributes:
        model, vnnlib: paths. scratch: a folder for copies of the model.
        deadline: `time.time()` after which nothing new is begun, or None.
        threads: of torch, None for its choice. dtype: "float32" or "float64".
        memory: bytes, or None. boundary: as in `Verifier`. options: of `engine.prove`.
        entry: `shape`, `fix` and `input_node` of `Verifier`, where they are given.
    """

    model: str
    vnnlib: str
    scratch: str
    deadline: float | None = None
    threads: int | None = None
    dtype: str = "float32"
    memory: float | None = None
    boundary: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    entry: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Of the property: its file's, without the endings."""
        return Path(self.vnnlib).name.removesuffix(".gz").removesuffix(".vnnlib")


@dataclass(frozen=True)
class Witness:
    """A counterexample: inputs and the outputs that onnxruntime gives there, flat, in order.

    Attributes:
        variables: what a VNN-LIB 2.0 file declares, inputs first; () for 1.0.
    """

    inputs: list[float]
    outputs: list[float]
    variables: Declared = ()

    def lines(self) -> Iterator[str]:
        """As the results file has it, in the form of the property's version."""
        if not self.variables:
            pairs = [f"X_{i} {v!r}" for i, v in enumerate(self.inputs)]
            pairs += [f"Y_{j} {v!r}" for j, v in enumerate(self.outputs)]
            last = len(pairs) - 1
            for i, pair in enumerate(pairs):
                yield f"{'(' if i == 0 else ''}({pair}){')' if i == last else ''}"
            return
        values = iter([*self.inputs, *self.outputs])
        for name, kind, shape in self.variables:
            yield f"{name} {kind} [{','.join(map(str, shape))}]"
            count = 1
            for size in shape:
                count *= size
            for _ in range(count):
                yield repr(next(values))


@dataclass(frozen=True)
class Answer:
    """What is said about one property.

    Attributes:
        status: one of `STATUSES`; "unsat": it holds, "sat": there is a witness.
        margin: lower bound of the smallest margin, or None; method: the one that gave it or the witness.
        seconds: since the process started.
        reason: why it is neither sat nor unsat, or a warning.
    """

    property: str
    status: str
    margin: float | None = None
    method: str = ""
    seconds: float = 0.0
    witness: Witness | None = None
    reason: str = ""
    tried: list[dict[str, Any]] = field(default_factory=list)

    def row(self) -> dict[str, Any]:
        """For JSON."""
        row = asdict(self)
        if self.witness is not None:
            del row["witness"]["variables"]
        return row

    def text(self) -> str:
        """For a person; the verdict stands alone on the first line."""
        lines = [self.status]
        known = [] if self.margin is None else [f"margin at least {self.margin:.6g}"]
        known += [f"by {self.method}"] if self.method else []
        lines.append(f"{self.property}: {', '.join([*known, f'{self.seconds:.1f} s'])}")
        if self.reason:
            lines.append(self.reason)
        return "\n".join(lines)

    def result_lines(self) -> Iterable[str]:
        """The results file."""
        yield self.status
        if self.witness is not None:
            yield from self.witness.lines()

    def save(self, path: str | Path) -> None:
        """Write the results file at once or not at all; raises OSError."""
        path = Path(path)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(handle, "w") as file:
                file.write("\n".join(self.result_lines()) + "\n")
                file.flush()
                os.fsync(file.fileno())
            umask = os.umask(0)
            os.umask(umask)
            os.chmod(name, 0o666 & ~umask)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
