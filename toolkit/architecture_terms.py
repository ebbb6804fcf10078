"""Terms that only one or two model types have."""

from __future__ import annotations

from typing import Any

from toolkit.model_terms import (
    Experts,
    Flag,
    Rule,
    Shape,
    Total,
    attention,
    by_layer_type,
    lightning_attention,
)

MLA: dict[str, Any] = {
    "head_dim": lambda shape: shape.num("qk_nope_head_dim") + shape.num("qk_rope_head_dim"),
    "kv_heads": lambda shape: shape.heads,
    "needs": ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
}
"""What every row with latent attention says of its heads."""


def key(name: str) -> Total:
    """A number of the config."""
    return lambda shape: shape.num(name)


def product(number: str, width: str) -> Total:
    """A number of experts times the width of one."""
    return lambda shape: shape.num(number) * shape.num(width)


def routed(sparse: Rule, shared_bias: Flag = False) -> Experts:
    """Experts with DeepSeek's keys."""
    return Experts(
        number="n_routed_experts",
        sparse=sparse,
        shared=product("n_shared_experts", "moe_intermediate_size"),
        shared_bias=shared_bias,
    )


GRANITE_SHARED = Experts(
    number="num_local_experts", width="intermediate_size", shared=key("shared_intermediate_size")
)


def sinks(shape: Shape, layer: int) -> int:
    """One learned logit a head, to which a query may attend instead of to a key."""
    return shape.heads


def attention_gate(shape: Shape, layer: int) -> int:
    """A gate on the output of attention, as wide as it."""
    return shape.hidden * shape.heads * shape.head_dim


def laguna_gate(shape: Shape, layer: int) -> int:
    """A gate on the output of attention: one number a head, or as wide as the output."""
    per_head = shape.get("gating") in (True, "per-head")
    return shape.hidden * shape.heads * (1 if per_head else shape.head_dim)


def doge_gates(shape: Shape, layer: int) -> int:
    """Scales of the residual stream, and the gate that picks the keys to attend to."""
    gate = shape.kv_heads * (shape.kv_heads * shape.head_dim + 1 + shape.on("attention_bias"))
    return 2 * shape.hidden + gate


minimax_attention = by_layer_type(
    lambda shape, layer: "linear_attention" if layer % 2 else "full_attention",
    {"full_attention": attention(), "linear_attention": lightning_attention},
)
"""Softmax and linear attention in turn."""


def norm_and_head_bias(shape: Shape) -> int:
    """A final norm with bias, and a bias of the output head."""
    return 2 * shape.hidden + shape.vocab


def falcon_kv_heads(shape: Shape) -> int:
    """Grouped in the 40B design, else one or all."""
    if shape.on("new_decoder_architecture"):
        return shape.num("num_kv_heads") or shape.heads
    return 1 if shape.on("multi_query") else shape.heads


def falcon_norms(shape: Shape) -> int:
    """Two norms unless attention and MLP run in parallel after one."""
    given = shape.num("num_ln_in_parallel_attn") or (2 if shape.on("new_decoder_architecture") else 1)
    return 2 if shape.on("!parallel_attn") or given == 2 else 1


def opt_norms(shape: Shape) -> int:
    """Two norms with bias in each layer, unless they have no parameters."""
    return 4 * shape.on("layer_norm_elementwise_affine")


def opt_final(shape: Shape) -> int:
    """The final norm, which OPT-350M lacks, and the way to the width of the token table."""
    norm = shape.on("do_layer_norm_before") and shape.on("!_remove_final_layer_norm")
    return 2 * shape.hidden * (norm and shape.on("layer_norm_elementwise_affine")) + opt_projection(shape)


def opt_projection(shape: Shape) -> int:
    """Between the width of the token table and that of the layers, where they differ."""
    width = shape.num("word_embed_proj_dim") or shape.hidden
    return width * shape.hidden if width != shape.hidden else 0


def ernie_sparse(shape: Shape, layer: int) -> bool:
    """Every n-th layer from a first to a last one."""
    end = shape.num("moe_layer_end_index")
    last = shape.layers - 1 if end == -1 else end
    every = shape.num("moe_layer_interval") or 1
    return (layer + 1) % every == 0 and shape.num("moe_layer_start_index") <= layer <= last


def llama4_sparse(shape: Shape, layer: int) -> bool:
    """The layers of `moe_layers`, or every n-th one."""
    chosen = shape.get("moe_layers")
    step = shape.num("interleave_moe_layer_step") or 1
    return layer in chosen if chosen is not None else (layer + 1) % step == 0
