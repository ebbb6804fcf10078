"""A real training command that is disturbed: its strategy, its workers, the random moment, how it has to end."""

from __future__ import annotations

import random
import re
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks.harness import commands
from benchmarks.harness.commands import at_step, toolkit

STEPS = 40
EVERY = 8
LAST = STEPS - 12
"""Steps before this one are disturbed: the run must not end on its own first."""
STRATEGIES: dict[str, tuple[int, tuple[str, ...]]] = {
    "data_parallel": (2, ("strategy.name=data_parallel",)),
    "zero_1": (2, ("strategy.name=zero", "strategy.zero_stage=1")),
    "zero_2": (2, ("strategy.name=zero", "strategy.zero_stage=2")),
    "zero_3": (2, ("strategy.name=zero", "strategy.zero_stage=3")),
    "tensor_parallel": (2, ("strategy.name=tensor_parallel", "strategy.tp=2")),
    "pipeline": (2, ("strategy.name=pipeline", "strategy.pp=2")),
    "sequence_parallel": (2, ("strategy.name=sequence_parallel", "strategy.sp=2")),
    "hybrid": (4, ("strategy.name=hybrid", "strategy.pp=2", "strategy.tp=2")),
    "expert_parallel": (2, ("strategy.name=expert_parallel", "strategy.ep=2", "strategy.zero_stage=2")),
    "local_sgd": (2, ("strategy.name=local_sgd", "strategy.islands=2", "strategy.local_steps=4")),
}
"""Name → number of processes and overrides."""
MICRO_BATCH = "strategy.micro_batch=2"
"""Fixed, so that a run on two hosts and its resume on one take the same sums."""


@dataclass
class Try:
    """One disturbed run."""

    fault: str
    strategy: str
    run: Path
    recipe: Path
    rng: random.Random
    env: Mapping[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    process: subprocess.Popen[str] | None = None
    text: str = ""
    disturbed: bool = False
    """Whether the fault reached the run before it had ended."""
    problems: list[str] = field(default_factory=list)

    @property
    def nproc(self) -> int:
        """Number of processes."""
        return STRATEGIES[self.strategy][0]

    def start(self, *overrides: str, prefix: tuple[str, ...] = ()) -> subprocess.Popen[str]:
        """Start the training command."""
        axes = (*STRATEGIES[self.strategy][1], MICRO_BATCH)
        options = self.options or ("--nproc", str(self.nproc))
        words = ("train", str(self.recipe), *axes, *overrides, "--run-dir", str(self.run), *options)
        self.process = commands.start([*prefix, *toolkit(*words)], self.run, self.env)
        return self.process

    def end(self, code: int | tuple[int, ...], pattern: str) -> None:
        """Wait for the command; its exit code and message must be those of the fault."""
        assert self.process is not None
        wanted = code if isinstance(code, tuple) else (code,)
        text, in_time = commands.finish(self.process)
        if not in_time:
            self.problems.append("no end in time")
        self.text += text
        if self.process.returncode not in wanted:
            self.problems.append(f"exit code {self.process.returncode} instead of {wanted}")
        if self.process.returncode not in (0, 75) and not re.search(pattern, " ".join(text.split())):
            self.problems.append(f"the cause is not named: no {pattern!r}")
        if "Traceback" in text and "its log" not in text:
            self.problems.append("a traceback was shown")

    def wait_for_moment(self, first: int = 0) -> None:
        """Wait for a random step; one time in four for a moment before the first one, if that is allowed."""
        assert self.process is not None
        if not first and self.rng.random() < 0.25:
            deadline = time.monotonic() + 300
            while not self.workers() and self.process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.05)
            time.sleep(self.rng.uniform(0, 4))
        else:
            at_step(self.run, self.rng.randrange(max(first, 1), LAST), self.process)

    def workers(self) -> dict[int, psutil.Process]:
        """Worker processes of the command, by rank."""
        assert self.process is not None
        found = {}
        try:
            for each in psutil.Process(self.process.pid).children(recursive=True):
                if "toolkit.worker" in each.cmdline():
                    found[int(each.environ()["RANK"])] = each
        except (psutil.Error, KeyError):  # one has just started, or just ended
            return found
        return found

    def signal_worker(self, number: signal.Signals) -> int | None:
        """Send a signal to a random worker; its rank, or None if there is no worker."""
        found = self.workers()
        if not found:
            return None
        rank = self.rng.choice(sorted(found))
        try:
            found[rank].send_signal(number)
        except psutil.Error:
            return None
        self.disturbed = True
        return rank
