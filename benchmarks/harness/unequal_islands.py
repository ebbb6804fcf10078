"""Three islands of 1, 1 and 2 processes, one slowed down: each as a run of its own, and together as one run.

Every process has a core, the same in both cases: the first island and the third one's first process share a core, the
slowed island and the third one's second process another. An island's own speed is measured while the other two also
train, as runs that know nothing of one another, so that both cases have the same contention.
"""

from __future__ import annotations

import io
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from toolkit.launching import launchers
from toolkit.launching.launchers import Command
from toolkit.recipe.file import load_recipe
from toolkit.resources import find_recipe
from toolkit.run_dir.layout import RunDir
from toolkit.runtime.engine.replica import ReplicaEngine
from toolkit.runtime.islands.store_access import new_key
from toolkit.runtime.supervision.warm_pool import WarmProcess, enter_worker
from toolkit.sessions.islands import MeetingPlace, check_store, prepare_islands, watch_islands
from toolkit.sessions.resolve import resolve

CORES = ((0,), (1,), (0, 1))
"""Core of every process, by island."""
SLOWED, TIMES = 1, 3.0
"""The island whose steps take so many times as long."""
FIRST_STEPS = 5
"""Steps of every island before anything is timed: the first ones fill caches."""

Record = dict[str, Any]


@dataclass(frozen=True)
class Confined:
    """A worker on its core; each step sleeps so long that it takes `times` as long."""

    cores: tuple[int, ...]
    times: float

    @classmethod
    def of(cls, island: int) -> Confined:
        """The workers of an island."""
        return cls(CORES[island], TIMES if island == SLOWED else 1.0)

    def __call__(self, argv: tuple[str, ...], env: dict[str, str]) -> None:
        os.sched_setaffinity(0, {self.cores[int(env["RANK"])] % (os.cpu_count() or 1)})
        if self.times > 1:
            slow_down(self.times)
        enter_worker(argv, env)


def slow_down(times: float) -> None:
    """From now on, steps of this process take so many times as long."""
    step = ReplicaEngine.step

    def slow(*args: Any) -> Any:
        started = time.perf_counter()
        result = step(*args)
        time.sleep((times - 1) * (time.perf_counter() - started))
        return result

    ReplicaEngine.step = slow  # type: ignore[method-assign]


def own_speeds(given: Sequence[str], batch: int, seconds: float, folder: Path) -> list[float]:
    """Tokens per second of each island as a plain run of its own with its share of the batch; all three at a time."""
    runs, processes = [], []
    axes = ["strategy={name: data_parallel}", f"train.global_batch={batch // len(CORES)}", "train.steps=1000000"]
    for island, cores in enumerate(CORES):
        run = resolve(load_recipe(find_recipe("demo"), [*given, *axes]), len(cores)).write(folder / f"own-{island}")
        runs.append(run)
        processes += [
            WarmProcess.start(command, Confined.of(island))
            for command in launchers.commands("local", run.path, len(cores), "cpu")
        ]
    try:
        while min(len(records(run)) for run in runs) < FIRST_STEPS:
            assert not any(process.poll() for process in processes), "a run of its own has failed"
            time.sleep(0.2)
        time.sleep(seconds)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return speeds([records(run) for run in runs])


def together(given: Sequence[str], batch: int, steps: int, folder: Path) -> list[list[Record]]:
    """The records of each island of one asynchronous run."""
    place = MeetingPlace((folder / "store").as_uri(), str(folder / "islands.key"))
    new_key().write(Path(place.key_file))
    axes = [
        f"strategy={{name: local_sgd, islands: {len(CORES)}, local_steps: 10}}", "train.outer={mode: async}",
        f"train.global_batch={batch}", f"train.steps={steps}",
    ]  # fmt: skip
    islands, runs = [], []
    for island, cores in enumerate(CORES):
        resolved = resolve(load_recipe(find_recipe("demo"), [*given, *axes]), len(CORES) * len(cores))
        check_store(place, resolved)
        run = resolved.write(folder / f"site-{island}")
        islands += prepare_islands(resolved, run, place, island)
        runs.append(run.island(island))

    def start(command: Command) -> WarmProcess:
        return WarmProcess.start(command, Confined.of(int(command.env["TOOLKIT_ISLAND"].partition("/")[0])))

    said = io.StringIO()
    code = watch_islands(islands, Console(file=said, width=200), 0, start)
    assert code == 0, said.getvalue()
    return [records(run) for run in runs]


def records(run: RunDir) -> list[Record]:
    """Steps that a run has recorded."""
    lines = run.metrics.read_text().splitlines() if run.metrics.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def speeds(islands: Sequence[Sequence[Record]]) -> list[float]:
    """Tokens per second of each island, over the time in which all train: from the last start to the first end."""
    begin = max(found[FIRST_STEPS - 1]["time"] for found in islands)
    end = min(found[-1]["time"] for found in islands)
    inside = [[record["tokens"] for record in found if begin < record["time"] <= end] for found in islands]
    return [sum(tokens) / (end - begin) for tokens in inside]
