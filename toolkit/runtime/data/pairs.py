"""Preference data: rows of pairs. Both answers of a pair share a row and do not attend to each other.

A prompt is in the row once, and both answers continue it, if the model's type is proven to give the same results.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from toolkit.errors import BadInput
from toolkit.runtime.corpus.token_documents import Documents, spread
from toolkit.runtime.data.packing import BestFit, Pieces, best_fit
from toolkit.runtime.models.documents import Documents as Spans
from toolkit.runtime.models.micro_batch import MicroBatch


@dataclass(frozen=True)
class PairRows:
    """Rows of complete pairs, as full as possible: chosen, rejected, chosen, rejected …

    If pairs share their prompts, a pair has three pieces: the prompt, and what is different in both.
    """

    rows: BestFit
    reference: np.ndarray | None = None
    """Log-probability of each document of `rows` under the reference, if it is known."""
    scores: np.ndarray | None = None
    """Of each pair of `rows`: whether its answer is good (KTO)."""
    shares: bool = False
    """Whether pairs share their prompts."""
    lengths: None = None

    @classmethod
    def pack(
        cls, documents: Documents, pairs: np.ndarray, seq_len: int, pad: int, source: str, *, share: bool = False
    ) -> PairRows:
        """Pack pairs, given by their numbers. Pair `n` is the documents `2n` (chosen) and `2n + 1` (rejected)."""
        numbers = np.stack([2 * pairs, 2 * pairs + 1], 1)
        starts, inputs = documents.bounds[:-1][numbers], documents.lengths[numbers] - 1
        shared = _shared_inputs(documents, starts, inputs) if share else np.zeros(len(pairs), np.int64)
        lengths = _shortened(inputs, seq_len + shared[:, None])
        shared = np.minimum(shared, lengths.min(1))
        _check_answers(documents, starts, lengths, pairs, seq_len, source)
        places = best_fit(lengths.sum(1) - shared, seq_len)
        order = np.argsort(places, kind="stable")
        rows = np.arange(places.max() + 2 if len(places) else 1)
        pieces = _pieces(starts[order], lengths[order], shared[order] if share else None)
        firsts = (3 if share else 2) * np.searchsorted(places[order], rows)
        scores = None if documents.scores is None else documents.scores[2 * pairs[order]]
        return cls(BestFit(documents, pieces, firsts, seq_len, pad), scores=scores, shares=share)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def num_documents(self) -> int:
        """Documents of all rows."""
        return 2 * int(self._first_pairs[-1])

    @property
    def _first_pairs(self) -> np.ndarray:
        """First pair of each row, then the number of pairs."""
        return self.rows.firsts // (3 if self.shares else 2)

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
        firsts = 2 * self._first_pairs
        return spread(firsts[indices], firsts[indices + 1] - firsts[indices])

    def batch(self, indices: np.ndarray, width: int | None = None) -> MicroBatch:
        places = self.places(indices)
        counts = self._first_pairs[indices + 1] - self._first_pairs[indices]
        known = None if self.reference is None else torch.from_numpy(self.reference[places])
        scores = None if self.scores is None else torch.from_numpy(self.scores[places[::2] // 2])
        found = replace(self.rows.batch(indices, width), pairs=torch.from_numpy(counts), reference=known, scores=scores)
        return replace(found, documents=self._spans(indices)) if self.shares else found

    def _spans(self, indices: np.ndarray) -> Spans:
        """Bounds of prompts and answers, which positions do not tell; padding belongs to a row's last answer."""
        lengths = []
        for first, end in zip(self.rows.firsts[indices], self.rows.firsts[indices + 1], strict=True):
            row = self.rows.pieces.lengths[first:end].copy()
            row[-1] += self.rows.seq_len - row.sum()
            lengths.append(row)
        return Spans.of_pairs(np.concatenate(lengths).tolist(), len(indices))


def _shared_inputs(documents: Documents, starts: np.ndarray, inputs: np.ndarray) -> np.ndarray:
    """How many inputs at the start are the same in both documents of each pair, before the first that counts."""
    assert documents.counted is not None
    found = np.zeros(len(starts), np.int64)
    for number, (one, two) in enumerate(starts):
        length = int(inputs[number].min())
        differ = documents.tokens[one : one + length] != documents.tokens[two : two + length]
        counts = documents.counted[one + 1 : one + length + 1] + documents.counted[two + 1 : two + length + 1]
        ends = differ | (counts > 0)
        found[number] = int(ends.argmax()) if ends.any() else length
    return found


def _pieces(starts: np.ndarray, lengths: np.ndarray, shared: np.ndarray | None) -> Pieces:
    """Pieces of pairs: both documents, or what they share and the rest of both."""
    if shared is None:
        return Pieces(starts.reshape(-1), lengths.reshape(-1))
    column, zeros = shared[:, None], np.zeros((len(shared), 1), np.int64)
    return Pieces(
        np.concatenate([starts[:, :1], starts + column], 1).reshape(-1),
        np.concatenate([column, lengths - column], 1).reshape(-1),
        positions=np.concatenate([zeros, column, column], 1).reshape(-1),
    )


def _shortened(inputs: np.ndarray, room: np.ndarray) -> np.ndarray:
    """Inputs of both documents of each pair, shortened at the end so that they fit into their room together.

    The shorter one keeps what it needs up to half of the room.
    """
    others: np.ndarray = np.maximum(room - inputs[:, ::-1], room // 2)
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
