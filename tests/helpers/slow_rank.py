"""A worker in which one rank works longer than the others."""

from __future__ import annotations

import time
from typing import Any

from toolkit.runtime.engine.replica import ReplicaEngine
from toolkit.runtime.pipeline.engine import PipelineEngine
from toolkit.runtime.supervision.warm_pool import enter_worker

SLOW_RANK = 1
SLEEP_SECONDS = 0.15


def enter(argv: tuple[str, ...], env: dict[str, str]) -> None:
    """As a worker; the slow rank sleeps in every step."""
    if int(env["RANK"]) == SLOW_RANK:
        for kind in (ReplicaEngine, PipelineEngine):
            kind.step = slow(kind.step)
    enter_worker(argv, env)


def slow(step: Any) -> Any:
    def run(*args: Any) -> Any:
        time.sleep(SLEEP_SECONDS)
        return step(*args)

    return run
