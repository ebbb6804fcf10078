"""Synchronous local SGD: islands train independently and average their weights every `local_steps` steps.

Each island is an ordinary engine with its own ZeRO group. Ranks with the same index in their islands hold the same
fragments of the fp32 masters. So the exchange is one all-reduce between these ranks, sharded as the island is, and no
rank ever gathers the complete weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import deepspeed.comm as dist
import torch
import torch.distributed

from toolkit.recipe.batch_sections import Outer
from toolkit.runtime.checkpoint.fragments import Stateful
from toolkit.runtime.distributed.mesh import Mesh
from toolkit.runtime.distributed.process_group import device
from toolkit.runtime.engine.protocol import EvaluationSums, StepNumbers, StepResult
from toolkit.runtime.engine.replica import ReplicaEngine
from toolkit.runtime.islands.checkpoint_state import IslandState
from toolkit.runtime.islands.flat_masters import FlatMasters
from toolkit.runtime.islands.quantize import QuantizedMean
from toolkit.runtime.metrics.step_clock import Clock, NoClock, part
from toolkit.runtime.models.loss import Loss
from toolkit.runtime.models.micro_batch import MicroBatch


class IslandEngine:
    """`Engine` of one rank of an island."""

    def __init__(self, inner: ReplicaEngine, mesh: Mesh, outer: Outer, last_step: int) -> None:
        self._inner, self._mesh, self._last_step = inner, mesh, last_step
        self._clock: Clock = NoClock()
        self._delay_steps = outer.delay_steps
        self._exchange = OuterStep(inner.state, mesh, outer)
        self._state = IslandState(inner.state, mesh, self._exchange)

    @property
    def replica(self) -> int:
        return self._mesh.island * self._mesh.plan.dp + self._mesh.data

    @property
    def loss(self) -> Loss:
        return self._inner.loss

    @property
    def state(self) -> Stateful:
        return self._state

    @property
    def module(self) -> torch.nn.Module:
        """The model inside the engine."""
        return self._inner.module

    def step(self, batch: Sequence[MicroBatch]) -> StepResult:
        result = self._inner.step(batch)
        done = int(self._state.counters()["scheduler_steps"])
        if done % self._mesh.plan.local_steps and done != self._last_step:
            if done % self._mesh.plan.local_steps == self._delay_steps:
                with part(self._clock, "grad_sync"):
                    self._exchange.catch_up()
            return replace(result, tokens=result.tokens * self._mesh.plan.islands)
        with part(self._clock, "grad_sync"):
            self._exchange.run()
            if done == self._last_step:
                self._exchange.drain()
            return self._together(result)

    def look(self, batch: Sequence[MicroBatch]) -> None:
        self._inner.look(batch)

    def evaluate(self, batch: Sequence[MicroBatch]) -> EvaluationSums:
        found = self._inner.evaluate(batch)
        sums = torch.tensor([found.loss, found.counted, found.correct], dtype=torch.float64, device=device())
        dist.all_reduce(sums, group=self._mesh.island_group)
        return EvaluationSums(float(sums[0]), int(sums[1]), int(sums[2]))

    def watch(self, clock: Clock) -> None:
        self._clock = clock
        self._inner.watch(clock)

    def _together(self, result: StepResult) -> StepResult:
        """At an exchange, loss and tokens are those of all islands; between exchanges, those of this island."""
        sums = torch.tensor([result.loss * result.tokens, result.tokens], dtype=torch.float64, device=device())
        dist.all_reduce(sums, group=self._mesh.island_group)
        tokens = int(sums[1])
        loss = (sums[0] / max(tokens, 1)).float()
        numbers = StepNumbers(loss=loss, grad_norm=result.grad_norm, micro_square=result.micro_square)
        return replace(result, numbers=numbers, tokens=tokens)


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
