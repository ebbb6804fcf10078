"""Sizes of tiny models that run the same code paths as the real ones in milliseconds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

LAYERS = 4
IMAGES = {"image_size": 16, "patch_size": 4}
"""Sizes of vision models."""
HEAD_DIM = 16
VOCABULARY = 128
POSITIONS = 128

_WIDTH_KEYS = ("hidden_size", "n_embd", "d_model", "dim", "embedding_dim", "word_embed_proj_dim")
_INNER_KEYS = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "encoder_ffn_dim", "decoder_ffn_dim")
_HEAD_KEYS = (
    "num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads",
    "mamba_n_heads",
)  # fmt: skip
_LAYER_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
_POSITION_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_target_positions")
_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
_SIZES = {
    "vocab_size": VOCABULARY,
    "head_dim": HEAD_DIM,
    "rotary_dim": HEAD_DIM // 2,
    "encoder_layers": 2,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "moe_layer_start_index": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "mamba_d_state": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def tiny_sizes(heads: int) -> dict[str, Any]:
    """Config key → size, under every name that a model type uses for it."""
    width = heads * HEAD_DIM
    groups: list[tuple[Iterable[str], Any]] = [
        (_WIDTH_KEYS, width),
        (_INNER_KEYS, 2 * width),
        (_HEAD_KEYS, heads),
        (("num_key_value_heads",), heads // 2),
        (_LAYER_KEYS, LAYERS),
        (_POSITION_KEYS, POSITIONS),
        (_EXPERT_KEYS, 4),
    ]
    return {**_SIZES, **{key: value for keys, value in groups for key in keys}}
