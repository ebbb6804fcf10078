"""The GPT-2 and BERT families: plain MLPs, layer norms with bias, often learned positions."""

from __future__ import annotations

from toolkit.models.architectures import special_terms as own
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
from toolkit.models.architectures.terms import cross_attention, nothing, total

GPT: dict[str, Architecture] = {
    "gpt2": gpt(embed=positions(), names={"intermediate_size": "n_inner"}),
    "gpt-sw3": gpt(embed=positions(), names={"intermediate_size": "n_inner"}),
    "openai-gpt": gpt(embed=positions(), final=nothing),
    "gpt_neo": gpt(bias=False, out_bias=True, embed=positions()),
    "gpt_neox": gpt(bias="attention_bias"),
    "gptj": gpt(bias=False, norm_count=1, final=own.norm_and_head_bias, names={"intermediate_size": "n_inner"}),
    "codegen": gpt(bias=False, norm_count=1, final=own.norm_and_head_bias, names={"intermediate_size": "n_inner"}),
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
        norm_count=own.opt_norms,
        vectors=1,
        embed=lambda shape: positions(2)(shape) + own.opt_projection(shape),
        final=own.opt_final,
        token_width=lambda shape: shape.num("word_embed_proj_dim") or shape.hidden,
        names={"intermediate_size": "ffn_dim"},
    ),
    "bloom": gpt(legacy={"n_embed": "hidden_size"}, embed=lambda shape: 2 * shape.hidden),
    "falcon": gpt(
        legacy={"n_embed": "hidden_size"},
        bias="bias",
        mlp_bias="bias",
        norm_count=own.falcon_norms,
        kv_heads=own.falcon_kv_heads,
        names={"num_key_value_heads": "num_kv_heads", "intermediate_size": "ffn_hidden_size"},
    ),
    "mpt": gpt(bias=False, mlp_bias=False, vectors=1, names={"max_position_embeddings": "max_seq_len"}),
    "phi": gpt(
        qk_norm="head+bias", qk_norm_if="qk_layernorm", norm_count=1, own_head_dim=True, final=own.norm_and_head_bias
    ),
    "persimmon": gpt(qk_norm="head+bias", qk_norm_if="qk_layernorm"),
    "starcoder2": gpt(bias="use_bias", mlp_bias="use_bias", own_head_dim=True),
    "xglm": gpt(names={"intermediate_size": "ffn_dim"}),
    "biogpt": gpt(embed=positions(2)),
    "ctrl": gpt(names={"intermediate_size": "dff"}, final=own.norm_and_head_bias),
    "cpmant": decoder(
        embed=own.cpmant_embed,
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
        extra=own.modernbert_norms,
        own_head_dim=False,
        embed=own.modernbert_norm,
        final=own.modernbert_head,
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
        token_width=own.narrow("embedding_size"),
        embed=own.narrow_embed("embedding_size", lambda shape: shape.head_dim),
        final=own.narrow_head("embedding_size"),
    ),
    "electra": bert(
        token_width=own.narrow("embedding_size"),
        embed=own.narrow_embed("embedding_size"),
        final=own.narrow_head("embedding_size"),
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
    "trocr": seq2seq_decoder(embed=own.trocr_embed, extra=cross_attention("cross_attention_hidden_size")),
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
