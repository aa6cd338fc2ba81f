"""Values of nodes whose inputs are all constant."""

from __future__ import annotations

import operator
from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

from .context import Unsupported


def fold_node(node: ir.Node, inputs: list[Tensor | None]) -> Tensor:
    """Value of a node whose inputs are all constant and which onnxscript left standing."""
    if node.op_type == "ConstantOfShape":
        value = node.attributes.get_tensor("value", None)
        fill = 0.0 if value is None else value.numpy().reshape(-1)[0]
        shape = [] if inputs[0] is None else [int(v) for v in inputs[0]]
        return torch.from_numpy(np.full(shape, fill)).to(torch.float64)
    args = [x for x in inputs if x is not None]
    binary_ops: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "Add": operator.add,
        "Sub": operator.sub,
        "Mul": operator.mul,
        "Div": operator.truediv,
    }
    if node.op_type in binary_ops and len(args) == 2:
        return binary_ops[node.op_type](args[0], args[1])
    if node.op_type == "Expand" and len(args) == 2:
        shape = [int(v) for v in args[1]]
        return args[0] * torch.ones(shape, dtype=args[0].dtype)
    if node.op_type in ("Identity", "Cast") and args:
        return args[0]
    raise Unsupported("constant expression that could not be folded")
