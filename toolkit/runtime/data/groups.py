"""Samples of several texts: pairs to be scored, candidates of a query, a query with what is to be found for it.

Each text has a row of its own, padded on the right, and a sample has the same number of rows as every other one.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch

from toolkit.runtime.corpus.token_documents import Documents, from_lists
from toolkit.runtime.data.samples import padded_rows, rounded_widths
from toolkit.runtime.models.micro_batch import MicroBatch

ABSENT = -1.0
"""Score of a row that only fills a sample up."""


@dataclass(frozen=True)
class GroupRows:
    """Samples of `size` rows each; a sample with fewer texts is filled up with rows of padding."""

    documents: Documents
    firsts: np.ndarray
    """First document of each sample."""
    counts: np.ndarray
    """Documents of each sample."""
    size: int
    seq_len: int
    pad: int
    scores: np.ndarray | None = None
    """A number for each row of each sample; `ABSENT` where there is no document."""
    keys: np.ndarray | None = None
    """A number for each row of each sample that is equal for equal texts."""

    @classmethod
    def of(cls, documents: Documents, numbers: np.ndarray, size: int, seq_len: int, pad: int) -> GroupRows:
        """Samples by their numbers; sample `n` is the `n`-th row of the source."""
        counts = np.full(len(documents) // size, size) if documents.groups is None else np.asarray(documents.groups)
        firsts = np.concatenate([[0], np.cumsum(counts)])[:-1]
        firsts, counts = firsts[numbers], counts[numbers]
        found = cls(documents, firsts, counts, size, seq_len, pad)
        if documents.scores is None:
            return found
        scores = np.where(found._present, documents.scores[found._places], ABSENT)
        return cls(documents, firsts, counts, size, seq_len, pad, scores)

    def with_keys(self) -> GroupRows:
        """These samples with keys, by which equal texts are known."""
        keys = np.array([_key(self.documents.document(place)) for place in self._places.reshape(-1)], np.int64)
        return GroupRows(
            self.documents, self.firsts, self.counts, self.size, self.seq_len, self.pad, self.scores,
            keys.reshape(-1, self.size),
        )  # fmt: skip

    @property
    def _present(self) -> np.ndarray:
        found: np.ndarray = np.arange(self.size) < self.counts[:, None]
        return found

    @property
    def _places(self) -> np.ndarray:
        """Document of each row; the first one of the sample where there is none."""
        return np.where(self._present, self.firsts[:, None] + np.arange(self.size), self.firsts[:, None])

    def __len__(self) -> int:
        return len(self.firsts)

    @property
    def lengths(self) -> np.ndarray:
        """Length of the longest text of each sample."""
        longest: np.ndarray = np.minimum(self.documents.lengths[self._places].max(1), self.seq_len)
        return longest

    @property
    def positions(self) -> int:
        """Token positions that an epoch computes."""
        return int(rounded_widths(self.lengths, self.seq_len).sum()) * self.size

    @property
    def positions_used(self) -> int:
        """Token positions that are not padding."""
        texts = np.minimum(self.documents.lengths[self._places], self.seq_len)
        return int(texts[self._present].sum())

    def width(self, indices: np.ndarray) -> int:
        """Length of the longest text of the batch, rounded up."""
        return int(rounded_widths(self.lengths[indices], self.seq_len).max())

    def batch(self, indices: np.ndarray, width: int | None = None) -> MicroBatch:
        places, present = self._places[indices].reshape(-1), self._present[indices].reshape(-1)
        ids, mask = padded_rows(self.documents, places, width or self.width(indices), self.pad)
        absent = torch.from_numpy(~present)
        if absent.any():  # one visible token: a row without any would have no attention at all
            ids[absent] = self.pad
            mask[absent] = (torch.arange(mask.shape[1]) == 0).to(mask.dtype)
        return MicroBatch(
            ids,
            torch.zeros(len(indices), dtype=torch.long),
            mask,
            scores=None if self.scores is None else torch.from_numpy(self.scores[indices]),
            keys=None if self.keys is None else torch.from_numpy(self.keys[indices]),
        )


def _key(tokens: np.ndarray) -> int:
    digest = hashlib.blake2b(np.ascontiguousarray(tokens).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def mismatched(documents: Documents) -> Documents:
    """Every answer, followed by its prompt with the answer of the row before: what KTO estimates the KL term from.

    The rows of the source decide, not the batch, so the result does not depend on how a batch is split. Pairs of a
    chosen and a rejected answer count as two answers.
    """
    assert documents.counted is not None
    found: list[np.ndarray] = []
    counted: list[np.ndarray] = []
    paired = documents.scores is None or len(documents) > documents.counts.rows
    scores = np.tile([1.0, 0.0], len(documents) // 2) if paired else documents.scores
    assert scores is not None
    flags = [documents.counted[a:b].astype(bool) for a, b in zip(documents.bounds, documents.bounds[1:], strict=False)]
    for number, own in enumerate(flags):
        before = (number - (2 if paired else 1)) % len(flags)
        tokens, other = documents.document(number), documents.document(before)
        start, answer = int(own.argmax()), other[int(flags[before].argmax()) :]
        found += [tokens, np.concatenate([tokens[:start], answer])]
        counted += [own, np.concatenate([own[:start], np.ones(len(answer), bool)])]
    return from_lists(
        found,
        counted=np.concatenate(counted).astype(np.uint8) if counted else np.zeros(0, np.uint8),
        scores=np.repeat(scores, 2),
        counts=documents.counts,
    )
