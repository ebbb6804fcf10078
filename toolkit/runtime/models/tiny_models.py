"""Tiny models of a type: the code paths of the real model in milliseconds, for proofs and coverage."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from toolkit.models.tiny_sizes import (
    IMAGES,
    LAYERS,
    OF_TYPE,
    POSITIONS,
    VOCABULARY,
    WINDOW,
    Sizes,
    drawn_sizes,
    tiny_sizes,
)
from toolkit.runtime.models.micro_batch import IGNORE, MicroBatch

__all__ = ["LAYERS", "POSITIONS", "VOCABULARY", "Sizes", "drawn_sizes", "tiny_config", "tiny_of_type", "trial_config"]


USUAL = Sizes()


def tiny_config(base: PretrainedConfig, sizes: Sizes = USUAL, dropout: float = 0.0) -> dict[str, Any]:
    """A config with the type and flags of `base` and with small sizes, as in a recipe's `model.config`."""
    small = tiny_sizes(sizes) | ({} if _has(base, "vocab_size") else IMAGES)
    flags = {key: value for key, value in base.to_diff_dict().items() if _is_flag(key, value, base)}
    values = {key: value for key, value in small.items() if _has(base, key)}
    values |= OF_TYPE.get(base.model_type, {})
    values = {key: value for key, value in values.items() if value is not None}
    kinds = base.to_dict().get("layer_types") or values.get("layer_types")
    if kinds:
        values["layer_types"] = [kind for _, kind in zip(range(sizes.layers), _cycle(kinds), strict=False)]
    for key in ("sliding_window", "window_size"):  # the second one is GPT-Neo's; that of images has another meaning
        if _has(base, "vocab_size") and type(getattr(base, key, None)) is int:
            values[key] = WINDOW
    if _has(base, "index_topk"):  # sparse latent attention has no groups of heads
        values["num_key_value_heads"] = sizes.heads
    if _has(base, "attention_types"):  # GPT-Neo: kinds of layers, and how often they repeat
        values["attention_types"] = [[base.attention_types[0][0], sizes.layers // len(base.attention_types[0][0])]]
    return {**flags, **values, **_random_settings(base, dropout), "model_type": base.model_type}


def trial_config(base: PretrainedConfig) -> dict[str, Any]:
    """A tiny config for trials of single operators; for `tried`, which keeps verdicts by config."""
    tiny = tiny_config(base)
    if "kv_lora_rank" in tiny:  # latent attention has one key per head
        tiny["num_key_value_heads"] = tiny["num_attention_heads"]
    return tiny


def tiny_of_type(model_type: str, sizes: Sizes = USUAL, dropout: float = 0.0) -> dict[str, Any]:
    """The tiny config of a type's defaults."""
    return tiny_config(CONFIG_MAPPING[model_type](), sizes, dropout)


def _random_settings(base: PretrainedConfig, dropout: float) -> dict[str, float]:
    """Settings that use random numbers in a forward pass: dropout as given, everything else off."""
    rates = {key: value for key, value in base.to_dict().items() if isinstance(value, float)}
    off = {key: 0.0 for key in rates if "jitter" in key or "layerdrop" in key}
    return off | {key: dropout for key in rates if key not in off and ("dropout" in key or "pdrop" in key)}


def _has(base: PretrainedConfig, key: str) -> bool:
    if key == "q_lora_rank" and getattr(base, key, 0) is None:
        return False  # None selects a plain projection, another code path, which must stay
    if key == "head_dim" and hasattr(base, "qk_rope_head_dim"):
        return False  # latent attention derives it from the parts of a head
    derived = getattr(type(base), key, None)
    return hasattr(base, key) and not (isinstance(derived, property) and derived.fset is None)


def _is_flag(key: str, value: Any, base: PretrainedConfig) -> bool:
    """Whether a value is a switch that the tiny model must share: neither a size nor a list with an entry per layer."""
    if key in ("model_type", "transformers_version", "architectures", "dtype", "torch_dtype", "layer_types"):
        return False
    return isinstance(value, bool | str)


def _cycle(kinds: Iterable[str]) -> Iterable[str]:
    different = list(dict.fromkeys(kinds))
    while True:
        yield from different


SAMPLES, TOKENS, UNPADDED, PROBE_TOKENS = 2, 16, 10, 8
CHANNELS = 8
"""Channels of hidden states that stand for classes where a model has no head; every tiny model has as many."""
SEED = 0


def probe_inputs(model: PreTrainedModel, rows: int = 1, tokens: int = PROBE_TOKENS) -> dict[str, Any]:
    """Arguments of the smallest forward pass."""
    if model.main_input_name == "pixel_values":
        return {"pixel_values": torch.zeros(image_shape(model.config, rows))}
    ids = torch.arange(5, 5 + tokens).repeat(rows, 1)
    targets = {"decoder_input_ids": ids} if model.config.is_encoder_decoder and model.can_generate() else {}
    return {"input_ids": ids, "use_cache": False, **targets}


def image_shape(config: PretrainedConfig, images: int) -> tuple[int, int, int, int]:
    """Shape of a batch of images for a model."""
    return images, getattr(config, "num_channels", 3), config.image_size, config.image_size


def probe_batches(task: str | None, config: PretrainedConfig) -> list[MicroBatch]:
    """Batches of a task: a full one and, for tokens, one padded on the right."""
    generator = torch.Generator().manual_seed(SEED)
    if task == "image-classification":
        pixels = torch.rand(image_shape(config, SAMPLES), generator=generator)
        return [MicroBatch(None, torch.arange(SAMPLES) % config.num_labels, pixel_values=pixels)]
    ids = torch.randint(3, VOCABULARY - 1, (SAMPLES, TOKENS + 1), generator=generator)
    inputs, labels = ids[:, :-1], ids[:, 1:]
    mask = torch.ones_like(inputs)
    mask[0, UNPADDED:] = 0
    if task == "classification":
        classes = torch.arange(SAMPLES) % config.num_labels
        return [MicroBatch(inputs, classes), MicroBatch(inputs * mask, classes, mask)]
    if task == "seq2seq":
        seen = labels.roll(1, dims=1)
        return [
            MicroBatch(inputs, labels, decoder_input_ids=seen),
            MicroBatch(inputs * mask, labels, mask, decoder_input_ids=seen),
        ]
    if task == "embedding":
        labels = labels % CHANNELS
    return [MicroBatch(inputs, labels), MicroBatch(inputs * mask, labels.masked_fill(mask == 0, IGNORE), mask)]
