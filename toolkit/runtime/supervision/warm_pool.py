"""Warm workers: forked from a server that has torch, DeepSpeed and transformers imported.

A run of two workers starts in a tenth of a second instead of six. For CPU runs only: a process must not be
forked after an accelerator was touched.
"""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext, ForkServerProcess

from toolkit.launching.launchers import WORKER, Command

POLL_SECONDS = 0.02
GRACE_SECONDS = 5.0


Enter = Callable[[tuple[str, ...], dict[str, str]], None]
"""What a forked process does with a command's argv and environment."""


def run_warm(commands: Sequence[Command], enter: Enter | None = None) -> list[int]:
    """Run worker commands in forked processes; their exit codes. When one fails, the rest are ended."""
    context = warm_context()
    target = enter or enter_worker
    processes = [context.Process(target=target, args=(command.argv, dict(command.env))) for command in commands]
    for process in processes:
        process.start()
    try:
        while any(process.is_alive() for process in processes):
            if any(process.exitcode for process in processes):
                _await(processes)
                break
            time.sleep(POLL_SECONDS)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
    return [process.exitcode if process.exitcode is not None else -1 for process in processes]


@dataclass(frozen=True)
class WarmProcess:
    """A forked worker, as `toolkit.runtime.supervision.supervise` watches it."""

    process: ForkServerProcess

    @classmethod
    def start(cls, command: Command, enter: Enter | None = None) -> WarmProcess:
        """Fork it."""
        process = warm_context().Process(target=enter or enter_worker, args=(command.argv, dict(command.env)))
        process.start()
        return cls(process)

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self.process.pid is not None
        return self.process.pid

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""
        return self.process.exitcode

    def kill(self) -> None:
        """End it now."""
        self.process.kill()

    def wait(self) -> None:
        """Until it has ended."""
        self.process.join()


@functools.cache
def warm_context() -> ForkServerContext:
    """Processes forked from a server that has the slow imports behind it."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["toolkit.preload"])
    return context


def _await(processes: Sequence[ForkServerProcess]) -> None:
    deadline = time.monotonic() + GRACE_SECONDS
    while time.monotonic() < deadline and any(process.is_alive() for process in processes):
        time.sleep(POLL_SECONDS)


def enter_worker(argv: tuple[str, ...], env: dict[str, str]) -> None:
    """The forked process: as if `argv` had been started with `env`."""
    # A process entry, as `python -m` is: imported by name, since supervision lies below the worker in the layers.
    worker = importlib.import_module(WORKER)
    os.environ.update(env)
    position = argv.index(WORKER)
    sys.exit(worker.main(argv[position + 1 :]))
