"""Whole training runs that compete in turns: one trains for some seconds while all others are stopped.

Whatever else the machine does then meets all of them alike. A step that is stopped in the middle is continued in the
next turn of its run: it counts in both, by the time that it took in each.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil

from benchmarks.paired import Ratio, ratio

WARM_UP = 4
"""Steps of every run before its first turn: the first ones fill caches."""
START_SECONDS = 600.0

Step = tuple[float, int]
"""When a step ended, in seconds since 1970, and its useful tokens."""


@dataclass
class Contestant:
    """A run: its processes, what it has done, and its turns."""

    name: str
    processes: Sequence[subprocess.Popen[bytes]]
    steps: Callable[[], list[Step]]
    turns: list[tuple[float, float]] = field(default_factory=list)

    def signal(self, number: signal.Signals) -> None:
        """To all processes, and to those that they have started."""
        for process in self.processes:
            with contextlib.suppress(psutil.Error):
                parent = psutil.Process(process.pid)
                for each in [*parent.children(recursive=True), parent]:
                    with contextlib.suppress(psutil.Error):
                        each.send_signal(number)

    def wait_until_warm(self) -> None:
        """Wait for the first steps, then stop."""
        deadline = time.monotonic() + START_SECONDS
        while len(self.steps()) < WARM_UP:
            assert time.monotonic() < deadline, f"{self.name} does not train"
            assert all(process.poll() is None for process in self.processes), f"{self.name} failed"
            time.sleep(0.2)
        self.signal(signal.SIGSTOP)

    def take_turn(self, seconds: float) -> None:
        """Train for so long."""
        begin = time.time()
        self.signal(signal.SIGCONT)
        time.sleep(seconds)
        self.signal(signal.SIGSTOP)
        self.turns.append((begin, time.time()))

    def rates(self) -> list[float]:
        """Tokens per second in every turn but the first, in which the run continues from its start."""
        begins = np.array([begin for begin, _ in self.turns])
        lengths = np.array([end - begin for begin, end in self.turns])
        before = np.cumsum(lengths) - lengths

        def trained(moment: float) -> float:
            """Seconds in turns until a moment; negative before the first one."""
            number = int(np.searchsorted(begins, moment, side="right")) - 1
            if number < 0:
                return moment - float(begins[0])
            return float(before[number] + min(moment - begins[number], lengths[number]))

        done = self.steps()
        ends = [trained(moment) for moment, _ in done]
        tokens = np.cumsum([count for _, count in done])
        bounds = np.interp([*before, float(lengths.sum())], ends, tokens)
        # The last turn's last step has not ended: interpolation gives it no tokens, so the turn does not count.
        return list((np.diff(bounds) / lengths)[1:-1])


def compete(starts: Mapping[str, Callable[[], Contestant]], rounds: int, seconds: float) -> dict[str, list[float]]:
    """Tokens per second of every contestant by round; who begins a round changes."""
    contestants: list[Contestant] = []
    try:
        for start in starts.values():
            contestants.append(start())
            contestants[-1].wait_until_warm()
        for number in range(rounds + 2):  # the first and the last do not count
            shift = number % len(contestants)
            for one in contestants[shift:] + contestants[:shift]:
                one.take_turn(seconds)
                assert all(process.poll() is None for process in one.processes), f"{one.name} ended too early"
        return {one.name: one.rates() for one in contestants}
    finally:
        for one in contestants:
            one.signal(signal.SIGKILL)
            for process in one.processes:
                process.wait()


def ratio_of(rates: Mapping[str, Sequence[float]], first: str, second: str) -> Ratio:
    """Of the tokens per second of two contestants: median over rounds, with its interval."""
    return ratio(list(zip(rates[first], rates[second], strict=True)))


def own_steps(file: Path) -> list[Step]:
    """What `metrics.jsonl` of a run of the toolkit says."""
    lines = file.read_text().splitlines() if file.is_file() else []
    records = [json.loads(line) for line in lines if line.endswith("}")]
    return [(record["time"], record["tokens"]) for record in records]


def noted_steps(files: Iterable[Path]) -> list[Step]:
    """What the ranks of a peer have noted with `note_step`: when the first rank was done, the tokens of all."""
    lines = [file.read_text().splitlines() if file.is_file() else [] for file in files]
    steps = [[json.loads(line) for line in own if line.endswith("]")] for own in lines]
    return [(same[0][0], sum(tokens for _, tokens in same)) for same in zip(*steps, strict=False)]


def note_step(file: Path, tokens: int) -> None:
    """Note that a step of this process has ended."""
    with file.open("a") as opened:
        opened.write(json.dumps([time.time(), tokens]) + "\n")
