"""Batches made ahead of the engine, by a thread: a step begins with its batch already there."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from deepspeed.accelerator import get_accelerator

from toolkit.runtime.data.sample_order import SampleOrder
from toolkit.runtime.data.samples import Samples, micro_batches
from toolkit.runtime.models.micro_batch import MicroBatch

AHEAD = 2
"""Batches that wait for the engine."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """Which part of every global batch this rank computes."""

    replica: int
    replicas: int
    micro_batch: int


Made = tuple[np.ndarray, list[MicroBatch]]
"""Sample ids of a global batch, and this replica's micro-batches."""


def global_batch(samples: Samples, ids: np.ndarray, share: Share) -> list[MicroBatch]:
    """This replica's micro-batches, in memory that an accelerator copies from fastest."""
    accelerator = get_accelerator()
    made = list(
        micro_batches(samples, ids, replica=share.replica, replicas=share.replicas, micro_batch=share.micro_batch)
    )
    if accelerator.device_name() == "cpu":
        return made
    return [micro.map(accelerator.pin_memory) for micro in made]


def prefetched(samples: Samples, order: SampleOrder, share: Share, steps: range) -> Iterator[Made]:
    """The batches of some steps; what goes wrong in the thread is raised here."""
    ready: queue.Queue[Made | Exception] = queue.Queue(AHEAD)
    done = threading.Event()

    def put(item: Made | Exception) -> None:
        while not done.is_set():
            try:
                ready.put(item, timeout=0.1)
                return
            except queue.Full:
                continue

    def work() -> None:
        try:
            for step in steps:
                ids = order.step(step)
                put((ids, global_batch(samples, ids, share)))
                if done.is_set():
                    return
        except Exception as error:  # whatever it is, it belongs to the run's own thread
            put(error)

    thread = threading.Thread(target=work, name="prefetch", daemon=True)
    thread.start()
    try:
        for _ in steps:
            item = ready.get()
            if isinstance(item, Exception):
                raise item
            yield item
    finally:
        done.set()
        thread.join()
