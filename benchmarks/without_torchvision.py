"""A stand-in for torchvision, which cannot be imported beside a CPU build of torch of another version.

timm and vit-pytorch import it for transforms of images and for operators that no Vision Transformer needs.
"""

from __future__ import annotations

import contextlib
import enum
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Iterator
from typing import Any


class InterpolationMode(enum.Enum):
    """torchvision's, of which timm makes a table on import."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


class _Anything(type):
    def __getattr__(cls, name: str) -> Any:
        return cls


class _Stub(metaclass=_Anything):
    """A class, function or module that nobody needs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        ours = name.partition(".")[0] == "torchvision"
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if ours else None

    def create_module(self, spec: Any) -> types.ModuleType:
        def attribute(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return InterpolationMode if name == "InterpolationMode" else _Stub

        module = types.ModuleType(spec.name)
        module.__dict__["__getattr__"] = attribute
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


@contextlib.contextmanager
def without_torchvision() -> Iterator[None]:
    """In here `import torchvision` finds the stand-in; afterwards other libraries see that it is missing."""
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
