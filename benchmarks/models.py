"""Models to measure, in two sizes a device: GPT, its decoding, Llama, BERT, ViT, ResNet, a perceptron.

They are plain fp32 programs with random weights and data. This module knows nothing of casting,
of compiling or of the clock.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

#: Keys and values of one layer, each [batch, heads, tokens, width of a head].
LayerCache = tuple[Tensor, Tensor]

CLASSES = 10  # of images


@dataclass(frozen=True)
class TextSize:
    """Size of a transformer on text; ``tokens`` is the longest sequence."""

    width: int
    layers: int
    heads: int
    tokens: int
    batch: int
    vocabulary: int


@dataclass(frozen=True)
class ViTSize:
    """Size of a transformer on square images."""

    width: int
    layers: int
    heads: int
    image: int
    patch: int
    batch: int


@dataclass(frozen=True)
class ResNetSize:
    """Size of a ResNet; ``block`` is ``"basic"`` or ``"bottleneck"``."""

    widths: tuple[int, ...]
    depths: tuple[int, ...]
    block: str
    image: int
    batch: int


@dataclass(frozen=True)
class MLPSize:
    """Size of a perceptron whose layers are square."""

    width: int
    layers: int
    batch: int


RESNET18 = ((64, 128, 256, 512), (2, 2, 2, 2), "basic")
RESNET50 = ((256, 512, 1024, 2048), (3, 4, 6, 3), "bottleneck")

#: Device type -> model -> size. A "decoder" is a GPT that generates text from a cache.
SIZES: dict[str, dict[str, dict[str, TextSize | ViTSize | ResNetSize | MLPSize]]] = {
    "cpu": {
        "gpt": {
            "small": TextSize(128, 2, 4, tokens=64, batch=8, vocabulary=256),
            "medium": TextSize(256, 4, 8, tokens=128, batch=8, vocabulary=1024),
        },
        "decoder": {
            "small": TextSize(128, 2, 4, tokens=80, batch=1, vocabulary=256),
            "medium": TextSize(768, 6, 12, tokens=80, batch=1, vocabulary=2048),
        },
        "llama": {
            "small": TextSize(128, 2, 4, tokens=64, batch=8, vocabulary=256),
            "medium": TextSize(256, 4, 8, tokens=128, batch=8, vocabulary=1024),
        },
        "bert": {
            "small": TextSize(128, 2, 4, tokens=64, batch=8, vocabulary=256),
            "medium": TextSize(256, 4, 8, tokens=128, batch=8, vocabulary=1024),
        },
        "vit": {
            "small": ViTSize(128, 2, 4, image=32, patch=4, batch=8),
            "medium": ViTSize(256, 4, 8, image=64, patch=8, batch=8),
        },
        "resnet": {
            "small": ResNetSize((16, 32, 64), (1, 1, 1), "basic", image=32, batch=16),
            "medium": ResNetSize(*RESNET18, image=64, batch=8),
        },
        "mlp": {
            "small": MLPSize(256, 6, batch=128),
            "medium": MLPSize(512, 6, batch=512),
        },
    },
    "cuda": {
        "gpt": {
            "small": TextSize(512, 6, 8, tokens=256, batch=8, vocabulary=8192),
            "medium": TextSize(768, 12, 12, tokens=512, batch=8, vocabulary=50304),
        },
        "decoder": {
            "small": TextSize(768, 12, 12, tokens=80, batch=1, vocabulary=8192),
            "medium": TextSize(2048, 16, 16, tokens=80, batch=1, vocabulary=32768),
        },
        "llama": {
            "small": TextSize(512, 6, 8, tokens=256, batch=8, vocabulary=8192),
            "medium": TextSize(768, 12, 12, tokens=512, batch=8, vocabulary=32000),
        },
        "bert": {
            "small": TextSize(512, 4, 8, tokens=128, batch=16, vocabulary=8192),
            "medium": TextSize(768, 12, 12, tokens=128, batch=32, vocabulary=30522),
        },
        "vit": {
            "small": ViTSize(384, 12, 6, image=224, patch=16, batch=32),
            "medium": ViTSize(768, 12, 12, image=224, patch=16, batch=32),
        },
        "resnet": {
            "small": ResNetSize(*RESNET18, image=224, batch=32),
            "medium": ResNetSize(*RESNET50, image=224, batch=32),
        },
        "mlp": {
            "small": MLPSize(1024, 6, batch=1024),
            "medium": MLPSize(4096, 6, batch=4096),
        },
    },
}


class MLP(nn.Module):
    """Square linear layers with GELU between them."""

    def __init__(self, size: MLPSize) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(size.width, size.width) for _ in range(size.layers))

    def forward(self, x: Tensor) -> Tensor:  # x: [batch, width]
        for layer in self.layers[:-1]:
            x = F.gelu(layer(x))
        return self.layers[-1](x)


class Attention(nn.Module):
    """Causal self-attention of several heads, as one kernel or written out."""

    def __init__(self, width: int, heads: int, *, is_explicit: bool) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads, self.is_explicit = heads, is_explicit

    def forward(
        self, x: Tensor, mask: Tensor, positions: Tensor, cache: LayerCache | None
    ) -> Tensor:
        # x: [batch, tokens, width], mask: [tokens, tokens attended to], positions: [tokens]
        batch, tokens, width = x.shape
        qkv = self.qkv(x).view(batch, tokens, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [batch, heads, tokens, width of a head]
        if cache is not None:
            keys, values = cache
            k, v = keys.index_copy_(2, positions, k), values.index_copy_(2, positions, v)
        if self.is_explicit:
            scores = q @ k.transpose(-2, -1) * (width // self.heads) ** -0.5
            weights = torch.softmax(scores.masked_fill(~mask, float("-inf")), -1)
            mixed = weights @ v
        elif cache is None:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))


class Block(nn.Module):
    """Attention and a two-layer perceptron, each behind a norm and beside a residual."""

    def __init__(self, width: int, heads: int, *, is_explicit: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, is_explicit=is_explicit)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(
        self, x: Tensor, mask: Tensor, positions: Tensor, cache: LayerCache | None
    ) -> Tensor:
        x = x + self.attention(self.norm1(x), mask, positions, cache)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A GPT with learned positions and a head of its own; with a cache it decodes."""

    def __init__(self, size: TextSize, *, is_attention_explicit: bool = False) -> None:
        super().__init__()
        self.size = size
        self.token = nn.Embedding(size.vocabulary, size.width)
        self.position = nn.Embedding(size.tokens, size.width)
        self.blocks = nn.ModuleList(
            Block(size.width, size.heads, is_explicit=is_attention_explicit)
            for _ in range(size.layers)
        )
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        cache: tuple[LayerCache, ...] | None = None,
    ) -> Tensor:
        """Returns logits [batch, tokens, vocabulary].

        Args:
            tokens: Token ids [batch, tokens].
            positions: Where they stand in the text [tokens]; from 0 on, if left out.
            cache: What `new_cache` returned. Keys and values are written there at ``positions``,
                and all that stands there up to them is attended to. Its shape stays, so that
                torch.compile has nothing to compile anew while the text grows.
        """
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        known = positions if cache is None else torch.arange(self.size.tokens, device=tokens.device)
        mask = known <= positions[:, None]  # [tokens, tokens attended to]
        x = self.token(tokens) + self.position(positions)
        for number, block in enumerate(self.blocks):
            x = block(x, mask, positions, None if cache is None else cache[number])
        return self.head(self.norm(x))

    def new_cache(self, batch: int) -> tuple[LayerCache, ...]:
        """Returns an empty cache, in the dtype that keys have here and now: low under casts."""
        keys = self.blocks[0].attention.qkv(self.token.weight[:1])
        shape = (batch, self.size.heads, self.size.tokens, self.size.width // self.size.heads)
        return tuple((keys.new_zeros(shape), keys.new_zeros(shape)) for _ in self.blocks)


class Logits(nn.Module):
    """A model of transformers that returns its logits and nothing else."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor) -> Tensor:
        return self.model(inputs).logits


@dataclass(frozen=True)
class Batch:
    """Inputs of a model and what it is to predict."""

    inputs: Tensor
    labels: Tensor


def build(
    name: str, size: str, *, device: str = "cpu", seed: int = 0, is_attention_explicit: bool = False
) -> nn.Module:
    """Returns a model with random fp32 weights, in training mode and without dropout.

    Args:
        name: A model of `SIZES`.
        size: ``"small"`` or ``"medium"``.
        device: ``"cpu"`` or ``"cuda"``; also decides what the sizes mean.
        seed: Of the weights.
        is_attention_explicit: A GPT's attention is matmul and softmax instead of one kernel.
    """
    torch.manual_seed(seed)
    return _build(SIZES[device][name][size], name, is_attention_explicit).to(device)


def _build(
    size: TextSize | ViTSize | ResNetSize | MLPSize, name: str, is_attention_explicit: bool
) -> nn.Module:
    if isinstance(size, MLPSize):
        return MLP(size)
    if isinstance(size, TextSize) and name not in {"bert", "llama"}:
        return GPT(size, is_attention_explicit=is_attention_explicit)
    try:
        import transformers
    except ImportError as error:
        raise SystemExit(
            f"the model {name} comes from transformers: pip install transformers, "
            "or choose others with --models"
        ) from error
    if isinstance(size, TextSize) and name == "llama":
        llama = transformers.LlamaConfig(
            vocab_size=size.vocabulary,
            hidden_size=size.width,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            num_key_value_heads=size.heads // 2,
            intermediate_size=8 * size.width // 3,
            max_position_embeddings=size.tokens,
            use_cache=False,
        )
        return Logits(transformers.LlamaForCausalLM(llama)).train()
    if isinstance(size, TextSize):
        bert = transformers.BertConfig(
            vocab_size=size.vocabulary,
            hidden_size=size.width,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            intermediate_size=4 * size.width,
            max_position_embeddings=size.tokens,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        return Logits(transformers.BertForMaskedLM(bert)).train()
    if isinstance(size, ViTSize):
        vit = transformers.ViTConfig(
            hidden_size=size.width,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            intermediate_size=4 * size.width,
            image_size=size.image,
            patch_size=size.patch,
            num_labels=CLASSES,
        )
        return Logits(transformers.ViTForImageClassification(vit)).train()
    resnet = transformers.ResNetConfig(
        embedding_size=min(size.widths[0], 64),
        hidden_sizes=list(size.widths),
        depths=list(size.depths),
        layer_type=size.block,
        num_labels=CLASSES,
    )
    return Logits(transformers.ResNetForImageClassification(resnet)).train()


def batch(
    name: str, size: str, *, device: str = "cpu", seed: int = 0, rows: int | None = None
) -> Batch:
    """Returns random data for a model.

    Args:
        name: A model of `SIZES`.
        size: ``"small"`` or ``"medium"``.
        device: ``"cpu"`` or ``"cuda"``; also decides what the sizes mean.
        seed: Of the data.
        rows: How many examples, in place of the size's own number.
    """
    chosen = SIZES[device][name][size]
    rows = rows or chosen.batch
    generator = torch.Generator().manual_seed(seed)
    if isinstance(chosen, TextSize):
        shape = (rows, chosen.tokens)
        inputs = torch.randint(0, chosen.vocabulary, shape, generator=generator)
        labels = torch.randint(0, chosen.vocabulary, shape, generator=generator)
    elif isinstance(chosen, MLPSize):
        inputs = torch.randn(rows, chosen.width, generator=generator)
        labels = torch.randint(0, chosen.width, (rows,), generator=generator)
    else:
        inputs = torch.randn(rows, 3, chosen.image, chosen.image, generator=generator)
        labels = torch.randint(0, CLASSES, (rows,), generator=generator)
    return Batch(inputs.to(device), labels.to(device))


def loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns the mean cross-entropy; logits: [..., classes], labels: [...]."""
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten())
