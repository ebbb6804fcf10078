"""Document bounds of a micro-batch: which tokens may attend to each other, as lengths instead of masks.

Packed documents, padded rows and plain rows are the same thing here: consecutive spans of the flattened rows. Padding
is a span of its own. The bounds are made on the host and travel with the micro-batch, so that no layer has to read
them from the device.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True, eq=False)
class Documents:
    """Bounds of the documents in the flattened rows of a micro-batch."""

    lengths: tuple[int, ...]
    """Tokens of each document, row after row; a document never spans two rows."""
    bounds: torch.Tensor
    """First token of each document, then the number of tokens (int32), for kernels of variable length."""
    rows: int
    padded: bool
    """Whether an attention mask was given."""
    branches: Branches | None = None
    """Set if the spans above come in threes: the beginning of two documents, and how each of them continues it."""

    @classmethod
    def of_pairs(cls, lengths: Iterable[int], rows: int) -> Documents:
        """Pairs of documents that share their beginning: lengths of (beginning, first rest, second rest), in turn."""
        spans = np.fromiter(lengths, np.int64)
        found = cls.of_lengths(spans.tolist(), rows)
        return replace(found, branches=Branches.of_spans(spans.reshape(-1, 3), rows))

    @classmethod
    def of_lengths(cls, lengths: Iterable[int], rows: int, padded: bool = False) -> Documents:
        """Documents of known lengths."""
        own = tuple(lengths)
        bounds = torch.tensor([0, *itertools.accumulate(own)], dtype=torch.int32)
        return cls(own, bounds, rows, padded)

    @classmethod
    def of_rows(
        cls, shape: tuple[int, int], positions: torch.Tensor | None = None, mask: torch.Tensor | None = None
    ) -> Documents:
        """Documents of rows: one starts where positions do not continue, and where padding starts or ends."""
        starts = np.zeros(shape, dtype=bool)
        starts[:, 0] = True
        if positions is not None:
            places = np.broadcast_to(positions.cpu().numpy(), shape)
            starts[:, 1:] |= np.diff(places, axis=1) != 1
        if mask is not None:
            visible = mask.cpu().numpy().astype(bool)
            starts[:, 1:] |= visible[:, 1:] != visible[:, :-1]
        firsts = np.flatnonzero(starts)
        lengths = np.diff(firsts, append=shape[0] * shape[1])
        return cls.of_lengths(lengths.tolist(), shape[0], mask is not None)

    @property
    def tokens(self) -> int:
        """Tokens of all rows."""
        return sum(self.lengths)

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest document."""
        return max(self.lengths)

    @property
    def row_length(self) -> int:
        """Tokens of a row."""
        return self.tokens // self.rows

    @cached_property
    def runs(self) -> list[tuple[int, int]]:
        """Neighbouring documents of the same length: (how many, length). A kernel takes each run as one batch."""
        return [(len(list(same)), length) for length, same in itertools.groupby(self.lengths)]

    def numbers(self, device: torch.device) -> torch.Tensor:
        """The number of each token's document, as rows; made on the device without reading from it."""
        places = torch.arange(self.tokens, device=device, dtype=torch.int32)
        inner = self.bounds[1:].to(device, non_blocking=True)
        return torch.bucketize(places, inner, right=True).view(self.rows, self.row_length)

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Documents:
        """These bounds with a function applied to their tensors."""
        branches = self.branches and self.branches.map(change)
        return replace(self, bounds=change(self.bounds), branches=branches)


@dataclass(frozen=True, eq=False)
class Branches:
    """Pairs of documents that share their beginning, as attention sees them: both are complete.

    Everything else in a layer treats tokens one by one, so it computes a shared beginning once.
    """

    documents: Documents
    """The complete documents."""
    source: torch.Tensor
    """Token of the rows that each token of the complete documents is."""
    places: torch.Tensor
    """Place of each token of the rows in the complete documents; the first one, if it is shared."""
    shared: torch.Tensor
    """Tokens of the rows that are shared."""
    again: torch.Tensor
    """Their second places."""

    @classmethod
    def of_spans(cls, spans: np.ndarray, rows: int) -> Branches:
        """Pairs of spans (beginning, first rest, second rest), which follow each other in the rows."""
        begin, one, two = spans.T
        starts = np.cumsum(spans.sum(1)) - spans.sum(1)
        complete = np.stack([begin + one, begin + two], 1)
        parts = np.stack([starts, starts + begin, starts, starts + begin + one], 1)
        source = _ranges(parts.reshape(-1), np.stack([begin, one, begin, two], 1).reshape(-1))
        ends = np.cumsum(complete.reshape(-1)).reshape(-1, 2)
        firsts = ends - complete
        places = np.stack([firsts[:, 0], firsts[:, 0] + begin, firsts[:, 1] + begin], 1)
        indices = (
            source,
            _ranges(places.reshape(-1), spans.reshape(-1)),
            _ranges(starts, begin),
            _ranges(firsts[:, 1], begin),
        )
        documents = Documents.of_lengths(complete.reshape(-1).tolist(), rows)
        return cls(documents, *(torch.from_numpy(each) for each in indices))

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Branches:
        """These branches with a function applied to every tensor."""
        tensors = (change(each) for each in (self.source, self.places, self.shared, self.again))
        return Branches(self.documents.map(change), *tensors)

    def complete(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tokens of the rows → tokens of the complete documents."""
        return _Completed.apply(tokens, self)  # type: ignore[no-any-return, no-untyped-call]

    def once(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tokens of the complete documents → tokens of the rows."""
        return _Once.apply(tokens, self)  # type: ignore[no-any-return, no-untyped-call]


def _ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Indices of ranges, one range after the other."""
    return np.concatenate([np.arange(at, at + length) for at, length in zip(starts, lengths, strict=True)])


class _Completed(torch.autograd.Function):
    """A token has at most two places, so its gradient is a sum of two: faster than autograd's."""

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, branches: Branches) -> torch.Tensor:
        ctx.branches = branches
        return tokens.index_select(0, branches.source)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        own: Branches = ctx.branches
        found = gradient.index_select(0, own.places)
        both = found.index_select(0, own.shared) + gradient.index_select(0, own.again)
        return found.index_copy_(0, own.shared, both), None


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, branches: Branches) -> torch.Tensor:
        ctx.branches, ctx.length = branches, len(tokens)
        return tokens.index_select(0, branches.places)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        found = gradient.new_zeros(ctx.length, *gradient.shape[1:])
        return found.index_copy_(0, ctx.branches.places, gradient), None
