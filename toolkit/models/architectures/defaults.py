"""The config keys that a parameter count can depend on, and what transformers assumes where they are missing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


SIZES = _words(
    """hidden_size n_embd d_model dim embedding_dim vocab_size num_hidden_layers n_layer n_layers num_layers
    num_attention_heads n_head n_heads num_heads attention_heads num_key_value_heads num_kv_heads kv_n_heads
    head_dim kv_channels dim_head dim_ff intermediate_size n_inner ffn_dim ffn_hidden_size dff decoder_layers
    decoder_ffn_dim decoder_attention_heads intermediate_size_mlp dense_intermediate_size
    prefix_dense_intermediate_size moe_intermediate_size expert_ffn_hidden_size shared_expert_intermediate_size
    decoder_sparse_step moe_layer_interval moe_layer_freq interleave_moe_layer_step kv_lora_rank q_lora_rank
    qk_rope_head_dim qk_nope_head_dim qk_head_dim v_head_dim index_n_heads index_head_dim
    word_embed_proj_dim embedding_size expansion_ratio intermediate_multiple_size
    linear_num_key_heads linear_num_value_heads linear_key_head_dim linear_value_head_dim linear_conv_kernel_dim
    type_vocab_size cross_attention_hidden_size decoder_vocab_size task_type_vocab_size
    position_bias_num_buckets input_embedding_size output_embedding_size full_attention_interval n_embed
    global_head_dim num_global_key_value_heads vocab_size_per_layer_input conv_L_cache block_multiple_of
    block_ff_dim index_topk_freq"""
)
"""Keys that hold a whole number above zero."""
COUNTS = _words(
    """max_position_embeddings n_positions n_ctx max_seq_len num_experts num_local_experts n_routed_experts
    moe_num_experts num_experts_per_tok moe_k moe_topk moe_top_k num_shared_experts n_shared_experts
    moe_num_shared_experts shared_intermediate_size first_k_dense_replace num_dense_layers moe_layer_start_index
    zero_expert_num num_ln_in_parallel_attn position_bias_max_distance prompt_types prompt_length segment_types
    max_target_positions
    hidden_size_per_layer_input num_kv_shared_layers top_k_experts index_skip_topk_offset"""
)
"""Keys that hold a whole number, zero allowed."""
FLAGS = _words(
    """tie_word_embeddings attention_bias attention_out_bias qkv_bias use_qkv_bias mlp_bias bias use_bias
    enable_bias lm_head_bias use_qk_norm qk_layernorm use_post_norm use_parallel_residual parallel_attn multi_query
    new_decoder_architecture do_layer_norm_before _remove_final_layer_norm layer_norm_elementwise_affine
    add_cross_attention is_moe norm_bias decoder_bias classifier_bias use_task_id use_learned_position_embeddings
    layernorm_embedding attention_k_eq_v enable_moe_block use_double_wide_mlp conv_bias block_auto_adjust_ff_dim
    use_expert_bias tie_embedding"""
)
"""Keys that are true or false."""
PER_LAYER = _words("layer_types mlp_layer_types indexer_types num_attention_heads_per_layer")
"""Keys that hold a list with one entry a layer: names, or numbers above zero."""
CHOSEN = _words("mlp_only_layers moe_layers full_attn_idxs")
"""Keys that hold a list of layer numbers."""
OTHERS = _words("""hidden_act gating index_topk_pattern sparse_attention_config per_layer_config""")
"""Keys with a form of their own; the rows that read them check them."""
FACTORS = _words("block_ffn_dim_multiplier")
"""Keys that hold a number above zero, whole or not."""
OFFSETS = _words("moe_layer_end_index")
"""Keys that hold a whole number, where -1 means the last layer."""
KEYS = SIZES | COUNTS | FLAGS | PER_LAYER | CHOSEN | OFFSETS | FACTORS | OTHERS
"""Every key that a parameter count can depend on; the generated defaults hold these and no more."""


@dataclass(frozen=True)
class Defaults:
    """What transformers assumes for one model type."""

    values: Mapping[str, Any]
    """Defaults by native key."""
    aliases: Mapping[str, str]
    """Common key to native key, e.g. `hidden_size` to `n_embd`."""


@cache
def _table() -> Mapping[str, Any]:
    table: Mapping[str, Any] = json.loads(Path(__file__).with_name("defaults.json").read_text(encoding="utf-8"))
    return table


def known_types() -> tuple[str, ...]:
    """Every model type that transformers can build as a causal language model."""
    return tuple(_table()["types"])


def text_types() -> Mapping[str, str]:
    """Composite model types, each with the type of its text part."""
    types: Mapping[str, str] = _table()["text_types"]
    return types


def defaults(model_type: str) -> Defaults:
    """What transformers assumes for keys that a config of this type leaves out."""
    row = _table()["types"][model_type]
    return Defaults(row.get("values", {}), row.get("aliases", {}))
