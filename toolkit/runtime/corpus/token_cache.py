"""Token cache: directories keyed by content, tokenizer and settings, which all ranks and runs share."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import numpy as np

from toolkit.errors import BadInput, Problem
from toolkit.recipe.sections import Data
from toolkit.runtime.corpus import sources
from toolkit.runtime.corpus.formats import Format
from toolkit.runtime.corpus.grouped_formats import key_columns, make_format, optional_columns
from toolkit.runtime.corpus.token_documents import TOKEN, Counts, Documents
from toolkit.runtime.corpus.tokenizer import Tokenizer
from toolkit.runtime.distributed.rank_zero_first import OncePerHost

VERSION = 2
"""Increase it when equal rows and settings would give other documents."""
ROWS_A_PROCESS = 2000
"""Minimum number of rows per process."""
BATCH_ROWS = 500


@dataclass(frozen=True)
class TokenCache:
    """Tokenised documents of sources, made if they are missing."""

    root: Path
    workers: int
    terminal: IO[str] | None = None
    """Where the progress bar is shown."""

    def key(self, section: Data, source: str, tokenizer: Tokenizer) -> str:
        """Name of the directory with the documents of a source. It exists completely or not at all."""
        columns = key_columns(section)
        settings = [VERSION, section.format, columns, tokenizer.identity, sources.content_key(section, source)]
        return hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:32]

    def make(self, path: Path, section: Data, source: str, tokenizer: Tokenizer) -> None:
        """Tokenise a source; a crash leaves nothing that looks like a finished directory."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            work = Path(tempfile.mkdtemp(prefix=f".writing-{path.name}-", dir=self.root))
        except OSError as error:
            raise BadInput("data.cache", f"{self.root} can't be written: {error.strerror}") from None
        try:
            documents = self._tokenise(section, source, tokenizer, work / "rows")
            documents.save(work / "done")
            with contextlib.suppress(OSError):  # a damaged one makes room; whoever has mapped it keeps its pages
                os.rename(path, work / "damaged")
            with contextlib.suppress(OSError):  # another process was first, with the same result
                os.rename(work / "done", path)
            _sync(self.root)
        finally:
            shutil.rmtree(work, ignore_errors=True)

    def intact(self, path: Path, vocab: int) -> bool:
        """Whether the directory has every byte that was written; reports one that does not, before it is made anew."""
        if not path.is_dir():
            return False
        problem = Documents.problem(path, vocab)
        if problem is not None:
            for stream in dict.fromkeys(stream for stream in (self.terminal, sys.stderr) if stream is not None):
                print(f"token cache {path}: {problem}; it is damaged, and is made anew", file=stream, flush=True)
        return problem is None

    def _tokenise(self, section: Data, source: str, tokenizer: Tokenizer, work: Path) -> Documents:
        with self._progress():
            rows = sources.read_rows(section, source, work)
            names = class_names(rows, section) if section.format == "classification" else ()
            reader = make_format(section, tokenizer, names, rows.column_names)
            sources.need_columns(rows, reader.columns, source)
            given = [*reader.columns, *optional_columns(section)]
            chosen = rows.select_columns([name for name in dict.fromkeys(given) if name in rows.column_names])
            encoded = chosen.map(
                _Encode(reader),
                batched=True,
                batch_size=BATCH_ROWS,
                with_indices=True,
                remove_columns=chosen.column_names,
                num_proc=self._processes(len(chosen)),
                load_from_cache_file=False,
                cache_file_name=str(work / "encoded.arrow"),
                desc=f"tokenising {source}",
            )
        return replace(_collected(encoded, source), names=names)

    def _processes(self, rows: int) -> int | None:
        count = min(self.workers, rows // ROWS_A_PROCESS)
        return count if count > 1 else None

    @contextlib.contextmanager
    def _progress(self) -> Iterator[None]:
        """Show the progress bars of `datasets` on the terminal, if there is one."""
        import datasets

        shown = self.terminal is not None and self.terminal.isatty()
        (datasets.enable_progress_bars if shown else datasets.disable_progress_bars)()
        with contextlib.redirect_stderr(self.terminal) if shown else contextlib.nullcontext():
            yield


def _sync(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def class_names(rows: Any, section: Data) -> tuple[str, ...]:
    """Sorted names of the classes if labels are strings; empty if labels are numbers."""
    sources.need_columns(rows, (section.label_column,), "the data")
    feature = rows.features[section.label_column]
    if getattr(feature, "names", None):
        return ()  # `ClassLabel`: its labels are numbers already
    found = rows.unique(section.label_column)
    return tuple(sorted(found)) if all(isinstance(label, str) for label in found) else ()


@dataclass(frozen=True)
class _Encode:
    """Encodes a batch of rows as one row of flat arrays, which Arrow stores faster than nested lists."""

    reader: Format

    def __call__(self, rows: Any, numbers: list[int]) -> dict[str, list[Any]]:
        found = self.reader.encode(rows)
        problems = [[numbers[place], what] for place, what in found.problems]
        return {
            "tokens": [_flat(found.documents, TOKEN)],
            "lengths": [_lengths(found.documents)],
            "counted": [_flat(found.counted, np.uint8)],
            "targets": [_flat(found.targets, TOKEN)],
            "target_lengths": [_lengths(found.targets)],
            "labels": [np.asarray(found.labels, np.int64)],
            "scores": [np.asarray(found.scores, np.float64)],
            "groups": [np.asarray(found.groups, np.int64)],
            "counts": [json.dumps([len(numbers), found.empty, found.unanswered, found.unrolled, problems[:5]])],
        }


def _flat(arrays: list[np.ndarray], dtype: Any) -> np.ndarray:
    return np.concatenate(arrays).astype(dtype) if arrays else np.zeros(0, dtype)


def _lengths(arrays: list[np.ndarray]) -> np.ndarray:
    return np.fromiter((len(array) for array in arrays), np.int64, len(arrays))


def _collected(encoded: Any, source: str) -> Documents:
    """Concatenate all batches."""
    columns: dict[str, list[np.ndarray]] = {}
    counts, problems = Counts(), []
    for table in encoded.with_format("arrow").iter(64):
        for name in table.column_names:
            if name != "counts":
                columns.setdefault(name, []).extend(
                    chunk.flatten().to_numpy(zero_copy_only=False) for chunk in table[name].chunks
                )
        for batch in table["counts"].to_pylist():
            rows, empty, unanswered, unrolled, found = json.loads(batch)
            counts = Counts(
                counts.rows + rows, counts.empty + empty, counts.unanswered + unanswered, counts.unrolled + unrolled
            )
            problems += found
    if problems:
        raise BadInput(f"data.path: {source}", [Problem(f"row {number + 1}", what) for number, what in problems[:5]])
    joined = {name: np.concatenate(parts) for name, parts in columns.items()}
    targets = Documents(joined["targets"], _bounds(joined["target_lengths"])) if len(joined["targets"]) else None
    return Documents(
        tokens=joined["tokens"],
        bounds=_bounds(joined["lengths"]),
        counted=joined["counted"] if len(joined["counted"]) else None,
        labels=joined["labels"] if len(joined["labels"]) else None,
        scores=joined["scores"] if len(joined["scores"]) else None,
        groups=joined["groups"] if len(joined["groups"]) else None,
        targets=targets,
        counts=counts,
    )


def _bounds(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def find_or_make(
    cache: TokenCache, section: Data, source: str, tokenizer: Tokenizer, once_per_host: OncePerHost
) -> Documents:
    """The documents of a source. If they are missing, one rank per host makes them while the others wait."""
    path = cache.root / once_per_host.from_rank_zero(lambda: cache.key(section, source, tokenizer))
    once_per_host.once(
        lambda: cache.intact(path, tokenizer.vocab), lambda: cache.make(path, section, source, tokenizer)
    )
    return Documents.open(path)
