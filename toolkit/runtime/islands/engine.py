"""Synchronous local SGD: islands train independently and average their weights every `local_steps` steps.

Each island is an ordinary engine with its own ZeRO group. Ranks with the same index in their islands hold the same
fragments of the fp32 masters. So the exchange is one reduction between these ranks, sharded as the island is, and no
rank ever gathers the complete weights.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import deepspeed.comm as dist
import torch

from toolkit.plans.exchange import Exchange, Rhythm
from toolkit.plans.plan import Plan
from toolkit.recipe.batch_sections import Outer
from toolkit.runtime.checkpoint.fragments import Stateful
from toolkit.runtime.distributed.mesh import Mesh
from toolkit.runtime.distributed.process_group import HostSum, all_max, device, host_group
from toolkit.runtime.engine.protocol import EvaluationSums, StepResult
from toolkit.runtime.engine.replica import ReplicaEngine
from toolkit.runtime.islands.checkpoint_state import IslandState
from toolkit.runtime.islands.outer_step import LinkUse, OuterStep
from toolkit.runtime.metrics.step_clock import Clock, NoClock, part
from toolkit.runtime.models.loss import Loss
from toolkit.runtime.models.micro_batch import MicroBatch

MEETING_STEPS = 16
"""Least steps between two meetings of islands that do not wait for exchanges: a meeting is a barrier over the link."""
BACK_OFF = 0.8
"""Factor of the measured speed of a link that was waited for."""
WAITED_SHARE = 0.02
"""Share of the time that may be waited before the link counts as too slow."""


def meeting_steps(plan: Plan, outer: Outer | None) -> int:
    """Steps between two questions to all ranks of a plan, such as whether to stop: islands agree where they meet."""
    hidden = plan.islands > 1 and outer is not None and outer.mode == "overlap"
    return -(-MEETING_STEPS // plan.local_steps) * plan.local_steps if hidden else plan.local_steps


class IslandEngine:
    """`Engine` of one rank of an island."""

    def __init__(self, inner: ReplicaEngine, mesh: Mesh, outer: Outer, last_step: int, exchange: Exchange) -> None:
        self._inner, self._mesh, self._last_step = inner, mesh, last_step
        self._clock: Clock = NoClock()
        self._settings = exchange
        self._exchange = OuterStep(inner.state, mesh, outer, exchange)
        self._state = IslandState(inner.state, mesh, self._exchange)
        self._pace = Pace(exchange)
        # Gloo groups of their own, over host memory: nothing is read from the device where islands meet.
        self._counts = mesh.between_islands()
        self._everyone = host_group() if exchange.adapts else None

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
        with part(self._clock, "grad_sync"):
            began = self._exchange.after_step(done)
            if done == self._last_step:
                self._exchange.drain()
            elif not began or not self._meets(done):
                return replace(result, tokens=result.tokens * self._mesh.plan.islands, exchange=self._figures())
            return replace(self._together(result, done), exchange=self._figures())

    def _meets(self, done: int) -> bool:
        """Whether islands meet after a step with an exchange: always if they wait for it, else not too often."""
        rhythm = self._exchange.rhythm
        before = done - rhythm.local_steps // rhythm.fragments
        return not rhythm.delay_steps or done // MEETING_STEPS > before // MEETING_STEPS

    def _figures(self) -> dict[str, float]:
        """How islands exchange now, and what this rank's exchanges have cost so far."""
        rhythm, use = self._exchange.rhythm, self._exchange.use
        return {
            "local_steps": rhythm.local_steps,
            "fragments": rhythm.fragments,
            "bits": rhythm.bits,
            "exchanges": use.exchanges,
            "sent_bytes": use.sent_bytes,
            "busy_seconds": use.busy_seconds,
            "waited_seconds": use.waited_seconds,
        }

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

    def _together(self, result: StepResult, done: int) -> StepResult:
        """Where islands meet, loss and tokens are those of all; between meetings, those of this island."""
        counted = HostSum(result.tokens, self._counts, self._mesh.plan.islands)
        weighed = result.numbers.loss.double() * result.tokens
        dist.all_reduce(weighed, group=self._mesh.island_group)
        if self._settings.adapts:
            # The slowest step and the fastest link count: who arrives last at an exchange has measured the link alone.
            seen = torch.tensor(self._pace.look(done, self._exchange.use), dtype=torch.float64)
            if rhythm := self._pace.rhythm(self._exchange, all_max(seen, self._everyone).tolist()):
                self._exchange.follow(rhythm)
        tokens = counted.total
        numbers = result.numbers.with_loss((weighed / max(tokens, 1)).float())
        return replace(result, numbers=numbers, tokens=tokens)


class Pace:
    """Measures steps and link between two meetings, and chooses the rhythm of exchanges from that."""

    def __init__(self, settings: Exchange) -> None:
        self._settings = settings
        self._since = (0, time.perf_counter(), LinkUse())

    def look(self, done: int, use: LinkUse) -> list[float]:
        """[seconds per step without waits, fp32 bytes per second that the link would move, share waited] of this rank.

        Zeros if there was no exchange since the last look.
        """
        steps, started, before = self._since
        now = time.perf_counter()
        self._since = (done, now, replace(use))
        busy, waited = use.busy_seconds - before.busy_seconds, use.waited_seconds - before.waited_seconds
        if done <= steps or busy <= 0 or not steps:  # the first steps include the start of the run
            return [0.0, 0.0, 0.0]
        share = (use.sent_bytes - before.sent_bytes) / busy
        return [(now - started - waited) / (done - steps), share, waited / (now - started)]

    def rhythm(self, exchange: OuterStep, seen: list[float]) -> Rhythm | None:
        """The rhythm for what all ranks have seen; None: nothing was measured yet."""
        step_seconds, bytes_per_second, waited = seen
        if not step_seconds or not bytes_per_second:
            return None
        if waited > WAITED_SHARE:
            bytes_per_second *= BACK_OFF
        return self._settings.chosen(exchange.fp32_bytes / bytes_per_second, step_seconds)
