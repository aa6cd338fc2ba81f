"""What the command line is given: inputs from npz and VNN-LIB files, and options that need parsing."""

from __future__ import annotations

import contextlib
import math
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from .errors import InputError
from .jobs import Item
from .vnnlib import read_vnnlib


def read_data(
    path: str | Path,
    input_shape: Sequence[int],
    outputs: int,
    indices: Sequence[int] = (),
    count: int | None = None,
    embed: Callable[[np.ndarray], np.ndarray | None] | None = None,
) -> list[Item]:
    """Labelled inputs of an npz file with arrays `x` (N, *input_shape) and `y` (N,).

    Arguments:
        outputs: of the model; 1 means a binary model with labels 0 and 1.
        indices: which ones (default all), or count: the first so many.
        embed: gives what the model takes for integers of another shape, or None where it takes no integers.

    Raises:
        InputError: not such a file, or it does not fit the model; names the file and the place.
    """
    try:
        loaded = np.load(path, allow_pickle=False)
        if not isinstance(loaded, np.lib.npyio.NpzFile):
            raise InputError(f"{path}: holds a single array; an npz file with arrays x and y is needed")
        with loaded as archive:
            missing = [name for name in ("x", "y") if name not in archive]
            if missing:
                found = ", ".join(archive.files) or "nothing"
                raise InputError(
                    f"{path}: no array {' or '.join(missing)} (found {found}); x and y are needed"
                )
            x, y = archive["x"], archive["y"]
    except InputError:
        raise
    except OSError as e:
        raise InputError(f"{path}: cannot be read ({e.strerror or e})") from None
    except ValueError:  # numpy's advice here is to unpickle the file, whatever it is
        raise InputError(f"{path}: not an npz file of plain arrays") from None
    except (EOFError, KeyError, zipfile.BadZipFile, zlib.error) as e:
        raise InputError(f"{path}: the npz file is damaged ({str(e).splitlines()[0]})") from None

    shape = tuple(input_shape)
    needed = ", ".join(map(str, ("N", *shape)))
    if x.dtype.kind not in "fiu":
        raise InputError(f"{path}: x holds {x.dtype}; numbers are needed")
    if x.ndim == 0:
        raise InputError(f"{path}: x has shape {x.shape}; this model needs ({needed})")
    chosen = _choose(path, len(x), indices, count)
    rows = x[chosen]
    if embed is not None and x.dtype.kind in "iu" and x.shape[1:] != shape:
        behind = embed(rows)
        rows = rows if behind is None else behind
    if rows.shape[1:] != shape:
        raise InputError(f"{path}: x has shape {x.shape}; this model needs ({needed})")
    if y.dtype.kind not in "iu" or y.shape != x.shape[:1]:
        raise InputError(
            f"{path}: y has shape {y.shape} and type {y.dtype}; {len(x)} integer labels are needed"
        )
    classes = 2 if outputs == 1 else outputs
    for i, row in zip(chosen, rows, strict=True):
        if not np.isfinite(row).all():
            raise InputError(f"{path}: x[{i}] has values that are NaN or infinite")
        if not 0 <= y[i] < classes:
            raise InputError(f"{path}: label {y[i]} of y[{i}] is out of range; classes are 0..{classes - 1}")
    dtype = rows.dtype if rows.dtype in (np.float32, np.float64) else np.dtype(np.float32)
    return [
        Item(i, torch.from_numpy(np.array(row, dtype=dtype)), int(y[i]))
        for i, row in zip(chosen, rows, strict=True)
    ]


def _choose(path: str | Path, n: int, indices: Sequence[int], count: int | None) -> list[int]:
    if indices and count is not None:
        raise InputError("--index and --count cannot be combined")
    for i in indices:
        if not 0 <= i < n:
            raise InputError(f"{path}: index {i} is out of range; there are inputs 0..{n - 1}")
    if count is not None and not 1 <= count <= n:
        raise InputError(f"{path}: --count {count} is out of range; there are {n} inputs")
    if n == 0:
        raise InputError(f"{path}: x is empty")
    return list(indices) or list(range(n if count is None else count))


def read_properties(paths: Sequence[str | Path], input_shape: Sequence[int], outputs: int) -> list[Item]:
    """Properties of VNN-LIB files; raises InputError as `read_vnnlib` does."""
    props = [read_vnnlib(path, tuple(input_shape), outputs) for path in paths]
    return [Item(p.name, prop=p) for p in props]


def parse_norm(text: str) -> float:
    """ "1", "2" or "inf"; raises InputError."""
    if text not in ("1", "2", "inf"):
        raise InputError(f"unknown norm {text!r}; known: 1, 2, inf")
    return float(text)


def parse_eps(eps: float) -> float:
    """A radius; raises InputError for a negative one, NaN and infinity."""
    if not 0 <= eps < math.inf:
        raise InputError(f"eps is {eps}; it must be a finite number >= 0")
    return eps


def parse_floats(name: str, text: str | None) -> list[float] | None:
    """ "a,b,c" as numbers; raises InputError naming the option."""
    if text is None:
        return None
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise InputError(
            f"{name} {text!r}: numbers with commas between them are needed, one or one per channel"
        ) from None


def parse_dtype(text: str) -> torch.dtype:
    """ "float32" or "float64"; raises InputError."""
    if text not in ("float32", "float64"):
        raise InputError(f"unknown dtype {text!r}; known: float32, float64")
    return torch.float64 if text == "float64" else torch.float32


def parse_device(text: str) -> str:
    """A device that torch can use here; raises InputError."""
    try:
        torch.empty(0, device=torch.device(text))
    except (RuntimeError, AssertionError) as e:
        raise InputError(f"device {text!r} cannot be used ({str(e).splitlines()[0]})") from None
    return text


@contextlib.contextmanager
def quiet(threads: int | None) -> Iterator[None]:
    """No warnings of torch and auto_LiRPA, and so many CPU threads, for a while."""
    saved = torch.get_num_threads()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.set_num_threads(threads or saved)
        try:
            yield
        finally:
            torch.set_num_threads(saved)
