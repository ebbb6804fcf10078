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
        """These bounds with a function applied to their tensor."""
        return replace(self, bounds=change(self.bounds))
