"""Decoders with latent attention (low-rank keys and values), linear attention, or both."""

from __future__ import annotations

from dataclasses import replace

from toolkit.models.architectures import hybrid_terms as hybrid
from toolkit.models.architectures import special_terms as own
from toolkit.models.architectures.table_row import Architecture, decoder
from toolkit.models.architectures.terms import Experts, after, indexer, latent_attention, listed, nothing

LATENT: dict[str, Architecture] = {
    "minicpm3": decoder(attend=latent_attention(), mlp_bias="mlp_bias", **(own.MLA | {"needs": own.MLA["needs"][:3]})),
    "youtu": decoder(attend=latent_attention(), **own.MLA),
    "deepseek_v2": decoder(
        attend=latent_attention(),
        mlp_bias="mlp_bias",
        experts=own.routed(after("first_k_dense_replace"), shared_bias="mlp_bias"),
        **own.MLA,
    ),
    "deepseek_v3": decoder(attend=latent_attention(), experts=own.routed(after("first_k_dense_replace")), **own.MLA),
    "deepseek_v32": decoder(
        legacy={"num_experts": "n_routed_experts"},
        attend=latent_attention(),
        extra=indexer,
        experts=own.routed(listed("first_k_dense_replace")),
        **own.MLA,
    ),
    "glm_moe_dsa": decoder(
        legacy={"num_experts": "n_routed_experts"},
        attend=latent_attention(),
        extra=hybrid.glm_indexer,
        experts=own.routed(listed("first_k_dense_replace")),
        reads=("index_topk_freq", "index_skip_topk_offset"),
        refuses={"index_topk_pattern": "indexers shared between layers in the form of older configs"},
        **own.MLA,
    ),
    "glm4_moe_lite": decoder(attend=latent_attention(), experts=own.routed(listed(1)), **own.MLA),
    "axk1": decoder(
        reads=("first_k_dense_replace", "moe_layer_freq"),
        attend=latent_attention(),
        experts=own.routed(own.axk1_sparse, beside=lambda shape: shape.hidden),
        **own.MLA,
    ),
    "longcat_flash": decoder(
        attend=latent_attention(),
        norm_count=2,
        extra=hybrid.longcat_second_half,
        feed_forward=nothing,
        experts=Experts(
            number="n_routed_experts",
            width="expert_ffn_hidden_size",
            beside=hybrid.longcat_zero_experts,
        ),
        names={"num_hidden_layers": "num_layers"},
        refuses={"num_hidden_layers": "half as many layers"},
        **own.MLA,
    ),
}
"""Decoders with latent attention."""

LAYER_TYPES = (own.FULL, own.LINEAR)
QWEN_NEEDS = tuple(f"linear_{part}" for part in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim"))
QWEN_READS = ("full_attention_interval",)
CONVOLUTIONS = (own.FULL, "conv")
LINEAR: dict[str, Architecture] = {
    "minimax": decoder(
        attend=own.minimax_attention, experts=Experts(width="intermediate_size"), layer_types=LAYER_TYPES
    ),
    "qwen3_next": decoder(
        attend=own.qwen_attention, experts=own.SHARED_GATED, layer_types=LAYER_TYPES, needs=QWEN_NEEDS, reads=QWEN_READS
    ),
    "qwen3_5_text": decoder(attend=own.qwen_attention, layer_types=LAYER_TYPES, needs=QWEN_NEEDS, reads=QWEN_READS),
    "qwen3_5_moe_text": decoder(
        attend=own.qwen_attention,
        experts=replace(own.SHARED_GATED, sparse=lambda shape, layer: True),
        layer_types=LAYER_TYPES,
        needs=QWEN_NEEDS,
        reads=QWEN_READS,
    ),
    "olmo_hybrid": decoder(attend=own.olmo_attention, layer_types=LAYER_TYPES),
    "lfm2": decoder(
        attend=hybrid.lfm2_mixer,
        names={"intermediate_size": ""},
        ffn=hybrid.lfm2_ffn,
        needs=("intermediate_size", "conv_L_cache"),
        layer_types=CONVOLUTIONS,
        legacy={"tie_embedding": "tie_word_embeddings", "block_ff_dim": "intermediate_size"},
    ),
    "lfm2_moe": decoder(
        attend=hybrid.lfm2_mixer,
        experts=Experts(sparse=after("num_dense_layers")),
        needs=("layer_types", "conv_L_cache"),
        layer_types=CONVOLUTIONS,
        legacy={"tie_embedding": "tie_word_embeddings"},
    ),
}
"""Decoders in which some layers have linear attention or a short convolution."""
