"""The inputs that a torch module is exported with: their names, and which dimensions are the batch."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from attn_bounds.errors import InputError

Example = Tensor | Sequence[Tensor] | Mapping[str, Tensor]


@dataclass(frozen=True)
class Arguments:
    """What a module is called with.

    Attributes:
        tensors: by the name of the module's parameter, positional ones first.
        positional: how many of them are.
        batched: names of those whose first dimension is the batch.
    """

    tensors: dict[str, Tensor]
    positional: int
    batched: frozenset[str]

    @classmethod
    def of(cls, model: nn.Module, example: Example) -> Arguments:
        """The example as arguments; one is batched if its first dimension is that of the first one.

        Raises:
            InputError: not tensors, or not what the module takes.
        """
        kwargs: dict[str, Any] = dict(example) if isinstance(example, Mapping) else {}
        args: list[Any] = []
        if not isinstance(example, Mapping):
            args = [*example] if isinstance(example, (tuple, list)) else [example]
        given = [*args, *kwargs.values()]
        if not given or not all(isinstance(t, Tensor) for t in given):
            kinds = ", ".join(type(t).__name__ for t in given) or "nothing"
            raise InputError(
                f"the example must be a tensor, or several in a tuple or a dict; it holds {kinds}"
            )
        name = type(model).__name__
        known = _parameters(model, len(args))
        if len(args) > len(known):
            raise InputError(f"{name} takes ({', '.join(known)}); the example has {len(args)} inputs")
        if given[0].ndim == 0 or len(given[0]) == 0:
            raise InputError(f"the example has shape {tuple(given[0].shape)}; (batch, …) is needed")
        tensors = dict(zip([*known[: len(args)], *kwargs], given, strict=True))
        batched = {n for n, t in tensors.items() if t.ndim > 0 and len(t) == len(given[0])}
        return cls(tensors, len(args), frozenset(batched))

    @property
    def batch(self) -> int:
        return len(next(iter(self.tensors.values())))

    @property
    def args(self) -> tuple[Tensor, ...]:
        return tuple(self.tensors.values())[: self.positional]

    @property
    def kwargs(self) -> dict[str, Tensor]:
        return dict(list(self.tensors.items())[self.positional :])

    def resized(self, batch: int, seed: int | None = None) -> Arguments:
        """The same kind of inputs with another batch: rows over again, with a seed random ones of floats."""
        generator = None if seed is None else torch.Generator().manual_seed(seed)

        def like(x: Tensor) -> Tensor:
            if generator is not None and x.is_floating_point():
                return torch.randn((batch, *x.shape[1:]), generator=generator).to(x)
            return x[torch.arange(batch, device=x.device) % len(x)]

        tensors = {n: like(t) if n in self.batched else t for n, t in self.tensors.items()}
        return replace(self, tensors=tensors)

    def call(self, model: nn.Module) -> dict[str, Tensor]:
        """The module's results by name, without gradients.

        Raises:
            InputError: it fails, or returns no tensor.
        """
        name = type(model).__name__
        try:
            with torch.no_grad():
                found = model(*self.args, **self.kwargs)
        except Exception as e:
            shapes = ", ".join(str(tuple(t.shape)) for t in self.tensors.values())
            reason = next(iter(str(e).splitlines()), type(e).__name__)
            raise InputError(f"{name} fails on an input of shape {shapes} ({reason})") from e
        if isinstance(found, Tensor):
            return {"output": found}
        if isinstance(found, Mapping):
            named = {str(k): v for k, v in found.items() if isinstance(v, Tensor)}
        else:
            leaves = torch.utils._pytree.tree_leaves(found)
            named = {f"output_{i}": v for i, v in enumerate(leaves) if isinstance(v, Tensor)}
        if not named:
            raise InputError(f"{name} returns {type(found).__name__} without a tensor in it")
        return named


def _parameters(model: nn.Module, count: int) -> list[str]:
    """Names of the parameters that positional inputs go to, numbered where `forward` takes any number."""
    names: list[str] = []
    for name, parameter in inspect.signature(model.forward).parameters.items():
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            return [*names, *(f"{name}_{i}" for i in range(count - len(names)))]
        if parameter.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD):
            names.append(name)
    return names
