"""Documents as token ids in flat arrays, in memory or memory-mapped, so that no Python code runs per token."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from toolkit.errors import first_line
from toolkit.units import MIB

TOKEN = np.int32
META = "meta.json"
BLOCK_BYTES = 4 * MIB


@dataclass(frozen=True)
class Counts:
    """Statistics of the rows of a source."""

    rows: int = 0
    """Number of rows, or of files if a file is a document."""
    empty: int = 0
    """Rows without text, which are left out."""
    unanswered: int = 0
    """Conversations without an assistant turn and prompts without a response, which are left out."""
    unrolled: int = 0
    """Conversations split into one document per turn, because the template rewrites earlier turns."""

    def notes(self) -> list[str]:
        """Remarks for the user."""
        words = {
            "empty": "empty documents left out",
            "unanswered": "without an answer to learn from, left out",
            "unrolled": "conversations split into one document per turn: their template rewrites earlier turns",
        }
        return [f"{count:,} {text}" for name, text in words.items() if (count := getattr(self, name))]


@dataclass(frozen=True)
class Documents:
    """Token ids of all documents, concatenated."""

    tokens: np.ndarray
    bounds: np.ndarray
    """Start of each document in `tokens`, then the number of tokens."""
    counted: np.ndarray | None = None
    """For each token, whether the loss counts its prediction; None: all."""
    labels: np.ndarray | None = None
    """The class of each document."""
    scores: np.ndarray | None = None
    """A number for each document: a margin, whether it is good, or how relevant it is."""
    groups: np.ndarray | None = None
    """Documents of each row of the source, if rows differ."""
    targets: Documents | None = None
    """Target text of each document (seq2seq)."""
    names: tuple[str, ...] = ()
    """Names of the classes, if labels are names."""
    counts: Counts = field(default_factory=Counts)

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each document."""
        return np.diff(self.bounds)

    def document(self, number: int) -> np.ndarray:
        """Token ids of one document."""
        return self.tokens[self.bounds[number] : self.bounds[number + 1]]

    def take(self, numbers: np.ndarray) -> Documents:
        """A copy of some documents."""
        lengths = self.lengths[numbers]
        spots = spread(self.bounds[:-1][numbers], lengths)
        return Documents(
            tokens=self.tokens[spots],
            bounds=np.concatenate([[0], np.cumsum(lengths)]),
            counted=None if self.counted is None else self.counted[spots],
            labels=None if self.labels is None else self.labels[numbers],
            scores=None if self.scores is None else self.scores[numbers],
            targets=None if self.targets is None else self.targets.take(numbers),
            names=self.names,
            counts=self.counts,
        )

    def save(self, directory: Path) -> None:
        """Write into a directory and sync it to disk; meta.json holds the size and digest of every file."""
        directory.mkdir(parents=True, exist_ok=True)
        files = {}
        for name, array in self._arrays().items():
            path = directory / f"{name}.npy"
            with path.open("wb") as file:
                np.save(file, array)
                file.flush()
                os.fsync(file.fileno())
            files[path.name] = [path.stat().st_size, _digest(path)]
        if self.targets is not None:
            self.targets.save(directory / "targets")
        body = {
            "names": list(self.names),
            "counts": asdict(self.counts),
            "files": files,
            "targets": self.targets is not None,
        }
        with (directory / META).open("w", encoding="utf-8") as file:
            json.dump({**body, "digest": _body_digest(body)}, file)
            file.flush()
            os.fsync(file.fileno())

    @classmethod
    def open(cls, directory: Path) -> Documents:
        """Memory-map what `save` wrote, without checking it."""
        meta = json.loads((directory / META).read_text(encoding="utf-8"))
        arrays: dict[str, Any] = {
            name.removesuffix(".npy"): np.load(directory / name, mmap_mode="r", allow_pickle=False)
            for name in meta["files"]
        }
        targets = cls.open(directory / "targets") if meta["targets"] else None
        counts = Counts(**meta["counts"])
        return cls(**arrays, targets=targets, names=tuple(meta["names"]), counts=counts)

    @classmethod
    def problem(cls, directory: Path, vocab: int) -> str | None:
        """What is wrong with a directory that `save` wrote: sizes, digests, shapes and token ids; None if intact."""
        try:
            return _files_problem(directory) or cls.open(directory)._content_problem(vocab)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, EOFError) as error:
            return f"can't be read: {first_line(error)}"

    def _content_problem(self, vocab: int) -> str | None:
        """What is wrong with the arrays themselves; None if every document can be trained on."""
        sizes = {
            "tokens": (self.tokens, TOKEN, len(self.tokens)),
            "bounds": (self.bounds, np.int64, len(self.bounds)),
            "counted": (self.counted, np.uint8, len(self.tokens)),
            "labels": (self.labels, np.int64, len(self)),
            "scores": (self.scores, np.float64, len(self)),
            "groups": (self.groups, np.int64, len(self) if self.groups is None else len(self.groups)),
        }
        for name, (array, dtype, length) in sizes.items():
            if array is not None and (array.ndim != 1 or array.dtype != dtype or len(array) != length):
                return (
                    f"{name} has the shape {array.shape} of {array.dtype}; {length} of {np.dtype(dtype)} are required"
                )
        if len(self.bounds) < 1 or self.bounds[0] != 0 or self.bounds[-1] != len(self.tokens):
            return "the bounds of documents do not match the tokens"
        if len(self) and self.lengths.min() < 0:
            return "the bounds of documents are not in order"
        if self.groups is not None and (self.groups.min(initial=1) < 1 or self.groups.sum() != len(self)):
            return "the groups of documents do not match the documents"
        if len(self.tokens) and not 0 <= self.tokens.min() <= self.tokens.max() < vocab:
            return f"has token ids {self.tokens.min()} to {self.tokens.max()}; the tokenizer has 0 to {vocab - 1}"
        if self.targets is not None:
            return self.targets._content_problem(vocab) if len(self.targets) == len(self) else "targets are missing"
        return None

    def _arrays(self) -> dict[str, np.ndarray]:
        names = ("tokens", "bounds", "counted", "labels", "scores", "groups")
        arrays = {name: getattr(self, name) for name in names}
        return {name: array for name, array in arrays.items() if array is not None}


def from_lists(documents: list[np.ndarray], **rest: Any) -> Documents:
    """Documents from one array each."""
    bounds = np.concatenate([[0], np.cumsum([len(document) for document in documents])]).astype(np.int64)
    tokens = np.concatenate(documents).astype(TOKEN) if documents else np.zeros(0, TOKEN)
    return Documents(tokens, bounds, **rest)


def spread(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The numbers `start, start + 1, …` (`length` of them) for each start, concatenated."""
    ends = np.cumsum(lengths)
    offsets: np.ndarray = np.repeat(starts - (ends - lengths), lengths)
    found: np.ndarray = np.arange(len(offsets)) + offsets
    return found


def _files_problem(directory: Path) -> str | None:
    meta = json.loads((directory / META).read_bytes())
    body = {key: value for key, value in meta.items() if key != "digest"}
    if meta["digest"] != _body_digest(body):
        return f"{META} does not have the digest that was written"
    for name, (size, digest) in body["files"].items():
        path = directory / name
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes; {size} were written"
        if _digest(path) != digest:
            return f"{name} does not have the digest that was written"
    return _files_problem(directory / "targets") if body["targets"] else None


def _digest(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _body_digest(body: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(body, sort_keys=True).encode(), digest_size=16).hexdigest()
