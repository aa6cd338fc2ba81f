"""Values as JSON has them."""

from __future__ import annotations

import json
import math
from typing import Any


def jsonable(value: Any) -> Any:
    """JSON has no infinities: they become the strings "inf", "-inf"; NaN becomes null."""
    if isinstance(value, dict):
        return {k: jsonable(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else ("inf" if value > 0 else "-inf")
    return value


def json_line(row: dict[str, Any]) -> str:
    """One JSON object on one line."""
    return json.dumps(jsonable(row), allow_nan=False)
