"""Decoders with identical layers, each with attention and one gated or plain MLP."""

from __future__ import annotations

from toolkit.models.architectures import special_terms as special
from toolkit.models.architectures.table_row import (
    CROSS_ATTENTION,
    SEQ2SEQ_NAMES,
    Architecture,
    bert,
    decoder,
    gpt,
    positions,
    seq2seq_decoder,
)
from toolkit.models.architectures.terms import attention, cross_attention, nothing, total

LLAMA = decoder(bias="attention_bias", mlp_bias="mlp_bias")
NO_BIAS = decoder()
ATTENTION_BIAS = decoder(bias="attention_bias")
QWEN3 = decoder(bias="attention_bias", qk_norm="head")
OLMO2 = decoder(bias="attention_bias", qk_norm="all")

DENSE: dict[str, Architecture] = {
    "llama": LLAMA,
    "granite": decoder(bias="attention_bias", mlp_bias="mlp_bias"),
    "smollm3": LLAMA,
    "cwm": decoder(mlp_bias="mlp_bias"),
    "mistral": NO_BIAS,
    "ministral": NO_BIAS,
    "ministral3": NO_BIAS,
    "phi3": NO_BIAS,
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
    "olmo": decoder(bias="attention_bias", vectors=0),
    "olmo2": OLMO2,
    "olmo3": OLMO2,
    "cohere": decoder(bias="attention_bias", qk_norm="all", qk_norm_if="use_qk_norm", norm_count=1),
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
        bias="attention_bias",
        qk_norm="head",
        matrices=2,
        extra=lambda shape, layer: 2 * (shape.get("hidden_act") == "xielu"),
    ),
    "nanochat": decoder(bias="attention_bias", vectors=0, matrices=2),
    "bitnet": decoder(bias="attention_bias", extra=lambda shape, layer: shape.hidden + shape.ffn),
    "diffllama": decoder(bias="attention_bias", extra=lambda shape, layer: 4 * shape.head_dim),
    "granite_swa": decoder(bias="attention_bias", mlp_bias="mlp_bias", extra=special.sinks),
    "doge": decoder(
        bias="attention_bias",
        qk_norm="head",
        mlp_bias="mlp_bias",
        extra=special.doge_gates,
        refuses={"is_moe": "experts retrieved by product keys"},
    ),
}
"""Decoders with identical layers and one MLP each."""


GPT: dict[str, Architecture] = {
    "gpt2": gpt(embed=positions(), names={"intermediate_size": "n_inner"}),
    "gpt-sw3": gpt(embed=positions(), names={"intermediate_size": "n_inner"}),
    "openai-gpt": gpt(embed=positions(), final=nothing),
    "gpt_neo": gpt(bias=False, out_bias=True, embed=positions()),
    "gpt_neox": gpt(bias="attention_bias"),
    "gptj": gpt(bias=False, norm_count=1, final=special.norm_and_head_bias, names={"intermediate_size": "n_inner"}),
    "codegen": gpt(bias=False, norm_count=1, final=special.norm_and_head_bias, names={"intermediate_size": "n_inner"}),
    "gpt_bigcode": gpt(
        embed=positions(),
        kv_heads=lambda shape: 1 if shape.on("multi_query") else shape.heads,
        names={"intermediate_size": "n_inner"},
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
        norm_count=special.opt_norms,
        vectors=1,
        embed=lambda shape: positions(2)(shape) + special.opt_projection(shape),
        final=special.opt_final,
        token_width=lambda shape: shape.num("word_embed_proj_dim") or shape.hidden,
        names={"intermediate_size": "ffn_dim"},
    ),
    "bloom": gpt(legacy={"n_embed": "hidden_size"}, embed=lambda shape: 2 * shape.hidden),
    "falcon": gpt(
        legacy={"n_embed": "hidden_size"},
        bias="bias",
        mlp_bias="bias",
        norm_count=special.falcon_norms,
        kv_heads=special.falcon_kv_heads,
        names={"num_key_value_heads": "num_kv_heads", "intermediate_size": "ffn_hidden_size"},
    ),
    "mpt": gpt(bias=False, mlp_bias=False, vectors=1, names={"max_position_embeddings": "max_seq_len"}),
    "phi": gpt(
        qk_norm="head+bias",
        qk_norm_if="qk_layernorm",
        norm_count=1,
        own_head_dim=True,
        final=special.norm_and_head_bias,
    ),
    "persimmon": gpt(qk_norm="head+bias", qk_norm_if="qk_layernorm"),
    "starcoder2": gpt(bias="use_bias", mlp_bias="use_bias", own_head_dim=True),
    "xglm": gpt(names={"intermediate_size": "ffn_dim"}),
    "biogpt": gpt(embed=positions(2)),
    "ctrl": gpt(names={"intermediate_size": "dff"}, final=special.norm_and_head_bias),
    "cpmant": decoder(
        embed=special.cpmant_embed,
        ties=False,
        names={"head_dim": "dim_head", "intermediate_size": "dim_ff"},
    ),
    "moshi": decoder(
        embed=lambda shape: shape.hidden,
        ties=False,
        names={"intermediate_size": ""},
        ffn=lambda shape: shape.num("ffn_dim") // 2,
        needs=("ffn_dim",),
    ),
    "modernbert-decoder": decoder(
        bias="attention_bias",
        mlp_bias="mlp_bias",
        norm_count=0,
        extra=special.modernbert_norms,
        own_head_dim=False,
        embed=special.modernbert_norm,
        final=special.modernbert_head,
    ),
}
"""The GPT-2 family: plain MLPs, layer norms with bias."""

BERT: dict[str, Architecture] = {
    "bert": bert(),
    "ernie": bert(refuses=CROSS_ATTENTION | {"use_task_id": "a table of task types"}),
    "roberta": bert(),
    "camembert": bert(),
    "xlm-roberta": bert(),
    "data2vec-text": bert(),
    "roberta-prelayernorm": bert(final=lambda shape: shape.hidden * (shape.hidden + 5) + shape.vocab),
    "xlm-roberta-xl": bert(embed_norm=False, final=lambda shape: shape.hidden * (shape.hidden + 5) + shape.vocab),
    "megatron-bert": bert(embed_norm=False, final=lambda shape: shape.hidden * (shape.hidden + 5) + shape.vocab),
    "bert-generation": bert(types=False, final=lambda shape: shape.vocab),
    "big_bird": bert(
        bias="use_bias",
        out_bias=True,
        final=lambda shape: shape.hidden * (2 * shape.hidden + 4) + shape.vocab,
    ),
    "roformer": bert(
        token_width=special.narrow("embedding_size"),
        embed=special.narrow_embed("embedding_size", lambda shape: shape.head_dim),
        final=special.narrow_head("embedding_size"),
    ),
    "electra": bert(
        token_width=special.narrow("embedding_size"),
        embed=special.narrow_embed("embedding_size"),
        final=special.narrow_head("embedding_size"),
        untied_bias=False,
    ),
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
    "trocr": seq2seq_decoder(embed=special.trocr_embed, extra=cross_attention("cross_attention_hidden_size")),
    "marian": seq2seq_decoder(
        vocab=lambda shape: shape.num("decoder_vocab_size") or shape.vocab, extra=cross_attention()
    ),
    "bigbird_pegasus": seq2seq_decoder(
        bias="use_bias", embed_norm=True, ties=False, final=nothing, extra=cross_attention(bias="use_bias")
    ),
    "whisper": seq2seq_decoder(
        bias=False,
        final_norm=True,
        names=SEQ2SEQ_NAMES | {"max_position_embeddings": "max_target_positions"},
        extra=total(cross_attention(biases=3), lambda shape, layer: 3 * shape.hidden),
    ),
}
"""Decoder halves of encoder-decoder models."""
