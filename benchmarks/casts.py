"""How often models cast one activation for several consumers, which could share the cast.

    python benchmarks/casts.py [--models bert]

One forward without gradients. The casts are those that reach torch's dispatcher:

activations    casts of tensors that are no parameters
again          of these, casts of a tensor that was cast to the same dtype before
parameters     casts of parameters
"""

from __future__ import annotations

import argparse
import collections
import warnings
from typing import Any

import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

import hmpx


class Casts(TorchDispatchMode):
    """Counts casts between fp32 and bf16."""

    def __init__(self, parameters: set[int]) -> None:
        super().__init__()
        self.count: collections.Counter[str] = collections.Counter()
        self._parameters = parameters
        self._seen: set[tuple[object, ...]] = set()
        self._alive: list[torch.Tensor] = []  # so that no address is used twice

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten._to_copy.default and kwargs.get("dtype") in (
            torch.bfloat16,
            torch.float32,
        ):
            tensor = args[0]
            key = (tensor.data_ptr(), tensor.shape, tensor._version, kwargs["dtype"])
            if tensor.data_ptr() in self._parameters:
                self.count["parameters"] += 1
            else:
                self.count["activations"] += 1
                self.count["again"] += key in self._seen
            self._seen.add(key)
            self._alive.append(tensor)
        return func(*args, **(kwargs or {}))


def models() -> dict[str, tuple[torch.nn.Module, torch.Tensor]]:
    """Returns name -> model with random weights, and its input."""
    bert = transformers.BertConfig(
        hidden_size=64, num_hidden_layers=4, num_attention_heads=4, intermediate_size=128
    )
    resnet = transformers.ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32, 64, 128], depths=[2, 2, 2, 2], layer_type="basic"
    )
    return {
        "bert": (transformers.BertModel(bert), torch.arange(32).view(2, 16)),
        "resnet": (
            transformers.ResNetForImageClassification(resnet),
            torch.randn(1, 3, 64, 64),
        ),
    }


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=["bert", "resnet"])
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    print(f"{'model':8}{'lists':16}{'activations':>12}{'again':>8}{'parameters':>12}")
    for name, (model, inputs) in models().items():
        if options.models and name not in options.models:
            continue
        for lists in ("hmpx", "autocast-cuda", "autocast-cpu"):
            counting = Casts({parameter.data_ptr() for parameter in model.parameters()})
            with hmpx.convert(lists=lists, legalize="never"), torch.no_grad(), counting:
                model.eval()(inputs)
            count = counting.count
            print(
                f"{name:8}{lists:16}{count['activations']:12}{count['again']:8}{count['parameters']:12}"
            )


if __name__ == "__main__":
    main()
