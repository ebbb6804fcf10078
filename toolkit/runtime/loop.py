"""The training loop: the story of a run, the same for every strategy."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from deepspeed.accelerator import get_accelerator

from toolkit.launching.stop_signals import StopRequest
from toolkit.runtime.between_steps import AfterStep, FinishedStep, Progress, StopEarly, preempted, save
from toolkit.runtime.checkpoint.saver import Saver
from toolkit.runtime.data.prefetch import Made, Share, prefetched
from toolkit.runtime.data.sample_order import SampleOrder, own_share
from toolkit.runtime.data.samples import Samples
from toolkit.runtime.engine.protocol import Engine
from toolkit.runtime.islands.async_engine import AsyncIslandEngine, Waits
from toolkit.runtime.observer import Observer
from toolkit.runtime.spike_rewind import Rewind, Spike


@dataclass
class Position:
    """How far a run has come: steps done, and the order of samples from there on."""

    step: int
    order: SampleOrder


class StepSource(Protocol):
    """Which steps this rank trains on. Asynchronous islands bring their own: they claim a round at a time."""

    def __iter__(self) -> Iterator[range]:
        """Ranges of steps, counted from 0; each is asked for when the one before is done."""

    def finish(self) -> None:
        """Called after the last range."""


@dataclass(frozen=True)
class RemainingSteps:
    """All steps from the position to the last: synchronous training."""

    position: Position
    last_step: int

    def __iter__(self) -> Iterator[range]:
        while self.position.step < self.last_step:  # again after a rewind
            yield range(self.position.step, self.last_step)

    def finish(self) -> None:
        """The hooks of the last step have saved already."""


@dataclass(frozen=True)
class AsyncRounds:
    """Steps of an asynchronous island: rounds that it claims until all islands together have done them all."""

    island: AsyncIslandEngine
    heartbeat: Progress
    stop: StopRequest
    saver: Saver
    position: Position
    last_step: int

    def __iter__(self) -> Iterator[range]:
        yield from self.island.rounds(Waits(self.heartbeat.move, lambda: self.stop.signal is not None))

    def finish(self) -> None:
        """Save the state after the last round of all islands, or after a stop request."""
        if not self.island.complete:
            save(self.saver, self.heartbeat, self.position.step)
            self.saver.wait()
            raise preempted(self.position.step, self.saver)
        self.position.step = self.last_step
        if self.saver.recipe.checkpoint.every and not self.island.came_too_late:
            self.saver.save(self.last_step)
        self.saver.wait()


@dataclass(frozen=True, kw_only=True)
class Loop:
    """What the loop drives, put together in `assemble.py`."""

    engine: Engine
    samples: Samples
    share: Share
    position: Position
    source: StepSource
    observer: Observer
    rewind: Rewind | None = None
    """Needed if a hook raises `Spike`."""
    hooks: list[AfterStep] = field(default_factory=list)
    say: Callable[[str], object] = print
    reads_late: bool = field(default_factory=lambda: not get_accelerator().is_synchronized_device())
    """Whether a step's numbers are read after the next step was started, so that the device never runs out of work."""

    def run(self) -> None:
        """Train on every range of steps; after a loss spike, rewind and continue from the last checkpoint."""
        for steps in self.source:
            try:
                self.train(steps)
                self.position.step = steps.stop
            except StopEarly as reason:
                self.position.step = reason.step
                self.say(str(reason))
                return
            except Spike as spike:
                assert self.rewind is not None
                self.position.step, self.position.order = self.rewind.before(spike)
        self.source.finish()

    def train(self, steps: range) -> None:
        """One update for each step: fetch the batch, step, record, run the hooks.

        Records and hooks of a step come one step late, except where a hook needs the state of that very step.
        """
        batches = prefetched(self.samples, self.position.order, self.share, steps)
        unread: FinishedStep | None = None
        for index in steps:
            step = self._step(index + 1, batches)
            at_once = not self.reads_late or index + 1 == steps.stop or self._is_needed(step.number)
            for done in (unread, step if at_once else None):
                if done is not None:
                    self._finish(done)
            unread = None if at_once else step

    def _step(self, number: int, batches: Iterator[Made]) -> FinishedStep:
        started = time.perf_counter()
        with self.observer.meter.part("data"):
            ids, batch = next(batches)
        data_seconds = time.perf_counter() - started
        with self.observer.watching(number):
            result = self.engine.step(batch)
        own = own_share(ids, replica=self.share.replica, replicas=self.share.replicas)
        return FinishedStep(
            number=number,
            result=result,
            sample_ids=own,
            started=started,
            data_seconds=data_seconds,
            memory=self.observer.memory.last(),
        )

    def _is_needed(self, number: int) -> bool:
        """Whether the state right after this step is saved, evaluated or measured; every hook is asked."""
        needed = [hook.needs_state(number) for hook in self.hooks]
        return any(needed) or self.observer.meter.samples_around(number)

    def _finish(self, step: FinishedStep) -> None:
        self.observer.record(step)
        for hook in self.hooks:
            hook.after(step)
