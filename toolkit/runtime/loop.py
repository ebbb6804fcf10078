"""The training loop: one screen, the same for every strategy."""

from __future__ import annotations

import time
from typing import Protocol

from toolkit.runtime.data.prefetch import Share, prefetched
from toolkit.runtime.data.sample_order import SampleOrder, own_share
from toolkit.runtime.data.samples import Samples
from toolkit.runtime.engine.protocol import Engine
from toolkit.runtime.observer import Observer


class Keeper(Protocol):
    """What happens between two steps."""

    def after(self, step: int) -> None:
        """`step` steps are done: save if it is time; `Preempted` if the run was asked to stop."""


def train(
    engine: Engine, samples: Samples, order: SampleOrder, share: Share, steps: range, observer: Observer, keeper: Keeper
) -> None:
    """One update for each of `steps`, counted from 0, on the recipe's samples."""
    batches = prefetched(samples, order, share, steps)
    for step in steps:
        started = time.perf_counter()
        with observer.meter.part("data"):
            ids, batch = next(batches)
        loaded = time.perf_counter()
        with observer.watching(step + 1):
            result = engine.step(batch)
        step_seconds = time.perf_counter() - started
        own = own_share(ids, replica=share.replica, replicas=share.replicas)
        with observer.meter.part("agree"):
            samples_taken = observer.taken(own)
        observer.record(
            step + 1, result, data_seconds=loaded - started, step_seconds=step_seconds, sample_ids=samples_taken
        )
        observer.check(step + 1, result, own)
        keeper.after(step + 1)
