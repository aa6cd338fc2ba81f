"""VNN-LIB files of both versions, plain or compressed."""

from __future__ import annotations

import math
from pathlib import Path

from .errors import InputError
from .properties import Property, Variable
from .vnnlib_cases import Constraints
from .vnnlib_tree import is_version_2, read_text


def read_vnnlib(
    path: str | Path, input_shape: tuple[int, ...] | None = None, outputs: int | None = None
) -> Property:
    """Read a VNN-LIB property, version 1.0 or 2.0, plain or compressed with gzip (all told by content).

    The file describes the UNSAFE region: a set of inputs and outputs that must not occur there. Disjunctions
    over inputs give several cases; branches that no input satisfies are left out, and if none is left the
    property has no case and a warning. Input sets are closed and `InputSet.inner` knows strict bounds; rows
    on outputs know whether they are strict.

    input_shape: features of one input without the batch axis, to check the number of inputs and to shape the
        sets, which are float64 (1, *input_shape); None for (1, number of inputs). Several inputs are taken
        one after the other, flattened, in the order of their declaration.
    outputs: number of output values, all outputs together.

    Raises InputError that names file and line for what cannot be read or is not supported: an input without a
    bound or in a constraint with other variables, a non-linear term (but for one l2 ball over the inputs in a
    2.0 file), a property of another model."""
    text = read_text(path)
    reader: Constraints
    declared: tuple[tuple[Variable, ...], tuple[Variable, ...]] = ((), ())
    if is_version_2(text):
        from . import vnnlib2  # its package is not needed for 1.0

        reader = vnnlib2.Reader(path, text)
        declared = (reader.inputs, reader.outputs)
        count_x, count_y = reader.count(reader.inputs), reader.count(reader.outputs)
    else:
        from . import vnnlib1

        reader = vnnlib1.Reader(path, text)
        reader.read()
        count_x, count_y = reader.counts()
    if input_shape is not None and math.prod(input_shape) != count_x:
        raise InputError(
            f"{path}: declares {count_x} inputs{_shapes(declared[0])}, but an input of shape "
            f"{tuple(input_shape)} has {math.prod(input_shape)} values; give the property of this model"
        )
    if outputs is not None and outputs != count_y:
        raise InputError(
            f"{path}: declares {count_y} outputs{_shapes(declared[1])}, but the model has {outputs}"
        )
    cases, warning = reader.cases(input_shape or (count_x,), count_x, count_y)
    return Property(_stem(path), cases, *declared, warning)


def _shapes(variables: tuple[Variable, ...]) -> str:
    return f" ({', '.join(f'{v.name} {list(v.shape)}' for v in variables)})" if variables else ""


def _stem(path: str | Path) -> str:
    return Path(path).name.removesuffix(".gz").removesuffix(".vnnlib")
