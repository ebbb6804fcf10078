"""Workers with a planted fault: SIGKILL at a chosen instant, so that no instant of a save is left out; no numbers."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable
from typing import Any

from toolkit.checkpoints import store
from toolkit.runtime.checkpoint import safetensors_writer
from toolkit.runtime.models import head_loss, loss
from toolkit.runtime.pipeline import stage
from toolkit.runtime.supervision.warm_pool import enter_worker

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

    def look(count: int) -> float:
        if count == int(when):
            threading.Timer(0.02 * (when % 1), die).start()
        return 1.0

    scale_losses(look)


def poison(argv: tuple[str, ...], env: dict[str, str]) -> None:
    """From step 3 on, rank 1's loss is NaN."""
    scale_losses(lambda count: float("nan") if env["RANK"] == "1" and count >= 3 else 1.0)
    enter_worker(argv, env)


def poison_stage(argv: tuple[str, ...], env: dict[str, str]) -> None:
    """From step 3 on, one stage's first attention makes no numbers of what it gets, in one of the passes."""
    rank, way = env["CULPRIT"].split(":")
    original = stage.Stage.feed

    def feed(self: Any, batch: Any, weight: float) -> None:
        original(self, batch, weight)
        steps[0] += 1
        if steps[0] == 3:
            name = f"{self.split.layers[0]}.{self.split.bounds[self.index]}.self_attn"
            self.model.get_submodule(name).register_forward_hook(spoil)

    def spoil(module: Any, inputs: Any, output: Any) -> Any:
        hidden, *others = output
        if way == "forward":
            return (hidden * float("nan"), *others)
        hidden.register_hook(lambda gradient: gradient * float("nan"))
        return output

    steps = [0]
    if rank == env["RANK"]:
        stage.Stage.feed = feed
    enter_worker(argv, env)


def spike_at_step_9(argv: tuple[str, ...], env: dict[str, str]) -> None:
    """The loss of the ninth batch is ten times too large."""
    scale_losses(lambda count: 10.0 if count == 9 else 1.0)
    enter_worker(argv, env)


def scale_losses(factor: Callable[[int], float]) -> None:
    """Multiply the loss of this process's n-th micro-batch, counted from 1, by `factor(n)`."""
    count = [0]

    def scaled(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *args: Any) -> Any:
            count[0] += 1
            return original(self, *args) * factor(count[0])

        return call

    for kind in (loss.SummedCrossEntropy, head_loss.HeadLoss):
        kind.__call__ = scaled(kind.__call__)
