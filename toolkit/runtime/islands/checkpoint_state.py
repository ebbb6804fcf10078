"""Checkpoint state of islands: all share masters and outer state; each has its own optimizer moments."""

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
"""Kind of the error feedback: what quantization has rounded away and is still to be sent."""
FOREIGN = "@"
"""Separates a kind from the island's number, for states that islands do not share."""


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
                yield replace(fragment, copy=fragment.copies) if island else fragment  # island 0 saves it
        for fragment in self._exchange.masters.fragments(MOMENTUM, self._exchange.momentum):
            yield replace(fragment, copy=fragment.copies) if island else fragment
        for fragment in self._exchange.masters.fragments(ERROR, self._exchange.error):
            yield replace(fragment, kind=self._kind(fragment))

    def _kind(self, fragment: Fragment) -> str:
        """The kind with the island's number; without it on island 0, or if the checkpoint has no such kind."""
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
    """`Stateful` of one rank of an asynchronous island; between rounds its masters equal the shared weights."""

    def __init__(
        self, inner: Stateful, masters: FlatMasters, codec: ErrorFeedbackCodec, samples: Mapping[str, int]
    ) -> None:
        """`samples`: how many a round and the run have, as counters."""
        self._inner, self._masters, self._codec, self._samples = inner, masters, codec, samples
        self.shared = masters.part()
        """This rank's part of the shared weights, in host memory; changed in place at the end of a round."""
        self.layout = masters.layout()
        """Where its elements are in the parameters."""
        self.completed = CompletedRounds()
        """Rounds whose changes are part of `shared`."""

    def adopt(self, shared: torch.Tensor, completed: CompletedRounds) -> None:
        """Continue from another island's weights; the optimizer's moments stay. Collective over the island."""
        self.shared, self.completed = shared, completed
        self._masters.write(shared)

    def drain(self) -> None:
        """Nothing to do: updates in transit belong to the next state."""

    def fragments(self) -> Iterator[Fragment]:
        yield from self._inner.fragments()
        yield from self._masters.fragments(ERROR, self._codec.error)

    def prepare(self, kinds: Mapping[str, Collection[str]], steps: int) -> None:
        self._inner.prepare(kinds, steps)

    def refresh(self) -> None:
        self._inner.refresh()
        self.shared = self._masters.part()

    def counters(self) -> dict[str, float]:
        return {**self._inner.counters(), **self.completed.counters(), **self._samples}

    def set_counters(self, counters: dict[str, float]) -> None:
        self._inner.set_counters(counters)
        self.completed = CompletedRounds.of(counters)
