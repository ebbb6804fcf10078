"""Rows of sources that are read during training: one shuffled block at a time, from any recorded position.

A block depends only on the seed and on where it starts, not on what was read before. So a run resumes at the start of a
block: rows before it are skipped without tokenising, and files before it are not opened.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from toolkit.errors import BadInput
from toolkit.recipe.data_files import TABLE_FORMATS, data_files
from toolkit.recipe.sections import Data
from toolkit.runtime.corpus import sources
from toolkit.runtime.corpus.formats import Format

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

    def __init__(self, rows: Any, seed: Sequence[int], place: StreamPosition) -> None:
        self._dataset = rows
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
        Source(_columns(_open(section, name), section, reader, name), (seed, number), place)
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
    if kind is None:
        return datasets.IterableDataset.from_generator(
            _texts, gen_kwargs={"paths": names, "column": section.text_column}
        )
    return datasets.load_dataset(kind, data_files=names, split="train", streaming=True)


def _texts(paths: list[str], column: str) -> Iterator[dict[str, str]]:
    for path in paths:
        yield {column: Path(path).read_text(encoding="utf-8", errors="replace")}
