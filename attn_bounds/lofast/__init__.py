"""Methods `lofast` and `lofast-paper`: whole networks bounded by composing local bounds of their layers."""

from .walk import LOFAST_METHODS, compute_bounds

__all__ = ["LOFAST_METHODS", "compute_bounds"]
