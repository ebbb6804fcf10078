"""What an island that goes its own way gives to checkpoints: its engine's state, and which chunks are in it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import torch

from toolkit.run_dir.async_progress import Chunks
from toolkit.runtime.checkpoint.fragments import Fragment, Stateful
from toolkit.runtime.islands.checkpoint_state import ERROR
from toolkit.runtime.islands.flat_masters import Masters
from toolkit.runtime.islands.wire import Wire


class MemberState:
    """`Stateful` of one rank; between rounds its masters are what all islands share."""

    def __init__(self, inner: Stateful, masters: Masters, wire: Wire) -> None:
        self._inner, self._masters, self._wire = inner, masters, wire
        self.shared = masters.part()
        """This rank's part of what islands share, in host memory; replaced, never changed in place."""
        self.chunks = Chunks()
        """What is in it."""

    def take(self, shared: torch.Tensor, chunks: Chunks) -> None:
        """Go on from another island's state; the optimizer's moments stay. Collective over the island."""
        self.shared, self.chunks = shared, chunks
        self._masters.write(shared)

    def settle(self) -> None:
        """Letters that are under way belong to the next state."""

    def fragments(self) -> Iterator[Fragment]:
        yield from self._inner.fragments()
        yield from self._masters.fragments(ERROR, self._wire.error)

    def prepare(self, kinds: Mapping[str, Collection[str]], steps: int) -> None:
        self._inner.prepare(kinds, steps)

    def refresh(self) -> None:
        self._inner.refresh()
        self.shared = self._masters.part()

    def counters(self) -> dict[str, float]:
        return {**self._inner.counters(), **self.chunks.counters()}

    def set_counters(self, counters: dict[str, float]) -> None:
        self._inner.set_counters(counters)
        self.chunks = Chunks.of(counters)
