"""Sequences packed from documents as they are read, for sources that fit neither memory nor disk.

Every rank reads the stream and packs the same windows, so a sequence has the same number on all ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from toolkit.errors import BadInput
from toolkit.recipe.sections import Data
from toolkit.runtime.corpus.formats import Encoded, Format
from toolkit.runtime.corpus.stream_reader import Start, StreamPosition, batched, open_blocks
from toolkit.runtime.corpus.token_documents import Documents, from_lists
from toolkit.runtime.data.samples import Samples
from toolkit.runtime.models.micro_batch import MicroBatch

WINDOW_SEQUENCES = 256
"""About this many sequences are packed together; a window never spans two blocks of rows."""
FRUITLESS_TURNS = 2
"""After this many complete passes without a document, the stream counts as empty."""

Window = tuple[Start, Documents]
"""(start of the block of rows, documents to pack together)."""


@dataclass(kw_only=True)
class Streamed:
    """Numbered sequences of an endless stream, in order; used ones are dropped."""

    windows: Iterator[Window]
    """Windows from the current position."""
    open: Callable[[Start], Iterator[Window]]
    """Opens the windows from the start of a block."""
    make: Callable[[Documents], Samples]
    """Packs a window."""
    seq_len: int
    keep: int
    """Used sequences that stay available: prefetched batches are made again after a rewind."""
    identity: Mapping[str, Any] = field(default_factory=dict)
    """Settings that the numbering of sequences depends on; a resumed run must have the same."""
    lengths: None = None
    _held: deque[tuple[int, Samples]] = field(default_factory=deque)
    """First number of each window in memory, and its sequences."""
    _starts: deque[tuple[int, Start]] = field(default_factory=deque)
    """For each block that can still be returned to: its first sequence number, and where it starts."""
    _next: int = 0

    def __len__(self) -> int:
        """Number of sequences read so far; a stream has no end."""
        self._read(0)
        return self._next

    @property
    def positions(self) -> int:
        """Token positions of the windows in memory."""
        self._read(0)
        return sum(samples.positions for _, samples in self._held)

    @property
    def positions_used(self) -> int:
        """Token positions of the windows in memory."""
        return sum(samples.positions_used for _, samples in self._held)

    def width(self, indices: np.ndarray) -> int:
        """Tokens per row."""
        return self.seq_len

    def batch(self, indices: np.ndarray, width: int | None = None) -> MicroBatch:
        self._read(int(indices.max()))
        rows = [self._row(int(index)) for index in indices]
        return MicroBatch(**{name: torch.cat([row.tensors()[name] for row in rows]) for name in rows[0].tensors()})

    def mark(self, position: int) -> dict[str, Any]:
        """For a checkpoint: where to continue reading if `position` is the next sequence."""
        self._read(0)
        first, start = max((found for found in list(self._starts) if found[0] <= position), key=lambda found: found[0])
        return {"first": first, "block": start.block, "places": [asdict(p) for p in start.places], **self.identity}

    def resume_at(self, mark: Mapping[str, Any] | None) -> str:
        """Continue from a checkpoint's mark and return a log message; `BadInput` if it is of another stream."""
        if mark is None:
            raise BadInput(
                "data.streaming",
                "the checkpoint has no position in a stream, so the next sample is not defined; "
                "resume with the data section that it was made with, or start again with checkpoint.resume: none",
            )
        for name, value in self.identity.items():
            if mark.get(name) != value:
                what = f"{value} given; the checkpoint's stream has {mark.get(name)}, so the next sample is not defined"
                raise BadInput(f"data.{name}", what)
        start = Start(int(mark["block"]), tuple(StreamPosition(**place) for place in mark["places"]))
        self.windows, self._next = self.open(start), int(mark["first"])
        self._held.clear()
        self._starts.clear()
        return f"the stream continues at sequence {self._next:,}: {', '.join(p.words() for p in start.places)}"

    def _row(self, index: int) -> MicroBatch:
        for first, samples in self._held:
            if first <= index < first + len(samples):
                return samples.batch(np.array([index - first]))
        raise AssertionError(f"sequence {index} has been dropped from the stream")

    def _read(self, index: int) -> None:
        while index >= self._next or not self._starts:
            start, documents = next(self.windows)
            samples = self.make(documents)
            self._forget(min(index, self._next) - self.keep)
            if not self._starts or self._starts[-1][1] != start:
                self._starts.append((self._next, start))
            if len(samples):
                self._held.append((self._next, samples))
                self._next += len(samples)

    def _forget(self, before: int) -> None:
        """Drop what only sequences before this number need."""
        while self._held and self._held[0][0] + len(self._held[0][1]) <= before:
            self._held.popleft()
        while len(self._starts) > 1 and self._starts[1][0] <= before:
            self._starts.popleft()


def windows(
    section: Data, weights: Mapping[str, float], reader: Format, seed: int, start: Start | None = None
) -> Iterator[Window]:
    """Documents of the sources, in endless passes, each in another order; a few thousand at a time."""
    blocks = open_blocks(section, weights, reader, seed, start)
    last = blocks.start
    while True:
        begin = blocks.start
        for documents in _cut(blocks.take(), section, reader):
            last = begin
            yield begin, documents
        turns = [now.turn - then.turn for now, then in zip(blocks.start.places, last.places, strict=True)]
        if min(turns) >= FRUITLESS_TURNS:
            raise BadInput("data.path", f"{', '.join(weights)}: no document in the complete stream")


def _cut(rows: list[dict[str, Any]], section: Data, reader: Format) -> Iterator[Documents]:
    """The documents of a block, one window at a time."""
    found, tokens = Encoded(), 0
    for some in batched(rows):
        encoded = reader.encode(some)
        _check(encoded)
        found.documents += encoded.documents
        found.counted += encoded.counted
        tokens += sum(map(len, encoded.documents))
        if tokens >= WINDOW_SEQUENCES * section.seq_len:
            yield _documents(found)
            found, tokens = Encoded(), 0
    if found.documents:
        yield _documents(found)


def _documents(found: Encoded) -> Documents:
    counted = np.concatenate(found.counted).astype(np.uint8) if found.counted else None
    return from_lists(found.documents, counted=counted)


def _check(encoded: Encoded) -> None:
    if encoded.problems:
        raise BadInput("data.path", f"a row of the stream can't be used: {encoded.problems[0][1]}")
