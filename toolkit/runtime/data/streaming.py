"""Sequences packed from documents as they are read, for sources that fit neither memory nor disk.

Every rank reads the stream and packs the same windows, so a sequence has the same number on all ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from toolkit.errors import BadInput
from toolkit.recipe.data_files import TABLE_FORMATS, data_files
from toolkit.recipe.sections import Data
from toolkit.runtime.corpus import sources
from toolkit.runtime.corpus.formats import Encoded, Format
from toolkit.runtime.corpus.token_documents import Documents, from_lists
from toolkit.runtime.data.samples import Samples
from toolkit.runtime.models.micro_batch import MicroBatch

BLOCK_ROWS = 10_000
"""Rows that are shuffled together."""
BATCH_ROWS = 100
Row = dict[str, Any]


@dataclass(frozen=True)
class StreamPosition:
    """The next row of a source."""

    turn: int = 0
    """Number of complete passes over the source."""
    shard: int = 0
    """Number of files read completely in this pass."""
    rows: int = 0
    """Number of rows read in this file."""

    def words(self) -> str:
        """A description for the log."""
        again = f", pass {self.turn + 1}" if self.turn else ""
        return f"row {self.rows + 1:,} of file {self.shard + 1:,}{again}"


@dataclass(frozen=True)
class Start:
    """Where a block starts."""

    block: int
    places: tuple[StreamPosition, ...]
    """Position in each source."""


class Source:
    """Endless passes over one source; each pass reads its files in another order."""

    def __init__(self, rows: Any, seed: Sequence[int], place: StreamPosition, files: Sequence[Path] = ()) -> None:
        self._dataset = rows
        self._unchecked = set(files)
        self._files = files
        self._seed = seed
        self.place = place
        self._coming = self._read()

    def take(self, count: int, *, past_end: bool) -> list[Row]:
        """The next rows; without `past_end`, only up to the end of this pass."""
        found: list[Row] = []
        while len(found) < count:
            row = next(self._coming)
            if row is not None:
                found.append(row)
            elif not past_end:
                break
        return found

    def _read(self) -> Iterator[Row | None]:
        """Rows, and None at the end of each pass."""
        shards = int(self._dataset.num_shards)
        while True:
            turn = self.place.turn
            order = np.random.default_rng([*self._seed, turn]).permutation(shards)
            for shard in range(self.place.shard, shards):
                start = self.place.rows if shard == self.place.shard else 0
                self.place = StreamPosition(turn, shard, start)
                for row in self._shard(int(order[shard]), shards, start):
                    self.place = StreamPosition(turn, shard, self.place.rows + 1)
                    yield row
            self.place = StreamPosition(turn + 1)
            yield None

    def _shard(self, index: int, shards: int, start: int) -> Iterator[Row]:
        if len(self._files) == shards and self._files[index] in self._unchecked:  # a shard is a file
            sources.check_json(self._files[index])
            self._unchecked.discard(self._files[index])
        rows = self._dataset.shard(shards, index)
        for batch in (rows.skip(start) if start else rows).iter(BATCH_ROWS):
            for values in zip(*batch.values(), strict=True):
                yield dict(zip(batch, values, strict=True))


class Blocks:
    """Blocks of all sources, mixed by weight."""

    def __init__(self, found: Sequence[Source], weights: Sequence[float], seed: int, block: int = 0) -> None:
        self._sources = found
        self._shares = np.asarray(weights) / sum(weights)
        self._seed = seed
        self._block = block

    @property
    def start(self) -> Start:
        """Where the next block starts."""
        return Start(self._block, tuple(source.place for source in self._sources))

    def take(self) -> list[Row]:
        """The next block; with a single source, it ends at the latest with the pass."""
        random = np.random.default_rng([self._seed, self._block])
        if len(self._sources) == 1:
            rows = self._sources[0].take(BLOCK_ROWS, past_end=False)
        else:
            counts = random.multinomial(BLOCK_ROWS, self._shares)
            taken = [source.take(int(n), past_end=True) for source, n in zip(self._sources, counts, strict=True)]
            rows = [row for some in taken for row in some]
        self._block += 1
        return [rows[place] for place in random.permutation(len(rows))]


def open_blocks(
    section: Data, weights: Mapping[str, float], reader: Format, seed: int, start: Start | None = None
) -> Blocks:
    """The blocks of a recipe's sources, from the beginning or from the start of a block."""
    start = start or Start(0, (StreamPosition(),) * len(weights))
    found = [
        Source(_columns(_open(section, name), section, reader, name), (seed, number), place, data_files(name) or ())
        for number, (name, place) in enumerate(zip(weights, start.places, strict=True))
    ]
    return Blocks(found, list(weights.values()), seed, start.block)


def batched(rows: Sequence[Row]) -> Iterator[dict[str, list[Any]]]:
    """Batches of rows as columns; None where a source lacks a column that another has."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    for low in range(0, len(rows), BATCH_ROWS):
        some = rows[low : low + BATCH_ROWS]
        yield {name: [row.get(name) for row in some] for name in names}


def _columns(rows: Any, section: Data, reader: Format, source: str) -> Any:
    names = rows.column_names
    if names is not None:
        sources.need_columns(rows, reader.columns, source)
    extra = ["tools"] if section.format == "chat" and names and "tools" in names else []
    return rows.select_columns([*reader.columns, *extra])


def _open(section: Data, source: str) -> Any:
    import datasets

    files = data_files(source)
    if files is None:
        name, _, part = source.partition(":")
        try:
            return datasets.load_dataset(name, part or None, split="train", streaming=True)
        except Exception as error:  # network, permissions, missing files: each library has its own class
            raise BadInput("data.path", f"{source} can't be streamed from the hub: {sources.deepest(error)}") from None
    kinds = {TABLE_FORMATS.get(file.suffix) for file in files}
    if len(kinds) > 1:
        raise BadInput(
            "data.path", f"{source}: files of several formats can't be streamed together; give each a weight"
        )
    (kind,) = kinds
    names = [str(file) for file in files]
    sources.check_json(files[0])  # its first lines are read now, for the columns
    if kind is None:
        return datasets.IterableDataset.from_generator(
            _texts, gen_kwargs={"paths": names, "column": section.text_column}
        )
    return datasets.load_dataset(kind, data_files=names, split="train", streaming=True)


def _texts(paths: list[str], column: str) -> Iterator[dict[str, str]]:
    for path in paths:
        yield {column: sources.read_document(Path(path))}


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
        joined: dict[str, Any] = {name: torch.cat([row.tensors()[name] for row in rows]) for name in rows[0].tensors()}
        return MicroBatch(**joined)

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
