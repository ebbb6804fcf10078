"""Small batches that try a model's code paths: one for each task, full and padded."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from toolkit.runtime.data.samples_protocol import IGNORE, MicroBatch
from toolkit.runtime.models.tiny_config import VOCABULARY

SAMPLES, TOKENS, UNPADDED, PROBE_TOKENS = 2, 16, 10, 8
SEED = 0


def probe_inputs(model: PreTrainedModel) -> dict[str, Any]:
    """Arguments of the smallest forward pass."""
    if model.main_input_name == "pixel_values":
        return {"pixel_values": torch.zeros(image_shape(model.config, 1))}
    return {"input_ids": torch.arange(5, 5 + PROBE_TOKENS)[None], "use_cache": False}


def image_shape(config: PretrainedConfig, images: int) -> tuple[int, int, int, int]:
    """Of a batch of images that a model takes."""
    return images, getattr(config, "num_channels", 3), config.image_size, config.image_size


def probe_batches(task: str | None, config: PretrainedConfig) -> list[MicroBatch]:
    """What a task trains on: a full batch, and one padded on the right where there are tokens."""
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
    return [MicroBatch(inputs, labels), MicroBatch(inputs * mask, labels.masked_fill(mask == 0, IGNORE), mask)]
