"""Shrinks configurations of transformers: the architecture stays, the widths and depths don't.

Sizes go by attribute names, which the library shares among its models; what else a model needs
stands beside it in the catalogue. The initial weights are scaled up as the widths are scaled down,
so that activations have the size that they have in full models: with the library's own 0.02 at a
width of 64 attention is uniform, and rounded positions would pass unnoticed.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

#: Of every attribute with one of these names, where the default configuration has a number there.
SIZES: dict[str, float] = {
    # widths
    "hidden_size": 64, "d_model": 64, "n_embd": 64, "embed_dim": 64, "emb_dim": 64,
    "embedding_size": 64, "hidden_dim": 64, "projection_dim": 32, "proj_dim": 32,
    "shared_embed_dim": 32, "dim": 64, "word_embed_proj_dim": 64, "encoder_hidden_size": 64,
    "decoder_hidden_size": 64, "hidden_size_per_layer_input": 16, "output_dim": 64,
    "out_hidden_size": 64, "encoder_hidden_dim": 64, "cross_attention_hidden_size": 64,
    "attention_hidden_size": 64, "lru_width": 64, "embedding_dim": 64, "fusion_hidden_size": 32,
    # layers
    "num_hidden_layers": 2, "num_layers": 2, "n_layer": 2, "n_layers": 2, "encoder_layers": 2,
    "decoder_layers": 2, "num_decoder_layers": 2, "num_encoder_layers": 2, "depth": 2,
    "decoder_num_hidden_layers": 2, "encoder_num_hidden_layers": 2, "num_decoder_blocks": 2,
    # heads
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "attention_heads": 4,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_key_value_heads": 2,
    "decoder_num_attention_heads": 4, "decoder_num_key_value_heads": 2, "n_kv_heads": 2,
    "encoder_num_attention_heads": 4, "encoder_num_key_value_heads": 2,
    "head_dim": 16, "d_kv": 16, "dim_head": 16, "global_head_dim": 16,
    "kv_channels": 16, "rotary_dim": 8, "attention_head_dim": 16, "swa_head_dim": 16,
    "num_global_key_value_heads": 2, "swa_num_key_value_heads": 2, "swa_num_attention_heads": 4,
    # feed forward
    "intermediate_size": 128, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "ffn_dim": 128,
    "d_ff": 128, "ffn_hidden_size": 128, "n_inner": 128, "dim_ff": 128, "mlp_dim": 128,
    "decoder_intermediate_size": 128, "dim_feedforward": 128, "encoder_intermediate_size": 128,
    # vocabularies and positions
    "vocab_size": 99, "text_vocab_size": 99, "max_position_embeddings": 2048, "n_positions": 2048,
    "vocab_size_per_layer_input": 99, "max_seq_len": 2048, "max_source_positions": 2048,
    "max_target_positions": 2048, "decoder_vocab_size": 99, "max_sequence_length": 2048,
    # mixtures of experts
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 64, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
    "num_shared_experts": 1, "moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1,
    "shared_expert_intermediate_size": 64, "first_k_dense_replace": 1, "moe_k": 2, "top_k_experts": 2,
    "expert_ffn_hidden_size": 64, "moe_shared_expert_intermediate_size": 64, "num_experts_per_token": 2,
    "shared_intermediate_size": 64,
    # latent attention
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 16, "qk_head_dim": 16, "index_head_dim": 16, "index_n_heads": 2, "index_topk": 8,
    # state spaces and linear attention
    "state_size": 8, "mamba_d_state": 8, "mamba_n_heads": 8, "mamba_d_head": 16,
    "mamba_num_heads": 8, "mamba_head_dim": 16, "mamba_chunk_size": 16, "mamba_n_groups": 1,
    "ssm_state_size": 8, "time_step_rank": 4, "mamba_dt_rank": 4, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_head_dim": 16, "linear_num_heads": 4,
    # images
    "image_size": 32, "patch_size": 8, "pretrain_image_size": 32, "img_size": 32,
    # audio
    "num_mel_bins": 16, "classifier_proj_size": 32, "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4, "codevector_dim": 32, "proj_codevector_dim": 32,
    "tdnn_dim": 32, "num_codevectors_per_group": 16,
    # tokens with a meaning
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
    "sep_token_id": 2, "cls_token_id": 1, "mask_token_id": 3, "forced_eos_token_id": 2,
    "image_token_id": 90, "image_token_index": 90, "video_token_id": 91, "video_token_index": 91,
    "audio_token_id": 92, "audio_token_index": 92, "vision_start_token_id": 93,
    "vision_end_token_id": 94, "image_start_token_id": 93, "image_end_token_id": 94,
    "boi_token_id": 93, "eoi_token_id": 94, "boi_token_index": 93, "eoi_token_index": 94,
    "boa_token_id": 95, "eoa_token_id": 96, "boa_token_index": 95, "eoa_token_index": 96,
    "video_start_token_id": 95, "video_end_token_id": 96, "vision_token_id": 97,
    "audio_bos_token_id": 95, "audio_eos_token_id": 96,
    # initial weights
    "initializer_range": 0.12, "init_std": 0.12,
}  # fmt: skip

#: Switched off where present, since dropout is compared to nothing, and stops of masks are luck.
OFF = frozenset({
    "layerdrop", "encoder_layerdrop", "decoder_layerdrop", "mask_time_prob", "mask_feature_prob",
    "router_jitter_noise",
})  # fmt: skip


def arguments(config: Any, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Returns keyword arguments for a small configuration of the class of `config`.

    Args:
        config: the default configuration.
        overrides: what the model needs besides, with nested dicts for nested configurations.
    """
    nested = {
        name: value
        for name in getattr(type(config), "sub_configs", {})
        if (value := getattr(config, name, None)) is not None
    }
    values = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    small: dict[str, Any] = {}
    for name, value in values.items():
        if name in OFF and isinstance(value, float):
            small[name] = 0.0
        elif name in SIZES and isinstance(value, (int, float)) and not isinstance(value, bool):
            small[name] = SIZES[name] if name.endswith("token_id") else min(value, SIZES[name])
            if name in {"initializer_range", "init_std"} or name.endswith(("_id", "_index")):
                small[name] = SIZES[name]
    for name, value in nested.items():
        given = overrides.get(name, {})
        small[name] = arguments(value, given) if not isinstance(value, dict) else given
        model_type = getattr(value, "model_type", None)
        if model_type and isinstance(small[name], dict):
            small[name].setdefault("model_type", model_type)
    for name, value in overrides.items():
        if name not in nested:
            small[name] = copy.deepcopy(value)
    return small


def shrink(config_class: Any, overrides: Mapping[str, Any]) -> Any:
    """Returns a small configuration of `config_class`."""
    return config_class(**arguments(config_class(), overrides))
