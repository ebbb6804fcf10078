"""Prefetching: a thread makes batches ahead of the engine, so that a step starts without waiting for data."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from deepspeed.accelerator import get_accelerator

from toolkit.runtime.data.sample_order import SampleOrder, own_share
from toolkit.runtime.data.samples import Samples, micro_batches
from toolkit.runtime.models.embedder import row_salts
from toolkit.runtime.models.micro_batch import MicroBatch

AHEAD = 2
"""Number of batches that are ready in advance."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """The part of every global batch that this rank computes."""

    replica: int
    replicas: int
    micro_batch: int
    noise_seed: int | None = None
    """Seed of the noise on embeddings; None: no noise."""


Made = tuple[np.ndarray, list[MicroBatch]]
"""(sample ids of a global batch, this replica's micro-batches)."""


def global_batch(samples: Samples, ids: np.ndarray, share: Share, step: int | None = None) -> list[MicroBatch]:
    """This replica's micro-batches of a global batch, in pinned memory if there is an accelerator.

    Document bounds are found and tokens counted here, on the host, so that the engine neither reads them from a device
    nor waits for them. `step`: the step that trains on them, whose noise they get; None if none does.
    """
    accelerator = get_accelerator()
    made = [
        micro.located()
        for micro in micro_batches(
            samples, ids, replica=share.replica, replicas=share.replicas, micro_batch=share.micro_batch
        )
    ]
    if share.noise_seed is not None and step is not None:
        salts = row_salts(share.noise_seed, step, own_share(ids, replica=share.replica, replicas=share.replicas))
        size = share.micro_batch
        made = [replace(micro, noise=salts[n * size : (n + 1) * size]) for n, micro in enumerate(made)]
    if accelerator.device_name() != "cpu":
        made = [micro.map(accelerator.pin_memory) for micro in made]
    for micro in made:
        _ = micro.weighed  # kept by the micro-batch, for the engine
    return made


def prefetched(samples: Samples, order: SampleOrder, share: Share, steps: range) -> Iterator[Made]:
    """The batches of these steps; an error of the thread is raised here."""
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
                put((ids, global_batch(samples, ids, share, step)))
                if done.is_set():
                    return
        except Exception as error:  # any error is raised in the main thread
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
