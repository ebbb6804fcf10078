"""Sizes of tiny models that run the same code paths as the real ones in milliseconds."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

LAYERS = 4
IMAGES = {"image_size": 16, "patch_size": 4}
"""Sizes of vision models."""
HEAD_DIM = 16
VOCABULARY = 128
POSITIONS = 128
WINDOW = 5
"""Tokens of a sliding window: fewer than a tiny sequence has, else the window would cut nothing off."""
CHUNK = 8
"""Tokens of a chunk of a Mamba layer. Of the usual 256, a tiny sequence would fill a part of one, and the rest would be
computed as padding."""

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
    "mamba_chunk_size": CHUNK,
    "linear_num_heads": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_head_dim": HEAD_DIM,
    "linear_key_head_dim": HEAD_DIM,
    "linear_value_head_dim": HEAD_DIM,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
OF_TYPE: dict[str, dict[str, Any]] = {
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"head_dim": _SIZES["qk_rope_head_dim"], "num_hidden_layers": None, "zero_expert_num": 2},
    "nemotron_h": {"chunk_size": CHUNK},
    "qwen4_exp_text": {
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": HEAD_DIM, "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip
"""Sizes that the code of a type (transformers 5.22.2) insists on: keys that its default config leaves empty (kinds of
layers are repeated for all layers), the rotated part of a head under a second name, the only number of visits; and a
size under a name that means something else in other types; experts without weights, of which LongCat's 256 would take
every token from the few others. None: a key that sets another one, and is left out."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of a tiny decoder; a 0 stands for what usually follows from the others."""

    heads: int = 4
    kv_heads: int = 0
    """Key/value heads; usually half of the heads."""
    head_dim: int = HEAD_DIM
    width: int = 0
    """Width of the residual stream; usually that of all heads together."""
    inner: int = 0
    """Inner width of an MLP; usually twice the width."""
    layers: int = LAYERS
    vocabulary: int = VOCABULARY

    def describe(self) -> str:
        """A short name for tables, e.g. `6 layers, 144 wide, 6/2 heads of 24, MLP 250, 131 tokens`."""
        sizes = tiny_sizes(self)
        heads = f"{self.heads}/{sizes['num_key_value_heads']} heads of {self.head_dim}"
        wide = f"{self.layers} layers, {sizes['hidden_size']} wide"
        return f"{wide}, {heads}, MLP {sizes['intermediate_size']}, {self.vocabulary} tokens"


def drawn_sizes(numbers: random.Random, *, odd_width: bool) -> Sizes:
    """Sizes that a user may have: few key/value heads, uneven stages, odd vocabularies and MLPs.

    `odd_width`: the residual stream is not as wide as all heads together, which only some types allow.
    Every size is one that two tensor ranks and two chunks on each of two pipeline ranks can divide the model by.
    """
    heads, head_dim = numbers.choice((4, 6, 8)), numbers.choice((8, 16, 24))
    together = heads * head_dim
    return Sizes(
        heads=heads,
        kv_heads=numbers.choice([size for size in (1, 2, 4, heads) if heads % size == 0]),
        head_dim=head_dim,
        width=2 * numbers.randrange(16, 64) if odd_width else together,
        inner=2 * numbers.randrange(together // 2 + 1, together),
        layers=numbers.choice((LAYERS, LAYERS + 2)),
        vocabulary=numbers.choice((VOCABULARY, VOCABULARY + 3, VOCABULARY + 22)),
    )


def tiny_sizes(sizes: Sizes) -> dict[str, Any]:
    """Config key → size, under every name that a model type uses for it."""
    width = sizes.width or sizes.heads * sizes.head_dim
    groups: list[tuple[Iterable[str], Any]] = [
        (_WIDTH_KEYS, width),
        (_INNER_KEYS, sizes.inner or 2 * width),
        (_HEAD_KEYS, sizes.heads),
        (("num_key_value_heads",), sizes.kv_heads or sizes.heads // 2),
        (("head_dim",), sizes.head_dim),
        (("rotary_dim",), sizes.head_dim // 2),
        (("vocab_size",), sizes.vocabulary),
        (_LAYER_KEYS, sizes.layers),
        (_POSITION_KEYS, POSITIONS),
        (_EXPERT_KEYS, 4),
    ]
    return {**{key: value for keys, value in groups for key in keys}, **_SIZES}
