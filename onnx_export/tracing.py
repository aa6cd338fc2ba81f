"""What has to hold while torch's exporters look at a module, and how they are called.

The module is in eval mode, its attention in plain sums and products, and operators of ours are their
contents; all of that is undone afterwards, whatever happens.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn_bounds.errors import first_line

from . import functions, ops
from .arguments import Arguments

EXPORTERS = ("auto", "dynamo", "torchscript")
DYNAMO_OPSETS = range(18, 100)  # as far as the installed torch goes: it says so itself
TORCHSCRIPT_OPSETS = range(9, 21)


class ExporterError(Exception):
    """torch could not export the module; the text is one line."""


@contextlib.contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Dropout off, batch statistics frozen; every part gets its own mode back."""
    modes = {part: part.training for part in model.modules()}
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # one fused kernel that no exporter knows
    try:
        model.eval()
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for part, mode in modes.items():  # `model.train` would set them all alike
            part.training = mode


def _plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`F.scaled_dot_product_attention` (without its dropout) in the operators that every exporter knows."""
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = (t.repeat_interleave(groups, -3) for t in (key, value))
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        n, m = int(query.shape[-2]), int(key.shape[-2])
        scores = scores + torch.full((n, m), float("-inf"), dtype=query.dtype).triu(1).to(query.device)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, float("-inf"))
    elif attn_mask is not None:
        scores = scores + attn_mask
    return torch.softmax(scores, -1) @ value


def _attention_of_heads(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *args: Any, **kwargs: Any
) -> Tensor:
    """`F.scaled_dot_product_attention` with an axis of heads, without which torch knows no Attention node."""
    if query.ndim != 3:
        return _SDPA(query, key, value, attn_mask, *args, **kwargs)
    if attn_mask is not None and attn_mask.ndim == 3:
        attn_mask = attn_mask.unsqueeze(1)
    q, k, v = (t.unsqueeze(1) for t in (query, key, value))
    return _SDPA(q, k, v, attn_mask, *args, **kwargs).squeeze(1)


_SDPA = F.scaled_dot_product_attention


@contextlib.contextmanager
def plain_attention(wanted: bool) -> Iterator[None]:
    """`F.scaled_dot_product_attention`, also inside torch's own layers, as products and a softmax.

    torch's exporters need opset 14 for it, scale both operands by a root of the scale, and from opset 23 on
    write an Attention node. Where that is wanted, the function stays one.
    """
    saved = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = _plain_attention if wanted else _attention_of_heads
    try:
        yield
    finally:
        F.scaled_dot_product_attention = saved


class _NoContext:
    """What `forward` of an autograd function saves its tensors on, where no gradient is wanted."""

    def save_for_backward(self, *tensors: Tensor) -> None:
        pass


def _expanded_distances(query: Tensor, key: Tensor) -> Tensor:
    """Squared distances as `‖q‖² − 2 q · k + ‖k‖²`: no tensor of all differences in the file."""
    norms = query.square().sum(-1, keepdim=True), key.square().sum(-1, keepdim=True).transpose(-2, -1)
    return norms[0] - 2.0 * (query @ key.transpose(-2, -1)) + norms[1]


@contextlib.contextmanager
def plain_operators() -> Iterator[None]:
    """Operators of ours are ordinary torch code: `apply` runs `forward`, and no `symbolic` is met."""
    own = [
        kind
        for module in (ops, functions)
        for kind in vars(module).values()
        if inspect.isclass(kind) and issubclass(kind, torch.autograd.Function)
    ]
    distances = ops.squared_distances
    try:
        for kind in own:
            setattr(kind, "apply", functools.partial(kind.forward, _NoContext()))  # noqa: B010
        setattr(ops, "squared_distances", _expanded_distances)  # noqa: B010
        yield
    finally:
        setattr(ops, "squared_distances", distances)  # noqa: B010
        for kind in own:
            delattr(kind, "apply")


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Nothing on stdout and stderr, from C++ either: the exporters print graphs and advice.

    Errors come as exceptions all the same.
    """
    streams = sys.stdout, sys.stderr
    for stream in streams:
        stream.flush()
    with contextlib.ExitStack() as stack:
        sink = stack.enter_context(tempfile.TemporaryFile())
        for number in (1, 2):
            saved = os.dup(number)
            stack.callback(os.close, saved)
            stack.callback(os.dup2, saved, number)
            os.dup2(sink.fileno(), number)
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        yield


def reason(error: BaseException) -> str:
    """The part of an exporter's message that says what went wrong, in one line."""
    chain: list[BaseException] = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and cause not in chain:
        chain.append(cause)
    cause = chain[-1]  # the innermost says why, those around it in which stage it was
    return f"{type(cause).__name__}: {first_line(cause)}"


def run(
    model: nn.Module,
    example: Arguments,
    file: Path,
    exporter: str,
    opset: int,
    plain: bool,
    inputs: Sequence[str],
    outputs: Sequence[str],
    dynamic: bool,
) -> None:
    """Call one of torch's exporters on a module in eval mode.

    Arguments:
        exporter: "dynamo" or "torchscript".
        plain: attention as products and a softmax.
        inputs, outputs: names in the file. dynamic: the batch is.

    Raises:
        ExporterError: with the reason, in one line.
    """
    options: dict[str, Any] = {"opset_version": opset, "input_names": [*inputs], "output_names": [*outputs]}
    names = list(example.tensors)
    if exporter == "torchscript":
        options["dynamo"] = False
        if dynamic:
            batched = [new for new, name in zip(inputs, names, strict=True) if name in example.batched]
            options["dynamic_axes"] = {name: {0: "batch"} for name in (*batched, *outputs)}
    else:
        options |= {"dynamo": True, "external_data": False, "verbose": False}
        if dynamic:
            size = torch.export.Dim("batch")
            options["dynamic_shapes"] = {n: {0: size} if n in example.batched else {} for n in names}
    try:
        with silent(), plain_operators(), plain_attention(plain), torch.no_grad():
            torch.onnx.export(model, example.args, str(file), kwargs=example.kwargs, **options)
    except Exception as e:
        raise ExporterError(reason(e)) from e
