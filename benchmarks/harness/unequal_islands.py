"""Three islands of 1, 1 and 2 processes, one slowed down: each as a run of its own, and together as one run.

Every process has a core, the same in both cases: the first island and the third one's first process share a core, the
slowed island and the third one's second process another. An island's own speed is measured while the other two also
train, as runs that know nothing of one another, so that both cases have the same contention.

Both cases run in turns of a few seconds, one stopped while the other one trains, so that whatever else the machine does
meets both alike. A turn is shorter than the lease of an island.
"""

from __future__ import annotations

import io
import json
import os
import signal
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
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

TURN_SECONDS = 4.0

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


class Case:
    """The processes and run directories of the three islands in one of the two cases."""

    def __init__(self) -> None:
        self.processes: list[WarmProcess] = []
        self.runs: list[RunDir] = []
        self.turns: list[tuple[float, float]] = []

    def start(self, command: Command, island: int) -> WarmProcess:
        """Start a worker of an island."""
        self.processes.append(WarmProcess.start(command, Confined.of(island)))
        return self.processes[-1]

    def signal(self, number: signal.Signals) -> None:
        """To all workers that live."""
        for process in self.processes:
            if process.poll() is None:
                os.kill(process.pid, number)

    def records(self) -> list[list[Record]]:
        """Steps that each island has recorded."""
        return [records(run) for run in self.runs]

    def has_begun(self) -> bool:
        """Whether all islands train."""
        return min(len(found) for found in self.records()) >= FIRST_STEPS

    def speeds(self) -> list[float]:
        """Tokens per second of each island in this case's turns, until the first island has no more to do."""
        found = self.records()
        end = min(island[-1]["time"] for island in found)
        turns = [(begin, min(until, end)) for begin, until in self.turns if begin < end]
        seconds = sum(until - begin for begin, until in turns)
        return [
            sum(record["tokens"] for record in island if any(a < record["time"] <= b for a, b in turns)) / seconds
            for island in found
        ]


def start_alone(given: Sequence[str], batch: int, folder: Path) -> Case:
    """Each island as a plain run of its own with its share of the batch."""
    case = Case()
    axes = ["strategy={name: data_parallel}", f"train.global_batch={batch // len(CORES)}", "train.steps=1000000"]
    for island, cores in enumerate(CORES):
        run = resolve(load_recipe(find_recipe("demo"), [*given, *axes]), len(cores)).write(folder / f"own-{island}")
        case.runs.append(run)
        for command in launchers.commands("local", run.path, len(cores), "cpu"):
            case.start(command, island)
    return case


def start_together(given: Sequence[str], batch: int, steps: int, folder: Path) -> tuple[Case, Future[int]]:
    """All islands in one asynchronous run; its exit code comes when it ends."""
    place = MeetingPlace((folder / "store").as_uri(), str(folder / "islands.key"))
    new_key().write(Path(place.key_file))
    axes = [
        f"strategy={{name: local_sgd, islands: {len(CORES)}, local_steps: 10}}", "train.outer={mode: async}",
        f"train.global_batch={batch}", f"train.steps={steps}",
    ]  # fmt: skip
    case, islands = Case(), []
    for island, cores in enumerate(CORES):
        resolved = resolve(load_recipe(find_recipe("demo"), [*given, *axes]), len(CORES) * len(cores))
        check_store(place, resolved)
        run = resolved.write(folder / f"site-{island}")
        islands += prepare_islands(resolved, run, place, island)
        case.runs.append(run.island(island))

    def start(command: Command) -> WarmProcess:
        return case.start(command, int(command.env["TOOLKIT_ISLAND"].partition("/")[0]))

    watching = ThreadPoolExecutor(1, "islands")
    return case, watching.submit(watch_islands, islands, Console(file=io.StringIO()), 0, start)


def in_turns(given: Sequence[str], batch: int, steps: int, folder: Path) -> tuple[Case, Case]:
    """(together, alone): both cases in turns until the run of all islands has ended."""
    alone = start_alone(given, batch, folder)
    try:
        while not alone.has_begun():
            assert not any(process.poll() for process in alone.processes), "a run of its own has failed"
            time.sleep(0.2)
        alone.signal(signal.SIGSTOP)
        both, code = start_together(given, batch, steps, folder)
        while not both.has_begun() and not code.done():
            time.sleep(0.2)
        while not code.done():
            _turn(both, alone)
            _turn(alone, both)
        both.signal(signal.SIGCONT)
        assert code.result() == 0, "the run of all islands has failed"
    finally:
        for process in alone.processes:
            process.kill()
            process.wait()
    return both, alone


def _turn(case: Case, other: Case) -> None:
    other.signal(signal.SIGSTOP)
    case.signal(signal.SIGCONT)
    begin = time.time()
    time.sleep(TURN_SECONDS)
    case.turns.append((begin, time.time()))


def records(run: RunDir) -> list[Record]:
    """Steps that a run has recorded."""
    lines = run.metrics.read_text().splitlines() if run.metrics.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("}")]
