"""Data: documents → tokens → samples → batches. One global, seeded order that no strategy changes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import numpy as np
import torch

from toolkit.errors import BadInput
from toolkit.recipe import Data
from toolkit.runtime.sources import read_documents
from toolkit.runtime.tokenizer import Tokenizer

IGNORE = -100
"""Label of a position that does not count."""


@dataclass(frozen=True)
class MicroBatch:
    """What one forward pass takes: `labels[i]` is the token after `input_ids[i]`, or `IGNORE`."""

    input_ids: torch.Tensor
    labels: torch.Tensor
    attention_mask: torch.Tensor | None = None
    position_ids: torch.Tensor | None = None
    """Positions that start anew in packed documents; None: 0, 1, 2 …"""

    def to(self, device: torch.device) -> MicroBatch:
        """The same on a device."""
        given = {f.name: tensor for f in fields(self) if (tensor := getattr(self, f.name)) is not None}
        return MicroBatch(**{name: tensor.to(device, non_blocking=True) for name, tensor in given.items()})

    def inputs(self) -> dict[str, Any]:
        """Arguments of the model's forward."""
        optional = {"attention_mask": self.attention_mask, "position_ids": self.position_ids}
        given = {name: tensor for name, tensor in optional.items() if tensor is not None}
        return {"input_ids": self.input_ids, "use_cache": False, **given}

    @property
    def counted(self) -> int:
        """Tokens that the loss counts."""
        return int((self.labels != IGNORE).sum())


class Samples(Protocol):
    """A fixed list of samples."""

    def __len__(self) -> int: ...

    def batch(self, indices: np.ndarray) -> MicroBatch:
        """These samples as one micro-batch."""


@dataclass(frozen=True)
class Packed:
    """All documents in one stream, cut into sequences: nothing is padded, every token is predicted once."""

    tokens: np.ndarray
    seq_len: int

    def __len__(self) -> int:
        return max(0, (len(self.tokens) - 1) // self.seq_len)

    def batch(self, indices: np.ndarray) -> MicroBatch:
        spans = indices[:, None] * self.seq_len + np.arange(self.seq_len + 1)
        window = torch.from_numpy(self.tokens[spans].astype(np.int64))
        return MicroBatch(window[:, :-1].contiguous(), window[:, 1:].contiguous())


@dataclass(frozen=True)
class Padded:
    """One document a sample, cut at the sequence length and padded on the right."""

    documents: list[np.ndarray]
    seq_len: int
    pad: int

    def __len__(self) -> int:
        return len(self.documents)

    def batch(self, indices: np.ndarray) -> MicroBatch:
        ids = torch.full((len(indices), self.seq_len), self.pad)
        labels = torch.full((len(indices), self.seq_len), IGNORE)
        mask = torch.zeros((len(indices), self.seq_len), dtype=torch.long)
        for row, index in enumerate(indices):
            document = torch.from_numpy(self.documents[index][: self.seq_len + 1].astype(np.int64))
            inputs, targets = document[: self.seq_len], document[1:]
            ids[row, : len(inputs)], mask[row, : len(inputs)] = inputs, 1
            labels[row, : len(targets)] = targets
        return MicroBatch(ids, labels, mask)


@dataclass(frozen=True)
class Synthetic:
    """Arithmetic sequences: no files, learnable, for smoke tests and benchmarks."""

    vocab: int
    seq_len: int
    count: int = 65536

    def __len__(self) -> int:
        return self.count

    def batch(self, indices: np.ndarray) -> MicroBatch:
        stride = 1 + indices % 7
        window = (indices[:, None] + stride[:, None] * np.arange(self.seq_len + 1)) % self.vocab
        tensor = torch.from_numpy(window.astype(np.int64))
        return MicroBatch(tensor[:, :-1].contiguous(), tensor[:, 1:].contiguous())


def load_samples(section: Data, tokenizer: Tokenizer, vocab: int) -> Samples:
    """The recipe's data as samples; `BadInput` if there are none or the tokenizer does not fit the model."""
    if section.path == "synthetic":
        return Synthetic(vocab, section.seq_len)
    if tokenizer.vocab > vocab:
        raise BadInput(
            "data.tokenizer",
            f"{tokenizer.vocab} tokens; the model's embedding has {vocab} rows; use a model or tokenizer that match",
        )
    documents = [ids for text in read_documents(section) if len(ids := tokenizer.encode(text)) > 1]
    samples = _make(section, tokenizer, documents)
    if len(samples) == 0:
        found = f"{sum(map(len, documents))} tokens in {len(documents)} documents"
        raise BadInput("data.path", f"{section.path}: {found}; one sequence needs {section.seq_len + 1}")
    return samples


def _make(section: Data, tokenizer: Tokenizer, documents: list[np.ndarray]) -> Samples:
    if not section.packing:
        return Padded(documents, section.seq_len, tokenizer.pad)
    return Packed(np.concatenate(documents) if documents else np.zeros(0, np.int32), section.seq_len)


@dataclass(frozen=True, kw_only=True)
class Order:
    """Which samples each step uses, over all ranks: depends on the seed and the global batch alone."""

    samples: int
    global_batch: int
    seed: int
    first_step: int = 0
    """A step from which on the position is known: 0, or where a run was resumed."""
    first_position: int = 0
    """Samples that were used before it."""

    def step(self, step: int) -> np.ndarray:
        """Sample ids of a step, counted from 0; an epoch's last samples share a batch with the next epoch's first."""
        positions = np.arange(self.position(step), self.position(step + 1))
        epochs, places = np.divmod(positions, self.samples)
        return np.concatenate([self._epoch(int(e))[places[epochs == e]] for e in np.unique(epochs)])

    def position(self, step: int) -> int:
        """Samples used before a step."""
        return self.first_position + (step - self.first_step) * self.global_batch

    def moved(self, step: int, position: int) -> Order:
        """The same order, with `position` samples used before `step`: another global batch goes on at the next one."""
        return replace(self, first_step=step, first_position=position)

    def _epoch(self, epoch: int) -> np.ndarray:
        return np.random.default_rng([self.seed, epoch]).permutation(self.samples)


def own_share(ids: np.ndarray, *, replica: int, replicas: int) -> np.ndarray:
    """A replica's samples of a global batch."""
    return np.array_split(ids, replicas)[replica]


def micro_batches(
    samples: Samples, ids: np.ndarray, *, replica: int, replicas: int, micro_batch: int
) -> Iterator[MicroBatch]:
    """A replica's share of a global batch, one micro-batch at a time."""
    own = own_share(ids, replica=replica, replicas=replicas)
    for start in range(0, len(own), micro_batch):
        yield samples.batch(own[start : start + micro_batch])
