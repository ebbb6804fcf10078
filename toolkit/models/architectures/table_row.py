"""What a row of the table of model types holds, and the short ways to write one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from toolkit.models.architectures.terms import Experts, Flag, Term, Total, attention, mlp, norms, nothing, total


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """How the parameters of one model type follow from its config."""

    layer: Term
    """One layer without its MLP or experts."""
    mlp: Term
    """The MLP of a dense layer."""
    gated: bool
    """Whether the MLP has a gate."""
    experts: Experts | None = None
    """The mixture of experts, if there is one."""
    embed: Total = nothing
    """Before the first layer, beside the token table."""
    final: Total = nothing
    """After the last layer, beside the output matrix."""
    token_width: Total = lambda shape: shape.hidden
    """Width of the token table and of the output matrix."""
    untied_bias: bool = False
    """Whether an output matrix of its own brings a bias of its own."""
    ffn: Total | None = None
    """Inner width of the MLP where the config gives none."""
    own_head_dim: bool = True
    """Whether the type reads `head_dim`; otherwise it is the hidden size over the heads."""
    ties: bool = True
    """Whether `tie_word_embeddings` is heeded at all."""
    vocab: Total | None = None
    """Rows of the token table where they are not simply `vocab_size`."""
    heads: Total | None = None
    """Query heads where the config does not give them."""
    kv_heads: Total | None = None
    """Key/value heads where they are not simply `num_key_value_heads`."""
    head_dim: Total | None = None
    """Width of a head where it is not simply `head_dim`."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Common key to native key, where transformers itself has no alias."""
    legacy: Mapping[str, str] = field(default_factory=dict)
    """Keys of older configs to native keys, as transformers still takes them."""
    reads: tuple[str, ...] = ()
    """Keys that the type heeds although transformers has no default for them."""
    needs: tuple[str, ...] = ()
    """Keys that must not be null."""
    layer_types: tuple[str, ...] = ()
    """Entries of `layer_types` that are known, where the count depends on them."""
    refuses: Mapping[str, str] = field(default_factory=dict)
    """Keys that change the count in a way that is not known here, with what they bring."""


CROSS_ATTENTION = {"add_cross_attention": "attention to an encoder"}
"""What no GPT-like or BERT-like row counts."""


SEQ2SEQ_NAMES = {
    "num_hidden_layers": "decoder_layers",
    "num_attention_heads": "decoder_attention_heads",
    "intermediate_size": "decoder_ffn_dim",
}
"""Keys of the decoder half of an encoder-decoder model."""


def decoder(
    *,
    bias: Flag = False,
    out_bias: Flag | None = None,
    qk_norm: str = "",
    qk_norm_if: Flag = True,
    norm_count: int | Total = 2,
    vectors: int = 1,
    matrices: int = 3,
    mlp_bias: Flag = False,
    attend: Term | None = None,
    feed_forward: Term | None = None,
    extra: Term = nothing,
    final: Total | None = None,
    **rest: Any,
) -> Architecture:
    """A Llama-like row: grouped attention, norms of `vectors` each, a gated MLP, a final norm."""
    term = attend or attention(bias, out_bias, qk_norm, qk_norm_if)
    return Architecture(
        layer=total(term, norms(norm_count, vectors), extra),
        mlp=feed_forward or mlp(matrices, mlp_bias),
        gated=matrices == 3,
        final=final or (lambda shape: vectors * shape.hidden),
        **rest,
    )


def gpt(*, bias: Flag = True, mlp_bias: Flag = True, **rest: Any) -> Architecture:
    """A GPT-2-like row: biases, layer norms with bias, a plain MLP of four times the width unless told otherwise."""
    options: dict[str, Any] = {"vectors": 2, "own_head_dim": False, "ffn": lambda shape: 4 * shape.hidden}
    options["refuses"] = CROSS_ATTENTION
    return decoder(bias=bias, mlp_bias=mlp_bias, matrices=2, **(options | rest))


def positions(extra_rows: int = 0) -> Total:
    """A learned position table."""
    return lambda shape: (shape.positions + extra_rows) * shape.hidden


def bert(*, types: bool = True, embed_norm: bool = True, **rest: Any) -> Architecture:
    """A BERT-like row: learned positions, token types, a prediction head with its own dense layer and bias."""

    def embed(shape: Any) -> int:
        rows = shape.positions + types * shape.num("type_vocab_size") + 2 * embed_norm
        return int(rows * shape.hidden)

    def final(shape: Any) -> int:
        return int(shape.hidden * (shape.hidden + 3) + shape.vocab)

    options: dict[str, Any] = {"embed": embed, "final": final, "untied_bias": True}
    return gpt(**(options | rest))


def seq2seq_decoder(
    *, offset: int = 0, embed_norm: bool = False, final_norm: bool = False, **rest: Any
) -> Architecture:
    """The decoder half of an encoder-decoder model, which transformers builds as a causal model."""
    options: dict[str, Any] = {
        "embed": lambda shape: (shape.positions + offset + 2 * embed_norm) * shape.hidden,
        "final": lambda shape: 2 * final_norm * shape.hidden,
        "names": SEQ2SEQ_NAMES,
    }
    return gpt(**(options | rest))
