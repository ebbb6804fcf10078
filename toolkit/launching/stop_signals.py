"""Being asked to stop: SIGTERM and SIGUSR1 (Slurm, Kubernetes, a person) set a flag that the run looks at."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """Whether this process was asked to stop, and by what."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def listen(self) -> None:
        """From now on the signals are noted instead of ending the process."""
        for number in SIGNALS:
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number)


@contextmanager
def forwarded(forward: Callable[[signal.Signals], object]) -> Iterator[None]:
    """Requests to stop are passed on while this lasts: who supervises workers does not end before they have saved."""
    before: dict[signal.Signals, Any] = {}
    try:
        for each in SIGNALS:
            before[each] = signal.signal(each, lambda number, frame: forward(signal.Signals(number)))
    except ValueError:  # not the main thread (a notebook's helper): nobody sends signals there
        pass
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
