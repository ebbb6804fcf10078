"""A micro-batch: tensors of a few sequences with shifted labels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

IGNORE = -100
"""Label of a position that does not count."""


@dataclass(frozen=True)
class MicroBatch:
    """What one forward pass takes.

    Language models: `labels[i]` is the token after `input_ids[i]`, or `IGNORE`. Classes: one label a sample.
    """

    input_ids: torch.Tensor | None
    labels: torch.Tensor
    attention_mask: torch.Tensor | None = None
    position_ids: torch.Tensor | None = None
    """Positions that start anew in packed documents; None: 0, 1, 2 …"""
    decoder_input_ids: torch.Tensor | None = None
    """Seq2seq: what the decoder has seen when it predicts `labels`."""
    pixel_values: torch.Tensor | None = None
    """Images, instead of `input_ids`."""

    def to(self, device: torch.device) -> MicroBatch:
        """The same on a device."""
        return self.map(lambda tensor: tensor.to(device, non_blocking=True))

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> MicroBatch:
        """The same with every tensor changed."""
        return replace(self, **{name: change(tensor) for name, tensor in self.tensors().items()})

    def tensors(self) -> dict[str, torch.Tensor]:
        """What there is, by name."""
        return {f.name: tensor for f in fields(self) if (tensor := getattr(self, f.name)) is not None}

    def inputs(self) -> dict[str, Any]:
        """Arguments of the model's forward."""
        given: dict[str, Any] = {name: tensor for name, tensor in self.tensors().items() if name != "labels"}
        return given | ({"use_cache": False} if self.labels.dim() == 2 else {})

    @property
    def shape(self) -> torch.Size:
        """Of what goes in."""
        given = self.input_ids if self.input_ids is not None else self.pixel_values
        assert given is not None
        return given.shape

    @property
    def counted(self) -> int:
        """Tokens, or samples with a class, that the loss counts."""
        return int((self.labels != IGNORE).sum())
