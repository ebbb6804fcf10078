"""Warm workers: forked from a server that has torch, DeepSpeed and transformers imported.

Two workers start in 0.1 s instead of 6 s. For CPU runs only: torch 2.13 can't use CUDA in a process that was forked
after CUDA was initialised.
"""

from __future__ import annotations

import functools
import gc
import importlib
import multiprocessing
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.launching import private_network
from toolkit.launching.environment import free_port, set_safe_path, use_loopback
from toolkit.launching.launchers import WORKER, Command, private_directory, private_meeting

GRACE_SECONDS = 5.0
PRELOAD = ("toolkit.runtime.supervision.uncollected_imports", "toolkit.preload")
"""Imported by the server that workers are forked from, in this order."""


Enter = Callable[[tuple[str, ...], dict[str, str]], None]
"""Entry of a forked process, called with a command's argv and environment."""


def run_warm(commands: Sequence[Command], enter: Enter | None = None) -> list[int]:
    """Run worker commands in forked processes; return their exit codes. If one fails, the others are ended."""
    with private_directory(commands) as prepared:
        return _run_forked(prepared, enter or enter_worker)


def _run_forked(commands: Sequence[Command], target: Enter) -> list[int]:
    processes = [_process(target, command.argv, dict(command.env)) for command in commands]
    for process in processes:
        process.start()
    try:
        while running := [process for process in processes if process.is_alive()]:
            if any(process.exitcode for process in processes):
                _await(processes)
                break
            wait([process.sentinel for process in running])
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
        process = _process(enter or enter_worker, command.argv, dict(command.env))
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
    set_safe_path()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOAD])
    return context


def preload(*modules: str) -> None:
    """Have further modules imported once, by the server that workers are forked from; before the first worker."""
    warm_context().set_forkserver_preload([*PRELOAD, *modules])


def _process(target: Callable[..., object], *args: Any) -> ForkServerProcess:
    """A process that calls `target(*args)` with everything imported; not started yet."""
    return warm_context().Process(target=_begin, args=(target, args))


def _begin(target: Callable[..., object], args: tuple[Any, ...]) -> None:
    """Entry of every forked process."""
    gc.freeze()  # keeps the garbage collector off what the server has imported, so that fork copies no pages for it
    gc.enable()
    target(*args)


def _await(processes: Sequence[ForkServerProcess]) -> None:
    deadline = time.monotonic() + GRACE_SECONDS
    while time.monotonic() < deadline and (running := [process for process in processes if process.is_alive()]):
        wait([process.sentinel for process in running], deadline - time.monotonic())


def enter_worker(argv: tuple[str, ...], env: dict[str, str]) -> None:
    """Entry of a forked process: run the worker as if `argv` had been started with `env`."""
    # Imported by name, like `python -m` does: supervision is below the worker in the package order.
    worker = importlib.import_module(WORKER)
    os.environ.update(env)
    position = argv.index(WORKER)
    sys.exit(worker.main(argv[position + 1 :]))


@dataclass(frozen=True)
class Failure:
    """A rank that did not return a result."""

    rank: int
    reason: str
    """The error's message, in one line."""
    details: str = ""
    """The traceback."""
    refused: bool = False
    """Whether the error is a refusal: a `ToolkitError`, whose reason is meant for the user."""
    late: bool = False
    """Whether it had not ended when the time was over, and no other rank had failed."""


def call_on_ranks(function: Callable[..., Any], *args: Any, nproc: int, timeout_seconds: float = 120.0) -> list[Any]:
    """Call `function(*args)` on each rank of a new process group; return results by rank, or `Failure`."""
    with private_meeting() as (directory, variables):
        world = {**variables, "WORLD_SIZE": str(nproc), "LOCAL_WORLD_SIZE": str(nproc)}
        world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        processes = [_process(_enter, directory, rank, world, function, args) for rank in range(nproc)]
        for process in processes:
            process.start()
        deadline = time.monotonic() + timeout_seconds
        while time.monotonic() < deadline and (running := [p for p in processes if p.is_alive()]):
            wait([p.sentinel for p in running], deadline - time.monotonic())
            if any(p.exitcode for p in processes):  # the others would wait for the failed rank
                deadline = min(deadline, time.monotonic() + 2.0)
        failed = any(p.exitcode for p in processes)
        limit = 0.0 if failed else timeout_seconds
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
        return [_result(directory / str(rank), rank, limit) for rank in range(nproc)]


def first_failure(results: list[Any]) -> Failure | None:
    """The failure that explains the others: a refusal, else one with a traceback."""
    failures = [result for result in results if isinstance(result, Failure)]
    return max(failures, key=lambda f: (f.refused, bool(f.details)), default=None)


def _result(path: Path, rank: int, limit_seconds: float) -> Any:
    """What a rank has returned; `limit_seconds`: the time that was over, 0 if a rank failed before."""
    if not path.exists():
        reason = f"no answer within {limit_seconds:.0f} s" if limit_seconds else "ended without an answer"
        return Failure(rank, reason, late=limit_seconds > 0)
    return pickle.loads(path.read_bytes())  # noqa: S301 - written by our own processes


def _enter(
    directory: Path, rank: int, world: dict[str, str], function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    """Entry of the forked process."""
    os.environ.update(world, RANK=str(rank), LOCAL_RANK=str(rank))
    network = private_network.enter(os.environ)
    use_loopback()
    log = os.open(os.devnull, os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        import torch

        from toolkit.runtime.distributed import process_group
        from toolkit.runtime.distributed.rendezvous import Meeting

        own = process_group.World.from_env(os.environ)
        process_group.join(own, Meeting.from_env(os.environ), network=network)
        torch.set_num_threads(1)  # models here are tiny: more threads would only wait for each other
        answer = function(*args)
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        reason = f"{type(error).__name__}: {lines[0]}"
        answer = Failure(rank, reason, traceback.format_exc(), isinstance(error, ToolkitError))
    path = directory / str(rank)
    path.with_suffix(".part").write_bytes(pickle.dumps(answer))
    path.with_suffix(".part").rename(path)
    os._exit(1 if isinstance(answer, Failure) else 0)  # at once: a normal exit would wait for peers that may hang
