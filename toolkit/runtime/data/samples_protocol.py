"""Batches: what one forward pass takes, and a replica's share of a global batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import numpy as np
import torch

from toolkit.runtime.data.sample_order import PAST_END, own_share

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


class Samples(Protocol):
    """A fixed list of samples."""

    @property
    def lengths(self) -> np.ndarray | None:
        """Tokens of each, where they differ; None: all are alike."""

    @property
    def positions(self) -> int:
        """Token positions that an epoch computes."""

    @property
    def positions_used(self) -> int:
        """Those of them that are not padding."""

    def __len__(self) -> int: ...

    def width(self, indices: np.ndarray) -> int:
        """Tokens of a row, if these samples are one global batch."""

    def batch(self, indices: np.ndarray, width: int | None = None) -> MicroBatch:
        """These samples as one micro-batch."""


def micro_batches(
    samples: Samples, ids: np.ndarray, *, replica: int, replicas: int, micro_batch: int
) -> Iterator[MicroBatch]:
    """A replica's share of a global batch, one micro-batch at a time, all of one shape."""
    present = ids[ids != PAST_END]
    width = samples.width(present)
    own = own_share(ids, replica=replica, replicas=replicas)
    for start in range(0, len(own), micro_batch):
        chosen = own[start : start + micro_batch]
        batch = samples.batch(np.where(chosen == PAST_END, present[0], chosen), width)
        batch.labels[torch.from_numpy(chosen == PAST_END)] = IGNORE
        yield batch
