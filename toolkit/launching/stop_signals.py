"""Stop requests: SIGTERM and SIGUSR1 (from Slurm, Kubernetes or a person) set a flag, read between steps."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """Whether this process was asked to stop, and by which signal."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def listen(self) -> None:
        """Record the signals from now on instead of letting them end the process."""
        for number in SIGNALS:
            signal.signal(number, self._record)

    def _record(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number)


@contextmanager
def forwarded(forward: Callable[[signal.Signals], object]) -> Iterator[None]:
    """Forward stop signals to the workers inside the context, so that the supervisor outlives their last checkpoint."""
    before: dict[signal.Signals, Any] = {}
    try:
        for each in SIGNALS:
            before[each] = signal.signal(each, lambda number, frame: forward(signal.Signals(number)))
    except ValueError:  # not the main thread, as in a notebook: Python delivers no signals there
        pass
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
