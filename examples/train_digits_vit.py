"""Train a small Vision Transformer on scikit-learn's digits and export it to ONNX.

Writes ``digits_vit.onnx`` (input ``image``, output ``logits``, dynamic batch) and
``digits_test.npz`` (the test set: ``x``, float32 of shape (N, 1, 8, 8) in [0, 1], and ``y``,
int64). The network is trained against PGD attacks, so that certified radii mean something: at
every step half of the adversarial images come from an l_inf ball and half from an l_2 ball. The
balls are not clipped to [0, 1], because the certified regions are not clipped either.

The settings were chosen on a validation part of the training set. Weight decay is heavy on purpose:
there, going from 0.1 to 3 cost no accuracy under attack and doubled the radius up to which a linear
relaxation certifies most images, because the softmax is flatter and more ReLUs are stable. The
attention weights still vary with the image, by 0.03 to 0.05; at a decay of 8 those of the first
block are constant.

The normalisation is BatchNorm over channels: fixed and affine at inference, so it costs a
verifier nothing, where LayerNorm divides by a data-dependent deviation.

    python examples/train_digits_vit.py --out examples

The run is deterministic for a given seed and software version, on one core.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

MIN_CLEAN_ACCURACY = 0.95
LINF_RADIUS = 0.05
L2_RADIUS = 0.5


@dataclass(frozen=True)
class Settings:
    """What the training depends on, apart from the seed."""

    epochs: int = 100
    batch_size: int = 64
    learning_rate: float = 5e-3
    weight_decay: float = 3.0
    train_linf: float = 0.1  # radii of the training attacks
    train_l2: float = 0.8
    train_steps: int = 5
    clean_weight: float = 0.5  # share of the clean images in the loss


class Normalise(nn.Module):
    """BatchNorm over channels of a (B, n, C) sequence."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


class Attention(nn.Module):
    """Multi-head self-attention, written out."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.head_dim = dim // heads
        self.scale = self.head_dim**-0.5
        self.query = nn.Linear(dim, dim)
        self.key = nn.Linear(dim, dim)
        self.value = nn.Linear(dim, dim)
        self.out = nn.Linear(dim, dim)

    def split(self, x: Tensor) -> Tensor:
        """(B, n, C) to (B, heads, n, head_dim)."""
        return x.reshape(x.shape[0], x.shape[1], self.heads, self.head_dim).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(self.query(x)), self.split(self.key(x)), self.split(self.value(x))
        scores = torch.matmul(q, k.transpose(-2, -1)) * self.scale
        weights = torch.softmax(scores, dim=-1)
        mixed = torch.matmul(weights, v).transpose(1, 2)
        return self.out(mixed.reshape(x.shape[0], x.shape[1], self.heads * self.head_dim))


class Block(nn.Module):
    """Pre-norm encoder block."""

    def __init__(self, dim: int, heads: int, ratio: int) -> None:
        super().__init__()
        self.norm1 = Normalise(dim)
        self.attention = Attention(dim, heads)
        self.norm2 = Normalise(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, ratio * dim), nn.ReLU(), nn.Linear(ratio * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class DigitsViT(nn.Module):
    """Vision Transformer for 8x8 grey images: 4x4 patches, class token, mean pooling."""

    def __init__(
        self, dim: int = 32, depth: int = 2, heads: int = 2, ratio: int = 2, patch: int = 4, classes: int = 10
    ) -> None:
        super().__init__()
        patches = (8 // patch) ** 2
        self.embed = nn.Conv2d(1, dim, kernel_size=patch, stride=patch)
        self.class_token = nn.Parameter(0.02 * torch.randn(1, 1, dim))
        self.positions = nn.Parameter(0.02 * torch.randn(1, patches + 1, dim))
        self.blocks = nn.Sequential(*(Block(dim, heads, ratio) for _ in range(depth)))
        self.norm = Normalise(dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, image: Tensor) -> Tensor:
        x = self.embed(image).flatten(2).transpose(1, 2)
        token = self.class_token.expand(image.shape[0], -1, -1)
        x = torch.cat([token, x], dim=1) + self.positions
        x = self.norm(self.blocks(x))
        return self.head(x.mean(dim=1))


def log(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def load_data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images and labels, then test images and labels (a fixed stratified split)."""
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ImportError:
        sys.exit('scikit-learn is needed for the digits data set: pip install "attn-bounds[examples]"')
    digits = load_digits()
    x = (digits.images / 16.0).astype(np.float32)[:, None]
    y = digits.target.astype(np.int64)
    x_train, x_test, y_train, y_test = train_test_split(x, y, test_size=0.25, random_state=0, stratify=y)
    return (
        torch.from_numpy(x_train),
        torch.from_numpy(y_train),
        torch.from_numpy(x_test),
        torch.from_numpy(y_test),
    )


def project(delta: Tensor, norm: str, radius: float) -> Tensor:
    """Nearest point of the ball, image by image."""
    if norm == "linf":
        return delta.clamp(-radius, radius)
    length = delta.flatten(1).norm(dim=1).clamp_min(1e-12).view(-1, 1, 1, 1)
    return delta * (radius / length).clamp_max(1.0)


def pgd(model: nn.Module, x: Tensor, y: Tensor, norm: str, radius: float, steps: int) -> Tensor:
    """Projected gradient ascent on the cross-entropy from a random start; the model is in eval mode."""
    step = 2.5 * radius / steps
    if norm == "linf":
        start = torch.empty_like(x).uniform_(-radius, radius)
    else:
        start = torch.randn_like(x) * radius / x[0].numel() ** 0.5
    delta = project(start, norm, radius)
    for _ in range(steps):
        delta.requires_grad_(True)
        loss = F.cross_entropy(model(x + delta), y, reduction="sum")
        (grad,) = torch.autograd.grad(loss, delta)
        if norm == "linf":
            move = grad.sign()
        else:
            move = grad / grad.flatten(1).norm(dim=1).clamp_min(1e-12).view(-1, 1, 1, 1)
        delta = project(delta.detach() + step * move, norm, radius)
    return (x + delta).detach()


def train(x: Tensor, y: Tensor, settings: Settings) -> DigitsViT:
    """A model in eval mode, trained on clean and attacked images."""
    model = DigitsViT()
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    optimiser = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=settings.learning_rate,
    )
    batches, steps = len(x) // settings.batch_size, settings.train_steps
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, settings.learning_rate, total_steps=max(2, batches * settings.epochs), pct_start=0.2
    )
    begin = time.perf_counter()
    for epoch in range(settings.epochs):
        # the attack grows to its full radius over the first third of the training
        growth = min(1.0, 3 * (epoch + 1) / settings.epochs)
        order = torch.randperm(len(x))[: batches * settings.batch_size].view(batches, -1)
        total = 0.0
        for index in order:
            clean, label = x[index], y[index]
            half = len(index) // 2
            model.eval()
            linf = pgd(model, clean[:half], label[:half], "linf", growth * settings.train_linf, steps)
            l2 = pgd(model, clean[half:], label[half:], "l2", growth * settings.train_l2, steps)
            model.train()
            logits = model(torch.cat([clean, linf, l2]))
            w = settings.clean_weight
            loss = w * F.cross_entropy(logits[: len(index)], label)
            loss = loss + (1 - w) * F.cross_entropy(logits[len(index) :], label)
            optimiser.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            schedule.step()
            total += loss.item()
        if (epoch + 1) % 10 == 0 or epoch + 1 == settings.epochs:
            seconds = time.perf_counter() - begin
            log(f"epoch {epoch + 1:4d}/{settings.epochs}  loss {total / batches:.4f}  {seconds:6.1f} s")
    return model.eval()


@torch.no_grad()
def correct(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return model(x).argmax(dim=1) == y


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    return correct(model, x, y).float().mean().item()


def robust_accuracy(
    model: nn.Module, x: Tensor, y: Tensor, norm: str, radius: float, steps: int = 50, restarts: int = 5
) -> float:
    """Share of images that are right before and after every restart of a PGD attack."""
    right = correct(model, x, y)
    for _ in range(restarts):
        right &= correct(model, pgd(model, x, y, norm, radius, steps), y)
    return right.float().mean().item()


def export(model: nn.Module, path: Path) -> None:
    """Write the model with PyTorch's TorchScript-based exporter."""
    model.eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the exporter chosen is the older one
        torch.onnx.export(
            model,
            (torch.zeros(1, 1, 8, 8),),
            str(path),
            dynamo=False,
            opset_version=17,
            training=torch.onnx.TrainingMode.EVAL,
            do_constant_folding=True,
            input_names=["image"],
            output_names=["logits"],
            dynamic_axes={"image": {0: "batch"}, "logits": {0: "batch"}},
        )


def check_export(model: nn.Module, path: Path, x: Tensor, tolerance: float = 1e-5) -> float:
    """Largest difference between PyTorch and onnxruntime at batch 1 and 3."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    worst = 0.0
    for batch in (1, 3):
        with torch.no_grad():
            expected = model(x[:batch]).numpy()
        (actual,) = session.run(["logits"], {"image": x[:batch].numpy()})
        worst = max(worst, float(np.abs(actual - expected).max()))
    assert worst <= tolerance, f"onnxruntime differs from PyTorch by {worst:.2e}"
    return worst


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small Vision Transformer on scikit-learn's digits and export it to ONNX."
    )
    parser.add_argument(
        "--epochs", type=int, default=Settings.epochs, help="passes over the training set (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of every random draw (%(default)s)")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(__file__).resolve().parent,
        metavar="DIR",
        help="folder for digits_vit.onnx and digits_test.npz (that of this script)",
    )
    arguments = parser.parse_args()
    if arguments.epochs < 1:
        parser.error("--epochs must be at least 1")
    return arguments


def seed_everything(seed: int) -> None:
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)


def main() -> None:
    arguments = parse_arguments()
    x_train, y_train, x_test, y_test = load_data()
    arguments.out.mkdir(parents=True, exist_ok=True)
    seed_everything(arguments.seed)

    begin = time.perf_counter()
    model = train(x_train, y_train, Settings(epochs=arguments.epochs))
    parameters = sum(p.numel() for p in model.parameters())
    log(f"trained {parameters} parameters in {time.perf_counter() - begin:.1f} s")

    clean = accuracy(model, x_test, y_test)
    log(f"test accuracy             {clean:.2%} of {len(x_test)} images")
    for norm, radius in (("linf", LINF_RADIUS), ("l2", L2_RADIUS)):
        log(f"under PGD, {norm:4} {radius:<6}    {robust_accuracy(model, x_test, y_test, norm, radius):.2%}")
    assert clean >= MIN_CLEAN_ACCURACY, f"clean accuracy {clean:.2%} is below {MIN_CLEAN_ACCURACY:.0%}"

    onnx_path = arguments.out / "digits_vit.onnx"
    export(model, onnx_path)
    worst = check_export(model, onnx_path, x_test)
    log(f"wrote {onnx_path} ({onnx_path.stat().st_size} bytes; onnxruntime within {worst:.1e} of PyTorch)")

    data_path = arguments.out / "digits_test.npz"
    np.savez_compressed(data_path, x=x_test.numpy(), y=y_test.numpy())
    log(f"wrote {data_path} ({data_path.stat().st_size} bytes)")


if __name__ == "__main__":
    main()
