"""Workers with a planted fault: SIGKILL at a chosen instant, so that no instant of a save is left out; no numbers."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable
from typing import Any

from toolkit import checkpoint_store as store
from toolkit.runtime import safetensors_writer
from toolkit.runtime.engine import ReplicaEngine
from toolkit.runtime.pool import enter_worker

SAVE_CALLS = {0: 12, 1: 2}
"""Instants of a save by rank: before and after each file, sync, rename. Rank 0 also commits."""


def kill_point(rng: random.Random, *, in_save: bool) -> str:
    """`rank:where:when`, for `suicidal`."""
    rank = rng.randrange(2)
    if in_save:  # in the second save of the attempt, so that the run gets on
        return f"{rank}:save:{SAVE_CALLS[rank] + rng.randrange(SAVE_CALLS[rank])}"
    return f"{rank}:step:{rng.randint(3, 5) + rng.random() * 0.9}"


def suicidal(argv: tuple[str, ...], env: dict[str, str]) -> None:
    """Enter the worker with a point at which this rank dies."""
    rank, where, when = env["KILL"].split(":")
    if rank == env["RANK"]:
        {"save": die_in_save, "step": die_in_step}[where](float(when))
    enter_worker(argv, env)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_in_save(when: float) -> None:
    count = [0]

    def counted(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if count[0] == int(when):
                die()
            count[0] += 1
            return original(*args, **kwargs)

        return call

    safetensors_writer.write = counted(safetensors_writer.write)
    store.begin = counted(store.begin)
    store.write_synced = counted(store.write_synced)
    store.sync_directory = counted(store.sync_directory)
    store.set_aside = counted(store.set_aside)
    store.point_to = counted(store.point_to)
    store.prune = counted(store.prune)


def die_in_step(when: float) -> None:
    """In the middle of a step: a timer that fires some milliseconds into its forward pass."""
    original, count = ReplicaEngine._loss_sum, [0]

    def loss_sum(self: Any, micro: Any) -> Any:
        count[0] += 1
        if count[0] == int(when):
            threading.Timer(0.02 * (when % 1), die).start()
        return original(self, micro)

    ReplicaEngine._loss_sum = loss_sum  # type: ignore[method-assign]


def poison(argv: tuple[str, ...], env: dict[str, str]) -> None:
    """From step 3 on, rank 1's loss is no number."""
    original, count = ReplicaEngine._loss_sum, [0]

    def loss_sum(self: Any, micro: Any) -> Any:
        count[0] += 1
        return original(self, micro) * (float("nan") if env["RANK"] == "1" and count[0] >= 3 else 1.0)

    ReplicaEngine._loss_sum = loss_sum  # type: ignore[method-assign]
    enter_worker(argv, env)
