"""Certificates and certified radii in one call each.

A certificate is about the model in real arithmetic on its stored weights: every margin bound has a rounding
slack taken off, and what comes out NaN or infinite counts as unknown. A counterexample is one of the ONNX
file itself: onnxruntime's own output must violate strictly.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from .errors import InputError, first_line
from .loading import example_for, exported
from .results import Certificate, Radius
from .verifier import Verifier, check_method

if TYPE_CHECKING:
    from onnx_export.given import Fixed, Sizes


def certify(
    model: str | Path | nn.Module | Verifier,
    x: Tensor,
    label: int | Sequence[int] | Tensor,
    *,
    norm: float = math.inf,
    eps: float,
    method: str = "auto",
    targets: Sequence[int] | None = None,
    top_k: int = 1,
    clip: tuple[float, float] | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    attack: bool = True,
    restarts: int = 10,
    steps: int = 50,
    seed: int = 0,
    timeout: float | None = None,
    memory: str | float | None = None,
    shape: Sizes | None = None,
    fix: Fixed | None = None,
    input_node: str | None = None,
) -> Certificate | list[Certificate]:
    """Certify that the class of x cannot change within an lp ball.

    Arguments:
        model: ONNX file, torch module, or a `Verifier` (then dtype, device, mean, std, and how the file is
            entered, are its own). A torch module is exported and loaded for each call: for many calls
            `Verifier(load(module, x))` does that once.
        x: (*input) or (1, *input) with an integer label, or (batch, *input) with a sequence of labels. Behind
            the embedding where the file takes integers: `onnx_export.Oracle(path).embed(ids)` gives it.
        label: class of x; for a model with one output 0 or 1; a place in the flattened output with tokens.
        norm: 1, 2 or inf. eps: radius in the units of x, or in pixel units where mean/std are given.
        method: one of `METHODS`.
        targets: certify against these classes only. top_k: the label stays among the k largest.
        clip: (lowest, highest) valid value of an input entry; the ball is intersected with it.
        timeout: seconds per input; memory: bytes or "4GB" per input. Kept in a child process, hence not for
            a `Verifier`.
        shape, fix, input_node: how a file is entered, as in `onnx_export.load`.

    Returns:
        `Certificate`, or a list of them for a batch.

    Raises:
        InputError: anything wrong with the arguments or the model.
    """
    check_method(method)
    x, (single, labels) = _tensor(x), _labels(label)
    samples = [x] if single else list(x)
    if len(samples) != len(labels):
        raise InputError(f"{len(samples)} inputs but {len(labels)} labels")
    job: dict[str, Any] = {
        "method": method,
        "attack": attack,
        "restarts": restarts,
        "steps": steps,
        "seed": seed,
    }
    ball: dict[str, Any] = {"norm": norm, "eps": eps, "targets": targets, "top_k": top_k, "clip": clip}
    entered = {"shape": shape, "fix": fix, "input_node": input_node}
    options: dict[str, Any] = {"dtype": dtype, "device": str(device), "mean": mean, "std": std, **entered}
    if timeout is not None or memory is not None:
        from .limits import LimitedVerifier

        with _file(model, samples[0]) as path:
            if not isinstance(path, (str, Path)):
                raise InputError(
                    "time and memory limits need the model as a path or torch module, not loaded already: "
                    "they run it in a child process"
                )
            with LimitedVerifier(path, timeout=timeout, memory=memory, **options) as limited:
                results = [
                    limited.certify_input(s, y, **ball, **job) for s, y in zip(samples, labels, strict=True)
                ]
        return results[0] if single else results
    with _verifier(model, samples[0], **options) as verifier:
        results = verifier.certify_inputs(samples, labels, **ball, **job)
    return results[0] if single else results


def _tensor(x: Any) -> Tensor:
    try:
        return torch.as_tensor(x)
    except (TypeError, ValueError, RuntimeError) as e:
        raise InputError(f"x is no tensor or array of numbers ({first_line(e)})") from None


def _labels(label: Any) -> tuple[bool, list[int]]:
    """Whether it is one label, and the labels; from integers, arrays and tensors of integers."""
    try:
        found = np.asarray(label.cpu() if isinstance(label, Tensor) else label)
    except ValueError:
        found = np.asarray("")
    if found.dtype.kind not in "iu" or found.ndim > 1:
        raise InputError(f"label {label!r}: an integer is needed, or a sequence of them, one per input")
    return found.ndim == 0, [int(v) for v in found.reshape(-1)]


def _sample_shape(x: Tensor) -> tuple[int, ...]:
    shape = tuple(x.shape)
    return shape[1:] if len(shape) > 1 and shape[0] == 1 else shape


@contextlib.contextmanager
def _file(model: str | Path | nn.Module | Verifier, x: Tensor) -> Iterator[str | Path | nn.Module | Verifier]:
    """A torch module as an ONNX file, which is there for a while; what is loaded or a file as it is."""
    from onnx_export import OnnxModule

    if not isinstance(model, nn.Module) or isinstance(model, OnnxModule):
        yield model
        return
    with exported(model, example_for(model, x.reshape(_sample_shape(x)))) as path:
        yield path


@contextlib.contextmanager
def _verifier(model: str | Path | nn.Module | Verifier, x: Tensor, **options: Any) -> Iterator[Verifier]:
    """A verifier, or a new one for the model, with an input of which x is one."""
    with _file(model, x) as source:
        if isinstance(source, Verifier):
            yield source
            return
        shape = _sample_shape(x) if isinstance(source, nn.Module) else None
        verifier = Verifier(source, input_shape=shape, **options)
        if source is not model:
            verifier.model_sha256 = ""  # of a file that nobody has
        yield verifier


def invariances(model: str | Path | nn.Module | Verifier, input_shape: Sequence[int] | None = None) -> Tensor:
    """Input directions that provably change nothing: the null space of the first linear layer.

    A patch embedding maps r·r·3 pixels to fewer features; what it drops, at any size, no later layer sees.

    Arguments:
        model: ONNX file, torch module (then with `input_shape`, without the batch), or a `Verifier`.

    Returns:
        (k, *input) orthonormal basis, float64; k = 0 if there is none.

    Raises:
        InputError: the model cannot be loaded, or its input does not go into a single linear layer.
    """
    if isinstance(model, nn.Module) and input_shape is None:
        raise InputError("a torch module needs input_shape, the shape of one input without the batch")
    with _verifier(model, torch.zeros((1, *(input_shape or ())))) as verifier:
        return verifier.graph(stock=False).domain().invariances()


def certified_radius(
    model: str | Path | nn.Module | Verifier,
    x: Tensor,
    label: int,
    *,
    norm: float = 2.0,
    method: str = "auto",
    targets: Sequence[int] | None = None,
    top_k: int = 1,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    shape: Sizes | None = None,
    fix: Fixed | None = None,
    input_node: str | None = None,
    **kwargs: Any,
) -> Radius:
    """Largest radius around x that `method` certifies; arguments as in `certify` and
    `Verifier.certified_radius`."""
    check_method(method)
    x, (single, labels) = _tensor(x), _labels(label)
    if not single:
        raise InputError("one input and one label are needed; call it for each input of a batch")
    entered = {"shape": shape, "fix": fix, "input_node": input_node}
    options: dict[str, Any] = {"dtype": dtype, "device": device, "mean": mean, "std": std, **entered}
    with _verifier(model, x, **options) as verifier:
        spec = verifier.specification(labels[0], targets, top_k)
        return verifier.certified_radius(x, spec, norm=norm, method=method, **kwargs)
