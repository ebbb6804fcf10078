"""Starting worker processes and watching them: when one fails, the rest end, and the message names it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from toolkit.errors import BadInput, LossNotFinite, Preempted, RankFailed, ToolkitError
from toolkit.launch import Command, environment

GRACE_SECONDS = 3.0
"""Time that workers have to end by themselves after one of them failed."""
POLL_SECONDS = 0.05
TAIL_LINES = 15


def run_all(commands: Sequence[Command], logs: Path) -> int:
    """Start every command and wait; 0, or the exit code of the contract. Interrupts end every worker."""
    processes = [
        subprocess.Popen(command.argv, env=environment(command), start_new_session=True) for command in commands
    ]
    try:
        while True:
            codes = [process.poll() for process in processes]
            failed = [index for index, code in enumerate(codes) if code]
            if failed:
                _await(processes, GRACE_SECONDS)  # the fault often meets all: let each say it
                return _report(commands, [process.poll() for process in processes], failed[0], logs)
            if all(code == 0 for code in codes):
                return 0
            time.sleep(POLL_SECONDS)
    finally:
        end_all(processes)


def end_all(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """No worker, and no child of one, stays behind."""
    for process in processes:
        _signal_group(process, signal.SIGTERM)
    _await(processes, GRACE_SECONDS)
    for process in processes:
        _signal_group(process, signal.SIGKILL)
        process.wait()


def _await(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(process.poll() is None for process in processes):
        time.sleep(POLL_SECONDS)


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    try:
        os.killpg(process.pid, number)
    except (ProcessLookupError, PermissionError):
        return


def _report(commands: Sequence[Command], codes: Sequence[int | None], first: int, logs: Path) -> int:
    """The exit code, and for a failed rank its name and last words."""
    code = codes[first] or RankFailed.exit_code
    spoken: tuple[type[ToolkitError], ...] = (BadInput, LossNotFinite, Preempted)
    if code in {error.exit_code for error in spoken}:
        return code  # the worker has said it in one message
    rank = commands[first].rank
    if rank is None:
        return code if code == RankFailed.exit_code else RankFailed.exit_code
    raise RankFailed(
        f"rank {rank} {_cause(code)}; its log: {logs / f'rank-{rank}.log'}\n{_tail(logs / f'rank-{rank}.log')}"
    )


def _cause(code: int) -> str:
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}" + (" (out of memory?)" if code == -signal.SIGKILL else "")
    return f"failed with exit code {code}"


def _tail(log: Path) -> str:
    if not log.exists():
        return "  (no log was written)"
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:]
    return "\n".join(f"  | {line}" for line in lines)
