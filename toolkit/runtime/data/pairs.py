"""Preference data: rows of pairs. Both answers of a pair share a row and do not attend to each other."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from toolkit.errors import BadInput
from toolkit.runtime.corpus.token_documents import Documents, spread
from toolkit.runtime.data.packing import BestFit, Pieces, best_fit
from toolkit.runtime.models.micro_batch import MicroBatch


@dataclass(frozen=True)
class PairRows:
    """Rows of complete pairs, as full as possible: chosen, rejected, chosen, rejected …"""

    rows: BestFit
    reference: np.ndarray | None = None
    """Log-probability of each piece of `rows` under the reference, if it is known."""
    scores: np.ndarray | None = None
    """Of each pair of `rows`: whether its answer is good (KTO)."""
    lengths: None = None

    @classmethod
    def pack(cls, documents: Documents, pairs: np.ndarray, seq_len: int, pad: int, source: str) -> PairRows:
        """Pack pairs, given by their numbers. Pair `n` is the documents `2n` (chosen) and `2n + 1` (rejected)."""
        numbers = np.stack([2 * pairs, 2 * pairs + 1], 1)
        starts, lengths = documents.bounds[:-1][numbers], _shortened(documents.lengths[numbers] - 1, seq_len)
        _check_answers(documents, starts, lengths, pairs, seq_len, source)
        places = best_fit(lengths.sum(1), seq_len)
        order = np.argsort(places, kind="stable")
        rows = np.arange(places.max() + 2 if len(places) else 1)
        pieces = Pieces(starts[order].reshape(-1), lengths[order].reshape(-1))
        firsts = 2 * np.searchsorted(places[order], rows)
        scores = None if documents.scores is None else documents.scores[2 * pairs[order]]
        return cls(BestFit(documents, pieces, firsts, seq_len, pad), scores=scores)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def num_documents(self) -> int:
        """Documents of all rows."""
        return len(self.rows.pieces)

    @property
    def positions(self) -> int:
        """Token positions that an epoch computes."""
        return self.rows.positions

    @property
    def positions_used(self) -> int:
        """Token positions that are not padding."""
        return self.rows.positions_used

    def width(self, indices: np.ndarray) -> int:
        """Tokens per row: always a full sequence."""
        return self.rows.width(indices)

    def places(self, indices: np.ndarray) -> np.ndarray:
        """Numbers of the documents in these rows."""
        firsts = self.rows.firsts
        return spread(firsts[indices], firsts[indices + 1] - firsts[indices])

    def batch(self, indices: np.ndarray, width: int | None = None) -> MicroBatch:
        counts = (self.rows.firsts[indices + 1] - self.rows.firsts[indices]) // 2
        known = None if self.reference is None else torch.from_numpy(self.reference[self.places(indices)])
        own = self.places(indices)[::2] // 2
        scores = None if self.scores is None else torch.from_numpy(self.scores[own])
        return replace(self.rows.batch(indices, width), pairs=torch.from_numpy(counts), reference=known, scores=scores)


def _shortened(inputs: np.ndarray, seq_len: int) -> np.ndarray:
    """Inputs of both documents of each pair, shortened at the end so that they fit a row together.

    The shorter one keeps what it needs up to half of the row.
    """
    others: np.ndarray = np.maximum(seq_len - inputs[:, ::-1], seq_len // 2)
    shortened: np.ndarray = np.minimum(inputs, others)
    return shortened


def _check_answers(
    documents: Documents, starts: np.ndarray, lengths: np.ndarray, pairs: np.ndarray, seq_len: int, source: str
) -> None:
    """`BadInput` if a prompt leaves no room for an answer."""
    assert documents.counted is not None
    before = np.concatenate([[0], np.cumsum(documents.counted, dtype=np.int64)])
    empty = (before[starts + lengths + 1] == before[starts + 1]).any(1)
    if empty.any():
        first = int(np.flatnonzero(empty)[0])
        raise BadInput(
            "data.seq_len",
            f"{source}, row {int(pairs[first]) + 1}: the prompt leaves no room for both answers in {seq_len} tokens "
            f"({int(empty.sum()):,} such rows); use longer sequences, or remove these rows",
        )
