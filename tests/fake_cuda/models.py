"""The seven models whose steps are counted, by name: small, with weights that have no values."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers.initialization import no_init_weights

from .flattening import flatten
from .steps import Step

VOCABULARY, CLASSES, BATCH, TOKENS, WIDTH = 1000, 10, 4, 128, 256


def gpt2() -> nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=TOKENS,
            n_embd=WIDTH,
            n_layer=4,
            n_head=4,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            intermediate_size=2 * WIDTH,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=TOKENS,
        )
    )


def bert() -> nn.Module:
    return transformers.BertForMaskedLM(
        transformers.BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            num_hidden_layers=4,
            num_attention_heads=4,
            intermediate_size=4 * WIDTH,
        )
    )


def t5() -> nn.Module:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=VOCABULARY,
            d_model=WIDTH,
            d_kv=64,
            d_ff=2 * WIDTH,
            num_layers=3,
            num_heads=4,
            decoder_start_token_id=0,
        )
    )


def vit() -> nn.Module:
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(
            hidden_size=WIDTH,
            num_hidden_layers=4,
            num_attention_heads=4,
            intermediate_size=4 * WIDTH,
            image_size=64,
            patch_size=8,
            num_labels=CLASSES,
        )
    )


def resnet() -> nn.Module:
    return transformers.ResNetForImageClassification(
        transformers.ResNetConfig(
            depths=[2, 2, 2, 2],
            layer_type="basic",
            hidden_sizes=[64, 128, 256, 512],
            num_labels=CLASSES,
        )
    )


class LSTM(nn.Module):
    """An LSTM of two layers between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 128)
        self.lstm = nn.LSTM(128, 128, 2, batch_first=True)
        flatten(self.lstm)  # as cuDNN has it
        self.head = nn.Linear(128, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:  # [batch, tokens]
        return self.head(self.lstm(self.embedding(input_ids))[0])  # type: ignore[no-any-return]


def _on_text(build: Callable[[], nn.Module]) -> Step:
    ids = torch.randint(0, VOCABULARY, (BATCH, TOKENS))
    return Step(build(), {"input_ids": ids, "labels": ids}, lambda output: output.loss)


def _on_images(build: Callable[[], nn.Module]) -> Step:
    images, labels = torch.randn(BATCH, 3, 64, 64), torch.randint(0, CLASSES, (BATCH,))
    inputs = {"pixel_values": images}
    return Step(build(), inputs, lambda output: F.cross_entropy(output.logits, labels))


def _on_sequences(build: Callable[[], nn.Module]) -> Step:
    ids = torch.randint(0, VOCABULARY, (BATCH, 8))
    inputs = {"input_ids": ids}
    return Step(build(), inputs, lambda x: F.cross_entropy(x.flatten(0, 1), ids.flatten()))


_MODELS = {
    "gpt2": (gpt2, _on_text),
    "llama": (llama, _on_text),
    "bert": (bert, _on_text),
    "vit": (vit, _on_images),
    "resnet": (resnet, _on_images),
    "t5": (t5, _on_text),
    "lstm": (LSTM, _on_sequences),
}
NAMES = tuple(_MODELS)


def make(name: str) -> Step:
    """Returns a step of the model ``name``; its weights are not set, since fake ones have no values."""
    build, on_data = _MODELS[name]
    with no_init_weights():
        return on_data(build)
