"""Runs that tell which samples each step took, stopped where a test wants it: for tests and for benchmarks/order.py."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from toolkit.run_dir.layout import RunDir
from toolkit.runtime.metrics.record import Record
from toolkit.runtime.sinks.local_files import JsonlSink
from toolkit.runtime.supervision.warm_pool import Enter, enter_worker

STRATEGIES = ("zero", "pipeline", "tensor_parallel")
WORLDS = (1, 2, 4, 8)


def strategy(name: str, world: int) -> str:
    """The override for a strategy on so many processes; one process is one replica under each of them."""
    if world == 1:
        return "strategy={name: data_parallel}"
    axes = {
        "zero": f"zero_stage: {2 if world == 2 else 3}",
        "pipeline": f"pp: 2, dp: {world // 2}",
        "tensor_parallel": f"tp: 2, dp: {world // 2}",
    }
    return f"strategy={{name: {name}, micro_batch: 1, {axes[name]}}}"


def stopping_at(step: int) -> Enter:
    """A worker that is asked to stop after a step, as a scheduler would."""
    return partial(_enter, step)


def _enter(step: int, argv: tuple[str, ...], env: dict[str, str]) -> None:
    log = JsonlSink.log

    def stop(self: JsonlSink, record: Record) -> None:
        log(self, record)
        if record.step == step:
            os.kill(os.getpid(), signal.SIGTERM)

    JsonlSink.log = stop  # type: ignore[method-assign]
    enter_worker(argv, env)


def steps_of(run: RunDir) -> list[list[int]]:
    """Sample ids by step; every step is there once."""
    records: list[dict[str, Any]] = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    return [record["sample_ids"] for record in records]


def missed_and_repeated(steps: Iterable[Sequence[int]], epochs: int) -> tuple[int, int]:
    """Samples that an epoch left out, and those that it had more than once, over all epochs."""
    ids = [i for step in steps for i in step]
    size = max(ids) + 1
    missed = repeated = 0
    for epoch in range(epochs):
        own = ids[epoch * size : (epoch + 1) * size]
        missed += size - len(set(own))
        repeated += len(own) - len(set(own))
    return missed, repeated + len(ids[epochs * size :])
