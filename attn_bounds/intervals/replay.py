"""Points of a query in onnxruntime: witnesses are replayed, and intervals are compared with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from ..errors import UnsupportedModelError
from .inputs import NUMPY, Variable
from .network import Network
from .query import All, Atom, Formula, Query

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Witness:
    """Values that satisfy a query, one array per variable, in the order of declaration."""

    variables: tuple[Variable, ...]
    values: tuple[Array, ...]


class Replay:
    """The networks of a query in onnxruntime, on one thread."""

    def __init__(self, query: Query) -> None:
        self.query = query
        self._sessions: dict[int, Any] = {}

    def values(self, point: Array) -> list[Array]:
        """The values of all variables at inputs (n,), as float64 or whole numbers, in their shapes."""
        result: list[Array | None] = [None] * len(self.query.variables)
        for use, network in enumerate(self.query.uses):
            feed = {}
            for v in self.query.inputs.variables:
                if v.use == use:
                    part = point[v.first : v.first + v.size].reshape(v.shape)
                    feed[v.tensor] = part.astype(NUMPY.get(v.stored, v.stored))
            wanted = [(i, v) for i, v in enumerate(self.query.variables) if v.use == use]
            names = [v.tensor for _, v in wanted if v.kind != "input"]
            session = self._session(network)
            try:
                outputs = session.run(names, feed)
            except Exception as error:
                reason = str(error).splitlines()[0]
                raise UnsupportedModelError(f"{network.path}: onnxruntime cannot run it: {reason}") from error
            found = iter(outputs)
            for i, v in wanted:
                result[i] = np.asarray(feed[v.tensor] if v.kind == "input" else next(found))
        return [v for v in result if v is not None]

    def satisfied(self, values: Sequence[Array]) -> bool:
        """Whether values satisfy the formula exactly, with the numbers as they are written."""
        if not all(np.isfinite(v.astype(np.float64)).all() for v in values):
            return False
        return _holds(self.query.formula, [v.ravel() for v in values])

    def witness(self, values: Sequence[Array]) -> Witness:
        return Witness(tuple(self.query.variables), tuple(values))

    def _session(self, network: Network) -> Any:
        if id(network) not in self._sessions:
            import onnx
            import onnxruntime

            model = onnx.ModelProto()
            model.CopyFrom(network.model)
            present = {o.name for o in model.graph.output} | {i.name for i in model.graph.input}
            for v in self.query.variables:
                if v.kind == "hidden" and self.query.uses[v.use] is network and v.tensor not in present:
                    model.graph.output.append(onnx.ValueInfoProto(name=v.tensor))
                    present.add(v.tensor)
            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads = options.inter_op_num_threads = 1
            options.log_severity_level = 4
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
            try:
                self._sessions[id(network)] = onnxruntime.InferenceSession(
                    model.SerializeToString(), options, providers=["CPUExecutionProvider"]
                )
            except Exception as error:
                reason = str(error).splitlines()[0]
                raise UnsupportedModelError(
                    f"{network.path}: onnxruntime cannot load it: {reason}"
                ) from error
        return self._sessions[id(network)]


def _holds(formula: Formula, values: Sequence[Array]) -> bool:
    if isinstance(formula, Atom):
        total = Fraction(0)
        for monomial, factor in formula.exact.items():
            term = factor
            for number, index in monomial:
                term *= Fraction(values[number][index].item())
            total += term
        return {"<": total < 0, "<=": total <= 0, "=": total == 0, "!=": total != 0}[formula.sign]
    check = all if isinstance(formula, All) else any
    return check(_holds(p, values) for p in formula.parts)
