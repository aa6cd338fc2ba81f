"""Certified bounds for transformers: attention operators for auto_LiRPA.

`import attn_bounds` is light: torch, auto_LiRPA, onnx and onnxruntime are loaded by the names that need them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .errors import AttnBoundsError, InputError, UnsupportedModelError

if TYPE_CHECKING:
    from .api import certified_radius, certify, invariances
    from .attack import attack_radius, pgd
    from .loading import load
    from .module import BoundedModule
    from .properties import InputSet, Property, Specification
    from .results import Certificate, Radius
    from .verifier import METHODS, Verifier
    from .vnnlib import read_vnnlib

__version__ = "0.1.0"

_LAZY = {
    "BoundedModule": "module",
    "METHODS": "verifier",
    "Certificate": "results",
    "InputSet": "properties",
    "Property": "properties",
    "Radius": "results",
    "Specification": "properties",
    "Verifier": "verifier",
    "attack_radius": "attack",
    "certified_radius": "api",
    "certify": "api",
    "invariances": "api",
    "load": "loading",
    "pgd": "attack",
    "read_vnnlib": "vnnlib",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)


__all__ = [
    "METHODS",
    "AttnBoundsError",
    "BoundedModule",
    "Certificate",
    "InputError",
    "InputSet",
    "Property",
    "Radius",
    "Specification",
    "UnsupportedModelError",
    "Verifier",
    "attack_radius",
    "certified_radius",
    "certify",
    "invariances",
    "load",
    "pgd",
    "read_vnnlib",
]
