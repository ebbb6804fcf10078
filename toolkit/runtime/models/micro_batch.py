"""A micro-batch: tensors of a few sequences with shifted labels."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from toolkit.runtime.models.documents import Documents

IGNORE = -100
"""Label of a position that the loss does not count."""


FOR_THE_LOSS = ("labels", "pairs", "reference", "scores", "keys", "teacher_ids", "teacher_logps", "noise", "own_bounds")
"""Tensors that the model does not get."""


@dataclass(frozen=True)
class MicroBatch:
    """Inputs and labels of one forward pass.

    Language models: `labels[i]` is the token after `input_ids[i]`, or `IGNORE`. Classifiers: one label per sample.
    Samples of several texts have several rows of `input_ids` each, and one label, which is 0 or `IGNORE`.
    """

    input_ids: torch.Tensor | None
    labels: torch.Tensor
    attention_mask: torch.Tensor | None = None
    position_ids: torch.Tensor | None = None
    """Positions that restart at 0 in each packed document; None: 0, 1, 2 …"""
    decoder_input_ids: torch.Tensor | None = None
    """Seq2seq: decoder inputs, which are `labels` shifted right."""
    pixel_values: torch.Tensor | None = None
    """Images, instead of `input_ids`."""
    documents: Documents | None = None
    """Bounds for attention; see `located`."""
    pairs: torch.Tensor | None = None
    """Preference data: pairs of documents in each row; the chosen document of a pair comes first."""
    reference: torch.Tensor | None = None
    """Log-probability of each document under the reference, in the order of the documents."""
    scores: torch.Tensor | None = None
    """Numbers that the data gives: of each row of each sample (margin, relevance), or of each pair (KTO's label)."""
    keys: torch.Tensor | None = None
    """Retrieval: a number for each row of each sample that is equal for equal texts."""
    teacher_ids: torch.Tensor | None = None
    """Distillation: the teacher's likeliest tokens at each position."""
    teacher_logps: torch.Tensor | None = None
    """Their log-probabilities."""
    own_bounds: torch.Tensor | None = None
    """Pairs in rows that sequence ranks share: bounds of the documents among the tokens of this rank."""
    noise: torch.Tensor | None = None
    """A number for each row, from which the noise on its embeddings follows (NEFTune)."""

    def located(self) -> MicroBatch:
        """This micro-batch with its document bounds, which are read from tensors: call it while they are on the host.

        Images and seq2seq have none: their attention is not over one causal sequence.
        """
        if self.documents is not None or self.input_ids is None or self.decoder_input_ids is not None:
            return self
        rows, length = self.input_ids.shape
        return replace(self, documents=Documents.of_rows((rows, length), self.position_ids, self.attention_mask))

    def to(self, device: torch.device) -> MicroBatch:
        """This micro-batch on a device."""
        return self.map(lambda tensor: tensor.to(device, non_blocking=True))

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> MicroBatch:
        """This micro-batch with a function applied to every tensor."""
        documents = self.documents and self.documents.map(change)
        return replace(self, **{name: change(tensor) for name, tensor in self.tensors().items()}, documents=documents)

    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors that are not None, by name."""
        return {f.name: value for f in fields(self) if torch.is_tensor(value := getattr(self, f.name))}

    def inputs(self) -> dict[str, Any]:
        """Keyword arguments of the model's forward pass."""
        given: dict[str, Any] = {name: tensor for name, tensor in self.tensors().items() if name not in FOR_THE_LOSS}
        return given | ({"use_cache": False} if self.labels.dim() == 2 else {})

    @property
    def shape(self) -> torch.Size:
        """Shape of the input ids or images."""
        given = self.input_ids if self.input_ids is not None else self.pixel_values
        assert given is not None
        return given.shape

    @functools.cached_property
    def counted(self) -> int:
        """Number of tokens, or of samples with a class, that the loss counts."""
        return int((self.labels != IGNORE).sum())

    @functools.cached_property
    def weighed(self) -> int:
        """What the loss is averaged over: pairs, or else what it counts. Rows without any label are padding."""
        if self.pairs is None:
            return self.counted
        if self.own_bounds is not None:  # labels may be on other ranks
            return int(self.pairs.sum())
        return int(self.pairs[(self.labels != IGNORE).any(1)].sum())
