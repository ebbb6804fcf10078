"""Sequences from documents as they arrive, for sources that fit neither memory nor disk.

Every rank reads the stream and packs the same windows, so that a sequence has the same number on all of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from toolkit.data_files import TABLE_FORMATS, data_files
from toolkit.errors import BadInput
from toolkit.recipe import Data
from toolkit.runtime import sources
from toolkit.runtime.data import MicroBatch, Samples
from toolkit.runtime.documents import Documents, from_lists
from toolkit.runtime.formats import Encoded, Format

WINDOW_SEQUENCES = 256
"""Documents of about so many sequences are packed together."""
SHUFFLED_ROWS = 10_000
"""Rows that are held and drawn from at random: what stands together in the source is spread."""
BATCH_ROWS = 100


@dataclass
class Streamed:
    """Numbered sequences of an endless stream, in order; what was used is forgotten."""

    windows: Iterator[Documents]
    make: Callable[[Documents], Samples]
    """Packs a window."""
    seq_len: int
    keep: int
    """Sequences behind the newest that may still be asked for: batches made ahead are made again after a rewind."""
    lengths: None = None
    _held: deque[tuple[int, Samples]] = field(default_factory=deque)
    """First number of each window in memory, and its sequences."""
    _next: int = 0

    def __len__(self) -> int:
        """Sequences read so far: a stream has no end."""
        self._read(0)
        return self._next

    @property
    def positions(self) -> int:
        """Of the windows in memory."""
        self._read(0)
        return sum(samples.positions for _, samples in self._held)

    @property
    def positions_used(self) -> int:
        """Of the windows in memory."""
        return sum(samples.positions_used for _, samples in self._held)

    def width(self, indices: np.ndarray) -> int:
        """Tokens of a row."""
        return self.seq_len

    def batch(self, indices: np.ndarray, width: int | None = None) -> MicroBatch:
        self._read(int(indices.max()))
        rows = [self._row(int(index)) for index in indices]
        return MicroBatch(**{name: torch.cat([row.tensors()[name] for row in rows]) for name in rows[0].tensors()})

    def _row(self, index: int) -> MicroBatch:
        for first, samples in self._held:
            if first <= index < first + len(samples):
                return samples.batch(np.array([index - first]))
        raise AssertionError(f"sequence {index} is behind the stream")

    def _read(self, index: int) -> None:
        while index >= self._next:
            samples = self.make(next(self.windows))
            while self._held and self._held[0][0] + len(self._held[0][1]) <= min(index, self._next) - self.keep:
                self._held.popleft()
            if len(samples):
                self._held.append((self._next, samples))
                self._next += len(samples)


def windows(section: Data, weights: Mapping[str, float], reader: Format, seed: int) -> Iterator[Documents]:
    """Documents of the sources, again and again, each time in another order; some thousand at a time."""
    epoch = 0
    while True:
        found, tokens, some = Encoded(), 0, False
        for rows in _rows(section, weights, reader, seed, epoch).iter(BATCH_ROWS):
            encoded = reader.encode(rows)
            _check(encoded)
            found.documents += encoded.documents
            found.counted += encoded.counted
            tokens += sum(map(len, encoded.documents))
            if tokens >= WINDOW_SEQUENCES * section.seq_len:
                yield _documents(found)
                found, tokens, some = Encoded(), 0, True
        if found.documents:
            yield _documents(found)
        elif not some:
            raise BadInput("data.path", f"{', '.join(weights)}: no document in the whole stream")
        epoch += 1


def _rows(section: Data, weights: Mapping[str, float], reader: Format, seed: int, epoch: int) -> Any:
    import datasets

    streams = []
    for source in weights:
        rows = _open(section, source)
        names = rows.column_names
        if names is not None:
            sources.need_columns(rows, reader.columns, source)
        extra = ["tools"] if section.format == "chat" and names and "tools" in names else []
        streams.append(rows.select_columns([*reader.columns, *extra]))
    total = sum(weights.values())
    shares = [weight / total for weight in weights.values()]
    whole = streams[0]
    if len(streams) > 1:
        whole = datasets.interleave_datasets(streams, shares, seed=seed + epoch, stopping_strategy="all_exhausted")
    return whole.shuffle(seed=seed + epoch, buffer_size=SHUFFLED_ROWS)


def _open(section: Data, source: str) -> Any:
    import datasets

    files = data_files(source)
    if files is None:
        name, _, part = source.partition(":")
        try:
            return datasets.load_dataset(name, part or None, split="train", streaming=True)
        except Exception as error:  # network, permissions, missing: each library its own class
            raise BadInput("data.path", f"{source} can't be streamed from the hub: {sources.deepest(error)}") from None
    kinds = {TABLE_FORMATS.get(file.suffix) for file in files}
    if len(kinds) > 1:
        raise BadInput("data.path", f"{source}: files of several kinds can't be streamed together; give each a weight")
    (kind,) = kinds
    names = [str(file) for file in files]
    if kind is None:
        return datasets.IterableDataset.from_generator(
            _texts, gen_kwargs={"paths": names, "column": section.text_column}
        )
    return datasets.load_dataset(kind, data_files=names, split="train", streaming=True)


def _texts(paths: list[str], column: str) -> Iterator[dict[str, str]]:
    for path in paths:
        yield {column: Path(path).read_text(encoding="utf-8", errors="replace")}


def _documents(found: Encoded) -> Documents:
    counted = np.concatenate(found.counted).astype(np.uint8) if found.counted else None
    return from_lists(found.documents, counted=counted)


def _check(encoded: Encoded) -> None:
    if encoded.faults:
        raise BadInput("data.path", f"a row of the stream can't be used: {encoded.faults[0][1]}")
