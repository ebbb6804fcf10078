"""Decoders with routed experts."""

from __future__ import annotations

from dataclasses import replace

from toolkit.models.architectures import special_terms as special
from toolkit.models.architectures.table_row import Architecture, decoder
from toolkit.models.architectures.terms import (
    Experts,
    after,
    indexer,
    latent_attention,
    listed,
    nothing,
    stepped,
    total,
)

MIXTURES: dict[str, Architecture] = {
    "mixtral": decoder(experts=Experts(width="intermediate_size")),
    "qwen2_moe": decoder(
        bias="qkv_bias",
        out_bias=False,
        experts=special.SHARED_GATED,
    ),
    "qwen3_moe": decoder(bias="attention_bias", qk_norm="head", experts=Experts(sparse=stepped("num_experts"))),
    "olmoe": decoder(bias="attention_bias", qk_norm="hidden", experts=Experts(width="intermediate_size")),
    "flex_olmo": decoder(bias="attention_bias", qk_norm="all", experts=Experts(width="intermediate_size")),
    "phimoe": decoder(
        bias="attention_bias",
        vectors=2,
        experts=Experts(number="num_local_experts", width="intermediate_size"),
        final=lambda shape: 2 * shape.hidden + shape.on("lm_head_bias") * shape.vocab,
    ),
    "granitemoe": decoder(
        bias="attention_bias", experts=Experts(number="num_local_experts", width="intermediate_size")
    ),
    "granitemoeshared": decoder(bias="attention_bias", experts=special.GRANITE_SHARED),
    "granitemoe_swa": decoder(bias="attention_bias", extra=special.sinks, experts=special.GRANITE_SHARED),
    "gpt_oss": decoder(
        bias="attention_bias",
        extra=special.sinks,
        experts=Experts(width="intermediate_size", bias=True, router=1),
    ),
    "ernie4_5_moe": decoder(
        bias="use_bias",
        mlp_bias="use_bias",
        experts=Experts(
            sparse=special.ernie_sparse,
            shared=special.product("moe_num_shared_experts", "moe_intermediate_size"),
            shared_bias="use_bias",
            router=1,
        ),
        final=lambda shape: shape.hidden + shape.on("use_bias") * shape.vocab,
    ),
    "dots1": decoder(
        bias="attention_bias",
        qk_norm="head",
        experts=special.routed(after("first_k_dense_replace")),
    ),
    "exaone_moe": decoder(
        qk_norm="head",
        experts=Experts(
            sparse=listed("first_k_dense_replace"),
            shared=special.product("num_shared_experts", "moe_intermediate_size"),
        ),
    ),
    "glm4_moe": decoder(
        bias="attention_bias",
        out_bias=False,
        qk_norm="head",
        qk_norm_if="use_qk_norm",
        experts=special.routed(after("first_k_dense_replace")),
    ),
    "solar_open": decoder(bias="attention_bias", out_bias=False, experts=special.routed(lambda shape, layer: True)),
    "hunyuan_v1_moe": decoder(
        bias="attention_bias",
        qk_norm="head",
        experts=Experts(width="intermediate_size", shared=special.key("intermediate_size")),
    ),
    "hy_v3": decoder(
        bias="attention_bias",
        qk_norm="head",
        mlp_bias="mlp_bias",
        experts=Experts(
            sparse=listed(1),
            shared=special.product("num_shared_experts", "moe_intermediate_size"),
            shared_bias="mlp_bias",
        ),
    ),
    "kolibri1": decoder(
        norm_count=4, qk_norm="head", experts=Experts(shared=special.key("shared_expert_intermediate_size"))
    ),
    "laguna": decoder(
        attend=special.laguna_attention,
        experts=Experts(sparse=listed(1), shared=special.key("shared_expert_intermediate_size"), router=1),
    ),
    "mellum": decoder(bias="attention_bias", qk_norm="head", experts=Experts(sparse=listed(0))),
    "minimax_m2": decoder(qk_norm="all", experts=Experts(width="intermediate_size")),
    "afmoe": decoder(
        bias="attention_bias",
        norm_count=4,
        qk_norm="head",
        extra=special.attention_gate,
        experts=Experts(
            sparse=after("num_dense_layers"),
            shared=special.product("num_shared_experts", "moe_intermediate_size"),
            router=1,
        ),
    ),
    "beam": decoder(
        bias="attention_bias",
        norm_count=4,
        qk_norm="head",
        extra=total(special.attention_gate, special.sinks),
        experts=Experts(sparse=listed(3)),
    ),
    "aria_text": decoder(
        bias="attention_bias",
        experts=Experts(
            number="moe_num_experts",
            visited="moe_topk",
            width="intermediate_size",
            shared=special.product("moe_num_shared_experts", "intermediate_size"),
            shared_bias="mlp_bias",
        ),
    ),
    "flint": decoder(
        bias="attention_bias",
        qk_norm="head",
        extra=special.sinks,
        experts=Experts(
            sparse=stepped("num_experts", dense=(0, 1)), shared=special.key("shared_expert_intermediate_size")
        ),
    ),
    "llama4_text": decoder(
        bias="attention_bias",
        names={"intermediate_size": "intermediate_size_mlp"},
        experts=Experts(
            number="num_local_experts",
            width="intermediate_size",
            sparse=special.llama4_sparse,
            shared=special.key("intermediate_size"),
        ),
    ),
    "cohere2_moe": decoder(
        reads=("first_k_dense_replace",),
        bias="attention_bias",
        norm_count=1,
        names={"intermediate_size": "prefix_dense_intermediate_size"},
        ffn=special.key("intermediate_size"),
        experts=Experts(
            width="intermediate_size",
            sparse=listed("first_k_dense_replace"),
            shared=special.product("num_shared_experts", "intermediate_size"),
        ),
    ),
    "mimo_v2_flash": decoder(
        attend=special.mimo_attention,
        experts=Experts(number="n_routed_experts", sparse=listed(1)),
        layer_types=("full_attention", "sliding_attention"),
        needs=("v_head_dim",),
    ),
    "minimax_m3_vl_text": decoder(
        qk_norm="head",
        extra=special.m3_indexer,
        names={"intermediate_size": "dense_intermediate_size"},
        experts=Experts(width="intermediate_size", sparse=listed(0), shared=special.key("shared_intermediate_size")),
        layer_types=("full_attention", "minimax_m3_sparse"),
        refuses={"sparse_attention_config": "sparse layers in the form of older configs"},
    ),
    "dbrx": decoder(
        refuses={"tie_word_embeddings": "tied embeddings"},
        own_head_dim=False,
        names={"num_key_value_heads": "attn_config.kv_n_heads"},
        experts=Experts(
            number="ffn_config.moe_num_experts",
            visited="ffn_config.moe_top_k",
            width="ffn_config.ffn_hidden_size",
        ),
    ),
    "gemma4_text": decoder(
        attend=special.gemma4_attention,
        norm_count=4,
        extra=total(special.gemma4_mlp, special.gemma4_layer_input),
        feed_forward=nothing,
        embed=special.gemma4_embed,
        experts=Experts(
            visited="top_k_experts",
            sparse=lambda shape, layer: shape.on("enable_moe_block"),
            router=1,
            beside=lambda shape: 4 * shape.hidden,
        ),
        reads=("global_head_dim", "num_global_key_value_heads", "per_layer_config"),
        layer_types=("full_attention", "sliding_attention"),
    ),
    "jetmoe": decoder(
        attend=special.jetmoe_attention,
        names={"num_attention_heads": "num_key_value_heads"},
        heads=lambda shape: shape.kv_heads * shape.num("num_experts_per_tok"),
        experts=Experts(number="num_local_experts", width="intermediate_size", beside=lambda shape: shape.hidden),
    ),
}
"""Decoders with routed experts."""


LATENT: dict[str, Architecture] = {
    "minicpm3": decoder(
        attend=latent_attention(), mlp_bias="mlp_bias", **(special.MLA | {"needs": special.MLA["needs"][:3]})
    ),
    "youtu": decoder(attend=latent_attention(), **special.MLA),
    "deepseek_v2": decoder(
        attend=latent_attention(),
        mlp_bias="mlp_bias",
        experts=special.routed(after("first_k_dense_replace"), shared_bias="mlp_bias"),
        **special.MLA,
    ),
    "deepseek_v3": decoder(
        attend=latent_attention(), experts=special.routed(after("first_k_dense_replace")), **special.MLA
    ),
    "deepseek_v32": decoder(
        legacy={"num_experts": "n_routed_experts"},
        attend=latent_attention(),
        extra=indexer,
        experts=special.routed(listed("first_k_dense_replace")),
        **special.MLA,
    ),
    "glm_moe_dsa": decoder(
        legacy={"num_experts": "n_routed_experts"},
        attend=latent_attention(),
        extra=special.glm_indexer,
        experts=special.routed(listed("first_k_dense_replace")),
        reads=("index_topk_freq", "index_skip_topk_offset"),
        refuses={"index_topk_pattern": "indexers shared between layers in the form of older configs"},
        **special.MLA,
    ),
    "glm4_moe_lite": decoder(attend=latent_attention(), experts=special.routed(listed(1)), **special.MLA),
    "axk1": decoder(
        reads=("first_k_dense_replace", "moe_layer_freq"),
        attend=latent_attention(),
        experts=special.routed(special.axk1_sparse, beside=lambda shape: shape.hidden),
        **special.MLA,
    ),
    "longcat_flash": decoder(
        attend=latent_attention(),
        norm_count=2,
        extra=special.longcat_second_half,
        feed_forward=nothing,
        experts=Experts(
            number="n_routed_experts",
            width="expert_ffn_hidden_size",
            beside=special.longcat_zero_experts,
        ),
        names={"num_hidden_layers": "num_layers"},
        refuses={"num_hidden_layers": "half as many layers"},
        **special.MLA,
    ),
}
"""Decoders with latent attention."""

LAYER_TYPES = (special.FULL, special.LINEAR)
QWEN_NEEDS = tuple(f"linear_{part}" for part in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim"))
QWEN_READS = ("full_attention_interval",)
CONVOLUTIONS = (special.FULL, "conv")
LINEAR: dict[str, Architecture] = {
    "minimax": decoder(
        attend=special.minimax_attention, experts=Experts(width="intermediate_size"), layer_types=LAYER_TYPES
    ),
    "qwen3_next": decoder(
        attend=special.qwen_attention,
        experts=special.SHARED_GATED,
        layer_types=LAYER_TYPES,
        needs=QWEN_NEEDS,
        reads=QWEN_READS,
    ),
    "qwen3_5_text": decoder(attend=special.qwen_attention, layer_types=LAYER_TYPES, needs=QWEN_NEEDS, reads=QWEN_READS),
    "qwen3_5_moe_text": decoder(
        attend=special.qwen_attention,
        experts=replace(special.SHARED_GATED, sparse=lambda shape, layer: True),
        layer_types=LAYER_TYPES,
        needs=QWEN_NEEDS,
        reads=QWEN_READS,
    ),
    "olmo_hybrid": decoder(attend=special.olmo_attention, layer_types=LAYER_TYPES),
    "lfm2": decoder(
        attend=special.lfm2_mixer,
        names={"intermediate_size": ""},
        ffn=special.lfm2_ffn,
        needs=("intermediate_size", "conv_L_cache"),
        layer_types=CONVOLUTIONS,
        legacy={"tie_embedding": "tie_word_embeddings", "block_ff_dim": "intermediate_size"},
    ),
    "lfm2_moe": decoder(
        attend=special.lfm2_mixer,
        experts=Experts(sparse=after("num_dense_layers")),
        needs=("layer_types", "conv_L_cache"),
        layer_types=CONVOLUTIONS,
        legacy={"tie_embedding": "tie_word_embeddings"},
    ),
}
"""Decoders in which some layers have linear attention or a short convolution."""
