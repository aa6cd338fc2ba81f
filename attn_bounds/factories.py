"""`SCRIPT:FACTORY` on the command line: a torch module made by a function of the user's."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from .errors import InputError
from .loading import example_for

WANTED = "SCRIPT.py:FACTORY or package.module:FACTORY is needed"


def make(reference: str, shapes: Sequence[str] = ()) -> tuple[nn.Module, Any]:
    """The module that the factory makes, and an example input.

    Arguments:
        reference: "SCRIPT.py:FACTORY" or "package.module:FACTORY"; FACTORY takes no arguments and returns a
            module, or (module, example). It may also be a module itself.
        shapes: "3,32,32", one per input, without the batch: random examples, instead of the factory's own.

    Raises:
        InputError: no such thing; what the user's code raises, with the place; no example.
    """
    script, _, name = reference.rpartition(":")
    if not script or not name:
        raise InputError(f"{reference!r}: {WANTED}")
    with _importing(script) as module:
        found = getattr(module, name, None)
        if found is None:
            known = ", ".join(n for n, v in vars(module).items() if callable(v) and not n.startswith("_"))
            raise InputError(f"{script}: nothing named {name} (found: {known or 'no function'})")
        made = found
        if not isinstance(found, nn.Module):
            if not callable(found):
                raise InputError(
                    f"{reference}: {type(found).__name__}, which is neither a function nor a module"
                )
            with _naming(reference):
                made = found()
    example = None
    if isinstance(made, tuple) and len(made) == 2:
        made, example = made
    if not isinstance(made, nn.Module):
        raise InputError(
            f"{reference} returns {type(made).__name__}; a torch.nn.Module is needed, or (module, example)"
        )
    if shapes:
        example = tuple(_random(made, shape) for shape in shapes)
    if example is None:
        raise InputError(
            f"{reference} returns a module without an example: give its input's shape with --shape, or "
            "return (module, example)"
        )
    return made, example


def _random(model: nn.Module, text: str) -> Tensor:
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = [0]
    if min(sizes) < 1:
        raise InputError(
            f"--shape {text!r}: sizes with commas between them are needed, without the batch: 3,32,32"
        )
    return example_for(model, torch.randn(sizes, generator=torch.Generator().manual_seed(0)))


@contextlib.contextmanager
def _importing(script: str) -> Iterator[ModuleType]:
    """Import a script as Python would run it, its folder first on the path; not under the name __main__."""
    saved = sys.path.copy()
    path = Path(script)
    is_file = path.suffix == ".py" or path.is_file()
    sys.path.insert(0, str(path.resolve().parent) if is_file else os.getcwd())
    try:
        if not is_file:
            with _naming(script):
                try:
                    module = importlib.import_module(script)
                except ModuleNotFoundError as e:
                    if e.name is None or not (script == e.name or script.startswith(f"{e.name}.")):
                        raise  # of something that it imports
                    raise InputError(f"{script}: no such file, and no such module; {WANTED}") from None
        else:
            if not path.is_file():
                raise InputError(f"{path}: no such file")
            spec = importlib.util.spec_from_file_location(path.stem, path)
            if spec is None or spec.loader is None:
                raise InputError(f"{path}: not a Python file; {WANTED}")
            module = importlib.util.module_from_spec(spec)
            sys.modules[path.stem] = module  # dataclasses and pickle look there
            with _naming(script):
                spec.loader.exec_module(module)
        yield module
    finally:
        sys.path[:] = saved


@contextlib.contextmanager
def _naming(what: str) -> Iterator[None]:
    """What the user's code raises in here becomes one line that says where."""
    try:
        yield
    except InputError:
        raise
    except (Exception, SystemExit) as e:
        frames = [f for f in traceback.extract_tb(e.__traceback__) if f.filename != __file__]
        frames = [f for f in frames if "importlib" not in f.filename]
        where = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
        if isinstance(e, SyntaxError):
            where = f" at {Path(e.filename or what).name}:{e.lineno}"
        reason = next(iter(str(e.msg if isinstance(e, SyntaxError) else e).splitlines()), "")
        raise InputError(f"{what}: {type(e).__name__}{where}: {reason}") from e
