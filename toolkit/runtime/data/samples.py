"""Kinds of samples besides best-fit packing: one stream of tokens, padded documents, labelled texts, synthetic data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from toolkit.runtime.corpus.token_documents import Documents, spread
from toolkit.runtime.data.sample_order import PAST_END, own_share
from toolkit.runtime.models.micro_batch import IGNORE, MicroBatch

ROUND = 64
"""Padded widths are multiples of this: few different shapes, which sequence ranks can divide."""


@dataclass(frozen=True)
class Stream:
    """All documents as one stream of tokens, cut into sequences: no padding; a sequence may span several documents."""

    tokens: np.ndarray
    seq_len: int
    lengths: None = None

    def __len__(self) -> int:
        return max(0, (len(self.tokens) - 1) // self.seq_len)

    @property
    def positions(self) -> int:
        """Token positions that an epoch computes; all of them are used."""
        return len(self) * self.seq_len

    positions_used = positions

    def width(self, indices: np.ndarray) -> int:
        """Tokens per row."""
        return self.seq_len

    def batch(self, indices: np.ndarray, width: int | None = None) -> MicroBatch:
        spans = indices[:, None] * self.seq_len + np.arange(self.seq_len + 1)
        return _shifted(self.tokens[spans])


@dataclass(frozen=True)
class Synthetic:
    """Arithmetic sequences for smoke tests and benchmarks: learnable, without files."""

    vocab: int
    seq_len: int
    count: int = 65536
    lengths: None = None

    def __len__(self) -> int:
        return self.count

    @property
    def positions(self) -> int:
        """Token positions that an epoch computes; all of them are used."""
        return self.count * self.seq_len

    positions_used = positions

    def width(self, indices: np.ndarray) -> int:
        """Tokens per row."""
        return self.seq_len

    def batch(self, indices: np.ndarray, width: int | None = None) -> MicroBatch:
        stride = 1 + indices % 7
        return _shifted((indices[:, None] + stride[:, None] * np.arange(self.seq_len + 1)) % self.vocab)


def _shifted(window: np.ndarray) -> MicroBatch:
    tensor = torch.from_numpy(window.astype(np.int64))
    return MicroBatch(tensor[:, :-1].contiguous(), tensor[:, 1:].contiguous())


class Rows(Protocol):
    """Samples with one document per row."""

    @property
    def lengths(self) -> np.ndarray:
        """Inputs of each row."""

    @property
    def seq_len(self) -> int:
        """Length of the longest row."""


def _positions(self: Rows) -> int:
    """Positions that an epoch computes, if all rows of a batch have the same length."""
    return int(rounded_widths(self.lengths, self.seq_len).sum())


def _positions_used(self: Rows) -> int:
    """Positions that are not padding."""
    return int(self.lengths.sum())


@dataclass(frozen=True)
class Padded:
    """One document per row, padded on the right to the longest of the global batch, whose lengths are similar."""

    documents: Documents
    starts: np.ndarray
    lengths: np.ndarray
    """Inputs of each row."""
    seq_len: int
    pad: int

    positions = property(_positions)
    positions_used = property(_positions_used)

    def __len__(self) -> int:
        return len(self.starts)

    def width(self, indices: np.ndarray) -> int:
        """Length of the longest row of the batch, rounded up."""
        return int(rounded_widths(self.lengths[indices], self.seq_len).max())

    def batch(self, indices: np.ndarray, width: int | None = None) -> MicroBatch:
        shape = (len(indices), width or self.width(indices))
        lengths = self.lengths[indices]
        spots = spread(np.arange(len(indices)) * shape[1], lengths)
        source = spread(self.starts[indices], lengths)
        labels = self.documents.tokens[source + 1].astype(np.int64)
        if self.documents.counted is not None:
            labels = np.where(self.documents.counted[source + 1], labels, IGNORE)
        mask = _filled(shape, 0, spots, np.ones(1, np.int64))
        ids = _filled(shape, self.pad, spots, self.documents.tokens[source])
        return MicroBatch(ids, _filled(shape, IGNORE, spots, labels), mask)


@dataclass(frozen=True)
class Labelled:
    """One document per row, with a class or with a target text."""

    documents: Documents
    seq_len: int
    pad: int
    start: int = 0
    """Seq2seq: first token of the decoder."""

    positions = property(_positions)
    positions_used = property(_positions_used)

    def __len__(self) -> int:
        return len(self.documents)

    @property
    def lengths(self) -> np.ndarray:
        """Inputs of each row."""
        lengths: np.ndarray = np.minimum(self.documents.lengths, self.seq_len)
        return lengths

    def width(self, indices: np.ndarray) -> int:
        """Length of the longest row of the batch, rounded up; encoder and decoder have the same width."""
        longest = self.documents.lengths[indices]
        if self.documents.targets is not None:
            longest = np.maximum(longest, self.documents.targets.lengths[indices])
        return int(rounded_widths(longest, self.seq_len).max())

    def batch(self, indices: np.ndarray, width: int | None = None) -> MicroBatch:
        width = width or self.width(indices)
        ids, mask = padded_rows(self.documents, indices, width, self.pad)
        if self.documents.targets is None:
            assert self.documents.labels is not None
            classes = np.asarray(self.documents.labels[indices], np.int64)
            return MicroBatch(ids, torch.from_numpy(classes), mask)
        targets, present = padded_rows(self.documents.targets, indices, width, self.pad)
        before = torch.cat([torch.full((len(indices), 1), self.start), targets[:, :-1]], 1)
        return MicroBatch(ids, targets.masked_fill(present == 0, IGNORE), mask, decoder_input_ids=before)


def rounded_widths(lengths: np.ndarray, seq_len: int) -> np.ndarray:
    """Widths of rows, rounded up to multiples of `ROUND`."""
    widths: np.ndarray = np.minimum(-(-lengths // ROUND) * ROUND, seq_len)
    return widths


def padded_rows(documents: Documents, indices: np.ndarray, width: int, pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, mask) of documents, truncated to the width."""
    shape = (len(indices), width)
    lengths = np.minimum(documents.lengths[indices], width)
    spots = spread(np.arange(len(indices)) * width, lengths)
    source = spread(documents.bounds[:-1][indices], lengths)
    return _filled(shape, pad, spots, documents.tokens[source]), _filled(shape, 0, spots, np.ones(1, np.int64))


def _filled(shape: tuple[int, int], rest: int, spots: np.ndarray, values: np.ndarray) -> torch.Tensor:
    whole = np.full(shape, rest, np.int64)
    whole.reshape(-1)[spots] = values
    return torch.from_numpy(whole)


class Samples(Protocol):
    """A fixed list of samples."""

    @property
    def lengths(self) -> np.ndarray | None:
        """Tokens of each sample; None if all have the same length."""

    @property
    def positions(self) -> int:
        """Token positions that an epoch computes."""

    @property
    def positions_used(self) -> int:
        """Token positions that are not padding."""

    def __len__(self) -> int: ...

    def width(self, indices: np.ndarray) -> int:
        """Tokens per row if these samples are one global batch."""

    def batch(self, indices: np.ndarray, width: int | None = None) -> MicroBatch:
        """These samples as one micro-batch."""


def micro_batches(
    samples: Samples, ids: np.ndarray, *, replica: int, replicas: int, micro_batch: int
) -> Iterator[MicroBatch]:
    """A replica's share of a global batch as micro-batches of the same shape."""
    present = ids[ids != PAST_END]
    width = samples.width(present)
    own = own_share(ids, replica=replica, replicas=replicas)
    for start in range(0, len(own), micro_batch):
        chosen = own[start : start + micro_batch]
        batch = samples.batch(np.where(chosen == PAST_END, present[0], chosen), width)
        batch.labels[torch.from_numpy(chosen == PAST_END)] = IGNORE
        yield batch
