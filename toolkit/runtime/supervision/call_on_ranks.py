"""Call a function on every rank of a group of warm processes; used by preflight, coverage and tests."""

from __future__ import annotations

import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.launching.environment import free_port
from toolkit.runtime.supervision.warm_pool import warm_context

POLL_SECONDS = 0.01


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


def call_on_ranks(function: Callable[..., Any], *args: Any, nproc: int, timeout_seconds: float = 120.0) -> list[Any]:
    """Call `function(*args)` on each rank of a new process group; return results by rank, or `Failure`."""
    context = warm_context()
    with tempfile.TemporaryDirectory(prefix="ranks-") as directory:
        port = free_port()
        processes = [
            context.Process(target=_enter, args=(directory, rank, nproc, port, function, args)) for rank in range(nproc)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + timeout_seconds
        while any(p.is_alive() for p in processes) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
            if any(p.exitcode for p in processes):  # the others would wait for the failed rank
                deadline = min(deadline, time.monotonic() + 2.0)
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
        return [_result(Path(directory) / str(rank), rank, timeout_seconds) for rank in range(nproc)]


def first_failure(results: list[Any]) -> Failure | None:
    """The failure that explains the others: a refusal, else one with a traceback."""
    failures = [result for result in results if isinstance(result, Failure)]
    return max(failures, key=lambda f: (f.refused, bool(f.details)), default=None)


def _result(path: Path, rank: int, timeout_seconds: float) -> Any:
    if not path.exists():
        return Failure(rank, f"no answer within {timeout_seconds:.0f} s, or ended with another rank")
    return pickle.loads(path.read_bytes())  # noqa: S301 - written by our own processes


def _enter(
    directory: str, rank: int, size: int, port: int, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    """Entry of the forked process."""
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    log = os.open(os.devnull, os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        import torch

        from toolkit.runtime.distributed import process_group

        process_group.join(process_group.World.from_env(os.environ))
        torch.set_num_threads(1)  # models here are tiny: more threads would only wait for each other
        answer = function(*args)
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        reason = f"{type(error).__name__}: {lines[0]}"
        answer = Failure(rank, reason, traceback.format_exc(), isinstance(error, ToolkitError))
    path = Path(directory) / str(rank)
    path.with_suffix(".part").write_bytes(pickle.dumps(answer))
    path.with_suffix(".part").rename(path)
    os._exit(1 if isinstance(answer, Failure) else 0)  # at once: a normal exit would wait for peers that may hang
