"""Language models of transformers: decoders, encoders, and both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .hugging_face import Model


def _plain(names: str) -> dict[str, Mapping[str, Any]]:
    """Returns the models that need nothing beside the general sizes."""
    return {name: {} for name in names.split()}


_LATENT = {"qk_rope_head_dim": 8, "num_key_value_heads": 4, "head_dim": 8}
_HYBRID = {"layer_types": ["linear_attention", "full_attention"]}

#: Model type -> what its small configuration needs. Classes go by the library's own mapping.
DENSE: Mapping[str, Mapping[str, Any]] = {
    **_plain("""
        apertus arcee biogpt bitnet bloom codegen cohere cohere2 cpmant ctrl cwm diffllama
        ernie4_5 exaone4 falcon gemma gemma2 gemma3_text gemma4_text glm glm4 gpt2 gpt_bigcode
        gpt_neox gpt_neox_japanese gptj granite granite_swa helium hrm_text hyperclovax jais2
        llama minicpm3 ministral3 mistral modernbert-decoder mpt nanochat olmo olmo2 olmo3
        openai-gpt opt persimmon phi phi3 qwen2 qwen3 seed_oss smollm3 stablelm starcoder2
        vaultgemma xglm xlnet
    """),
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "nemotron": {"num_key_value_heads": 2, "head_dim": 16},
    "ministral": {"head_dim": 16, "num_key_value_heads": 2},
    "hunyuan_v1_dense": {"head_dim": 16, "num_key_value_heads": 2},
    "youtu": _LATENT,
}  # fmt: skip
EXPERTS: Mapping[str, Mapping[str, Any]] = {
    **_plain("""
        afmoe aria_text cohere2_moe deepseek_v4 doge ernie4_5_moe exaone_moe flex_olmo glm4_moe
        glm4_moe_lite gpt_oss granitemoe granitemoeshared hy_v3 jetmoe kolibri1 laguna
        llama4_text mellum mimo_v2_flash minimax_m2 mixtral olmoe phimoe qwen2_moe qwen3_moe
        solar_open
    """),
    "deepseek_v2": {**_LATENT, "num_experts_per_tok": 2},
    "deepseek_v3": _LATENT,
    "axk1": _LATENT,
    "longcat_flash": _LATENT,
    "hunyuan_v1_moe": {"head_dim": 16, "num_key_value_heads": 2},
    "dots1": {
        "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
        "num_key_value_heads": 2,
    },
}  # fmt: skip
STATES: Mapping[str, Mapping[str, Any]] = {
    **_plain("falcon_mamba mamba lfm2 minimax nemotron_h olmo_hybrid"),
    "mamba2": {"num_heads": 8, "n_groups": 1, "chunk_size": 16},
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_d_head": 16},
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "qwen3_next": _HYBRID,
    "qwen3_5_text": _HYBRID,
    "qwen3_5_moe_text": _HYBRID,
    "kimi_linear": _HYBRID,
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "zamba": {
        "num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2,
        "attention_hidden_size": 128, "attention_head_dim": 32, "num_key_value_heads": 4,
    },
    "zamba2": {
        "num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "attention_hidden_size": 128, "attention_head_dim": 32, "mamba_headdim": 16,
        "n_mamba_heads": 8, "kv_channels": 32, "num_query_groups": 4, "num_key_value_heads": 4,
        "chunk_size": 16,
    },
}  # fmt: skip
ENCODERS: Mapping[str, Mapping[str, Any]] = {
    **_plain("""
        albert bert big_bird convbert deberta deberta-v2 distilbert electra ernie eurobert flaubert
        fnet gte ibert jina_embeddings_v3 layoutlm longformer megatron-bert mobilebert modernbert
        mpnet mra nomic_bert nystromformer rembert roberta roberta-prelayernorm roformer
        squeezebert tapas xlm xlm-roberta-xl yoso
    """),
    "esm": {
        "vocab_size": 99, "position_embedding_type": "rotary", "mask_token_id": 3, "pad_token_id": 0,
    },
}  # fmt: skip
BOTH: Mapping[str, Mapping[str, Any]] = {
    **_plain("""
        bart bigbird_pegasus blenderbot blenderbot-small led m2m_100 marian mbart mvp pegasus
        pegasus_x plbart prophetnet seamless_m4t t5gemma
    """),
    "mt5": {"decoder_start_token_id": 0},
    "umt5": {"decoder_start_token_id": 0},
    "t5": {"decoder_start_token_id": 0},
    "longt5": {"decoder_start_token_id": 0},
    "switch_transformers": {"decoder_start_token_id": 0},
    "nllb-moe": {"encoder_sparse_step": 2, "decoder_sparse_step": 2},
}  # fmt: skip


def models() -> list[Model]:
    """Returns all of them."""
    from transformers.models.auto import modeling_auto as auto

    groups = [
        (DENSE, "causal", "dense decoders", auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
        (EXPERTS, "causal", "mixtures of experts", auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
        (STATES, "causal", "state spaces", auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
        (ENCODERS, "masked", "encoders", auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES),
        (BOTH, "seq2seq", "encoder-decoders", auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES),
    ]
    return [
        Model(name, classes[name], task, overrides, family=family)
        for group, task, family, classes in groups
        for name, overrides in group.items()
        if name in classes
    ]
