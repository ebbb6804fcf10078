"""Who failed, and what a person needs to know about it: from exit codes, last beats, logs and the host."""

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
from toolkit.runtime.supervision import diagnosis
from toolkit.units import GIB

TAIL_LINES = 15
SPOKEN: tuple[type[ToolkitError], ...] = (BadInput, NoPlanFits, LossNotFinite, Preempted)
"""Ends that the workers have told the person about in one message."""
_NO_MEMORY = re.compile(r"OutOfMemory|out of memory|can't allocate memory|MemoryError")


def report(codes: Mapping[int, int | None], beats: dict[int, Beat], run: RunDir, kills_before: int) -> int:
    """The exit code if the workers have said why; else `RankFailed`, which names the rank."""
    rank = first_to_fail(codes, beats)
    code = codes.get(rank) or (beats[rank].exit_code if rank in beats else None)
    if code in {error.exit_code for error in SPOKEN}:
        return int(code or 0)
    text = _failure(rank, code, beats.get(rank), run, oom_kills() - kills_before)
    raise OutOfMemory(text) if rank in beats and _NO_MEMORY.search(beats[rank].error) else RankFailed(text)


def first_to_fail(codes: Mapping[int, int | None], beats: Mapping[int, Beat]) -> int:
    """The rank that failed by itself, not because another one had gone."""
    ranks = sorted({*codes, *beats})
    killed = [rank for rank in ranks if (codes.get(rank) or 0) < 0]
    told = sorted((beats[r].time, r) for r in ranks if r in beats and beats[r].exit_code)
    causes = [rank for _, rank in told if not beats[rank].lost_others]
    vanished = [r for r in ranks if r in beats and beats[r].exit_code is None and not _is_alive(beats[r])]
    silent = [rank for rank in ranks if codes.get(rank) and rank not in {r for _, r in told}]
    return next(iter([*killed, *causes, *vanished, *silent, *(rank for _, rank in told), *ranks, 0]))


def _failure(rank: int, code: int | None, beat: Beat | None, run: RunDir, kills: int) -> str:
    host, step = (beat.host, f" at step {beat.step}") if beat else (socket.gethostname(), "")
    lines = [f"rank {rank} on {host} {_cause(code, beat)}{step}"]
    if code == -signal.SIGKILL or (beat and beat.exit_code is None):
        memory = psutil.virtual_memory()
        acted = f"the kernel killed {kills} for lack of memory meanwhile" if kills else "its OOM killer was idle"
        lines.append(f"memory of the host: {memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB free; {acted}")
    lines.append(f"its log: {run.log(rank)}")
    return "\n".join([*lines, tail(run.log(rank))])


def _cause(code: int | None, beat: Beat | None) -> str:
    if code is not None and code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    if beat and beat.error:
        return f"failed: {beat.error}"
    if beat and beat.exit_code is None:
        return "was ended by a signal, or without a word"
    return f"failed with exit code {code}"


def hang_message(
    beats: dict[int, Beat], stopped: list[int], stacks: dict[int, str], run: RunDir, seconds: float
) -> str:
    """Who holds the others up, and in which collective they wait."""
    waiting = {rank: diagnosis.collective_of(stack) for rank, stack in stacks.items() if stack}
    guilty = diagnosis.culprits(stopped, waiting, beats)
    lines = [f"nothing was done for {seconds:.0f} s"]
    for rank in guilty:
        beat = beats[rank]
        state = "is stopped" if rank in stopped else "hangs"
        where = waiting.get(rank) or diagnosis.place_of(stacks.get(rank, ""))
        lines.append(f"rank {rank} on {beat.host} {state} at step {beat.step}, in {where}")
    others = sorted({c for rank, c in waiting.items() if c and rank not in guilty})
    if others:
        lines.append(f"the other ranks wait for it in {', '.join(others)}")
    lines.append(f"stacks of every rank are in {run.log(0).parent}")
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
    """Whether that process is a worker of ours still, and not another that got its number."""
    try:
        return "toolkit.worker" in " ".join(psutil.Process(pid).cmdline())
    except psutil.Error:
        return False


def _is_alive(beat: Beat) -> bool:
    return not is_here(beat) or (is_worker(beat.pid) and psutil.Process(beat.pid).status() != psutil.STATUS_ZOMBIE)


def oom_kills() -> int:
    """How often the kernel has killed a process for lack of memory since it started."""
    try:
        match = re.search(r"^oom_kill (\d+)", Path("/proc/vmstat").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(match[1]) if match else 0


def log_size(log: Path) -> int:
    """Bytes of a log so far."""
    return log.stat().st_size if log.exists() else 0


def log_since(log: Path, offset: int) -> str:
    """What was logged after a position."""
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
    """The collective that a dumped stack waits in; empty if it is in none."""
    match = _COLLECTIVES.search(stack)
    return match[1] if match else ""


def main_stack(dump: str) -> str:
    """The part of a dump that is the worker's own thread: the last one that entered through the worker."""
    threads = re.split(r"(?m)^(?=(?:Current thread|Thread) 0x)", dump)
    own = [thread for thread in threads if "toolkit/worker.py" in thread]
    return own[-1] if own else ""


def place_of(stack: str) -> str:
    """The innermost line of a stack, as `file:line in function`."""
    match = re.search(r'File "([^"]+)", line (\d+) in (\S+)', stack)
    return f"{match[1]}:{match[2]} in {match[3]}" if match else "an unknown place"


def culprits(stopped: Iterable[int], waiting: dict[int, str], beats: dict[int, Beat]) -> list[int]:
    """Which ranks hold the others up: those that are stopped; else those in no collective; else those behind."""
    found = sorted(stopped)
    if not found:
        found = sorted(rank for rank, collective in waiting.items() if not collective)
    if not found and beats:
        least = min(beat.progress for beat in beats.values())
        found = sorted(rank for rank, beat in beats.items() if beat.progress == least)
    return found
