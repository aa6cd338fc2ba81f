"""Certificates and certified radii in one call each.

A certificate is about the model in real arithmetic on its stored weights: every margin bound has a rounding
slack taken off, and what comes out NaN or infinite counts as unknown. A counterexample is one of the ONNX
file itself: onnxruntime's own output must violate strictly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .errors import InputError
from .results import Certificate, Radius
from .verifier import Verifier, check_method


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
) -> Certificate | list[Certificate]:
    """Certify that the class of x cannot change within an lp ball.

    Arguments:
        model: ONNX file, torch module, or a `Verifier` (then dtype, device, mean and std are its own).
        x: (*input) or (1, *input) with an integer label, or (batch, *input) with a sequence of labels.
        label: class of x; for a model with one output 0 or 1.
        norm: 1, 2 or inf. eps: radius in the units of x, or in pixel units where mean/std are given.
        method: one of `METHODS`.
        targets: certify against these classes only. top_k: the label stays among the k largest.
        clip: (lowest, highest) valid value of an input entry; the ball is intersected with it.
        timeout: seconds per input; memory: bytes or "4GB" per input. Kept in a child process, hence only
            for a model given as a path.

    Returns:
        `Certificate`, or a list of them for a batch.

    Raises:
        InputError: anything wrong with the arguments or the model.
    """
    check_method(method)
    x = torch.as_tensor(x)
    single = isinstance(label, int) or (isinstance(label, Tensor) and label.ndim == 0)
    labels = [int(label)] if single else [int(v) for v in label]  # type: ignore[arg-type, union-attr]
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
    if timeout is not None or memory is not None:
        from .limits import LimitedVerifier

        if not isinstance(model, (str, Path)):
            raise InputError(
                "time and memory limits need a model given as a path: they run it in a child process"
            )
        with LimitedVerifier(
            model, timeout=timeout, memory=memory, dtype=dtype, device=str(device), mean=mean, std=std
        ) as limited:
            results = [
                limited.certify_input(
                    s, y, norm=norm, eps=eps, targets=targets, top_k=top_k, clip=clip, **job
                )
                for s, y in zip(samples, labels, strict=True)
            ]
        return results[0] if single else results
    verifier = (
        model if isinstance(model, Verifier) else _verifier(model, samples[0], dtype, device, mean, std)
    )
    results = verifier.certify_inputs(
        samples, labels, norm=norm, eps=eps, targets=targets, top_k=top_k, clip=clip, **job
    )
    return results[0] if single else results


def _verifier(
    model: str | Path | nn.Module,
    x: Tensor,
    dtype: torch.dtype,
    device: str | torch.device,
    mean: Sequence[float] | None,
    std: Sequence[float] | None,
) -> Verifier:
    shape = tuple(x.shape) if isinstance(model, nn.Module) else None
    if shape is not None and shape[0] == 1 and len(shape) > 1:
        shape = shape[1:]
    return Verifier(model, input_shape=shape, dtype=dtype, device=device, mean=mean, std=std)


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
    verifier = model if isinstance(model, Verifier) else Verifier(model, input_shape=input_shape)
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
    **kwargs: Any,
) -> Radius:
    """Largest radius around x that `method` certifies; arguments as in `certify` and
    `Verifier.certified_radius`."""
    check_method(method)
    verifier = model if isinstance(model, Verifier) else _verifier(model, x, dtype, device, mean, std)
    spec = verifier.specification(int(label), targets, top_k)
    return verifier.certified_radius(x, spec, norm=norm, method=method, **kwargs)
