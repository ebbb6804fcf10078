"""Being asked to stop: SIGTERM and SIGUSR1 (Slurm, Kubernetes, a person) set a flag that the run looks at."""

from __future__ import annotations

import signal
from types import FrameType

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
