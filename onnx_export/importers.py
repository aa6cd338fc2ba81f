"""One small function per ONNX operator: node → function of tensors.

An importer sees the node, its constant inputs (None where an input is data) and the shapes of one sample;
it returns a torch function of the data inputs. What it emits is a small vocabulary (linear maps, `x * c`,
`x + c`, reshapes that keep the batch, activations, the attention operators) that every version of
auto_LiRPA bounds correctly. Constants are computed in float64 and rounded once.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
import torch
import torch.nn.functional as F
from torch import Tensor

from attn_bounds.sensitivity.softmax import FULLY_MASKED

from . import ops

Function = Callable[..., Tensor]


class Unsupported(Exception):
    """Raised by an importer: this node cannot be imported, with the reason."""


@dataclass
class Context:
    """What an importer may know about its node."""

    node: ir.Node
    opset: int
    constants: list[Tensor | None]  # per input: float64 (or integer) tensor, or None for data and absent ones
    present: list[bool]  # per input: given at all
    out_shapes: list[tuple[int, ...]]  # per output, with batch 1
    shapes: list[tuple[int, ...]]  # per input, with batch 1
    parameter: Callable[[Tensor], Callable[[], Tensor]]  # stores a constant in the module, returns its getter

    @property
    def out_shape(self) -> tuple[int, ...]:
        return self.out_shapes[0]

    def attr_int(self, name: str, default: int) -> int:
        return int(self.node.attributes.get_int(name, default))

    def attr_ints(self, name: str) -> list[int] | None:
        value = self.node.attributes.get_ints(name, None)
        return None if value is None else [int(v) for v in value]

    def attr_float(self, name: str, default: float) -> float:
        return float(self.node.attributes.get_float(name, default))

    def constant(self, i: int, what: str) -> Tensor:
        c = self.constants[i] if i < len(self.constants) else None
        if c is None:
            raise Unsupported(f"{what} must be a constant")
        return c

    def optional(self, i: int) -> Tensor | None:
        return self.constants[i] if i < len(self.constants) else None

    def ints(self, i: int, name: str) -> list[int] | None:
        """Integers given as an attribute (old opsets) or as constant input i (newer ones)."""
        if (value := self.attr_ints(name)) is not None:
            return value
        if i < len(self.present) and self.present[i]:
            return [int(v) for v in self.constant(i, name).flatten()]
        return None

    def axis(self, axis: int) -> int:
        """Non-negative axis of input 0; refuses the batch axis."""
        axis = axis + len(self.shapes[0]) if axis < 0 else axis
        if axis == 0:
            raise Unsupported("acts on the batch axis")
        return axis

    def unbatched(self, c: Tensor) -> Tensor:
        """A constant without a batch dimension of its own (auto_LiRPA wants constants so)."""
        if c.ndim == len(self.out_shape) and c.ndim > 0:
            if c.shape[0] != 1:
                raise Unsupported(f"a constant of shape {tuple(c.shape)} varies over the batch")
            c = c[0]
        return c


def _reshape_to(shape: Sequence[int]) -> Function:
    if len(shape) < 2 or shape[0] != 1:
        raise Unsupported(
            f"result shape {tuple(shape)} (for batch 1) does not keep the batch as first dimension"
        )
    target = (-1, *shape[1:])
    return lambda x: x.reshape(target)


def _add_constant(ctx: Context, c: Tensor) -> Function:
    get = ctx.parameter(ctx.unbatched(c))
    return lambda x: x + get()


def _mul_constant(ctx: Context, c: Tensor) -> Function:
    get = ctx.parameter(ctx.unbatched(c))
    return lambda x: x * get()


def binary(ctx: Context) -> Function:
    op, (a, b) = ctx.node.op_type, ctx.constants[:2]
    data_rank = max((len(s) for s, c in zip(ctx.shapes, ctx.constants, strict=True) if c is None), default=0)
    if data_rank < len(ctx.out_shape):
        raise Unsupported("a constant of higher rank than the data would shift the batch dimension")
    if op == "Add":
        if b is not None:
            return _add_constant(ctx, b)
        return _add_constant(ctx, a) if a is not None else lambda x, y: x + y
    if op == "Sub":
        if b is not None:
            return _add_constant(ctx, -b)
        if a is not None:
            get = ctx.parameter(ctx.unbatched(a))
            return lambda x: x * -1.0 + get()
        return lambda x, y: x + y * -1.0
    if op == "Mul":
        if b is not None:
            return _mul_constant(ctx, b)
        return _mul_constant(ctx, a) if a is not None else lambda x, y: x * y
    if b is not None:  # Div
        if bool((b == 0).any()):
            raise Unsupported("division by a constant zero")
        return _mul_constant(ctx, 1.0 / b)
    raise Unsupported("division by a tensor that depends on the input")


def neg(ctx: Context) -> Function:
    return lambda x: x * -1.0


def unary(f: Function) -> Callable[[Context], Function]:
    return lambda ctx: f


def leaky_relu(ctx: Context) -> Function:
    slope = ctx.attr_float("alpha", 0.01)
    return lambda x: F.leaky_relu(x, slope)


def matmul(ctx: Context) -> Function:
    a, b = ctx.constants[:2]
    if b is not None:
        while b.ndim > 2 and b.shape[0] == 1:
            b = b[0]
        if b.ndim != 2:
            raise Unsupported(f"product with a constant of rank {b.ndim}")
        get = ctx.parameter(b)
        return lambda x: torch.matmul(x, get())
    if a is not None:
        while a.ndim > 2 and a.shape[0] == 1:
            a = a[0]
        if a.ndim != 2:
            raise Unsupported(f"product with a constant of rank {a.ndim}")
        get = ctx.parameter(a.T)
        return lambda x: torch.matmul(x.transpose(-2, -1), get()).transpose(-2, -1)
    if min(len(s) for s in ctx.shapes[:2]) < 3:
        raise Unsupported("product of two tensors without a batch dimension")
    return torch.matmul


def gemm(ctx: Context) -> Function:
    alpha, beta = ctx.attr_float("alpha", 1.0), ctx.attr_float("beta", 1.0)
    if ctx.attr_int("transA", 0) or ctx.constants[0] is not None:
        raise Unsupported("Gemm with a transposed or constant first operand")
    weight = ctx.constant(1, "the weight") * alpha
    weight = weight if ctx.attr_int("transB", 0) else weight.T
    w, bias = ctx.parameter(weight), ctx.optional(2)
    if bias is None:
        zero = ctx.parameter(torch.zeros(weight.shape[0], dtype=torch.float64))
        return lambda x: F.linear(x, w(), zero())
    b = ctx.parameter(torch.broadcast_to(bias * beta, (1, weight.shape[0]))[0])
    return lambda x: F.linear(x, w(), b())


def conv(ctx: Context) -> Function:
    weight = ctx.constant(1, "the weight")
    dims = weight.ndim - 2
    if dims not in (1, 2):
        raise Unsupported(f"convolution over {dims} dimensions")
    pads = ctx.attr_ints("pads") or [0] * (2 * dims)
    auto = ctx.node.attributes.get_string("auto_pad", "NOTSET")
    if auto not in ("NOTSET", "VALID") or pads[:dims] != pads[dims:]:
        raise Unsupported(f"asymmetric padding (auto_pad={auto}, pads={pads})")
    stride = ctx.attr_ints("strides") or [1] * dims
    dilation = ctx.attr_ints("dilations") or [1] * dims
    group = ctx.attr_int("group", 1)
    bias = ctx.optional(2)
    if bias is None:
        bias = torch.zeros(weight.shape[0], dtype=torch.float64)
    w, b = ctx.parameter(weight), ctx.parameter(bias)
    run = F.conv1d if dims == 1 else F.conv2d
    padding = pads[:dims]
    return lambda x: run(x, w(), b(), stride, padding, dilation, group)


def batch_normalization(ctx: Context) -> Function:
    """Inference mode, any rank: x * scale + shift over axis 1."""
    if ctx.attr_int("training_mode", 0):
        raise Unsupported("training_mode=1; export the model in eval mode")
    weight, bias, mean, var = (ctx.constant(i, "its parameter") for i in range(1, 5))
    scale = weight / torch.sqrt(var + ctx.attr_float("epsilon", 1e-5))
    shape = (-1,) + (1,) * (len(ctx.out_shape) - 2)
    s, t = ctx.parameter(scale.reshape(shape)), ctx.parameter((bias - mean * scale).reshape(shape))
    return lambda x: x * s() + t()


def reshape(ctx: Context) -> Function:
    return _reshape_to(ctx.out_shape)


def transpose(ctx: Context) -> Function:
    perm = ctx.attr_ints("perm") or list(range(len(ctx.out_shape)))[::-1]
    if perm[0] != 0:
        raise Unsupported(f"perm {perm} moves the batch axis")
    return lambda x: x.permute(perm)


def concat(ctx: Context) -> Function:
    """Constants (a class token, say) enter as a linear placement plus a constant: no copy per sample."""
    axis = ctx.axis(ctx.attr_int("axis", 0))
    if all(c is None for c in ctx.constants):
        return lambda *xs: torch.cat(xs, axis)
    sizes = [s[axis] for s in ctx.shapes]
    fill = torch.zeros(ctx.out_shape, dtype=torch.float64)
    columns, start = [], 0
    for c, size in zip(ctx.constants, sizes, strict=True):
        if c is None:
            columns += list(range(start, start + size))
        else:
            fill.narrow(axis, start, size).copy_(c)
        start += size
    place = torch.zeros(len(columns), start, dtype=torch.float64)
    place[torch.arange(len(columns)), torch.tensor(columns)] = 1.0
    get_place, get_fill = ctx.parameter(place), ctx.parameter(ctx.unbatched(fill))
    last = len(ctx.out_shape) - 1
    perm = list(range(last + 1))
    perm[axis], perm[last] = last, axis

    def run(*xs: Tensor) -> Tensor:
        x = xs[0] if len(xs) == 1 else torch.cat(xs, axis)
        if axis == last:
            return torch.matmul(x, get_place()) + get_fill()
        return torch.matmul(x.permute(perm), get_place()).permute(perm) + get_fill()

    return run


def split(ctx: Context) -> list[Function]:
    axis = ctx.axis(ctx.attr_int("axis", 0))
    functions, start = [], 0
    for shape in ctx.out_shapes:
        functions.append(_select(ctx, axis, list(range(start, start + shape[axis])), keep=True))
        start += shape[axis]
    return functions


def _select(ctx: Context, axis: int, indices: list[int], keep: bool) -> Function:
    """Entries of one axis, as a product with a 0/1 matrix (an operation every version bounds exactly)."""
    size, last = ctx.shapes[0][axis], len(ctx.shapes[0]) - 1
    pick = torch.zeros(size, len(indices), dtype=torch.float64)
    pick[torch.tensor(indices), torch.arange(len(indices))] = 1.0
    get = ctx.parameter(pick)
    perm = list(range(last + 1))
    perm[axis], perm[last] = last, axis
    shape = (-1, *ctx.out_shape[1:])

    def run(x: Tensor) -> Tensor:
        y = torch.matmul(x.permute(perm), get()).permute(perm)  # perm is the identity for the last axis
        return y if keep else y.reshape(shape)

    return run


def gather(ctx: Context) -> Function:
    axis = ctx.axis(ctx.attr_int("axis", 0))
    index = ctx.constant(1, "the index")
    if index.ndim > 1:
        raise Unsupported(f"index of rank {index.ndim}")
    size = ctx.shapes[0][axis]
    return _select(ctx, axis, [int(i) % size for i in index.flatten()], keep=index.ndim == 1)


def slice_(ctx: Context) -> Function:
    starts, ends = ctx.ints(1, "starts"), ctx.ints(2, "ends")
    if starts is None or ends is None:
        raise Unsupported("starts and ends must be constants")
    axes = ctx.ints(3, "axes") or list(range(len(starts)))
    steps = ctx.ints(4, "steps") or [1] * len(starts)
    active = []
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        size = ctx.shapes[0][axis]
        indices = list(range(size))[slice(start, end if abs(end) < 2**31 else None, step)]
        if len(indices) != size:
            active.append((ctx.axis(axis), indices))
        elif step != 1:
            raise Unsupported(f"step {step}")
    if len(active) > 1:
        raise Unsupported("slices along several axes at once")
    if not active:
        return lambda x: x
    return _select(ctx, *active[0], keep=True)


def reduce_mean(ctx: Context) -> Function:
    axes = ctx.ints(1, "axes")
    if axes is None:
        raise Unsupported("mean over all axes, the batch included")
    axes = sorted(ctx.axis(a) for a in axes)
    keep = bool(ctx.attr_int("keepdims", 1))
    count = math.prod(ctx.shapes[0][a] for a in axes)
    if ctx.node.op_type == "ReduceMean":
        return lambda x: torch.mean(x, axes, keepdim=keep)
    return lambda x: torch.mean(x, axes, keepdim=keep) * float(count)


def softmax(ctx: Context) -> Function:
    last = len(ctx.shapes[0]) - 1
    axis = ctx.axis(ctx.attr_int("axis", 1 if ctx.opset < 13 else -1))
    if ctx.opset < 13 and math.prod(ctx.shapes[0][axis + 1 :]) != 1:
        raise Unsupported("Softmax of an opset below 13 over several axes at once")
    if axis != last:
        perm = list(range(last + 1))
        perm[axis], perm[last] = last, axis
        return lambda x: torch.softmax(x.permute(perm), -1).permute(perm)
    return lambda x: torch.softmax(x, -1)


def identity(ctx: Context) -> Function:
    return lambda x: x


def cast(ctx: Context) -> Function:
    if ctx.attr_int("to", 1) not in (ir.DataType.FLOAT, ir.DataType.DOUBLE):
        raise Unsupported("cast of data to a type that is not float or double")
    return lambda x: x


def attention_scores(ctx: Context) -> Function:
    scores = ops.l2_scores if ctx.node.op_type == "L2Scores" else ops.attention_scores
    scale = ctx.attr_float("scale", 1.0)
    mask = ctx.optional(2)
    if mask is None:
        return lambda q, k: scores(q, k, scale=scale)
    if bool((mask <= FULLY_MASKED).all(-1).any()):
        raise Unsupported("the mask excludes every key of some query")
    # −inf would turn into NaN as soon as it is multiplied by a zero coefficient; e^−1e9 is 0 all the same.
    get = ctx.parameter(ctx.unbatched(mask).clamp(min=-1e9))
    return lambda q, k: scores(q, k, get(), scale=scale)


# an importer returns one function, or a list with one per output
IMPORTERS: dict[tuple[str, str], Callable[[Context], Function | list[Function]]] = {
    ("", "Add"): binary,
    ("", "Sub"): binary,
    ("", "Mul"): binary,
    ("", "Div"): binary,
    ("", "Neg"): neg,
    ("", "Relu"): unary(torch.relu),
    ("", "LeakyRelu"): leaky_relu,
    ("", "Tanh"): unary(torch.tanh),
    ("", "Sigmoid"): unary(torch.sigmoid),
    ("", "MatMul"): matmul,
    ("", "Gemm"): gemm,
    ("", "Conv"): conv,
    ("", "BatchNormalization"): batch_normalization,
    ("", "Reshape"): reshape,
    ("", "Flatten"): reshape,
    ("", "Squeeze"): reshape,
    ("", "Unsqueeze"): reshape,
    ("", "Transpose"): transpose,
    ("", "Concat"): concat,
    ("", "Gather"): gather,
    ("", "Slice"): slice_,
    ("", "Split"): split,
    ("", "ReduceMean"): reduce_mean,
    ("", "ReduceSum"): reduce_mean,
    ("", "Softmax"): softmax,
    ("", "Identity"): identity,
    ("", "Dropout"): identity,
    ("", "Cast"): cast,
    (ops.DOMAIN, "AttentionScores"): attention_scores,
    (ops.DOMAIN, "L2Scores"): attention_scores,
    (ops.DOMAIN, "AttentionWeights"): unary(ops.attention_weights),
    (ops.DOMAIN, "AttentionAverage"): unary(ops.attention_average),
}


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
