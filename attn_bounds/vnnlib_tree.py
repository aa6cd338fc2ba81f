"""The text of VNN-LIB files, and the syntax tree of those of version 2.0. Imports no torch."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from .errors import InputError

MAX_DEPTH = 100  # nesting of brackets in a VNN-LIB file
_VERSION_2 = re.compile(r"\s*(?:;[^\n]*(?:\n\s*|\Z))*\(\s*(?:vnnlib-version|declare-network)\b")


def read_text(path: str | Path) -> str:
    """The content of a file that may be compressed with gzip; raises InputError."""
    try:
        data = Path(path).read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        return data.decode()
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InputError(f"{path}: the gzip data is damaged ({error})") from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: is neither text nor gzip; give a .vnnlib or .vnnlib.gz file") from error


def is_version_2(text: str) -> bool:
    """Whether a file is of version 2.0, else it is of 1.0."""
    return _VERSION_2.match(text) is not None


def parse(path: object, text: str) -> Any:
    """The query of a 2.0 file, as the package `vnnlib` has it; raises InputError with the line."""
    import vnnlib  # the package, not the module of that name here

    deep = _too_deep(text)  # the package's parser overflows the stack
    if deep:
        raise InputError(f"{path}:{deep}: brackets are nested more than {MAX_DEPTH} deep")
    try:
        # it takes no comment on the last line that does not end
        return vnnlib.parse_query_string(text + "\n")
    except vnnlib.VNNLibException as error:
        raise InputError(f"{path}{_reason(str(error))}") from None
    except (IndexError, ValueError):  # of C++: std::stod and the like
        raise InputError(f"{path}: a number in it is beyond the range of float64") from None


def line_of(node: Any) -> int:
    """Line of the first variable or number below a node; the package gives lines to these only."""
    while not hasattr(node, "line"):
        node = node.children()[0]
    return int(node.line)


def _too_deep(text: str) -> int:
    """The line at which brackets are nested too deep, 0 if they are not."""
    data = np.frombuffer(re.sub(r";[^\n]*", "", text).encode(), dtype=np.uint8)
    depth = np.cumsum((data == ord("(")).astype(int) - (data == ord(")")))
    over = np.flatnonzero(depth > MAX_DEPTH)
    return int((data[: over[0]] == ord("\n")).sum()) + 1 if len(over) else 0


def _reason(message: str) -> str:
    """`:line: reason` from the package's message, which is JSON for what is wrong after parsing."""
    try:
        first = json.loads(message)["errors"][0]
        text = f"{first['message']}: {first['offendingSymbol']}. {first['hint']}"
        return f":{first['line']}: {text}"
    except (ValueError, KeyError, IndexError, TypeError):
        place = re.search(r"line (\d+)", message)
        return f"{':' + place[1] if place else ''}: {' '.join(message.split())}"
