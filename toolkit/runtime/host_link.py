"""The connection to one host's agent: a process of ssh, and what was heard through it."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from toolkit.hostfile import Host
from toolkit.runtime.host_agent import BEAT_SECONDS


class HostLink:
    """One host. What its workers print is printed here."""

    def __init__(self, host: Host, argv: Sequence[str]) -> None:
        self.host = host
        self.hello: dict[str, Any] = {}
        """The agent's greeting; empty until it has come."""
        self.refused = ""
        """Why the host can't do what was ordered."""
        self.end: dict[str, Any] | None = None
        """How the workers ended."""
        self.closed = False
        """Whether nothing more can be heard."""
        self._heard = time.monotonic()
        self._lock = threading.Lock()
        self._complaints: deque[str] = deque(maxlen=5)
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,  # Ctrl-C is ours to pass on
        )
        self._threads = [
            threading.Thread(target=work, daemon=True) for work in (self._listen, self._complain, self._ping)
        ]
        for thread in self._threads:
            thread.start()

    def send(self, **message: Any) -> None:
        """One line; a link that is broken is noticed by its silence."""
        assert self._process.stdin is not None
        with self._lock, contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()

    def is_lost(self, silence_seconds: float) -> bool:
        """Whether the host has gone before its workers had ended."""
        return self.end is None and not self.refused and (self.closed or self._silent_seconds() > silence_seconds)

    def reason(self) -> str:
        """Why nothing comes from there."""
        if self._complaints:
            return self._complaints[-1]
        if self.closed:
            return f"ssh ended with exit code {self._process.wait()}"
        return f"nothing was heard of it for {self._silent_seconds():.0f} s"

    def hang_up(self) -> None:
        """The agent ends when nobody speaks to it."""
        assert self._process.stdin is not None
        with self._lock, contextlib.suppress(OSError):
            self._process.stdin.close()

    def leave(self, seconds: float) -> None:
        """Wait for the agent to end; ssh is not waited for any longer."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for thread in self._threads[:2]:
            thread.join(timeout=1)

    def _silent_seconds(self) -> float:
        return time.monotonic() - self._heard

    def _ping(self) -> None:
        while not self.closed:
            self.send(ping=True)
            time.sleep(BEAT_SECONDS)

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._heard = time.monotonic()
            try:
                self._take(json.loads(line))
            except ValueError:  # a shell's greeting
                self._complaints.append(line.strip())
        self.closed = True

    def _take(self, message: dict[str, Any]) -> None:
        if "out" in message:
            print(message["out"], end="", flush=True)
        self.hello = message.get("hello", self.hello)
        self.refused = message.get("refused", self.refused)
        self.end = message.get("end", self.end)

    def _complain(self) -> None:
        """Before the greeting it is ssh that speaks; afterwards the workers."""
        assert self._process.stderr is not None
        for line in self._process.stderr:
            if self.hello:
                print(line, end="", file=sys.stderr, flush=True)
            elif line.strip():
                self._complaints.append(line.strip())
