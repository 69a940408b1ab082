"""Hugging Face models that mask by the lowest number of fp32, or one near it: they run, and agree with fp32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hmpx

transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.models, pytest.mark.filterwarnings("ignore", "error::hmpx.HmpxWarning")]

#: Relative errors of the loss that are allowed; measured: up to 0.013 and 0.0006. Of the gradients, five
#: times as much; measured: up to 0.045 and 0.0022.
TOLERANCE = {torch.bfloat16: 0.025, torch.float16: 0.0015}

Batch = dict[str, Any]

TEXT: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 128,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def text(repeats: int = 1) -> Batch:
    """Returns ids: [2, 16 * repeats], and a mask that leaves out the ends; labels where it doesn't."""
    ids = torch.randint(5, 50, (2, 16)).repeat(1, repeats)
    mask = torch.ones_like(ids)
    mask[0, -6:] = mask[1, -13:] = 0
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": ids.masked_fill(mask == 0, -100),
    }


def deberta() -> tuple[nn.Module, Batch]:
    config = transformers.DebertaConfig(
        **TEXT, relative_attention=True, pos_att_type=["c2p", "p2c"], max_relative_positions=16
    )
    return transformers.DebertaForMaskedLM(config), text()


def deberta_v2() -> tuple[nn.Module, Batch]:
    config = transformers.DebertaV2Config(
        **TEXT, relative_attention=True, pos_att_type=["c2p", "p2c"]
    )
    return transformers.DebertaV2ForMaskedLM(config), text()


def gpt_neo() -> tuple[nn.Module, Batch]:
    config = transformers.GPTNeoConfig(
        vocab_size=60, hidden_size=16, num_layers=2, num_heads=2, intermediate_size=32,
        attention_types=[[["global", "local"], 1]], window_size=4, max_position_embeddings=64,
    )  # fmt: skip
    return transformers.GPTNeoForCausalLM(config), text()


def xlnet() -> tuple[nn.Module, Batch]:
    config = transformers.XLNetConfig(vocab_size=60, d_model=16, n_layer=2, n_head=2, d_inner=32)
    return transformers.XLNetLMHeadModel(config), text()


def reformer() -> tuple[nn.Module, Batch]:
    config = transformers.ReformerConfig(
        vocab_size=60, hidden_size=16, attention_head_size=8, num_attention_heads=2,
        feed_forward_size=32, axial_pos_embds=False, max_position_embeddings=64,
        attn_layers=["local", "local"], local_attn_chunk_length=4, is_decoder=True,
        hidden_dropout_prob=0.0, local_attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.ReformerModelWithLMHead(config), text()


def longformer() -> tuple[nn.Module, Batch]:
    return transformers.LongformerForMaskedLM(
        transformers.LongformerConfig(**TEXT, attention_window=4)
    ), text()


def big_bird() -> tuple[nn.Module, Batch]:
    config = transformers.BigBirdConfig(
        **TEXT, attention_type="block_sparse", block_size=4, num_random_blocks=1
    )
    return transformers.BigBirdForMaskedLM(config), text(6)


def funnel() -> tuple[nn.Module, Batch]:
    config = transformers.FunnelConfig(
        vocab_size=60, block_sizes=[1, 1], d_model=16, n_head=2, d_head=8, d_inner=32
    )
    return transformers.FunnelForMaskedLM(config), text()


def distilbert() -> tuple[nn.Module, Batch]:
    config = transformers.DistilBertConfig(
        vocab_size=60, dim=16, n_layers=2, n_heads=2, hidden_dim=32, attn_implementation="eager"
    )
    return transformers.DistilBertForMaskedLM(config), text()


def bloom() -> tuple[nn.Module, Batch]:
    config = transformers.BloomConfig(vocab_size=60, hidden_size=16, n_layer=2, n_head=2)
    return transformers.BloomForCausalLM(config), text()


def falcon() -> tuple[nn.Module, Batch]:
    """It asks for its softmax in the dtype of the hidden states, of scores that are fp32 with the mask.

    Padded at the left, whole rows of these are masked.
    """
    config = transformers.FalconConfig(
        vocab_size=60, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        attn_implementation="eager",
    )  # fmt: skip
    batch = text()
    mask = batch["attention_mask"].flip(1)
    labels = batch["input_ids"].masked_fill(mask == 0, -100)
    return transformers.FalconForCausalLM(config), {
        **batch,
        "attention_mask": mask,
        "labels": labels,
    }


def codegen() -> tuple[nn.Module, Batch]:
    config = transformers.CodeGenConfig(
        vocab_size=60, n_embd=32, n_layer=2, n_head=4, n_positions=64, rotary_dim=4, n_inner=32
    )
    return transformers.CodeGenForCausalLM(config), text()


def prophetnet() -> tuple[nn.Module, Batch]:
    config = transformers.ProphetNetConfig(
        vocab_size=60, hidden_size=16, encoder_ffn_dim=32, num_encoder_layers=1,
        num_encoder_attention_heads=2, decoder_ffn_dim=32, num_decoder_layers=1,
        num_decoder_attention_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    return transformers.ProphetNetForConditionalGeneration(config), text()


def clip() -> tuple[nn.Module, Batch]:
    vision = {
        "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2, "image_size": 32, "patch_size": 8,
    }  # fmt: skip
    shared = {name: value for name, value in TEXT.items() if not name.endswith("prob")}
    config = transformers.CLIPConfig(text_config=shared, vision_config=vision, projection_dim=16)
    batch = {**text(), "pixel_values": torch.randn(2, 3, 32, 32), "return_loss": True}
    del batch["labels"]
    return transformers.CLIPModel(config), batch


def detr() -> tuple[nn.Module, Batch]:
    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], out_features=["stage2"]
    )
    config = transformers.DetrConfig(
        use_timm_backbone=False, use_pretrained_backbone=False, backbone=None,
        backbone_config=backbone, d_model=16, encoder_layers=1, decoder_layers=1,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=32,
        decoder_ffn_dim=32, num_queries=5,
    )  # fmt: skip
    mask = torch.ones(2, 64, 64, dtype=torch.long)
    mask[:, :, 40:] = 0
    batch = {"pixel_values": torch.randn(2, 3, 64, 64), "pixel_mask": mask}
    return transformers.DetrForObjectDetection(config), batch


MODELS: list[Callable[[], tuple[nn.Module, Batch]]] = [
    big_bird, bloom, clip, codegen, deberta, deberta_v2, detr, distilbert, falcon, funnel,
    gpt_neo, longformer, prophetnet, reformer, xlnet,
]  # fmt: skip


def step(model: nn.Module, batch: Batch) -> tuple[Tensor, list[Tensor]]:
    """Returns the loss of one training step, that of DETR made up, and the gradients."""
    model.zero_grad()
    torch.manual_seed(1)
    output = model(**{k: v.clone() if isinstance(v, Tensor) else v for k, v in batch.items()})
    loss = output["loss"] if "loss" in output else output["logits"].softmax(-1)[..., 0].mean()
    loss.backward()
    return loss.detach().float(), [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.sampled(4)
@pytest.mark.native
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=["bf16", "fp16"])
@pytest.mark.parametrize("make", MODELS, ids=[make.__name__ for make in MODELS])
def test_a_training_step_agrees_with_fp32(
    make: Callable[[], tuple[nn.Module, Batch]], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    model, batch = make()
    model.train(make is reformer)  # which trains only so; no dropout anywhere
    torch.manual_seed(2)
    expected, exact = step(model, batch)
    exact = [gradient.clone() for gradient in exact]
    with hmpx.convert(low_precision_type=dtype):
        loss, gradients = step(model, batch)
    torch.testing.assert_close(loss, expected, rtol=TOLERANCE[dtype], atol=0)
    ours, theirs = (torch.cat([g.flatten() for g in each]) for each in (gradients, exact))
    assert (ours - theirs).norm() < 5 * TOLERANCE[dtype] * theirs.norm()
