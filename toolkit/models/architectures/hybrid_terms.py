"""Terms of model types whose layers differ: Gemma 4, Laguna, GLM, LongCat, LFM2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from toolkit.models.architectures.terms import Shape, attention, by_layer_type, indexer, latent_attention, mlp_params

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
