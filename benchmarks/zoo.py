"""Small transformers of the libraries that people use, to export and load. A library, not a script.

All have random weights of a size at which attention matters, at most three layers and twenty tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from dressings import DRESSINGS, EXPORTS, PROCESSED
from torch import Tensor, nn
from without_torchvision import without_torchvision

CLASSES = 3
WIDTH, HEADS, LAYERS, TOKENS = 16, 2, 2, 6
IMAGE = (3, 8, 8)  # four patches of 4 by 4


@dataclass(frozen=True)
class Entry:
    """A model of the zoo.

    Attributes:
        make: (model, example); the example is (2, …), of floats or of token numbers.
        kept: dressings whose files the tests load.
        optimiser: model type for onnxruntime's transformer optimiser.
        dressings: all that are tried.
    """

    library: str
    make: Callable[[], tuple[nn.Module, Tensor]]
    kept: tuple[str, ...]
    optimiser: str = "bert"
    dressings: tuple[str, ...] = (*EXPORTS, *(d for d in PROCESSED if not d.endswith(("int8", "float16"))))


def randomised(model: nn.Module, seed: int = 0) -> nn.Module:
    """Weights such that values keep their size, biases and gains that are not 0 and 1, statistics too."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=g)
            if p.ndim > 1:
                p.copy_(noise * (1.0 if "embed" in name else p[0].numel() ** -0.5))
            else:
                p.copy_(0.1 * noise + (1.0 if "weight" in name or "gamma" in name else 0.0))
    return model.eval()


def _random(*shape: int) -> Tensor:
    return torch.randn((2, *shape), generator=torch.Generator().manual_seed(1))


def _ids() -> Tensor:
    return torch.randint(5, 40, (2, TOKENS), generator=torch.Generator().manual_seed(1))


class TorchEncoder(nn.Module):
    """`nn.TransformerEncoder` with mean pooling."""

    def __init__(self, batch_first: bool, norm_first: bool, activation: str) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 2 * WIDTH, 0.1, activation, batch_first=batch_first, norm_first=norm_first
        )
        self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head, self.batch_first = nn.Linear(WIDTH, CLASSES), batch_first

    def forward(self, x: Tensor) -> Tensor:
        if self.batch_first:
            return self.head(self.encoder(x).mean(1))
        return self.head(self.encoder(x.transpose(0, 1)).mean(0))


class FromEmbeddings(nn.Module):
    """A model of Hugging Face called with embeddings; the logits, or a head on the last token."""

    def __init__(self, model: nn.Module, head: bool = False) -> None:
        super().__init__()
        self.model = model
        self.head = nn.Linear(WIDTH, CLASSES) if head else None

    def forward(self, inputs_embeds: Tensor) -> Tensor:
        found = self.model(inputs_embeds=inputs_embeds)
        return found.logits if self.head is None else self.head(found.last_hidden_state[:, -1])


class FromIds(nn.Module):
    """A model of Hugging Face called with token numbers, with the second half of a sequence masked out."""

    def __init__(self, model: nn.Module, padded: bool = False) -> None:
        super().__init__()
        self.model, self.padded = model, padded

    def forward(self, input_ids: Tensor) -> Tensor:
        mask = torch.ones_like(input_ids)
        if self.padded:
            mask = mask * (torch.arange(TOKENS) < TOKENS // 2).long()
        return self.model(input_ids=input_ids, attention_mask=mask).logits


class Pixels(nn.Module):
    """A model of Hugging Face called with images."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.model(pixel_values=pixel_values).logits


def _torch(batch_first: bool, norm_first: bool, activation: str) -> tuple[nn.Module, Tensor]:
    return randomised(TorchEncoder(batch_first, norm_first, activation)), _random(TOKENS, WIDTH)


def _timm(name: str, **options: Any) -> tuple[nn.Module, Tensor]:
    with without_torchvision():
        import timm.models.deit
        import timm.models.swin_transformer
        import timm.models.vision_transformer

    kinds = {
        "vit": timm.models.vision_transformer.VisionTransformer,
        "deit": timm.models.deit.VisionTransformerDistilled,
        "swin": timm.models.swin_transformer.SwinTransformer,
    }
    if name == "swin":
        sizes: dict[str, Any] = {"embed_dim": WIDTH, "depths": (2,), "num_heads": (HEADS,), "window_size": 2}
        sizes |= {"img_size": 16, "patch_size": 4}
        shape: tuple[int, ...] = (3, 16, 16)
    else:
        sizes = {"embed_dim": WIDTH, "depth": LAYERS, "num_heads": HEADS, "mlp_ratio": 2.0}
        sizes |= {"img_size": IMAGE[1], "patch_size": 4}
        shape = IMAGE
    return randomised(kinds[name](num_classes=CLASSES, **sizes, **options)), _random(*shape)


def _vit_pytorch(name: str) -> tuple[nn.Module, Tensor]:
    with without_torchvision():
        import vit_pytorch

    model = getattr(vit_pytorch, name)(
        image_size=IMAGE[1], patch_size=4, num_classes=CLASSES, dim=WIDTH, depth=LAYERS, heads=HEADS,
        mlp_dim=2 * WIDTH, dim_head=WIDTH // HEADS,
    )  # fmt: skip
    return randomised(model), _random(*IMAGE)


def _config(kind: str, **options: Any) -> Any:
    import transformers

    sizes: dict[str, Any] = {
        "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "intermediate_size": 2 * WIDTH, "vocab_size": 40, "max_position_embeddings": 24,
        "num_labels": CLASSES,
    }  # fmt: skip
    if kind in ("ViT", "DeiT"):
        sizes |= {"image_size": IMAGE[1], "patch_size": 4, "num_channels": 3}
    if kind == "DistilBert":
        sizes |= {"dim": WIDTH, "hidden_dim": 2 * WIDTH, "n_layers": LAYERS, "n_heads": HEADS}
    if kind == "GPT2":
        sizes |= {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 24, "bos_token_id": 0}
        sizes |= {"eos_token_id": 0}
    return getattr(transformers, f"{kind}Config")(**sizes, **options)


def _transformers(kind: str, form: str, **options: Any) -> tuple[nn.Module, Tensor]:
    import transformers

    config = _config(kind, **options)
    if kind == "GPT2":
        model: nn.Module = FromEmbeddings(transformers.GPT2Model(config), head=True)
        return randomised(model), _random(TOKENS, WIDTH)
    if form == "pixels":
        inner = getattr(transformers, f"{kind}ForImageClassification")(config)
        return randomised(Pixels(inner)), _random(*IMAGE)
    inner = getattr(transformers, f"{kind}ForSequenceClassification")(config)
    if form == "embeddings":
        return randomised(FromEmbeddings(inner)), _random(TOKENS, WIDTH)
    return randomised(FromIds(inner, padded=form == "padded ids")), _ids()


TS14, TS17, DYNAMO, OPERATOR = EXPORTS
FUSED, DYNAMO_FUSED, EXTENDED, INT8, FLOAT16 = PROCESSED
ZOO: dict[str, Entry] = {
    "torch-encoder": Entry("torch", lambda: _torch(True, False, "relu"), (TS14, DYNAMO)),
    "torch-encoder-sequence-first": Entry(
        "torch", lambda: _torch(False, True, "gelu"), (TS17, OPERATOR, FUSED)
    ),
    "timm-vit": Entry("timm", lambda: _timm("vit"), (TS14, OPERATOR, INT8), "vit", DRESSINGS),
    "timm-deit": Entry("timm", lambda: _timm("deit"), (EXTENDED,), "vit"),
    "timm-swin": Entry("timm", lambda: _timm("swin"), (TS17, DYNAMO), "swin"),
    "vit-pytorch-vit": Entry("vit-pytorch", lambda: _vit_pytorch("ViT"), (DYNAMO, FUSED), "vit"),
    "vit-pytorch-simple-vit": Entry("vit-pytorch", lambda: _vit_pytorch("SimpleViT"), (OPERATOR,), "vit"),
    "bert-ids": Entry("transformers", lambda: _transformers("Bert", "ids"), (TS14,)),
    "bert-padded-ids": Entry("transformers", lambda: _transformers("Bert", "padded ids"), (DYNAMO,)),
    "bert-embeddings": Entry(
        "transformers",
        lambda: _transformers("Bert", "embeddings"),
        (OPERATOR, EXTENDED, FLOAT16),
        dressings=DRESSINGS,
    ),
    "bert-eager": Entry(
        "transformers", lambda: _transformers("Bert", "embeddings", attn_implementation="eager"), (TS17,)
    ),
    "distilbert-ids": Entry("transformers", lambda: _transformers("DistilBert", "ids"), (FUSED,)),
    "roberta-embeddings": Entry(
        "transformers", lambda: _transformers("Roberta", "embeddings"), (DYNAMO_FUSED,)
    ),
    "hf-vit": Entry("transformers", lambda: _transformers("ViT", "pixels"), (TS14,), "vit"),
    "hf-deit": Entry("transformers", lambda: _transformers("DeiT", "pixels"), (DYNAMO,), "vit"),
    "gpt2": Entry("transformers", lambda: _transformers("GPT2", "embeddings"), (OPERATOR, EXTENDED), "gpt2"),
}
