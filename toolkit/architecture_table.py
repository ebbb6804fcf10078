"""Every model type that the planner can count, one row a type.

A row is exact or absent: the tests build each type with transformers and compare it layer by layer.
"""

from __future__ import annotations

from collections.abc import Mapping

from toolkit import architecture_terms as own
from toolkit.architectures import CROSS_ATTENTION, Architecture, bert, decoder, gpt, positions, seq2seq_decoder
from toolkit.model_terms import (
    Experts,
    after,
    attention,
    cross_attention,
    indexer,
    latent_attention,
    listed,
    mlp,
    norms,
    nothing,
    stepped,
    total,
)

LLAMA = decoder(bias="attention_bias", mlp_bias="mlp_bias")
NO_BIAS = decoder()
ATTENTION_BIAS = decoder(bias="attention_bias")
QWEN3 = decoder(bias="attention_bias", qk_norm="head")
OLMO2 = decoder(bias="attention_bias", qk_norm="all", own_head_dim=False)

DENSE: dict[str, Architecture] = {
    "llama": LLAMA,
    "granite": decoder(bias="attention_bias", mlp_bias="mlp_bias"),
    "smollm3": LLAMA,
    "cwm": decoder(mlp_bias="mlp_bias"),
    "mistral": NO_BIAS,
    "ministral": NO_BIAS,
    "ministral3": NO_BIAS,
    "phi3": decoder(own_head_dim=False),
    "gemma": ATTENTION_BIAS,
    "gemma2": decoder(bias="attention_bias", norm_count=4),
    "gemma3_text": decoder(bias="attention_bias", norm_count=4, qk_norm="head"),
    "vaultgemma": ATTENTION_BIAS,
    "helium": decoder(attend=attention("attention_bias", False, square_out=True), mlp_bias="mlp_bias"),
    "hyperclovax": decoder(
        bias="attention_bias", mlp_bias="mlp_bias", norm_count=lambda shape: 2 + 2 * shape.on("use_post_norm")
    ),
    "glm": decoder(bias="attention_bias", out_bias=False),
    "glm4": decoder(bias="attention_bias", out_bias=False, norm_count=4),
    "ernie4_5": decoder(bias="use_bias", mlp_bias="use_bias"),
    "qwen2": decoder(bias=True, out_bias=False),
    "qwen3": QWEN3,
    "seed_oss": decoder(bias="attention_bias", out_bias="attention_out_bias", mlp_bias="mlp_bias"),
    "exaone4": decoder(qk_norm="head"),
    "hunyuan_v1_dense": QWEN3,
    "olmo": decoder(bias="attention_bias", vectors=0, own_head_dim=False),
    "olmo2": OLMO2,
    "olmo3": OLMO2,
    "cohere": decoder(
        bias="attention_bias", qk_norm="all", qk_norm_if="use_qk_norm", norm_count=1
    ),
    "cohere2": decoder(bias="attention_bias", norm_count=1),
    "stablelm": decoder(
        bias="use_qkv_bias",
        out_bias=False,
        qk_norm="all",
        qk_norm_if="qk_layernorm",
        norm_count=lambda shape: 1 + shape.on("!use_parallel_residual"),
        vectors=2,
        own_head_dim=False,
    ),
    "nemotron": decoder(bias="attention_bias", vectors=2, matrices=2, mlp_bias="mlp_bias"),
    "jais2": decoder(bias="attention_bias", vectors=2, matrices=2, mlp_bias="mlp_bias"),
    "arcee": decoder(bias="attention_bias", matrices=2, mlp_bias="mlp_bias"),
    "apertus": decoder(
        bias="attention_bias", qk_norm="head", matrices=2,
        extra=lambda shape, layer: 2 * (shape.get("hidden_act") == "xielu"),
    ),
    "nanochat": decoder(bias="attention_bias", vectors=0, matrices=2, own_head_dim=False),
    "bitnet": decoder(bias="attention_bias", extra=lambda shape, layer: shape.hidden + shape.ffn),
    "diffllama": decoder(bias="attention_bias", extra=lambda shape, layer: 4 * shape.head_dim),
    "granite_swa": decoder(bias="attention_bias", mlp_bias="mlp_bias", extra=own.sinks),
    "doge": decoder(
        bias="attention_bias", qk_norm="head", mlp_bias="mlp_bias", extra=own.doge_gates,
        refuses={"is_moe": "experts retrieved by product keys"},
    ),
    "minicpm3": decoder(attend=latent_attention(), mlp_bias="mlp_bias", **own.MLA),
    "youtu": decoder(attend=latent_attention(), **own.MLA),
}
"""Decoders whose layers are alike, with one MLP each."""

GPT: dict[str, Architecture] = {
    "gpt2": gpt(embed=positions(), names={"intermediate_size": "n_inner"}, refuses=CROSS_ATTENTION),
    "gpt-sw3": gpt(embed=positions(), names={"intermediate_size": "n_inner"}, refuses=CROSS_ATTENTION),
    "openai-gpt": gpt(embed=positions(), final=nothing),
    "gpt_neo": gpt(bias=False, out_bias=True, embed=positions()),
    "gpt_neox": gpt(bias="attention_bias"),
    "gptj": gpt(
        bias=False, norm_count=1, final=own.norm_and_head_bias, names={"intermediate_size": "n_inner"}
    ),
    "codegen": gpt(
        bias=False, norm_count=1, final=own.norm_and_head_bias, names={"intermediate_size": "n_inner"}
    ),
    "gpt_bigcode": gpt(
        embed=positions(),
        kv_heads=lambda shape: 1 if shape.on("multi_query") else shape.heads,
        names={"intermediate_size": "n_inner"},
        refuses=CROSS_ATTENTION,
    ),
    "gpt_neox_japanese": gpt(
        bias=False,
        mlp_bias=False,
        ffn=lambda shape: shape.hidden * shape.num("intermediate_multiple_size"),
        extra=lambda shape, layer: shape.hidden * (layer == shape.layers - 1),
    ),
    "opt": gpt(
        bias="enable_bias",
        mlp_bias="enable_bias",
        norm_count=own.opt_norms,
        vectors=1,
        embed=lambda shape: positions(2)(shape) + own.opt_projection(shape),
        final=own.opt_final,
        token_width=lambda shape: shape.num("word_embed_proj_dim") or shape.hidden,
        names={"intermediate_size": "ffn_dim"},
    ),
    "bloom": gpt(embed=lambda shape: 2 * shape.hidden),
    "falcon": gpt(
        bias="bias",
        mlp_bias="bias",
        norm_count=own.falcon_norms,
        kv_heads=own.falcon_kv_heads,
        names={"num_key_value_heads": "num_kv_heads", "intermediate_size": "ffn_hidden_size"},
    ),
    "mpt": gpt(bias=False, mlp_bias=False, vectors=1, names={"max_position_embeddings": "max_seq_len"}),
    "phi": gpt(
        qk_norm="head+bias", qk_norm_if="qk_layernorm", norm_count=1, final=own.norm_and_head_bias
    ),
    "persimmon": gpt(qk_norm="head+bias", qk_norm_if="qk_layernorm"),
    "starcoder2": gpt(bias="use_bias", mlp_bias="use_bias", own_head_dim=True),
    "xglm": gpt(names={"intermediate_size": "ffn_dim"}, refuses=CROSS_ATTENTION),
    "biogpt": gpt(embed=positions(2)),
    "ctrl": gpt(names={"intermediate_size": "dff"}, final=own.norm_and_head_bias),
}
"""The GPT-2 family: plain MLPs, layer norms with bias."""

BERT: dict[str, Architecture] = {
    "bert": bert(),
    "ernie": bert(refuses={"use_task_id": "a table of task types"}),
    "roberta": bert(),
    "camembert": bert(),
    "xlm-roberta": bert(),
    "data2vec-text": bert(),
    "roberta-prelayernorm": bert(final=lambda shape: shape.hidden * (shape.hidden + 5) + shape.vocab),
    "xlm-roberta-xl": bert(
        embed_norm=False, final=lambda shape: shape.hidden * (shape.hidden + 5) + shape.vocab
    ),
    "megatron-bert": bert(
        embed_norm=False, final=lambda shape: shape.hidden * (shape.hidden + 5) + shape.vocab
    ),
    "bert-generation": bert(types=False, final=lambda shape: shape.vocab),
}
"""Encoders that transformers can also build with a language-model head."""

SEQ2SEQ: dict[str, Architecture] = {
    "bart": seq2seq_decoder(offset=2, embed_norm=True, extra=cross_attention()),
    "mvp": seq2seq_decoder(offset=2, embed_norm=True, extra=cross_attention()),
    "plbart": seq2seq_decoder(offset=2, embed_norm=True, extra=cross_attention()),
    "mbart": seq2seq_decoder(offset=2, embed_norm=True, final_norm=True, extra=cross_attention()),
    "blenderbot": seq2seq_decoder(final_norm=True, extra=cross_attention()),
    "blenderbot-small": seq2seq_decoder(embed_norm=True, extra=cross_attention()),
    "pegasus": seq2seq_decoder(final_norm=True, extra=cross_attention()),
}
"""Decoder halves of encoder-decoder models."""

MIXTURES: dict[str, Architecture] = {
    "mixtral": decoder(experts=Experts(width="intermediate_size")),
    "qwen2_moe": decoder(
        bias="qkv_bias",
        out_bias=False,
        experts=Experts(
            sparse=stepped("num_experts"),
            shared=own.key("shared_expert_intermediate_size"),
            extra=lambda shape: shape.hidden,
        ),
    ),
    "qwen3_moe": decoder(
        bias="attention_bias", qk_norm="head", experts=Experts(sparse=stepped("num_experts"))
    ),
    "olmoe": decoder(
        bias="attention_bias", qk_norm="all", own_head_dim=False, experts=Experts(width="intermediate_size")
    ),
    "flex_olmo": decoder(
        bias="attention_bias", qk_norm="all", own_head_dim=False, experts=Experts(width="intermediate_size")
    ),
    "phimoe": decoder(
        bias="attention_bias",
        vectors=2,
        experts=Experts(number="num_local_experts", width="intermediate_size"),
        final=lambda shape: 2 * shape.hidden + shape.on("lm_head_bias") * shape.vocab,
    ),
    "granitemoe": decoder(
        bias="attention_bias", experts=Experts(number="num_local_experts", width="intermediate_size")
    ),
    "granitemoeshared": decoder(bias="attention_bias", experts=own.GRANITE_SHARED),
    "granitemoe_swa": decoder(bias="attention_bias", extra=own.sinks, experts=own.GRANITE_SHARED),
    "gpt_oss": decoder(
        bias="attention_bias",
        extra=own.sinks,
        experts=Experts(width="intermediate_size", bias=True, router=1),
    ),
    "ernie4_5_moe": decoder(
        bias="use_bias",
        mlp_bias="use_bias",
        experts=Experts(
            sparse=own.ernie_sparse,
            shared=own.product("moe_num_shared_experts", "moe_intermediate_size"),
            shared_bias="use_bias",
            router=1,
        ),
        final=lambda shape: shape.hidden + shape.on("use_bias") * shape.vocab,
    ),
    "dots1": decoder(
        bias="attention_bias", qk_norm="head", experts=own.routed(after("first_k_dense_replace")),
    ),
    "exaone_moe": decoder(
        qk_norm="head",
        experts=Experts(
            sparse=listed("first_k_dense_replace"), shared=own.product("num_shared_experts", "moe_intermediate_size")
        ),
    ),
    "glm4_moe": decoder(
        bias="attention_bias",
        out_bias=False,
        qk_norm="head",
        qk_norm_if="use_qk_norm",
        experts=own.routed(after("first_k_dense_replace")),
    ),
    "solar_open": decoder(bias="attention_bias", out_bias=False, experts=own.routed(lambda shape, layer: True)),
    "hunyuan_v1_moe": decoder(
        bias="attention_bias",
        qk_norm="head",
        experts=Experts(width="intermediate_size", shared=own.key("intermediate_size")),
    ),
    "hy_v3": decoder(
        bias="attention_bias",
        qk_norm="head",
        mlp_bias="mlp_bias",
        experts=Experts(
            sparse=listed(1),
            shared=own.product("num_shared_experts", "moe_intermediate_size"),
            shared_bias="mlp_bias",
        ),
    ),
    "kolibri1": decoder(
        norm_count=4, qk_norm="head", experts=Experts(shared=own.key("shared_expert_intermediate_size"))
    ),
    "laguna": decoder(
        bias="attention_bias",
        qk_norm="head",
        extra=own.laguna_gate,
        experts=Experts(sparse=listed(1), shared=own.key("shared_expert_intermediate_size"), router=1),
        refuses={"num_attention_heads_per_layer": "another number of heads in each layer"},
    ),
    "mellum": decoder(bias="attention_bias", qk_norm="head", experts=Experts(sparse=listed(0))),
    "minimax_m2": decoder(qk_norm="all", experts=Experts(width="intermediate_size")),
    "minimax": decoder(attend=own.minimax_attention, experts=Experts(width="intermediate_size")),
    "afmoe": decoder(
        bias="attention_bias",
        norm_count=4,
        qk_norm="head",
        extra=own.attention_gate,
        experts=Experts(
            sparse=after("num_dense_layers"),
            shared=own.product("num_shared_experts", "moe_intermediate_size"),
            router=1,
        ),
    ),
    "beam": decoder(
        bias="attention_bias",
        norm_count=4,
        qk_norm="head",
        extra=total(own.attention_gate, own.sinks),
        experts=Experts(sparse=listed(3)),
    ),
    "aria_text": decoder(
        bias="attention_bias",
        experts=Experts(
            number="moe_num_experts",
            per_token="moe_topk",
            width="intermediate_size",
            shared=own.product("moe_num_shared_experts", "intermediate_size"),
            shared_bias="mlp_bias",
        ),
    ),
    "flint": decoder(
        bias="attention_bias",
        qk_norm="head",
        extra=own.sinks,
        experts=Experts(
            sparse=stepped("num_experts", dense=(0, 1)), shared=own.key("shared_expert_intermediate_size")
        ),
    ),
    "llama4_text": decoder(
        bias="attention_bias",
        names={"intermediate_size": "intermediate_size_mlp"},
        experts=Experts(
            number="num_local_experts",
            width="intermediate_size",
            sparse=own.llama4_sparse,
            shared=own.key("intermediate_size"),
        ),
    ),
    "deepseek_v2": decoder(
        attend=latent_attention(),
        mlp_bias="mlp_bias",
        experts=own.routed(after("first_k_dense_replace"), shared_bias="mlp_bias"),
        **own.MLA,
    ),
    "deepseek_v3": decoder(
        attend=latent_attention(), experts=own.routed(after("first_k_dense_replace")), **own.MLA
    ),
    "deepseek_v32": decoder(
        attend=latent_attention(), extra=indexer, experts=own.routed(listed("first_k_dense_replace")), **own.MLA
    ),
    "glm_moe_dsa": decoder(
        attend=latent_attention(),
        extra=indexer,
        experts=own.routed(listed("first_k_dense_replace")),
        refuses={
            "indexer_types": "indexers shared between layers",
            "index_topk_pattern": "indexers shared between layers",
            "index_topk_freq": "indexers shared between layers",
        },
        **own.MLA,
    ),
    "glm4_moe_lite": decoder(attend=latent_attention(), experts=own.routed(listed(1)), **own.MLA),
}
"""Decoders with routed experts."""

ARCHITECTURES: Mapping[str, Architecture] = DENSE | GPT | BERT | SEQ2SEQ | MIXTURES
