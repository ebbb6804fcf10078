"""How long this process is held by DeepSpeed's collectives, measured without synchronising anything."""

from __future__ import annotations

import time
from typing import Any

import deepspeed.comm.comm as comm

_TIMED = frozenset(
    {
        "all_reduce",
        "all_reduce_coalesced",
        "reduce_scatter",
        "reduce_scatter_tensor",
        "reduce",
        "all_gather",
        "all_gather_into_tensor",
        "all_gather_coalesced",
        "broadcast",
        "all_to_all_single",
        "all_to_all",
        "send",
        "recv",
        "barrier",
    }
)


class CommTimer:
    """Stands before DeepSpeed's backend and adds up the time inside its collectives.

    On a CPU that is all of the communication; on an accelerator collectives return at once,
    and it is the part that the host waits for.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._backend, name)
        return self._timed(attribute) if name in _TIMED else attribute

    def _timed(self, collective: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return collective(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - start

        return run

    def take(self) -> float:
        """Seconds since the last call."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds


def install() -> CommTimer:
    """Time all collectives of this process from now on."""
    timer = CommTimer(comm.cdb)
    comm.cdb = timer
    return timer
