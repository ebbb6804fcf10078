"""Documents as token ids in flat arrays, in memory or memory-mapped, so that no Python code runs per token."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

TOKEN = np.int32


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
            targets=None if self.targets is None else self.targets.take(numbers),
            names=self.names,
            counts=self.counts,
        )

    def save(self, directory: Path) -> None:
        """Write into a directory."""
        directory.mkdir(parents=True, exist_ok=True)
        for name, array in self._arrays().items():
            np.save(directory / f"{name}.npy", array)
        if self.targets is not None:
            self.targets.save(directory / "targets")
        meta = {"names": list(self.names), "counts": asdict(self.counts)}
        (directory / "meta.json").write_text(json.dumps(meta), encoding="utf-8")

    @classmethod
    def open(cls, directory: Path) -> Documents:
        """Memory-map what `save` wrote."""
        meta = json.loads((directory / "meta.json").read_text(encoding="utf-8"))
        arrays: dict[str, Any] = {
            path.stem: np.load(path, mmap_mode="r", allow_pickle=False) for path in directory.glob("*.npy")
        }
        inner = directory / "targets"
        targets = cls.open(inner) if inner.is_dir() else None
        counts = Counts(**meta["counts"])
        return cls(**arrays, targets=targets, names=tuple(meta["names"]), counts=counts)

    def _arrays(self) -> dict[str, np.ndarray]:
        arrays = {"tokens": self.tokens, "bounds": self.bounds, "counted": self.counted, "labels": self.labels}
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
