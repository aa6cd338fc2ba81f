"""Amounts of memory as people write them."""

from __future__ import annotations

import math
import re

from .errors import InputError

UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def parse_memory(memory: str | float | None) -> float | None:
    """ "4GB", "500 MB", "2GiB" or bytes → bytes; None stays None. Raises InputError."""
    if memory is None:
        return None
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([kmg]?i?b|)\s*", str(memory).lower())
    size = float(match[1]) * UNITS.get(match[2], math.nan) if match else math.nan
    if not 0 < size < math.inf:
        raise InputError(f"memory limit {memory!r} is malformed; write it like 4GB, 500MB or in bytes")
    return size
