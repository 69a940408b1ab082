"""Reports of real models: one training step of each, as text, and as a page in a directory.

    python examples/reports.py [bert] [llama] [resnet] [--to DIRECTORY]

The models are those of Hugging Face with random weights, small enough for a CPU: needs transformers.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import hmpx


def bert() -> Callable[[], Tensor]:
    """Returns a masked language model's loss on one batch."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(hidden_size=256, num_hidden_layers=4, num_attention_heads=4,
                        intermediate_size=1024, vocab_size=2000)  # fmt: skip
    model, tokens = BertForMaskedLM(config), torch.randint(0, 2000, (4, 64))
    return lambda: model(input_ids=tokens, labels=tokens).loss


def llama() -> Callable[[], Tensor]:
    """Returns a language model's loss on one batch."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(hidden_size=256, num_hidden_layers=4, num_attention_heads=4,
                         num_key_value_heads=2, intermediate_size=688, vocab_size=2000)  # fmt: skip
    model, tokens = LlamaForCausalLM(config), torch.randint(0, 2000, (4, 64))
    return lambda: model(input_ids=tokens, labels=tokens).loss


def resnet() -> Callable[[], Tensor]:
    """Returns an image classifier's loss on one batch."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=32, hidden_sizes=[32, 64, 128, 256], depths=[2, 2, 2, 2],
                          layer_type="basic", num_labels=10)  # fmt: skip
    model = ResNetForImageClassification(config)
    images, labels = torch.randn(4, 3, 96, 96), torch.randint(0, 10, (4,))
    return lambda: model(pixel_values=images, labels=labels).loss


MODELS = {"bert": bert, "llama": llama, "resnet": resnet}


def main() -> None:
    """Prints each report; with ``--to``, also writes pages."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", choices=[*MODELS, []], help="default: all")
    parser.add_argument("--to", type=Path, help="directory for NAME.html")
    options = parser.parse_args()
    torch.manual_seed(0)
    for name in options.models or MODELS:
        with hmpx.convert(device_types={"cpu"}):
            loss = MODELS[name]()
            with hmpx.record() as rec:
                loss().backward()
        print(f"{name}: {rec}\n")
        if options.to is not None:
            rec.to_html(options.to / f"{name}.html")


if __name__ == "__main__":
    main()
