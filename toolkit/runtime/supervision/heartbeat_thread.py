"""Heartbeat thread: writes progress twice a second; kills the process after the hang timeout."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import IO

from toolkit.errors import RankFailed
from toolkit.run_dir import heartbeat
from toolkit.run_dir.heartbeat import BEAT_SECONDS, Beat

SPARE_SECONDS = 5.0
"""Extra time before a worker ends a hang itself: the supervisor, which can report more, goes first."""


class HeartbeatThread:
    """Progress of a rank: the training loop updates it, the thread writes it to a file."""

    def __init__(self, directory: Path, rank: int, terminal: IO[str], parent: int | None = None) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory, self._terminal, self._parent = directory, terminal, parent
        self._beat = Beat(rank=rank, host=socket.gethostname(), pid=os.getpid(), time=time.time())
        self._timeout = self._wanted = float("inf")
        self._looked = 0.0
        self._seen: dict[int, Beat] = {}
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Start writing. On SIGUSR2, dump the stacks of all threads to standard error, which is the log."""
        faulthandler.register(signal.SIGUSR2, file=sys.stderr, all_threads=True)
        heartbeat.write(self._directory, self._beat)
        self._thread.start()

    def watch(self, timeout_seconds: float) -> None:
        """Start of training: after the first step, which fills caches, no progress for this long is a hang."""
        self._wanted = timeout_seconds
        self.move(phase="first step")

    def move(self, *, step: int | None = None, phase: str | None = None) -> None:
        """Record progress."""
        if step is not None:
            self._timeout = self._wanted
        beat = self._beat
        self._beat = replace(
            beat,
            step=beat.step if step is None else step,
            phase=phase or beat.phase,
            progress=beat.progress + 1,
        )

    def end(self, code: int, error: str) -> bool:
        """Record the normal end of the rank: exit code and error message. Returns whether that could be written."""
        self._done.set()
        self._thread.join()
        try:
            heartbeat.write(self._directory, heartbeat.ended(self._beat, code, error, time.time()))
        except OSError:
            return False
        return True

    def _run(self) -> None:
        seen, since = self._beat.progress, time.monotonic()
        while not self._done.wait(BEAT_SECONDS):
            beat = replace(self._beat, time=time.time())
            with contextlib.suppress(OSError):  # a full disk must not end the rank; a failing save reports it
                heartbeat.write(self._directory, beat)
            if beat.progress != seen:
                seen, since = beat.progress, time.monotonic()
            idle = time.monotonic() - since
            if idle > self._timeout + SPARE_SECONDS or (idle > self._wanted and self._one_is_silent()):
                self._give_up(f"no progress for {idle:.0f} s")
            if self._parent is not None and os.getppid() != self._parent:
                self._give_up("the process that started it is gone")

    def _one_is_silent(self) -> bool:
        """During the first step, which may be slow: whether another rank has had no heartbeat for the full timeout.

        A clock that is set would look like silence, so the heartbeat must also be the same at two looks.
        """
        if time.monotonic() - self._looked < SPARE_SECONDS:
            return False
        self._looked, before = time.monotonic(), self._seen
        self._seen = heartbeat.read_all(self._directory)
        return any(age > self._wanted and before.get(beat.rank) == beat for beat, age in self._silent_beats())

    def _silent_beats(self) -> list[tuple[Beat, float]]:
        """(last heartbeat, seconds since then) of ranks that have not ended but have no recent heartbeat."""
        ages = ((beat, time.time() - beat.time) for beat in heartbeat.read_all(self._directory).values())
        return [(beat, age) for beat, age in ages if age > 4 * BEAT_SECONDS and beat.exit_code is None]

    def _give_up(self, why: str) -> None:
        """End the process from this thread: the main thread may never return."""
        faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        silent = [
            f"rank {beat.rank} on {beat.host} (no heartbeat for {age:.0f} s)" for beat, age in self._silent_beats()
        ]
        text = f"rank {self._beat.rank} on {self._beat.host} ends at step {self._beat.step}: {why}"
        with contextlib.suppress(OSError):  # the terminal may be closed, or the disk full
            heartbeat.write(self._directory, heartbeat.ended(self._beat, RankFailed.exit_code, why, time.time()))
            print(text + (f"; {', '.join(silent)}" if silent else ""), file=self._terminal, flush=True)
        os._exit(RankFailed.exit_code)
