"""Terms that only one or two model types use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from toolkit.models.architectures.terms import (
    Experts,
    Flag,
    Rule,
    Shape,
    Total,
    attention,
    by_layer_type,
    delta_attention,
    indexer,
    latent_attention,
    lightning_attention,
    mlp_params,
    nothing,
    stepped,
    total,
)

MLA: dict[str, Any] = {
    "head_dim": lambda shape: shape.num("qk_nope_head_dim") + shape.num("qk_rope_head_dim"),
    "kv_heads": lambda shape: shape.heads,
    "needs": ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
}
"""Head sizes of every row with latent attention."""


def key(name: str) -> Total:
    """The value of a config key."""
    return lambda shape: shape.num(name)


def product(number: str, width: str) -> Total:
    """Number of experts times the width of one expert."""
    return lambda shape: shape.num(number) * shape.num(width)


def routed(sparse: Rule, shared_bias: Flag = False, beside: Total = nothing) -> Experts:
    """Experts with the config keys of DeepSeek."""
    return Experts(
        number="n_routed_experts",
        sparse=sparse,
        shared=product("n_shared_experts", "moe_intermediate_size"),
        shared_bias=shared_bias,
        beside=beside,
    )


SHARED_GATED = Experts(
    sparse=stepped("num_experts"), shared=key("shared_expert_intermediate_size"), beside=lambda shape: shape.hidden
)
"""Experts of Qwen: routed ones, and a shared one with a gate."""
GRANITE_SHARED = Experts(number="num_local_experts", width="intermediate_size", shared=key("shared_intermediate_size"))
"""Experts of Granite: routed ones, and a shared one."""


def sinks(shape: Shape, layer: int) -> int:
    """Attention sinks: one learned logit per head."""
    return shape.heads


def attention_gate(shape: Shape, layer: int) -> int:
    """A gate as wide as the output of attention."""
    return shape.hidden * shape.heads * shape.head_dim


def doge_gates(shape: Shape, layer: int) -> int:
    """Doge: scales of the residual stream, and the gate that selects keys."""
    gate = shape.kv_heads * (shape.kv_heads * shape.head_dim + 1 + shape.on("attention_bias"))
    return 2 * shape.hidden + gate


FULL, LINEAR = "full_attention", "linear_attention"
minimax_attention = by_layer_type(
    lambda shape, layer: LINEAR if layer % 2 else FULL, {FULL: attention(), LINEAR: lightning_attention}
)
"""MiniMax: softmax and linear attention in turn."""


def _qwen_kind(shape: Shape, layer: int) -> str:
    return LINEAR if (layer + 1) % (shape.num("full_attention_interval") or 4) else FULL


def _gate_on_queries(shape: Shape, layer: int) -> int:
    return shape.heads * shape.head_dim * (shape.hidden + shape.on("attention_bias"))


qwen_attention = by_layer_type(
    _qwen_kind,
    {FULL: total(attention("attention_bias", qk_norm="head"), _gate_on_queries), LINEAR: delta_attention},
)
"""Qwen3-Next: gated delta rule, and gated softmax attention in every fourth layer."""


def _olmo_kind(shape: Shape, layer: int) -> str:
    last = layer == shape.layers - 1 and shape.layers < 4
    return FULL if layer % 4 == 3 or last else LINEAR


olmo_attention = by_layer_type(_olmo_kind, {FULL: attention("attention_bias", qk_norm="all"), LINEAR: delta_attention})
"""OLMo Hybrid: gated delta rule, and softmax attention in every fourth layer."""


def mimo_attention(shape: Shape, layer: int) -> int:
    """MiMo: values narrower than keys; sliding layers have twice as many key/value heads, and sinks."""
    full = FULL if layer == 0 or not (layer + 1) % 6 else "sliding_attention"
    sliding = shape.kind("layer_types", layer, full) == "sliding_attention"
    keys, value = shape.kv_heads * (1 + sliding), shape.num("v_head_dim")
    projected = shape.heads * shape.head_dim + keys * (shape.head_dim + value)
    output = shape.heads * value * shape.hidden
    return projected * (shape.hidden + shape.on("attention_bias")) + output + sliding * shape.heads


def m3_indexer(shape: Shape, layer: int) -> int:
    """MiniMax M3: the indexer of sparse layers, which selects the blocks of keys for a query."""
    heads, width = shape.num("index_n_heads"), shape.num("index_head_dim")
    sparse = shape.kind("layer_types", layer, FULL) == "minimax_m3_sparse"
    return sparse * (shape.hidden * width * (heads + 1) + 2 * width)


def axk1_sparse(shape: Shape, layer: int) -> bool:
    """axk1: mixture layers by `mlp_layer_types`, or by the keys of older configs."""
    first = shape.get("first_k_dense_replace")
    moe = layer >= (1 if first is None else first) and layer % (shape.num("moe_layer_freq") or 1) == 0
    return shape.kind("mlp_layer_types", layer, "sparse" if moe else "dense") == "sparse"


def jetmoe_attention(shape: Shape, layer: int) -> int:
    """JetMoE: experts for queries and outputs, with a router and a bias; keys and values are shared."""
    width, experts = shape.kv_heads * shape.head_dim, shape.num("num_local_experts")
    return shape.hidden * (experts * (2 * width + 1) + 2 * width + 1)


def modernbert_norms(shape: Shape, layer: int) -> int:
    """ModernBERT: two norms, but one in the first layer, whose input is normalised already."""
    return (2 - (layer == 0)) * modernbert_norm(shape)


def modernbert_norm(shape: Shape) -> int:
    """ModernBERT: one norm, with or without bias."""
    return (1 + shape.on("norm_bias")) * shape.hidden


def modernbert_head(shape: Shape) -> int:
    """ModernBERT: final norm, a dense layer with its norm, and a bias over the vocabulary."""
    dense = shape.hidden * (shape.hidden + shape.on("classifier_bias"))
    return 2 * modernbert_norm(shape) + dense + shape.on("decoder_bias") * shape.vocab


def narrow(key: str) -> Total:
    """Width of a token table that is narrower than the layers."""
    return lambda shape: shape.num(key) or shape.hidden


def narrow_embed(key: str, position_width: Total | None = None) -> Total:
    """Positions, token types and norm of a narrow token table, and the projection to the width of the layers."""

    def term(shape: Shape) -> int:
        width = narrow(key)(shape)
        positions = shape.positions * (position_width(shape) if position_width else width)
        types = (shape.num("type_vocab_size") + 2) * width
        return positions + types + (width != shape.hidden) * shape.hidden * (width + 1)

    return term


def narrow_head(key: str) -> Total:
    """Dense layer and norm that project to the width of the token table, and a bias over the vocabulary."""
    return lambda shape: narrow(key)(shape) * (shape.hidden + 3) + shape.vocab


def cpmant_embed(shape: Shape) -> int:
    """CPM-Ant: prompt and segment tables, and relative position biases between segments."""
    segments = shape.num("segment_types")
    rows = shape.num("prompt_types") * shape.num("prompt_length") + segments
    return rows * shape.hidden + shape.heads * (shape.num("position_bias_num_buckets") + segments**2)


def norm_and_head_bias(shape: Shape) -> int:
    """A final norm with bias, and a bias of the output head."""
    return 2 * shape.hidden + shape.vocab


def falcon_kv_heads(shape: Shape) -> int:
    """Falcon: grouped key/value heads in the 40B design, otherwise one or all."""
    if shape.on("new_decoder_architecture"):
        return shape.num("num_kv_heads") or shape.heads
    return 1 if shape.on("multi_query") else shape.heads


def falcon_norms(shape: Shape) -> int:
    """Falcon: two norms, or one if attention and MLP run in parallel."""
    given = shape.num("num_ln_in_parallel_attn") or (2 if shape.on("new_decoder_architecture") else 1)
    return 2 if shape.on("!parallel_attn") or given == 2 else 1


def opt_norms(shape: Shape) -> int:
    """OPT: vectors of two norms with bias per layer; 0 if the norms have no parameters."""
    return 4 * shape.on("layer_norm_elementwise_affine")


def opt_final(shape: Shape) -> int:
    """OPT: the final norm, which OPT-350M lacks, and the projection to the width of the token table."""
    norm = shape.on("do_layer_norm_before") and shape.on("!_remove_final_layer_norm")
    return 2 * shape.hidden * (norm and shape.on("layer_norm_elementwise_affine")) + opt_projection(shape)


def opt_projection(shape: Shape) -> int:
    """OPT: projection between the widths of the token table and the layers, if they differ."""
    width = shape.num("word_embed_proj_dim") or shape.hidden
    return width * shape.hidden if width != shape.hidden else 0


def ernie_sparse(shape: Shape, layer: int) -> bool:
    """ERNIE: every n-th layer between a first and a last one is a mixture."""
    end = shape.num("moe_layer_end_index")
    last = shape.layers - 1 if end == -1 else end
    every = shape.num("moe_layer_interval") or 1
    return (layer + 1) % every == 0 and shape.num("moe_layer_start_index") <= layer <= last


def llama4_sparse(shape: Shape, layer: int) -> bool:
    """Llama 4: the layers of `moe_layers` are mixtures, or every n-th one."""
    chosen = shape.get("moe_layers")
    step = shape.num("interleave_moe_layer_step") or 1
    return layer in chosen if chosen is not None else (layer + 1) % step == 0


def trocr_embed(shape: Shape) -> int:
    """TrOCR: learned positions and a norm, each if the config enables it."""
    learned = shape.on("use_learned_position_embeddings") * (shape.positions + 2)
    return (learned + 2 * shape.on("layernorm_embedding")) * shape.hidden


FULL = "full_attention"


def _gemma4_full(shape: Shape, layer: int) -> bool:
    """Whether a layer has full attention: every sixth one unless the config lists them, and always the last."""
    listed = shape.kind("layer_types", layer, "sliding" if (layer + 1) % 6 else FULL)
    return layer == shape.layers - 1 or listed == FULL


def _gemma4_shared(shape: Shape, layer: int) -> bool:
    """Whether the layer reuses the keys and values of an earlier one."""
    return layer >= shape.layers - shape.num("num_kv_shared_layers") >= 0


def _gemma4_own(shape: Shape, layer: int) -> Mapping[str, int]:
    """Sizes that apply to one layer only: listed in saved configs, or from the keys for full-attention layers."""
    listed: Mapping[str, Mapping[str, int]] | None = shape.get("per_layer_config")
    if listed is not None:
        return listed.get(str(layer), {})
    if not _gemma4_full(shape, layer):
        return {}
    kv_heads = shape.num("num_global_key_value_heads") if shape.on("attention_k_eq_v") else 0
    width = {"head_dim": shape.num("global_head_dim") or 512}
    return width | {"num_key_value_heads": kv_heads} if kv_heads else width


def gemma4_attention(shape: Shape, layer: int) -> int:
    """Attention of Gemma 4: full layers have another head width and may have no values; some layers have no keys."""
    own, shared = _gemma4_own(shape, layer), _gemma4_shared(shape, layer)
    width, kv_heads = own.get("head_dim", shape.head_dim), own.get("num_key_value_heads", shape.kv_heads)
    no_values = _gemma4_full(shape, layer) and shape.on("attention_k_eq_v")
    projected = 0 if shared else (2 - no_values) * kv_heads * width
    queries, bias = shape.heads * width, shape.on("attention_bias")
    return (queries + projected) * (shape.hidden + bias) + (queries + bias) * shape.hidden + (2 - shared) * width


def gemma4_mlp(shape: Shape, layer: int) -> int:
    """The dense MLP, which may be twice as wide in layers without keys."""
    first = shape.layers - shape.num("num_kv_shared_layers")
    double = shape.on("use_double_wide_mlp") and layer >= first > 0
    return mlp_params(shape, shape.ffn * (1 + double), 3, False)


def gemma4_layer_input(shape: Shape, layer: int) -> int:
    """Gate, projection and norm of the per-layer embedding."""
    width = shape.num("hidden_size_per_layer_input")
    return shape.hidden * (2 * width + 1) if width else 0


def gemma4_embed(shape: Shape) -> int:
    """The table of per-layer embeddings, and a projection with a norm."""
    width = shape.num("hidden_size_per_layer_input")
    return width * (shape.layers * (shape.num("vocab_size_per_layer_input") + shape.hidden) + 1)


def laguna_attention(shape: Shape, layer: int) -> int:
    """Attention of Laguna: heads per layer, if listed; one gate per head, or a gate as wide as the output."""
    heads = shape.get("num_attention_heads_per_layer")
    own = replace(shape, heads=heads[layer]) if heads else shape
    per_head = shape.get("gating") in (True, "per-head")
    gate = shape.hidden * own.heads * (1 if per_head else own.head_dim)
    return attention("attention_bias", qk_norm="head")(own, layer) + gate


def glm_indexer(shape: Shape, layer: int) -> int:
    """The indexer of sparse attention, in layers that do not reuse the choice of an earlier layer."""
    offset = shape.get("index_skip_topk_offset")
    since = max(layer - (2 if offset is None else offset) + 1, 0)
    scheduled = "shared" if since % (shape.num("index_topk_freq") or 1) else "full"
    return indexer(shape, layer) if shape.kind("indexer_types", layer, scheduled) == "full" else 0


def longcat_second_half(shape: Shape, layer: int) -> int:
    """A LongCat layer is two layers with one mixture: here the second attention, its norms, and both dense MLPs."""
    return latent_attention()(shape, layer) + 2 * shape.hidden + 2 * mlp_params(shape, shape.ffn, 3, False)


def longcat_zero_experts(shape: Shape) -> int:
    """Router rows of experts that do nothing, and their gates, which transformers 5.22.2 allocates all the same."""
    zero, width = shape.num("zero_expert_num"), shape.num("expert_ffn_hidden_size")
    return zero * shape.hidden * (1 + 2 * width)


def _lfm2_convolution(shape: Shape, layer: int) -> int:
    """A short convolution with two gates."""
    bias = shape.on("conv_bias")
    return shape.hidden * (4 * shape.hidden + shape.num("conv_L_cache") + 5 * bias)


def _lfm2_kind(shape: Shape, layer: int) -> str:
    chosen = shape.get("full_attn_idxs")
    return FULL if chosen is None or layer in chosen else "conv"


lfm2_mixer = by_layer_type(_lfm2_kind, {FULL: attention(qk_norm="head"), "conv": _lfm2_convolution})
"""LFM2: attention or a short convolution, by layer."""


def lfm2_ffn(shape: Shape) -> int:
    """MLP width of LFM2: two thirds of the given width, times a factor, rounded up to a multiple."""
    width = shape.num("intermediate_size")
    if shape.on("!block_auto_adjust_ff_dim"):
        return width
    width, factor = int(2 * width / 3), shape.get("block_ffn_dim_multiplier")
    if factor is None:
        return width
    multiple = shape.num("block_multiple_of") or 1
    return -(-int(factor * width) // multiple) * multiple
