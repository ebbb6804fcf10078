"""Mixtures: several sources of samples as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from toolkit.runtime.data.samples_protocol import MicroBatch, Samples


@dataclass(frozen=True)
class Mixed:
    """Several sources, one behind the other."""

    parts: Sequence[Samples]
    weights: tuple[float, ...]

    @property
    def lengths(self) -> np.ndarray | None:
        """Of all, if they differ."""
        found = [part.lengths for part in self.parts]
        return np.concatenate([lengths for lengths in found if lengths is not None]) if found[0] is not None else None

    @property
    def positions(self) -> int:
        """Of all."""
        return sum(part.positions for part in self.parts)

    @property
    def positions_used(self) -> int:
        """Of all."""
        return sum(part.positions_used for part in self.parts)

    def __len__(self) -> int:
        return sum(len(part) for part in self.parts)

    def width(self, indices: np.ndarray) -> int:
        """The widest of the parts."""
        return max(part.width(own) for part, own, _ in self._split(indices))

    def batch(self, indices: np.ndarray, width: int | None = None) -> MicroBatch:
        width = width or self.width(indices)
        found = [(part.batch(own, width).tensors(), places) for part, own, places in self._split(indices)]
        back = torch.from_numpy(np.argsort(np.concatenate([places for _, places in found])))
        joined: dict[str, Any] = {
            name: torch.cat([tensors[name] for tensors, _ in found])[back] for name in found[0][0]
        }
        return MicroBatch(**{"input_ids": None} | joined)

    def _split(self, indices: np.ndarray) -> list[tuple[Samples, np.ndarray, np.ndarray]]:
        """Parts that these samples are of, their ids in the part, and their places in the batch."""
        first, found = 0, []
        for part in self.parts:
            places = np.flatnonzero((indices >= first) & (indices < first + len(part)))
            if len(places):
                found.append((part, indices[places] - first, places))
            first += len(part)
        return found
