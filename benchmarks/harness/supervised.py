"""Supervised runs of warm workers, disturbed from a thread: for tests and for benchmarks/checkpoints.py."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from toolkit.checkpoints import store
from toolkit.errors import RankFailed
from toolkit.launching import launchers
from toolkit.recipe.file import make_recipe
from toolkit.run_dir import heartbeat
from toolkit.run_dir.layout import RunDir, check
from toolkit.runtime.sinks.local_files import keep_until
from toolkit.runtime.supervision.supervise import run_all
from toolkit.runtime.supervision.warm_pool import Enter, WarmProcess
from toolkit.sessions.resolve import resolve

Disturb = Callable[[RunDir], None]


class Outcome:
    """How a supervised run ended."""

    def __init__(self, run: RunDir, code: int, message: str, seconds: float) -> None:
        self.run, self.code, self.message = run, code, message
        self.seconds = seconds
        """From the disturbance to the end."""

    @property
    def losses(self) -> dict[int, float]:
        return {record["step"]: record["loss"] for record in keep_until(self.run.metrics, 10**9)}


def supervised(
    recipe: Mapping[str, Any],
    path: Path,
    disturb: Disturb | None,
    *overrides: str,
    nproc: int = 2,
    enter: Enter | None = None,
    env: Mapping[str, str] | None = None,
) -> Outcome:
    """Run a recipe into a directory, new or resumed; `disturb` gets it in a thread of its own."""
    resolved = resolve(make_recipe(dict(recipe), overrides), nproc)
    run = resolved.write(path, resuming=path.exists())
    pids: list[int] = []
    disturbed = [time.monotonic()]

    def start(command: launchers.Command) -> WarmProcess:
        process = WarmProcess.start(replace(command, env={**command.env, **(env or {})}), enter)
        pids.append(process.pid)
        return process

    def disturber() -> None:
        if disturb is not None:
            disturb(run)
            disturbed.append(time.monotonic())

    threading.Thread(target=disturber, daemon=True).start()
    code, message = 0, ""
    try:
        commands = launchers.commands("local", run.path, nproc, "cpu")
        code = run_all(commands, run, resolved.recipe.train.hang_timeout_seconds, start)
    except RankFailed as error:
        code, message = error.exit_code, str(error)
    assert [pid for pid in pids if _lives(pid)] == [], "an orphan stayed"
    return Outcome(run, code, message, time.monotonic() - disturbed[-1])


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def at_step(run: RunDir, step: int) -> dict[int, heartbeat.Beat]:
    """Wait until the run has done so many steps."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        beats = heartbeat.read_all(run.heartbeats)
        if len(beats) > 1 and all(beat.step >= step and beat.phase != "starting" for beat in beats.values()):
            return beats
        time.sleep(0.01)
    raise AssertionError("the run never got there")


def send(rank: int, number: signal.Signals, step: int = 1) -> Callable[[RunDir], None]:
    return lambda run: os.kill(at_step(run, step)[rank].pid, number)


def assert_whole_and_recent(done: Outcome, every: int) -> None:
    found = store.steps(done.run.checkpoints)
    assert all(check(store.path_of(done.run.checkpoints, step)) == [] for step in found)
    assert max(done.losses, default=0) - (found[0] if found else 0) <= every
