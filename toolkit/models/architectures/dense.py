"""Decoders with identical layers, each with attention and one gated or plain MLP."""

from __future__ import annotations

from toolkit.models.architectures import special_terms as own
from toolkit.models.architectures.table_row import Architecture, decoder
from toolkit.models.architectures.terms import attention

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
    "granite_swa": decoder(bias="attention_bias", mlp_bias="mlp_bias", extra=own.sinks),
    "doge": decoder(
        bias="attention_bias",
        qk_norm="head",
        mlp_bias="mlp_bias",
        extra=own.doge_gates,
        refuses={"is_moe": "experts retrieved by product keys"},
    ),
}
"""Decoders with identical layers and one MLP each."""
