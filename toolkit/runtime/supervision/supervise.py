"""Start worker processes and watch them: if one fails or hangs, end the others and name it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

from toolkit.errors import RankFailed
from toolkit.launching.environment import PARENT, environment
from toolkit.launching.launchers import Command
from toolkit.launching.stop_signals import forwarded
from toolkit.run_dir import heartbeat
from toolkit.run_dir.heartbeat import Beat
from toolkit.run_dir.layout import RunDir
from toolkit.runtime.supervision import diagnosis

GRACE_SECONDS = 1.5
"""Time for the other workers to end on their own after one failed, so that they can report why."""
STARTUP_SECONDS = 3600.0
"""No progress for this long before the end of the first step (loading, rendezvous, filling caches) is a hang."""
POLL_SECONDS = 0.05
DUMP_SECONDS = 1.0
"""Maximum time for stack dumps to reach the logs."""


class Process(Protocol):
    """A started worker or launcher."""

    @property
    def pid(self) -> int:
        """Process id."""

    def poll(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""

    def kill(self) -> None:
        """Kill the process."""

    def wait(self) -> Any:
        """Wait until the process has ended."""


def spawn(command: Command) -> Process:
    """Start a process in its own session, so that signals of the terminal do not reach it."""
    env = environment(command.env)
    if command.rank is not None:
        env[PARENT] = str(os.getpid())
    return subprocess.Popen(command.argv, env=env, start_new_session=True)


def run_all(
    commands: Sequence[Command],
    run: RunDir,
    hang_timeout_seconds: float = float("inf"),
    start: Callable[[Command], Process] = spawn,
    *,
    forget: bool = True,
) -> int:
    """Start every command and wait; return 0 or a documented exit code. No started process survives this call.

    `forget` removes earlier heartbeats; hosts that run one job together must keep each other's.
    """
    if forget:
        shutil.rmtree(run.heartbeats, ignore_errors=True)
    kills, own = diagnosis.oom_kills(), OwnWorkers(commands, run)
    processes: list[Process] = []
    try:
        processes.extend(start(command) for command in commands)
        with forwarded(partial(_forward, processes, own)):
            failed = _wait(processes, run, hang_timeout_seconds)
        if not failed:
            return 0
        _await(processes, GRACE_SECONDS)  # an error often hits all ranks: let each report it
        codes = {c.rank: p.poll() for c, p in zip(commands, processes, strict=True) if c.rank is not None}
        return diagnosis.report(codes, heartbeat.read_all(run.heartbeats), run, kills)
    finally:
        end_all(processes, own)


class OwnWorkers:
    """The ranks that `commands` have started; the host may run other ranks of the same run."""

    def __init__(self, commands: Sequence[Command], run: RunDir) -> None:
        self._ranks = {command.rank for command in commands}
        self._run = run

    def beats(self) -> list[Beat]:
        """Last heartbeats of ranks that have not ended on their own."""
        beats = [beat for beat in heartbeat.read_all(self._run.heartbeats).values() if beat.exit_code is None]
        return [beat for beat in beats if diagnosis.is_here(beat) and (None in self._ranks or beat.rank in self._ranks)]


def _wait(processes: Sequence[Process], run: RunDir, timeout: float) -> bool:
    """Wait until all have succeeded (False) or one has failed (True); a hang raises `RankFailed`."""
    watch, looked = Watch(timeout), 0.0
    while True:
        codes = [process.poll() for process in processes]
        if any(codes):
            return True
        if all(code == 0 for code in codes):
            return False
        if time.monotonic() - looked > heartbeat.BEAT_SECONDS / 2:
            looked = time.monotonic()
            seconds = watch.look(heartbeat.read_all(run.heartbeats), looked)
            if seconds:
                raise RankFailed(_hang(watch.beats, run, seconds))
        time.sleep(POLL_SECONDS)


class Watch:
    """Detects a hang from the heartbeats of all ranks: no progress anywhere, or no heartbeat of one rank."""

    def __init__(self, timeout_seconds: float) -> None:
        self.beats: dict[int, Beat] = {}
        self._timeout = timeout_seconds
        self._moved_at: float | None = None
        self._beat_at: dict[int, float] = {}

    def look(self, now: dict[int, Beat], clock: float) -> float:
        """Duration of a hang in seconds; 0 if there is none."""
        if self._moved_at is None or heartbeat.moved(self.beats, now):
            self._moved_at = clock
        for rank, beat in now.items():
            if rank not in self.beats or beat != self.beats[rank]:
                self._beat_at[rank] = clock
        self.beats = now
        silent = [clock - at for rank, at in self._beat_at.items() if rank in now and now[rank].exit_code is None]
        idle = clock - self._moved_at
        # Loading, rendezvous and the first step may be slow, but a live process has heartbeats throughout.
        training = bool(now) and all(beat.phase not in ("starting", "first step") for beat in now.values())
        if idle > (self._timeout if training else max(self._timeout, STARTUP_SECONDS)):
            return idle
        return max([seconds for seconds in silent if seconds > self._timeout], default=0.0)


def _hang(beats: dict[int, Beat], run: RunDir, seconds: float) -> str:
    """Dump the stacks of every rank into its log; return a message that names the rank that hangs."""
    here = {rank: beat for rank, beat in beats.items() if diagnosis.is_here(beat)}
    stopped = [rank for rank, beat in here.items() if diagnosis.is_stopped(beat.pid)]
    offsets = {rank: diagnosis.log_size(run.log(rank)) for rank in here}
    for rank, beat in here.items():
        _send(beat.pid, signal.SIGUSR2)
        if rank in stopped:
            _send(beat.pid, signal.SIGCONT)  # a stopped process dumps its stacks only when it continues
    deadline = time.monotonic() + DUMP_SECONDS
    while time.monotonic() < deadline and not all(_stack(run, rank, offsets[rank]) for rank in here):
        time.sleep(POLL_SECONDS)
    time.sleep(POLL_SECONDS)  # time for the last lines of the last dump
    stacks = {rank: _stack(run, rank, offsets[rank]) for rank in here}
    return diagnosis.hang_message(beats, stopped, stacks, run, seconds)


def _stack(run: RunDir, rank: int, offset: int) -> str:
    """The main thread's stack that a rank has dumped into its log."""
    return diagnosis.main_stack(diagnosis.log_since(run.log(rank), offset))


def _forward(processes: Sequence[Process], own: OwnWorkers, number: signal.Signals) -> None:
    """Forward a signal to the workers, so that they save; a launcher would kill them instead."""
    if not send_to_workers(own.beats(), number):
        for process in processes:
            _send(process.pid, number)


def send_to_workers(beats: Iterable[Beat], number: signal.Signals) -> bool:
    """Send a signal to the workers of these heartbeats; return whether there are any."""
    pids = {beat.pid for beat in beats}
    for pid in pids:
        _send(pid, number)
    return bool(pids)


def end_all(processes: Sequence[Process], own: OwnWorkers) -> None:
    """Kill all workers and their children at once; checkpoints survive a kill at any moment."""
    beats = own.beats()
    for process in processes:
        _send(-process.pid, signal.SIGKILL)
        if process.poll() is None:
            process.kill()
    for beat in beats:
        if diagnosis.is_worker(beat.pid):
            _send(beat.pid, signal.SIGKILL)  # a launcher may have put it into another session
    for process in processes:
        process.wait()


def _await(processes: Sequence[Process], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(process.poll() is None for process in processes):
        time.sleep(POLL_SECONDS)


def _send(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process, or to a process group if the id is negative."""
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return
