"""The training loop: the story of a run, the same for every strategy."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from toolkit.runtime.between_steps import AfterStep, FinishedStep
from toolkit.runtime.data.prefetch import Share, prefetched
from toolkit.runtime.data.sample_order import SampleOrder, own_share
from toolkit.runtime.data.samples import Samples
from toolkit.runtime.engine.protocol import Engine
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

    def run(self) -> None:
        """Train on every range of steps; after a loss spike, rewind and continue from the last checkpoint."""
        for steps in self.source:
            try:
                self.train(steps)
                self.position.step = steps.stop
            except Spike as spike:
                assert self.rewind is not None
                self.position.step, self.position.order = self.rewind.before(spike)
        self.source.finish()

    def train(self, steps: range) -> None:
        """One update for each step: fetch the batch, step, record, run the hooks."""
        batches = prefetched(self.samples, self.position.order, self.share, steps)
        for index in steps:
            number = index + 1
            started = time.perf_counter()
            with self.observer.meter.part("data"):
                ids, batch = next(batches)
            data_seconds = time.perf_counter() - started
            with self.observer.watching(number):
                result = self.engine.step(batch)
            step_seconds = time.perf_counter() - started
            own = own_share(ids, replica=self.share.replica, replicas=self.share.replicas)
            step = FinishedStep(number, result, own)
            self.observer.record(step, data_seconds=data_seconds, step_seconds=step_seconds)
            for hook in self.hooks:
                hook.after(step)
