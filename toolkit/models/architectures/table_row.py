"""The type of a row in the table of model types, and helpers to write rows for common families."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from toolkit.models.architectures.terms import Experts, Flag, Term, Total, attention, mlp, norms, nothing, total


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """How the parameters of one model type follow from its config."""

    layer: Term
    """Parameters of one layer without its MLP or experts."""
    mlp: Term
    """Parameters of the MLP of a dense layer."""
    gated: bool
    """Whether the MLP has a gate."""
    experts: Experts | None = None
    """The mixture of experts; None for a dense model."""
    embed: Total = nothing
    """Parameters before the first layer other than the token table."""
    final: Total = nothing
    """Parameters after the last layer other than the output matrix."""
    token_width: Total = lambda shape: shape.hidden
    """Width of the token table and of the output matrix."""
    untied_bias: bool = False
    """Whether an untied output matrix has a bias."""
    ffn: Total | None = None
    """Inner width of the MLP if the config gives none."""
    own_head_dim: bool = True
    """Whether the type reads `head_dim`; otherwise it is the hidden size divided by the heads."""
    ties: bool = True
    """Whether the type reads `tie_word_embeddings` at all."""
    vocab: Total | None = None
    """Rows of the token table, if they are not simply `vocab_size`."""
    heads: Total | None = None
    """Query heads, if the config does not give them."""
    kv_heads: Total | None = None
    """Key/value heads, if they are not simply `num_key_value_heads`."""
    head_dim: Total | None = None
    """Width of a head, if it is not simply `head_dim`."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Common key → native key, for keys without an alias in transformers."""
    legacy: Mapping[str, str] = field(default_factory=dict)
    """Key of older configs → native key, as transformers still accepts them."""
    reads: tuple[str, ...] = ()
    """Keys that the type reads although transformers has no default for them."""
    needs: tuple[str, ...] = ()
    """Keys that must not be null."""
    layer_types: tuple[str, ...] = ()
    """Known entries of `layer_types`, if the count depends on them."""
    refuses: Mapping[str, str] = field(default_factory=dict)
    """Keys that change the count in an unsupported way → what they add."""


CROSS_ATTENTION = {"add_cross_attention": "attention to an encoder"}
"""An option that no GPT-like or BERT-like row supports."""


SEQ2SEQ_NAMES = {
    "num_hidden_layers": "decoder_layers",
    "num_attention_heads": "decoder_attention_heads",
    "intermediate_size": "decoder_ffn_dim",
}
"""Common key → key of the decoder half of an encoder-decoder model."""


@dataclass(frozen=True, kw_only=True)
class DecoderLayer:
    """A Llama-like layer: grouped attention, norms and one MLP."""

    bias: Flag = False
    """Whether the query, key and value projections have biases."""
    out_bias: Flag | None = None
    """Whether the output projection has a bias; None: as `bias`."""
    qk_norm: str = ""
    """Norms of queries and keys: `head`, `head+bias`, `all`, `hidden`, or none."""
    qk_norm_if: Flag = True
    """Whether those norms exist."""
    norm_count: int | Total = 2
    """Norms over the residual stream."""
    vectors: int = 1
    """Vectors of each norm: 1 for a scale, 2 for scale and bias, 0 for neither."""
    matrices: int = 3
    """Matrices of the MLP: 3 with a gate, 2 without."""
    mlp_bias: Flag = False
    """Whether the MLP has biases."""
    attend: Term | None = None
    """Replaces the attention that the fields above describe."""
    feed_forward: Term | None = None
    """Replaces the MLP that the fields above describe."""
    extra: Term = nothing
    """Anything else in the layer."""

    def without_mlp(self) -> Term:
        """Parameters of attention, norms and extras."""
        attend = self.attend or attention(self.bias, self.out_bias, self.qk_norm, self.qk_norm_if)
        return total(attend, norms(self.norm_count, self.vectors), self.extra)


_LAYER_OPTIONS = frozenset(option.name for option in fields(DecoderLayer))


def decoder(*, final: Total | None = None, **options: Any) -> Architecture:
    """A Llama-like row with a final norm; `options` are fields of `DecoderLayer` or of `Architecture`."""
    layer = DecoderLayer(**{key: value for key, value in options.items() if key in _LAYER_OPTIONS})
    return Architecture(
        layer=layer.without_mlp(),
        mlp=layer.feed_forward or mlp(layer.matrices, layer.mlp_bias),
        gated=layer.matrices == 3,
        final=final or (lambda shape: layer.vectors * shape.hidden),
        **{key: value for key, value in options.items() if key not in _LAYER_OPTIONS},
    )


def gpt(*, bias: Flag = True, mlp_bias: Flag = True, **rest: Any) -> Architecture:
    """A GPT-2-like row: biases, layer norms with bias, and by default a plain MLP of four times the width."""
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
