"""Hugging Face models, tiny and untrained: a training step under HMP's lists and its users'."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import hmpx

transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.models,
    pytest.mark.filterwarnings("ignore", "error::hmpx.HmpxWarning"),
]

LISTS = Path(__file__).parents[1] / "hmp_lists"
USERS = ("bert", "hubert", "resnet", "unet", "vit")

#: Loss of a converted model against fp32: HMP's users accept such a deviation before training.
RTOL = 0.05


def text(*, labels: bool = True) -> dict[str, Tensor]:
    """Returns a batch of token ids; ids: [2, 6], mask: [2, 6]."""
    ids = torch.randint(2, 50, (2, 6))
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[1, 4:] = 0
    batch = {"input_ids": ids, "attention_mask": mask}
    return batch | {"labels": ids} if labels else batch


def bert(attention: str) -> tuple[nn.Module, dict[str, Tensor]]:
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=16, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, attn_implementation=attention,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config), text()


def gpt2(attention: str) -> tuple[nn.Module, dict[str, Tensor]]:
    config = transformers.GPT2Config(
        vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=16, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, attn_implementation=attention,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config), text()


def llama(attention: str) -> tuple[nn.Module, dict[str, Tensor]]:
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=16,
        attn_implementation=attention,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config), text()


def t5(attention: str) -> tuple[nn.Module, dict[str, Tensor]]:
    config = transformers.T5Config(
        vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=0, attn_implementation=attention,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config), text()


def vit(attention: str) -> tuple[nn.Module, dict[str, Tensor]]:
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        image_size=16, patch_size=8, hidden_dropout_prob=0.0, num_labels=5,
        attn_implementation=attention,
    )  # fmt: skip
    batch = {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.tensor([1, 3])}
    return transformers.ViTForImageClassification(config), batch


def resnet(attention: str) -> tuple[nn.Module, dict[str, Tensor]]:
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=5,
    )  # fmt: skip
    batch = {"pixel_values": torch.randn(4, 3, 32, 32), "labels": torch.tensor([1, 3, 0, 2])}
    return transformers.ResNetForImageClassification(config), batch


def whisper(attention: str) -> tuple[nn.Module, dict[str, Tensor]]:
    config = transformers.WhisperConfig(
        vocab_size=50, num_mel_bins=8, d_model=16, encoder_layers=1, decoder_layers=1,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=32,
        decoder_ffn_dim=32, max_source_positions=10, max_target_positions=16, dropout=0.0,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        attn_implementation=attention,
    )  # fmt: skip
    batch = {"input_features": torch.randn(2, 8, 20), "labels": torch.randint(3, 50, (2, 6))}
    return transformers.WhisperForConditionalGeneration(config), batch


#: Name -> (builder, attention implementation).
MODELS: dict[str, tuple[Callable[[str], tuple[nn.Module, dict[str, Tensor]]], str]] = {
    "bert-eager": (bert, "eager"),
    "bert-sdpa": (bert, "sdpa"),
    "gpt2": (gpt2, "sdpa"),
    "llama-eager": (llama, "eager"),
    "llama-sdpa": (llama, "sdpa"),
    "resnet": (resnet, "eager"),
    "t5": (t5, "eager"),
    "vit": (vit, "eager"),
    "whisper": (whisper, "sdpa"),
}

#: Lists of convolution models, on models that call none of their low-precision ops.
ALL_FP32 = {
    ("bert-eager", "resnet"),
    ("bert-sdpa", "resnet"),
    ("llama-eager", "resnet"),
    ("llama-sdpa", "resnet"),
    ("whisper", "resnet"),
}


class Bf16Ops(TorchDispatchMode):
    """Collects the names of the kernels that got a bfloat16 tensor, casts apart."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not torch.ops.aten._to_copy.default and any(
            isinstance(a, Tensor) and a.dtype is torch.bfloat16 for a in args
        ):
            self.names.add(func.__name__)
        return func(*args, **(kwargs or {}))


class Step(NamedTuple):
    """What one training step gave."""

    loss: Tensor
    gradients: dict[str, Tensor | None]
    bf16_ops: set[str]


def step(name: str) -> Step:
    """Builds a model, always with the same weights, and runs forward and backward."""
    build, attention = MODELS[name]
    torch.manual_seed(0)
    model, batch = build(attention)
    model.train()
    with Bf16Ops() as bf16:
        loss = model(**batch).loss
    loss.backward()
    for parameter in model.parameters():
        assert parameter.dtype is torch.float32
    return Step(loss.detach(), {n: p.grad for n, p in model.named_parameters()}, bf16.names)


@functools.cache
def fp32(name: str) -> Step:
    """Returns the step of a model in an unconverted torch."""
    assert not hmpx.is_converted()
    return step(name)


@pytest.fixture(scope="module", autouse=True)
def lazy_imports() -> None:
    """Has torch import now what it imports at first calls: in a test it would look like a patch."""
    for name in MODELS:
        fp32(name)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("lists", ("default", *USERS))
@pytest.mark.parametrize("name", MODELS)
def test_training_step(name: str, lists: str) -> None:
    """Ops run in bf16, the loss stays close to fp32, and gradients are finite and fp32."""
    expected = fp32(name)
    assert not expected.bf16_ops
    paths = () if lists == "default" else (f"{lists}_bf16.txt", f"{lists}_fp32.txt")
    with hmpx.convert(*(LISTS / path for path in paths)):
        actual = step(name)
    torch.testing.assert_close(actual.loss.float(), expected.loss, rtol=RTOL, atol=0)
    faults = []
    for parameter, gradient in actual.gradients.items():
        if (gradient is None) != (expected.gradients[parameter] is None):
            faults.append(f"{parameter}: gradient {gradient}")
        elif gradient is not None and gradient.dtype is not torch.float32:
            faults.append(f"{parameter}: {gradient.dtype}")
        elif gradient is not None and not gradient.isfinite().all():
            faults.append(f"{parameter}: not finite")
    assert not faults, "\n".join(faults)
    if (name, lists) in ALL_FP32:
        assert not actual.bf16_ops
        assert torch.equal(actual.loss, expected.loss)
    else:
        assert actual.bf16_ops
