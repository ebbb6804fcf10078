"""Stop requests: SIGTERM, SIGUSR1 and SIGHUP (from Slurm, Kubernetes, a closed terminal or a person).

A worker sets a flag that is read between steps; a supervisor passes the request on; before training, a command ends.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from toolkit.errors import Preempted

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


class StopRequest:
    """Whether this process was asked to stop, and by which signal."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def listen(self) -> None:
        """Record the signals from now on instead of letting them end the process."""
        for number in _heeded():
            signal.signal(number, self._record)

    def record(self, number: signal.Signals) -> None:
        """Record a request to stop."""
        self.signal = number

    def _record(self, number: int, frame: FrameType | None) -> None:
        self.record(signal.Signals(number))


@contextmanager
def forwarded(forward: Callable[[signal.Signals], object]) -> Iterator[None]:
    """Call `forward` with stop signals inside the context, so that the supervisor outlives the last checkpoint.

    Afterwards the handlers are those of before, unless others were set inside: `ignore` holds until the process ends.
    """
    before: dict[signal.Signals, Any] = {}

    def handle(number: int, frame: FrameType | None) -> None:
        forward(signal.Signals(number))

    try:
        for each in _heeded():
            before[each] = signal.signal(each, handle)
    except ValueError:  # not the main thread, as in a notebook: Python delivers no signals there
        pass
    try:
        yield
    finally:
        for each, handler in before.items():
            if signal.getsignal(each) is handle:
                signal.signal(each, handler)


def ending_the_command() -> Any:
    """Context in which a stop signal raises `Preempted`: before the workers start, and between two attempts.

    While workers run, their supervisor decides instead. The exception ends child processes that are being waited for.
    """
    return forwarded(_raise)


def ignore() -> None:
    """Ignore stop signals from now on: the process has done its work and is about to end with its exit code."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _raise(number: signal.Signals) -> None:
    raise Preempted(f"asked to stop by {number.name} while no worker was running: there was nothing to save")


def _heeded() -> list[signal.Signals]:
    """The stop signals, without SIGHUP if it is ignored: `nohup` means that a closed terminal ends nothing."""
    return [each for each in SIGNALS if each != signal.SIGHUP or signal.getsignal(each) != signal.SIG_IGN]
