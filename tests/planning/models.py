"""Five small models of transformers', as functions that build them and their inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

Built = tuple[Callable[[], nn.Module], Callable[[], dict[str, Any]]]

VOCABULARY, CLASSES = 100, 4


def _text(**options: Any) -> dict[str, Any]:
    ids = torch.randint(0, VOCABULARY, (2, 16))
    return {"input_ids": ids, "labels": ids, **options}


def _image(size: int) -> dict[str, Any]:
    labels = torch.randint(0, CLASSES, (2,))
    return {"pixel_values": torch.randn(2, 3, size, size), "labels": labels}


def gpt2() -> nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=32,
            n_embd=32,
            n_layer=2,
            n_head=4,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def bert() -> nn.Module:
    return transformers.BertForMaskedLM(
        transformers.BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
        )
    )


def resnet18() -> nn.Module:
    return transformers.ResNetForImageClassification(
        transformers.ResNetConfig(
            depths=[2, 2, 2, 2],
            layer_type="basic",
            hidden_sizes=[8, 16, 32, 64],
            embedding_size=8,
            num_labels=CLASSES,
        )
    )


def vit() -> nn.Module:
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            image_size=32,
            patch_size=8,
            num_labels=CLASSES,
        )
    )


def llama(layers: int = 2) -> nn.Module:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32,
        )
    )


MODELS: dict[str, Built] = {
    "GPT-2": (gpt2, _text),
    "BERT": (bert, _text),
    "ResNet-18": (resnet18, lambda: _image(96)),
    "ViT": (vit, lambda: _image(32)),
    "Llama": (llama, lambda: _text(use_cache=False)),
}
