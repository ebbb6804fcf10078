"""Which rank failed and why: from exit codes, last heartbeats, logs and the host's memory."""

from __future__ import annotations

import os
import re
import signal
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path

import psutil

from toolkit.errors import BadInput, LossNotFinite, NoPlanFits, OutOfMemory, Preempted, RankFailed, ToolkitError
from toolkit.run_dir.heartbeat import Beat
from toolkit.run_dir.layout import RunDir
from toolkit.units import GIB

TAIL_LINES = 15
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


def log_size(log: Path) -> int:
    """Size of a log in bytes."""
    return log.stat().st_size if log.exists() else 0


def log_since(log: Path, offset: int) -> str:
    """The text of a log after an offset."""
    if not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(offset)
        return file.read().decode("utf-8", "replace")


def tail(log: Path) -> str:
    """The last lines of a log."""
    if not log.exists():
        return "  (no log was written)"
    with log.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - 20_000))
        lines = file.read().decode("utf-8", "replace").splitlines()[-TAIL_LINES:]
    return "\n".join(f"  | {line}" for line in lines)


_COLLECTIVES = re.compile(
    r"File \"[^\"]*(?:distributed|deepspeed/comm)[^\"]*\", line \d+ in "
    r"(all_reduce\w*|all_gather\w*|reduce_scatter\w*|reduce|broadcast\w*|barrier|all_to_all\w*|send|recv|gather\w*|wait)\b"
)


def collective_of(stack: str) -> str:
    """The collective that a dumped stack waits in; empty if none."""
    match = _COLLECTIVES.search(stack)
    return match[1] if match else ""


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
