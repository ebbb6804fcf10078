"""What an island gives to checkpoints: masters are shared by all, moments are its own, the outer state is shared."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

import torch

from toolkit.run_dir.async_islands import CompletedRounds
from toolkit.runtime.checkpoint.fragments import BUFFER, WEIGHT, Fragment, Stateful
from toolkit.runtime.distributed.mesh import Mesh
from toolkit.runtime.islands.flat_masters import FlatMasters
from toolkit.runtime.islands.outer_step import OuterStep
from toolkit.runtime.islands.quantize import ErrorFeedbackCodec

MOMENTUM = "outer_momentum"
"""Kind of the outer optimizer's state in checkpoints."""
ERROR = "exchange_error"
"""Kind of what rounding has taken from an island's messages."""
FOREIGN = "@"
"""In a kind: which island it is of, for states that islands do not share."""


class IslandState:
    """`Stateful` of one rank of an island."""

    def __init__(self, inner: Stateful, mesh: Mesh, exchange: OuterStep) -> None:
        self._inner, self._mesh, self._exchange = inner, mesh, exchange
        self._own_kinds: Mapping[str, Collection[str]] | None = None

    def drain(self) -> None:
        self._exchange.drain()

    def fragments(self) -> Iterator[Fragment]:
        island = self._mesh.island
        for fragment in self._inner.fragments():
            if fragment.kind not in (WEIGHT, BUFFER):
                yield replace(fragment, kind=self._kind(fragment))
            else:
                yield replace(fragment, copy=fragment.copies) if island else fragment  # the first island saves it
        for fragment in self._exchange.masters.fragments(MOMENTUM, self._exchange.momentum):
            yield replace(fragment, copy=fragment.copies) if island else fragment
        for fragment in self._exchange.masters.fragments(ERROR, self._exchange.error):
            yield replace(fragment, kind=self._kind(fragment))

    def _kind(self, fragment: Fragment) -> str:
        """Under its own name on the first island, and where a checkpoint of other islands is read."""
        own = f"{fragment.kind}{FOREIGN}{self._mesh.island}"
        if not self._mesh.island or (self._own_kinds and own not in self._own_kinds[fragment.name]):
            return fragment.kind
        return own

    def prepare(self, kinds: Mapping[str, Collection[str]], steps: int) -> None:
        self._own_kinds = kinds
        self._inner.prepare(kinds, steps)

    def refresh(self) -> None:
        self._inner.refresh()
        self._exchange.reset()
        self._own_kinds = None

    def counters(self) -> dict[str, float]:
        return self._inner.counters()

    def set_counters(self, counters: dict[str, float]) -> None:
        self._inner.set_counters(counters)


class AsyncIslandState:
    """`Stateful` of one rank; between rounds its masters are what all islands share."""

    def __init__(self, inner: Stateful, masters: FlatMasters, wire: ErrorFeedbackCodec) -> None:
        self._inner, self._masters, self._wire = inner, masters, wire
        self.shared = masters.part()
        """This rank's part of what islands share, in host memory; replaced, never changed in place."""
        self.chunks = CompletedRounds()
        """What is in it."""

    def take(self, shared: torch.Tensor, chunks: CompletedRounds) -> None:
        """Go on from another island's state; the optimizer's moments stay. Collective over the island."""
        self.shared, self.chunks = shared, chunks
        self._masters.write(shared)

    def drain(self) -> None:
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
        self.chunks = CompletedRounds.of(counters)
