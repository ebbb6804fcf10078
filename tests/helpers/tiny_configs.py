"""Small configs of every model type, two sizes and each flag flipped, for comparison with transformers' own models."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from toolkit.models.architectures import ARCHITECTURES
from toolkit.models.config_reader import FLAGS

LAYERS = 4
SIZES: dict[str, tuple[int, int]] = {
    "vocab_size": (131, 97),
    "hidden_size": (96, 120),
    "n_embd": (96, 120),
    "d_model": (96, 120),
    "intermediate_size": (212, 76),
    "intermediate_size_mlp": (148, 52),
    "dense_intermediate_size": (148, 52),
    "prefix_dense_intermediate_size": (148, 52),
    "shared_intermediate_size": (44, 20),
    "ffn_dim": (212, 76),
    "n_inner": (212, 76),
    "dff": (212, 76),
    "decoder_ffn_dim": (212, 76),
    "ffn_hidden_size": (212, 76),
    "num_hidden_layers": (LAYERS, LAYERS),
    "n_layer": (LAYERS, LAYERS),
    "n_layers": (LAYERS, LAYERS),
    "num_layers": (LAYERS, LAYERS),
    "decoder_layers": (LAYERS, LAYERS),
    "encoder_layers": (2, 2),
    "num_attention_heads": (4, 6),
    "n_head": (4, 6),
    "n_heads": (4, 6),
    "num_heads": (4, 6),
    "attention_heads": (4, 6),
    "decoder_attention_heads": (4, 6),
    "num_key_value_heads": (2, 6),
    "num_kv_heads": (2, 6),
    "head_dim": (28, 16),
    "kv_channels": (28, 16),
    "max_position_embeddings": (139, 67),
    "n_positions": (139, 67),
    "max_seq_len": (139, 67),
    "num_experts": (6, 9),
    "num_local_experts": (6, 9),
    "n_routed_experts": (6, 9),
    "moe_num_experts": (6, 9),
    "num_experts_per_tok": (2, 3),
    "moe_k": (2, 3),
    "moe_topk": (2, 3),
    "n_shared_experts": (1, 2),
    "num_shared_experts": (1, 2),
    "moe_intermediate_size": (36, 20),
    "expert_ffn_hidden_size": (36, 20),
    "shared_expert_intermediate_size": (44, 28),
    "n_group": (1, 1),
    "topk_group": (1, 1),
    "first_k_dense_replace": (1, 2),
    "num_dense_layers": (1, 2),
    "interleave_moe_layer_step": (1, 2),
    "decoder_sparse_step": (1, 2),
    "kv_lora_rank": (20, 12),
    "q_lora_rank": (18, 14),
    "qk_rope_head_dim": (8, 6),
    "qk_nope_head_dim": (14, 10),
    "v_head_dim": (10, 22),
    "index_n_heads": (3, 5),
    "index_head_dim": (24, 12),
    "top_k_experts": (2, 3),
    "hidden_size_per_layer_input": (12, 0),
    "vocab_size_per_layer_input": (61, 61),
    "num_kv_shared_layers": (1, 2),
    "conv_L_cache": (3, 5),
    "block_multiple_of": (32, 48),
    "zero_expert_num": (2, 3),
    "word_embed_proj_dim": (96, 40),
    "embedding_size": (40, 56),
    "linear_num_key_heads": (2, 3),
    "linear_num_value_heads": (4, 6),
    "linear_key_head_dim": (10, 14),
    "linear_value_head_dim": (12, 18),
    "linear_conv_kernel_dim": (4, 3),
    "pad_token_id": (0, 0),
    "bos_token_id": (1, 1),
    "eos_token_id": (2, 2),
}
"""By key, the value in each of the two small configs; the numbers differ so that no two terms can be confused."""

OWN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gpt_neo": ({"attention_types": [[["global", "local"], 2]]}, {"attention_types": [[["global"], 4]]}),
    "falcon": ({"num_kv_heads": 2}, {"num_kv_heads": 3, "new_decoder_architecture": True}),
    "dbrx": tuple(
        {
            # transformers 5.22 reads `rope_theta` here, but has no default for it.
            "attn_config": {"kv_n_heads": kv_heads, "rope_theta": 10_000.0},
            "ffn_config": {"ffn_hidden_size": ffn, "moe_num_experts": experts, "moe_top_k": 2},
        }
        for kv_heads, ffn, experts in ((2, 52, 6), (3, 20, 9))
    ),
    "gemma4_text": (
        {"global_head_dim": 20, "layer_types": ["full_attention", "sliding_attention"] * 2},
        {
            "global_head_dim": 12,
            "num_global_key_value_heads": 3,
            "attention_k_eq_v": True,
            "enable_moe_block": True,
            "use_double_wide_mlp": True,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
        },
    ),
    "lfm2": ({}, {"full_attn_idxs": [1], "block_ffn_dim_multiplier": 1.3}),
    "lfm2_moe": (
        {"layer_types": ["conv", "full_attention"] * 2},
        {"layer_types": ["conv"] * 3 + ["full_attention"], "tie_embedding": False},
    ),
    "qwen3_next": ({}, {"full_attention_interval": 2, "mlp_only_layers": [1]}),
    "qwen3_5_text": ({}, {"full_attention_interval": 3}),
    "qwen3_5_moe_text": ({}, {"layer_types": ["full_attention", "linear_attention"] * 2}),
    "olmo_hybrid": ({}, {key: None for key in SIZES if key.startswith("linear_")} | {"linear_conv_kernel_dim": 2}),
    "minimax": ({}, {"layer_types": ["linear_attention"] * 3 + ["full_attention"]}),
    "minimax_m3_vl_text": ({}, {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2}),
    "mimo_v2_flash": ({"layer_types": ["sliding_attention", "full_attention"] * 2}, {}),
    "cohere2_moe": ({"first_k_dense_replace": 1}, {}),
    "axk1": ({"first_k_dense_replace": 2, "moe_layer_freq": 2}, {}),
    "qwen3_moe": ({}, {"mlp_only_layers": [3]}),
    "llama4_text": ({}, {"moe_layers": [2], "interleave_moe_layer_step": 1}),
    "ernie4_5_moe": ({}, {"moe_layer_end_index": 2, "moe_layer_start_index": 0}),
    "laguna": ({}, {"gating": False, "num_attention_heads_per_layer": [6, 12, 6, 18]}),
    "glm_moe_dsa": ({"index_topk_freq": 2}, {"indexer_types": ["full", "shared", "full", "shared"]}),
    "marian": ({}, {"decoder_vocab_size": 71}),
    "apertus": ({}, {"hidden_act": "silu"}),
    "deepseek_v3": ({}, {"q_lora_rank": None}),
    "llama": ({}, {"head_dim": None, "num_key_value_heads": None}),
    "gpt2": ({}, {"n_inner": None}),
}
"""What one type needs, or shows only with keys of its own."""


def fields(model_type: str) -> dict[str, Any]:
    """The fields of transformers' config class, with their defaults."""
    return {field.name: field.default for field in dataclasses.fields(CONFIG_MAPPING[model_type])}


def small(model_type: str, size: int) -> dict[str, Any]:
    """A small config of the type, number 0 or 1."""
    known = fields(model_type)
    chosen = {key: sizes[size] for key, sizes in SIZES.items() if key in known}
    if size and "mlp_layer_types" in known:
        chosen["mlp_layer_types"] = ["sparse", "dense", "sparse", "dense"]
    return chosen | OWN.get(model_type, ({}, {}))[size]


def variants(model_type: str) -> Iterator[dict[str, Any]]:
    """Both small configs, then the first one with each flag flipped that the count may depend on."""
    first = small(model_type, 0)
    yield first
    yield small(model_type, 1)
    refused = ARCHITECTURES[model_type].refuses
    for key, default in fields(model_type).items():
        if key in FLAGS and key not in refused and isinstance(default, bool):
            yield first | {key: not default}
