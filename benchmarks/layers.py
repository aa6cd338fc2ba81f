"""Attention layers to measure bounds on, their function, and what ascent finds. A library, not a script.

The shared Vision Transformers are looked for in `../shared/data/vnncomp_vit`; without them their layers are
left out, with a line on stderr.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from attn_bounds.sensitivity.l2_attention import L2SelfAttention
from attn_bounds.sensitivity.layer import AttentionLayer
from onnx_export import OnnxModule, load
from onnx_export.load import Step

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT.parent / "shared" / "data" / "vnncomp_vit"
PROPERTIES = {"pgd_2_3_16": "pgd_2_3_16_4021", "ibp_3_3_8": "ibp_3_3_8_9119"}  # whose centre is the image
AFFINE = {"BatchNormalization", "Add", "Mul", "Sub", "Div", "MatMul", "Reshape", "Transpose", "Identity"}
Function = Callable[[Tensor], Tensor]


class Example(NamedTuple):
    """A layer at a clean input.

    Attributes:
        name: where it is from. group: "random" or "models".
        layer: weights, float64; or an L2 self-attention.
        x: (n, d), float64.
        queries: None, or in cross-attention how many rows of x the queries are; the others are the context.
    """

    name: str
    group: str
    layer: AttentionLayer | L2SelfAttention
    x: Tensor
    queries: int | None = None


def function(layer: AttentionLayer | L2SelfAttention, queries: int | None = None) -> Function:
    """What the layer computes: (…, n, d) → (…, n, d_out), or → (…, queries, d_out); see `Example`."""
    if isinstance(layer, L2SelfAttention):
        l2: L2SelfAttention = layer
        return lambda x: l2(x.reshape(-1, *x.shape[-2:])).reshape(x.shape)
    dot: AttentionLayer = layer
    if dot.groups != dot.heads or isinstance(dot.skip, Tensor):
        raise ValueError("only layers with a key head per head and a plain skip connection")
    hidden = None if dot.mask is None else ~dot.mask

    def heads(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        y = x @ w if b is None else x @ w + b
        return y.unflatten(-1, (dot.heads, -1)).transpose(-3, -2)

    def run(x: Tensor) -> Tensor:
        y, c = (x, x) if queries is None else (x[..., :queries, :], x[..., queries:, :])
        q, k, v = heads(y, dot.w_q, dot.b_q), heads(c, dot.w_k, dot.b_k), heads(c, dot.w_v, dot.b_v)
        scores = dot.factor() * q @ k.mT
        p = torch.softmax(scores if hidden is None else scores.masked_fill(hidden, -torch.inf), -1)
        out = (p @ v).transpose(-3, -2).flatten(-2) @ dot.w_o
        out = out if dot.b_o is None else out + dot.b_o
        return out + y if dot.skip else out

    return run


def per_head(layer: AttentionLayer) -> dict[str, Any]:
    """The layer as arguments of the functions in `attn_bounds.sensitivity.baselines`."""

    def split(w: Tensor) -> Tensor:
        return w.unflatten(1, (layer.heads, -1)).transpose(0, 1)

    return {
        "w_q": split(layer.w_q),
        "w_k": split(layer.w_k),
        "w_v": split(layer.w_v),
        "w_o": layer.w_o.unflatten(0, (layer.heads, -1)),
        "scale": layer.factor(),
        "skip": float(bool(layer.skip)),
        "b_q": None if layer.b_q is None else layer.b_q.unflatten(0, (layer.heads, -1)),
    }


def random_layer(heads: int, n: int = 16, d: int = 24, seed: int = 0, skip: bool = False) -> Example:
    """Normal weights of variance 1/d, normal tokens of variance 1; heads of width d / heads, no biases."""
    g = torch.Generator().manual_seed(seed)

    def weight() -> Tensor:
        return torch.randn((d, d), generator=g, dtype=torch.float64) / d**0.5

    layer = AttentionLayer(weight(), weight(), weight(), weight(), heads, skip=skip)
    x = torch.randn((n, d), generator=g, dtype=torch.float64)
    name = f"random, {heads} head{'s' if heads > 1 else ''}{', skip' if skip else ''}"
    return Example(name, "random", layer, x)


def causal_layer(heads: int, seed: int = 0) -> Example:
    """`random_layer` with a skip connection, each token seeing those up to itself."""
    example = random_layer(heads, seed=seed, skip=True)
    assert isinstance(example.layer, AttentionLayer)
    mask = torch.ones(len(example.x), len(example.x), dtype=torch.bool).tril()
    return example._replace(name=f"{example.name}, causal mask", layer=replace(example.layer, mask=mask))


def cross_layer(heads: int, seed: int = 0) -> Example:
    """`random_layer` with a skip connection, six tokens asking the ten others; both move."""
    example = random_layer(heads, seed=seed, skip=True)
    return example._replace(name=f"{example.name}, cross-attention", queries=6)


def random_l2_layer(heads: int, n: int = 16, d: int = 24, seed: int = 0) -> Example:
    """L2 self-attention with weights and tokens as in `random_layer`."""
    g = torch.Generator().manual_seed(seed)
    layer = L2SelfAttention(d, heads).double()
    for w in (layer.w_q, layer.w_v, layer.w_o):
        w.data = torch.randn(w.shape, generator=g, dtype=torch.float64) / d**0.5
        w.requires_grad_(False)
    x = torch.randn((n, d), generator=g, dtype=torch.float64)
    return Example(f"random L2 attention, {heads} heads", "random", layer, x)


def from_onnx(path: Path, image: Tensor, name: str) -> list[Example]:
    """The attention layers of a model at what an image makes of their input X.

    X is the last value that queries, keys and values all come from, as a rule the normalised tokens. And,
    where the normalisation is affine (BatchNorm), the same with its residual sum: X is what that adds to.
    From X they must be affine and act on tokens one by one: the matrices are read off by evaluation, and the
    layer is compared with the model to 1e-9.

    Arguments:
        image: (1, …), an input of the model.
    """
    module = load(path, dtype=torch.float64)
    values = module.values(image.double())
    averages = [step for step in module.steps if step.op == "AttentionAverage"]
    scales = [unit.scale for unit in module.info.attention]
    found = []
    for i, (average, scale) in enumerate(zip(averages, scales, strict=True)):
        for skip in (False, True):
            if (cut := _attention(module, values, average, scale, skip)) is not None:
                title = f"{name}, layer {i + 1}{' with its sum' if skip else ''}"
                found.append(Example(title, "models", *cut))
    return found


def _attention(
    module: OnnxModule, values: dict[str, Tensor], average: Step, scale: float, skip: bool
) -> tuple[AttentionLayer, Tensor] | None:
    """The layer and its input; None where it has no residual sum that is one of its X."""
    made_by = {step.output: step for step in module.steps}

    def chain(name: str) -> list[str]:
        """A value, what it comes from, and so on as long as that is one value."""
        names = [name]
        while names[-1] in made_by and len(made_by[names[-1]].inputs) == 1:
            names.append(made_by[names[-1]].inputs[0])
        return names

    def affine(source: str, target: str, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Matrix and bias of the steps between two values, at token 0, heads side by side."""
        names = chain(target)
        steps = [made_by[name] for name in reversed(names[: names.index(source)])]

        def row(x: Tensor) -> Tensor:
            for step in steps:
                x = step.run(x)
            return x[0, :, 0].flatten() if x.ndim == 4 else x[0, 0]

        bias = row(torch.zeros_like(inputs[0]))
        return torch.stack([row(x) for x in inputs]) - bias, bias

    scores = made_by[average.inputs[0]]
    if len(scores.inputs) != 2:
        raise ValueError(f"{scores.name}: a mask is not expected")
    ends = (*scores.inputs, average.inputs[2])
    out = average.output
    while len((after := next(s for s in module.steps if out in s.inputs)).inputs) == 1:
        out = after.output  # up to the residual sum
    common = [name for name in chain(ends[0]) if all(name in chain(end) for end in ends[1:])]
    source = common[0]
    if skip:
        source = next((name for name in after.inputs if name in common), "")
        between = chain(common[0])
        if not source or any(made_by[name].op not in AFFINE for name in between[: between.index(source)]):
            return None
    x = values[source]
    tokens = torch.eye(x.shape[-1], dtype=x.dtype)[:, None, None].expand(-1, *x.shape)
    (w_q, b_q), (w_k, b_k), (w_v, b_v) = (affine(source, end, tokens) for end in ends)

    _, heads, n, dv = values[average.output].shape
    mixed = torch.eye(heads * dv, dtype=x.dtype).reshape(-1, 1, heads, 1, dv).expand(-1, -1, -1, n, -1)
    w_o, b_o = affine(average.output, out, mixed)
    layer = AttentionLayer(w_q, w_k, w_v, w_o, heads, None, b_q, b_k, b_v, b_o, scale, skip=skip)
    out = after.output if skip else out
    error = float((function(layer)(x[0]) - values[out][0]).abs().max())
    if not error < 1e-9:
        raise ValueError(f"{module.info.path}: the layer is not the model's, they differ by {error:.2e}")
    return layer, x[0]


def model_layers() -> list[Example]:
    """Layers of the bundled digits model and, where the files are there, of the two shared ViTs."""
    image = torch.from_numpy(np.load(ROOT / "examples" / "digits_test.npz")["x"][:1])
    found = from_onnx(ROOT / "examples" / "digits_vit.onnx", image, "digits")
    if not DATA.is_dir():
        print(
            f"the shared Vision Transformers are not there, their layers are left out: {DATA}",
            file=sys.stderr,
        )
        return found
    from attn_bounds import read_vnnlib

    for model, prop in PROPERTIES.items():
        path = DATA / "vnnlib" / f"{prop}.vnnlib.gz"
        inputs, _ = read_vnnlib(path, (3, 32, 32), 10).cases[0]
        found += from_onnx(DATA / f"{model}.onnx", inputs.center, model)
    return found


def largest_moves(
    f: Function, x: Tensor, radii: list[float], starts: int = 12, steps: int = 80, seed: int = 0
) -> list[float]:
    """Largest `‖F(X') − F(X)‖_F` that ascent finds on `‖X' − X‖_F ≤ ε`: a lower bound, for each ε.

    Gradient steps towards the sphere, from the layer's first singular direction at X, random points, and the
    best point of the last radius. float64.

    Arguments:
        x: (n, d). radii: ascending.
    """
    g = torch.Generator().manual_seed(seed)
    clean = f(x)

    def unit(e: Tensor) -> Tensor:
        return e / torch.linalg.matrix_norm(e).clamp(min=1e-300)[..., None, None]

    v = unit(torch.randn((1, *x.shape), generator=g, dtype=torch.float64))
    for _ in range(30):
        pull = torch.func.vjp(f, x[None])[1]
        v = unit(pull(torch.func.jvp(f, (x[None],), (v,))[1])[0])
    start = torch.cat([v, -v, unit(torch.randn((starts, *x.shape), generator=g, dtype=torch.float64))])
    found, best, best_point = [], 0.0, start[:1]
    for eps in radii:
        e = eps * torch.cat([start, best_point])
        for step in range(steps + 1):
            e.requires_grad_()
            move = torch.linalg.matrix_norm(f(x + e) - clean)
            if float(move.detach().max()) > best:
                best = float(move.detach().max())
                best_point = unit(e.detach()[move.argmax()])[None]
            (slope,) = torch.autograd.grad(move.sum(), e)
            # all the way along the gradient at first (a power step where the map is linear), then less
            e = e.detach() + (eps * unit(slope) - e.detach()) / (1.0 + 0.1 * step)
        found.append(best)
    return found
