"""The outer step of synchronous islands: each fragment of the weights moves by the mean of what all have learned."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from toolkit.plans.exchange import Exchange, Rhythm
from toolkit.recipe.batch_sections import Outer
from toolkit.runtime.checkpoint.fragments import Stateful
from toolkit.runtime.distributed.mesh import Mesh
from toolkit.runtime.islands.flat_masters import FlatMasters
from toolkit.runtime.islands.quantize import BLOCK, Encoding, QuantizedMean


@dataclass
class LinkUse:
    """What exchanges have sent and cost so far."""

    sent_bytes: int = 0
    """Sent by this rank."""
    busy_seconds: float = 0.0
    """Duration of the exchanges."""
    waited_seconds: float = 0.0
    """Time in which training stood still for them."""
    exchanges: int = 0

    def add(self, *, sent_bytes: int, busy_seconds: float, waited_seconds: float) -> None:
        """Count one exchange."""
        self.sent_bytes += sent_bytes
        self.busy_seconds += busy_seconds
        self.waited_seconds += waited_seconds
        self.exchanges += 1


@dataclass
class _Transit:
    step: int
    own: torch.Tensor
    """The island's own change."""
    mean: Future[tuple[torch.Tensor, float]]
    """The mean, and the seconds that the exchange took."""
    encoding: Encoding


class OuterStep:
    """One rank's part of the outer step. All islands share `S`, of which each rank holds its part."""

    def __init__(self, state: Stateful, mesh: Mesh, outer: Outer, exchange: Exchange) -> None:
        self._outer, self._exchange = outer, exchange
        self.masters = FlatMasters(state, mesh)
        self.shared = self.masters.part()
        """This rank's part of `S`, in host memory like all of the outer state."""
        self.momentum = torch.zeros_like(self.shared if outer.optimizer == "nesterov" else self.shared[:0])
        self.error = torch.zeros(self.shared.numel() if exchange.bits != 32 else 0)
        """Error feedback: what quantization has rounded away from this rank's messages and is still to be sent."""
        self.rhythm = exchange.first()
        self.use = LinkUse()
        self._in_transit: dict[int, _Transit] = {}
        """Fragment → its exchange."""
        self._unsent: set[int] = set()
        """Fragments that were trained since their last exchange began."""
        # A gloo group of its own, over host memory: it communicates for a long time while the island trains.
        self._mean = QuantizedMean(mesh.between_islands())
        self._thread = ThreadPoolExecutor(1, "exchange")

    @property
    def fp32_bytes(self) -> int:
        """What this rank would send for all weights in fp32."""
        return self._mean.sent_bytes(self.shared.numel(), Encoding())

    def follow(self, rhythm: Rhythm) -> None:
        """Exchange in another rhythm from now on. Collective like `run`."""
        if rhythm != self.rhythm:
            self.catch_up()
            self.rhythm = rhythm
            self._unsent = set(range(rhythm.fragments)) if self._unsent else set()

    @torch.no_grad()
    def after_step(self, step: int) -> bool:
        """Apply means that are due and begin exchanges that are; whether any began. Collective like `run`."""
        self._unsent = set(range(self.rhythm.fragments))
        late = [n for n, transit in self._in_transit.items() if step - transit.step >= self.rhythm.delay_steps]
        due = self.rhythm.due(step)
        for number in sorted({*late, *(self._in_transit.keys() & due)}):
            self._settle(number, carries=True)
        for number in due:
            self._begin(number, step)
        return bool(due)

    @torch.no_grad()
    def run(self) -> None:
        """Exchange everything. Collective over ranks with the same index in their islands, then over the island."""
        self.catch_up()
        for number in range(self.rhythm.fragments):
            self._begin(number, 0)

    @torch.no_grad()
    def catch_up(self) -> None:
        """Replace the island's own changes by the means that were in transit. Collective like `run`."""
        for number in sorted(self._in_transit):
            self._settle(number, carries=True)

    @torch.no_grad()
    def drain(self) -> None:
        """Exchange what was not, and wait for it; then all islands are at `S`. Collective like `run`."""
        for number in sorted(self._in_transit):
            self._settle(number, carries=number in self._unsent)
        for number in sorted(self._unsent):
            self._begin(number, 0)
            if number in self._in_transit:  # islands that wait have settled it
                self._settle(number, carries=False)

    def reset(self) -> None:
        """Start again from the masters, which were just loaded on all islands."""
        for transit in self._in_transit.values():
            transit.mean.result()  # every island has sent it, so it completes
        self._in_transit.clear()
        self._unsent.clear()
        self.shared = self.masters.part()

    def _begin(self, number: int, step: int) -> None:
        where = self._where(number)
        own = self.shared[where] - self.masters.part(where)
        encoding = Encoding(self.rhythm.bits, self._exchange.density)
        error = self.error[where] if self.error.numel() else self.error
        future = self._thread.submit(self._timed_mean, own.clone(), error, encoding)
        self._in_transit[number] = _Transit(step, own, future, encoding)
        self._unsent.discard(number)
        if not self.rhythm.delay_steps:
            self._settle(number, carries=False)

    def _settle(self, number: int, *, carries: bool) -> None:
        """Move a fragment of `S` by its mean. `carries`: the island keeps what it has learned since it sent its own."""
        transit, where = self._in_transit.pop(number), self._where(number)
        before = self.shared[where] - transit.own
        started = time.perf_counter()
        mean, seconds = transit.mean.result()
        self.use.add(
            sent_bytes=self._mean.sent_bytes(transit.own.numel(), transit.encoding),
            busy_seconds=seconds,
            waited_seconds=time.perf_counter() - started,
        )
        if self._outer.optimizer == "nesterov":
            momentum = self.momentum[where].mul_(self._outer.momentum).add_(mean)
            mean = self._outer.lr * (mean + self._outer.momentum * momentum)
        moved = self.shared[where] - mean
        found = moved - (before - self.masters.part(where)) if carries else moved
        self.shared[where] = moved
        self.masters.write(found, where)

    def _where(self, number: int) -> slice:
        """The range of a fragment: whole blocks, as even as possible, in the order of the layers."""
        blocks = -(-self.shared.numel() // BLOCK)
        low, high = (blocks * n // self.rhythm.fragments * BLOCK for n in (number, number + 1))
        return slice(min(low, self.shared.numel()), min(high, self.shared.numel()))

    def _timed_mean(self, own: torch.Tensor, error: torch.Tensor, encoding: Encoding) -> tuple[torch.Tensor, float]:
        started = time.perf_counter()
        return self._mean.mean(own, error, encoding), time.perf_counter() - started
