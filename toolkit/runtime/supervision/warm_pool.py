"""Warm workers: forked from a server that has torch, DeepSpeed and transformers imported.

Two workers start in 0.1 s instead of 6 s. For CPU runs only: torch 2.13 can't use CUDA in a process that was forked
after CUDA was initialised.
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
"""Entry of a forked process, called with a command's argv and environment."""


def run_warm(commands: Sequence[Command], enter: Enter | None = None) -> list[int]:
    """Run worker commands in forked processes; return their exit codes. If one fails, the others are ended."""
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
    """A forked worker as a `supervise.Process`."""

    process: ForkServerProcess

    @classmethod
    def start(cls, command: Command, enter: Enter | None = None) -> WarmProcess:
        """Fork a worker."""
        process = warm_context().Process(target=enter or enter_worker, args=(command.argv, dict(command.env)))
        process.start()
        return cls(process)

    @property
    def pid(self) -> int:
        """Process id."""
        assert self.process.pid is not None
        return self.process.pid

    def poll(self) -> int | None:
        """Exit code; None while it runs."""
        return self.process.exitcode

    def kill(self) -> None:
        """Kill the process."""
        self.process.kill()

    def wait(self) -> None:
        """Wait until the process has ended."""
        self.process.join()


@functools.cache
def warm_context() -> ForkServerContext:
    """Context that forks processes from a server with the slow imports done."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["toolkit.preload"])
    return context


def _await(processes: Sequence[ForkServerProcess]) -> None:
    deadline = time.monotonic() + GRACE_SECONDS
    while time.monotonic() < deadline and any(process.is_alive() for process in processes):
        time.sleep(POLL_SECONDS)


def enter_worker(argv: tuple[str, ...], env: dict[str, str]) -> None:
    """Entry of a forked process: run the worker as if `argv` had been started with `env`."""
    # Imported by name, like `python -m` does: supervision is below the worker in the package order.
    worker = importlib.import_module(WORKER)
    os.environ.update(env)
    position = argv.index(WORKER)
    sys.exit(worker.main(argv[position + 1 :]))
