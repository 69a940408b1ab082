"""Small models of six families, of transformers' code: BERT, GPT-2, T5, ResNet, ViT and Llama.

They have random weights, and are trained for a moment on random data: enough that ops matter unequally. This
module knows nothing of casting.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

VOCABULARY: Final = 256
TOKENS: Final = 48
ROWS: Final = 8
CLASSES: Final = 10
_WIDTH: Final = 64
_LAYERS: Final = 2
_HEADS: Final = 4


class Logits(nn.Module):
    """A model of transformers that returns its logits and nothing else."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        # An encoder and decoder reads the same on both sides.
        self.is_twofold = "decoder_input_ids" in inspect.signature(model.forward).parameters

    def forward(self, inputs: Tensor) -> Tensor:
        options = {"decoder_input_ids": inputs} if self.is_twofold else {}
        return self.model(inputs, **options).logits


def _bert() -> nn.Module:
    return transformers.BertForMaskedLM(
        transformers.BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=_WIDTH,
            num_hidden_layers=_LAYERS,
            num_attention_heads=_HEADS,
            intermediate_size=4 * _WIDTH,
            max_position_embeddings=TOKENS,
        )
    )


def _gpt2() -> nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=_WIDTH,
            n_layer=_LAYERS,
            n_head=_HEADS,
            n_positions=TOKENS,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def _t5() -> nn.Module:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=VOCABULARY,
            d_model=_WIDTH,
            d_kv=_WIDTH // _HEADS,
            d_ff=4 * _WIDTH,
            num_layers=_LAYERS,
            num_heads=_HEADS,
        )
    )


def _resnet() -> nn.Module:
    return transformers.ResNetForImageClassification(
        transformers.ResNetConfig(
            embedding_size=16,
            hidden_sizes=[16, 32, 64],
            depths=[1, 1, 1],
            layer_type="basic",
            num_labels=CLASSES,
        )
    )


def _vit() -> nn.Module:
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(
            hidden_size=_WIDTH,
            num_hidden_layers=_LAYERS,
            num_attention_heads=_HEADS,
            intermediate_size=4 * _WIDTH,
            image_size=32,
            patch_size=4,
            num_labels=CLASSES,
        )
    )


def _llama() -> nn.Module:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=_WIDTH,
            intermediate_size=4 * _WIDTH,
            num_hidden_layers=_LAYERS,
            num_attention_heads=_HEADS,
            num_key_value_heads=_HEADS,
            max_position_embeddings=TOKENS,
        )
    )


FAMILIES: Final[dict[str, Callable[[], nn.Module]]] = {
    "bert": _bert,
    "gpt2": _gpt2,
    "t5": _t5,
    "resnet": _resnet,
    "vit": _vit,
    "llama": _llama,
}


def batch(name: str, seed: int) -> tuple[Tensor, Tensor]:
    """Returns random inputs and what is to be predicted of them."""
    generator = torch.Generator().manual_seed(seed)
    if name in ("resnet", "vit"):
        images = torch.randn(ROWS, 3, 32, 32, generator=generator)
        return images, torch.randint(0, CLASSES, (ROWS,), generator=generator)
    shape = (ROWS, TOKENS)
    return (
        torch.randint(0, VOCABULARY, shape, generator=generator),
        torch.randint(0, VOCABULARY, shape, generator=generator),
    )


def trained(name: str, steps: int) -> tuple[Any, Tensor]:
    """Returns a model, in evaluation mode, and inputs that it was not trained on."""
    torch.manual_seed(0)
    model = Logits(FAMILIES[name]())
    inputs, labels = batch(name, seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs).flatten(0, -2), labels.flatten()).backward()
        optimizer.step()
    return model.eval(), batch(name, seed=2)[0]
