"""Tiny models of a type: the same code paths in milliseconds, for proofs and coverage."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

LAYERS = 4
HEAD_DIM = 16
VOCABULARY = 128
POSITIONS = 128

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
    "vocab_size": VOCABULARY,
    "head_dim": HEAD_DIM,
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
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def tiny_config(base: PretrainedConfig, heads: int = 4, dropout: float = 0.0) -> dict[str, Any]:
    """A config of the same type with the same flags and small sizes, as `model.config` of a recipe has it."""
    sizes = _sizes(heads)
    flags = {key: value for key, value in base.to_diff_dict().items() if _is_flag(key, value, base)}
    values = {key: value for key, value in sizes.items() if _has(base, key)}
    kinds = base.to_dict().get("layer_types")
    if kinds:
        values["layer_types"] = [kind for _, kind in zip(range(LAYERS), _round(kinds), strict=False)]
    return {**flags, **values, **_noise(base, dropout), "model_type": base.model_type}


def tiny_of_type(model_type: str, heads: int = 4, dropout: float = 0.0) -> dict[str, Any]:
    """The tiny config of a type's defaults."""
    return tiny_config(CONFIG_MAPPING[model_type](), heads, dropout)


def _sizes(heads: int) -> dict[str, Any]:
    width = heads * HEAD_DIM
    groups: list[tuple[Iterable[str], Any]] = [
        (_WIDTH_KEYS, width),
        (_INNER_KEYS, 2 * width),
        (_HEAD_KEYS, heads),
        (("num_key_value_heads",), heads // 2),
        (_LAYER_KEYS, LAYERS),
        (_POSITION_KEYS, POSITIONS),
        (_EXPERT_KEYS, 4),
    ]
    return {**_SIZES, **{key: value for keys, value in groups for key in keys}}


def _noise(base: PretrainedConfig, dropout: float) -> dict[str, float]:
    """Everything that draws random numbers in a forward pass: dropout as wanted, the rest off."""
    rates = {key: value for key, value in base.to_dict().items() if isinstance(value, float)}
    off = {key: 0.0 for key in rates if "jitter" in key or "layerdrop" in key}
    return off | {key: dropout for key in rates if key not in off and ("dropout" in key or "pdrop" in key)}


def _has(base: PretrainedConfig, key: str) -> bool:
    if key == "q_lora_rank" and getattr(base, key, 0) is None:
        return False  # a plain projection: another code path, which must stay
    if key == "head_dim" and hasattr(base, "qk_rope_head_dim"):
        return False  # latent attention: it follows from the parts of a head
    derived = getattr(type(base), key, None)
    return hasattr(base, key) and not (isinstance(derived, property) and derived.fset is None)


def _is_flag(key: str, value: Any, base: PretrainedConfig) -> bool:
    """Whether a value is a switch that the twin must share: neither a size nor a list with an entry a layer."""
    if key in ("model_type", "transformers_version", "architectures", "dtype", "torch_dtype", "layer_types"):
        return False
    return isinstance(value, bool | str)


def _round(kinds: Iterable[str]) -> Iterable[str]:
    different = list(dict.fromkeys(kinds))
    while True:
        yield from different
