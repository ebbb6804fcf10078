"""How islands come together: at once, or behind the steps of the next round.

`S` is what all islands share; an island is at `S` less its own changes that the others have not got yet. A round's
mean change moves `S`. Where nobody waits, that mean arrives while the next round is trained: some steps into it, or at
its end, `S` moves by the mean, and the island goes on from the new `S` with what it has learned since. So a change of
every island counts once, late, and only changes that are not exchanged yet are an island's own.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import torch
import torch.distributed

from toolkit.recipe.batch_sections import Outer
from toolkit.runtime.checkpoint.fragments import Stateful
from toolkit.runtime.distributed.mesh import Mesh
from toolkit.runtime.islands.flat_masters import FlatMasters
from toolkit.runtime.islands.quantize import QuantizedMean


class OuterStep:
    """Brings the islands' masters together; one a rank."""

    def __init__(self, state: Stateful, mesh: Mesh, outer: Outer) -> None:
        self._outer, self._mesh = outer, mesh
        self.masters = FlatMasters(state, mesh)
        self.shared = self.masters.part()
        """`S`: this rank's part of it, like all of the outer state in host memory."""
        self.momentum = torch.zeros_like(self.shared if outer.optimizer == "nesterov" else self.shared[:0])
        self.error = torch.zeros(self.shared.numel() if outer.bits < 32 else 0)
        """What rounding has taken from this rank's messages and is to be sent yet."""
        self._own = self.shared[:0]
        self._coming: Future[torch.Tensor] | None = None
        # A group of its own, over host memory: it talks while the island trains, and may take long.
        self._group = mesh.between_islands()
        self._reduce = QuantizedMean(outer.bits, self._group, self.error).mean if outer.bits < 32 else self._sum
        self._thread = ThreadPoolExecutor(1, "exchange")

    @torch.no_grad()
    def run(self) -> None:
        """A round is over. Collective over the ranks with the same place in their islands, then over the island."""
        self.catch_up()
        self._own = self.shared - self.masters.part()
        self._coming = self._thread.submit(self._reduce, self._own.clone())
        if self._outer.mode == "wait":
            self.drain()

    @torch.no_grad()
    def catch_up(self) -> None:
        """From here the mean that was under way counts instead of the own change. Collective as `run`."""
        if self._coming is not None:
            since = self.shared - self._own - self.masters.part()
            self._move()
            self.masters.write(self.shared - since)

    @torch.no_grad()
    def drain(self) -> None:
        """Wait for what is under way: then all islands are at `S`. Only at a round's end. Collective as `run`."""
        if self._coming is not None:
            self._move()
            self.masters.write(self.shared)

    def reset(self) -> None:
        """The masters were loaded: all islands are there."""
        if self._coming is not None:
            self._coming.result()  # the others have sent it, too
            self._coming = None
        self.shared = self.masters.part()

    def _move(self) -> None:
        """Move `S` by the mean that was under way."""
        assert self._coming is not None
        mean = self._coming.result()
        self._coming = None
        if self._outer.optimizer == "nesterov":
            self.momentum.mul_(self._outer.momentum).add_(mean)
            mean = self._outer.lr * (mean + self._outer.momentum * self.momentum)
        self.shared = self.shared - mean

    def _sum(self, own: torch.Tensor) -> torch.Tensor:
        torch.distributed.all_reduce(own, group=self._group)
        return own / self._mesh.plan.islands
