"""Start worker processes and watch them: if one fails or hangs, end the others and name it."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import psutil

from toolkit.errors import BadInput, LossNotFinite, NoPlanFits, OutOfMemory, Preempted, RankFailed, ToolkitError
from toolkit.launching.environment import PARENT, environment
from toolkit.launching.launchers import Command, private_directory
from toolkit.launching.machine_checks import cgroup_limit_bytes, full_disk
from toolkit.launching.stop_signals import StopRequest, forwarded
from toolkit.run_dir import heartbeat
from toolkit.run_dir.heartbeat import Beat
from toolkit.run_dir.layout import RunDir, log_since, log_size, tail
from toolkit.units import GIB

GRACE_SECONDS = 1.5
"""Time for the other workers to end on their own after one failed, so that they can report why."""
STARTUP_SECONDS = 3600.0
"""No progress for this long before the end of the first step (loading, rendezvous, filling caches) is a hang."""
POLL_SECONDS = 0.05
NOTICE_SECONDS = 2 * heartbeat.BEAT_SECONDS
"""Time after a stop request in which a heartbeat may still report the first step, which is then saved."""
DUMP_SECONDS = 2.0
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
    return subprocess.Popen(command.argv, env=env, cwd=command.cwd, start_new_session=True)


def run_all(
    commands: Sequence[Command],
    run: RunDir,
    hang_timeout_seconds: float = float("inf"),
    start: Callable[[Command], Process] = spawn,
    *,
    forget: bool = True,
    stop: StopRequest | None = None,
) -> int:
    """Start every command and wait; return 0 or a documented exit code. No started process survives this call.

    `forget` removes earlier heartbeats; hosts that run one job together must keep each other's. `stop` is for callers
    that listen for stop signals themselves. A run that is asked to stop ends with 75, at any moment of its life.
    """
    if forget:
        shutil.rmtree(run.heartbeats, ignore_errors=True)
    kills, own, stop = oom_kills(), OwnWorkers(run), stop or StopRequest()
    # Signals are forwarded from before the first fork until no process is left.
    with forwarded(stop.record), private_directory(commands) as prepared:
        try:
            for command in prepared:
                own.processes.append(start(command))
            code = _wait(own, run, hang_timeout_seconds, stop)
            if code is not None:
                return code
            _await(own.processes, GRACE_SECONDS)  # an error often hits all ranks: let each report it
            codes = {c.rank: p.poll() for c, p in zip(commands, own.processes, strict=True) if c.rank is not None}
            beats = heartbeat.read_all(run.heartbeats)
            code = _code_when_stopped(beats) if stop.signal else None
            return report(codes, beats, run, kills) if code is None else code
        except RankFailed as error:
            error.stopped = stop.signal is not None
            raise
        finally:
            end_all(own)


class OwnWorkers:
    """The processes of a run that this supervisor has started, and the workers that those have started.

    Heartbeat files only say which processes to look at: anyone who can write to the run directory can plant one, so a
    process is signalled only if it descends from one of ours, and only while it is the same process.
    """

    def __init__(self, run: RunDir) -> None:
        self.processes: list[Process] = []
        self._run = run
        self._workers: dict[int, psutil.Process] = {}
        """Workers by process id."""

    def pids(self) -> list[int]:
        """Workers that have not ended, by their heartbeats."""
        beats = heartbeat.read_all(self._run.heartbeats).values()
        return [beat.pid for beat in beats if beat.exit_code is None and is_here(beat) and self.owns(beat.pid)]

    def owns(self, pid: int) -> bool:
        """Whether a process is ours. Asked while it runs, the answer stays right after its launcher has gone."""
        try:
            process = psutil.Process(pid)
            if pid not in self._workers:
                ours = {each.pid for each in self.processes if each.poll() is None}
                if not ours & {pid, *(parent.pid for parent in process.parents())}:
                    return False
                self._workers[pid] = process
            # psutil compares ticks since boot. `create_time()` moves whenever the host's clock is set.
            return bool(self._workers[pid] == process)
        except (psutil.Error, ValueError, TypeError, OverflowError):  # gone, or no process id at all
            return False


def _code_when_stopped(beats: dict[int, Beat]) -> int | None:
    """The exit code of a run that was asked to stop; None if a rank failed for another reason."""
    codes = {beat.exit_code for beat in beats.values()}
    if codes and codes <= {0, Preempted.exit_code}:
        return max(code or 0 for code in codes)
    reported = {error.exit_code for error in REPORTED}
    return None if heartbeat.has_stepped(beats) or codes & reported else Preempted.exit_code


def _wait(own: OwnWorkers, run: RunDir, timeout: float, stop: StopRequest) -> int | None:
    """Wait until the run has ended, and return its exit code; None if a process has failed. A hang raises."""
    watch, looked, asked_at = Watch(timeout), 0.0, 0.0
    told: set[int] = set()
    while True:
        codes = [process.poll() for process in own.processes]
        if any(codes):
            return None
        if all(code == 0 for code in codes):
            return 0
        if time.monotonic() - looked > heartbeat.BEAT_SECONDS / 2:
            looked = time.monotonic()
            beats = heartbeat.read_all(run.heartbeats)
            pids = own.pids()  # remembers workers while their launcher lives
            if seconds := watch.look(beats, looked):
                raise RankFailed(_hang(own, beats, run, seconds))
            if stop.signal:
                asked_at = asked_at or looked
                for pid in {*pids} - told:  # so that they save; a launcher would kill them instead
                    _send(pid, stop.signal)
                told |= {*pids}
                if looked - asked_at > NOTICE_SECONDS and not heartbeat.has_stepped(beats):
                    print("asked to stop before the first step: there was nothing to save", file=sys.stderr, flush=True)
                    return Preempted.exit_code
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


def _hang(own: OwnWorkers, beats: dict[int, Beat], run: RunDir, seconds: float) -> str:
    """Dump the stacks of every rank into its log; return a message that names the rank that hangs."""
    here = {rank: beat for rank, beat in beats.items() if is_here(beat) and own.owns(beat.pid)}
    stopped = [rank for rank, beat in here.items() if is_stopped(beat.pid)]
    offsets = {rank: log_size(run.log(rank)) for rank in here}
    waiting = [rank for rank in here if rank not in stopped]
    deadline = time.monotonic() + DUMP_SECONDS
    for ranks in (waiting, stopped):  # in this order: a stopped rank must continue to dump, and the others with it
        for rank in ranks:
            _send(here[rank].pid, signal.SIGUSR2)
            _send(here[rank].pid, signal.SIGCONT)
        while time.monotonic() < deadline and not all(_stack(run, rank, offsets[rank]) for rank in ranks):
            time.sleep(POLL_SECONDS)
    time.sleep(POLL_SECONDS)  # time for the last lines of the last dump
    stacks = {rank: _stack(run, rank, offsets[rank]) for rank in here}
    return hang_message(beats, stopped, stacks, run, seconds)


def _stack(run: RunDir, rank: int, offset: int) -> str:
    """The main thread's stack that a rank has dumped into its log."""
    return main_stack(log_since(run.log(rank), offset))


def end_all(own: OwnWorkers) -> None:
    """Kill all workers and their children at once; checkpoints survive a kill at any moment."""
    workers = own.pids()
    family: list[psutil.Process] = []
    for process in own.processes:
        if process.poll() is None:
            _send(process.pid, signal.SIGSTOP)  # a launcher that starts another worker meanwhile would leave it behind
            with contextlib.suppress(psutil.Error):
                family += psutil.Process(process.pid).children(recursive=True)
        _send(-process.pid, signal.SIGKILL)
        if process.poll() is None:
            process.kill()
    for pid in workers:
        if own.owns(pid):
            _send(pid, signal.SIGKILL)  # a launcher may have put it into another session
    for each in family:
        with contextlib.suppress(psutil.Error):
            each.kill()
    for process in own.processes:
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


REPORTED: tuple[type[ToolkitError], ...] = (BadInput, NoPlanFits, LossNotFinite, Preempted)
"""Errors that the workers have reported to the user themselves."""
_NO_MEMORY = re.compile(r"OutOfMemory|out of memory|can't allocate memory|MemoryError")


def report(codes: Mapping[int, int | None], beats: dict[int, Beat], run: RunDir, kills_before: int) -> int:
    """The exit code if the workers have reported the reason; otherwise raise `RankFailed`, which names the rank."""
    rank = first_to_fail(codes, beats)
    code = codes.get(rank) or (beats[rank].exit_code if rank in beats else None)
    if code in {error.exit_code for error in REPORTED}:
        return int(code or 0)
    text = _failure(rank, code, beats.get(rank), run, oom_kills() - kills_before)
    raise OutOfMemory(text) if rank in beats and _NO_MEMORY.search(beats[rank].error) else RankFailed(text)


def first_to_fail(codes: Mapping[int, int | None], beats: Mapping[int, Beat]) -> int:
    """The rank that failed on its own, not because it lost another rank."""
    ranks = sorted({*codes, *beats})
    killed = [rank for rank in ranks if (codes.get(rank) or 0) < 0]
    reported = sorted((beats[r].time, r) for r in ranks if r in beats and beats[r].exit_code)
    causes = [rank for _, rank in reported if not beats[rank].lost_others]
    vanished = [r for r in ranks if r in beats and beats[r].exit_code is None and not _is_alive(beats[r])]
    silent = [rank for rank in ranks if codes.get(rank) and rank not in {r for _, r in reported}]
    return next(iter([*killed, *causes, *vanished, *silent, *(rank for _, rank in reported), *ranks, 0]))


def _failure(rank: int, code: int | None, beat: Beat | None, run: RunDir, kills: int) -> str:
    host, step = (beat.host, f" at step {beat.step}") if beat else (socket.gethostname(), "")
    lines = [f"rank {rank} on {host} {_cause(code, beat)}{step}"]
    if code == -signal.SIGKILL or (beat and beat.exit_code is None):
        memory = psutil.virtual_memory()
        acted = f"the OOM killer killed {kills} processes meanwhile" if kills else "the OOM killer was not active"
        lines.append(f"memory of the host: {memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB free; {acted}")
        if (limit := cgroup_limit_bytes()) is not None:
            lines.append(f"memory limit of its control group (container or job): {limit / GIB:.2f} GiB")
    lines += full_disk(run.path)  # ranks could then report neither in logs nor in heartbeats
    lines.append(f"its log: {run.log(rank)}")
    return "\n".join([*lines, tail(run.log(rank))])


def _cause(code: int | None, beat: Beat | None) -> str:
    if code is not None and code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    if beat and beat.error:
        return f"failed: {beat.error}"
    if beat and beat.exit_code is None:
        return "was ended by a signal, or without an error message"
    return f"failed with exit code {code}"


def hang_message(
    beats: dict[int, Beat], stopped: list[int], stacks: dict[int, str], run: RunDir, seconds: float
) -> str:
    """Which rank hangs, and in which collective the others wait."""
    waiting = {rank: collective_of(stack) for rank, stack in stacks.items() if stack}
    guilty = culprits(stopped, waiting, beats)
    lines = [f"no progress for {seconds:.0f} s"]
    for rank in guilty:
        beat = beats[rank]
        state = "is stopped" if rank in stopped else "hangs"
        where = waiting.get(rank) or place_of(stacks.get(rank, ""))
        lines.append(f"rank {rank} on {beat.host} {state} at step {beat.step}, in {where}")
    others = sorted({c for rank, c in waiting.items() if c and rank not in guilty})
    if others:
        lines.append(f"the other ranks wait for it in {', '.join(others)}")
    lines.append(f"the stacks of all ranks are in {run.log(0).parent}")
    return "\n".join(lines)


def is_here(beat: Beat) -> bool:
    """Whether the rank is on this host."""
    return beat.host == socket.gethostname()


def is_stopped(pid: int) -> bool:
    """Whether a process was stopped (SIGSTOP, a debugger)."""
    try:
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except psutil.Error:
        return False


def is_worker(pid: int) -> bool:
    """Whether a process is still a worker of ours, and not another one with the same process id."""
    try:
        return "toolkit.worker" in " ".join(psutil.Process(pid).cmdline())
    except psutil.Error:
        return False


def _is_alive(beat: Beat) -> bool:
    return not is_here(beat) or (is_worker(beat.pid) and psutil.Process(beat.pid).status() != psutil.STATUS_ZOMBIE)


def oom_kills() -> int:
    """Number of processes that the kernel's OOM killer has killed since boot."""
    try:
        match = re.search(r"^oom_kill (\d+)", Path("/proc/vmstat").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(match[1]) if match else 0


_COLLECTIVES = re.compile(
    r"File \"[^\"]*(?:distributed|deepspeed/comm)[^\"]*\", line \d+ in "
    r"(all_reduce\w*|all_gather\w*|reduce_scatter\w*|reduce|broadcast\w*|barrier|all_to_all\w*|send\w*|recv|gather\w*|wait)\b"
)


def collective_of(stack: str) -> str:
    """The collective that a dumped stack waits in; empty if none."""
    match = _COLLECTIVES.search(stack)
    return match[1].removesuffix("_wait") if match else ""


def main_stack(dump: str) -> str:
    """The stack of the worker's main thread in a dump: the last one that entered through the worker."""
    threads = re.split(r"(?m)^(?=(?:Current thread|Thread) 0x)", dump)
    own = [thread for thread in threads if "toolkit/worker.py" in thread]
    return own[-1] if own else ""


def place_of(stack: str) -> str:
    """The innermost line of a stack, as `file:line in function`."""
    match = re.search(r'File "([^"]+)", line (\d+) in (\S+)', stack)
    return f"{match[1]}:{match[2]} in {match[3]}" if match else "an unknown place"


def culprits(stopped: Iterable[int], waiting: dict[int, str], beats: dict[int, Beat]) -> list[int]:
    """The ranks that cause a hang: stopped ones; else those in no collective; else those with the least progress."""
    found = sorted(stopped)
    if not found:
        found = sorted(rank for rank, collective in waiting.items() if not collective)
    if not found and beats:
        least = min(beat.progress for beat in beats.values())
        found = sorted(rank for rank, beat in beats.items() if beat.progress == least)
    return found
