"""Outer step of local SGD / DiLoCo: blocking, or overlapped with the next round.

`S` is the weights that all islands share. An island is at `S` minus its own changes that have not been exchanged yet.
The mean change of a round moves `S`. If the exchange overlaps, the mean arrives during the next round: after
`delay_steps` steps, or at its end, `S` moves by the mean, and the island continues from the new `S` with the changes it
has made since. So every change counts once, though late.
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
    """One rank's part of the outer step."""

    def __init__(self, state: Stateful, mesh: Mesh, outer: Outer) -> None:
        self._outer, self._mesh = outer, mesh
        self.masters = FlatMasters(state, mesh)
        self.shared = self.masters.part()
        """This rank's part of `S`, in host memory like all of the outer state."""
        self.momentum = torch.zeros_like(self.shared if outer.optimizer == "nesterov" else self.shared[:0])
        self.error = torch.zeros(self.shared.numel() if outer.bits < 32 else 0)
        """Error feedback: what quantization has rounded away from this rank's messages and is still to be sent."""
        self._own = self.shared[:0]
        self._in_transit: Future[torch.Tensor] | None = None
        # A gloo group of its own, over host memory: it communicates for a long time while the island trains.
        self._group = mesh.between_islands()
        self._reduce = QuantizedMean(outer.bits, self._group, self.error).mean if outer.bits < 32 else self._sum
        self._thread = ThreadPoolExecutor(1, "exchange")

    @torch.no_grad()
    def run(self) -> None:
        """Exchange after a round. Collective over ranks with the same index in their islands, then over the island."""
        self.catch_up()
        self._own = self.shared - self.masters.part()
        self._in_transit = self._thread.submit(self._reduce, self._own.clone())
        if self._outer.mode == "wait":
            self.drain()

    @torch.no_grad()
    def catch_up(self) -> None:
        """Replace the island's own change by the mean that was in transit. Collective like `run`."""
        if self._in_transit is not None:
            since = self.shared - self._own - self.masters.part()
            self._move()
            self.masters.write(self.shared - since)

    @torch.no_grad()
    def drain(self) -> None:
        """At the end of a round: wait for the exchange in transit; then all islands are at `S`. Collective."""
        if self._in_transit is not None:
            self._move()
            self.masters.write(self.shared)

    def reset(self) -> None:
        """Start again from the masters, which were just loaded on all islands."""
        if self._in_transit is not None:
            self._in_transit.result()  # every island has sent it, so it completes
            self._in_transit = None
        self.shared = self.masters.part()

    def _move(self) -> None:
        """Move `S` by the mean that was in transit."""
        assert self._in_transit is not None
        mean = self._in_transit.result()
        self._in_transit = None
        if self._outer.optimizer == "nesterov":
            self.momentum.mul_(self._outer.momentum).add_(mean)
            mean = self._outer.lr * (mean + self._outer.momentum * self.momentum)
        self.shared = self.shared - mean

    def _sum(self, own: torch.Tensor) -> torch.Tensor:
        torch.distributed.all_reduce(own, group=self._group)
        return own / self._mesh.plan.islands
