"""The connection to one host's agent: what was heard through it, by whatever way it goes."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from toolkit.launching.hostfile import Host
from toolkit.runtime.hosts.agent import BEAT_SECONDS


class Channel(Protocol):
    """The way to an agent: its standard streams, from afar."""

    def write(self, line: str) -> None:
        """To the agent; `OSError` or `ValueError` if it is not there."""

    def output(self) -> Iterator[str]:
        """What the agent says, line by line, to its end."""

    def complaints(self) -> Iterator[str]:
        """What comes on standard error."""

    def hang_up(self) -> None:
        """No more input."""

    def leave(self, seconds: float) -> None:
        """Wait for the agent to end, but not longer than that."""

    def end(self) -> str:
        """Why nothing more comes."""


class HostLink:
    """One host. What its workers print is printed here."""

    def __init__(
        self, host: Host, channel: Channel, *, env: Mapping[str, str] | None = None, address: str = ""
    ) -> None:
        self.host = host
        self.env = dict(env or {})
        """Settings of this host's workers alone."""
        self._address = address
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
        self._channel = channel
        self._threads = [
            threading.Thread(target=work, daemon=True) for work in (self._listen, self._complain, self._ping)
        ]
        for thread in self._threads:
            thread.start()

    def send(self, **message: Any) -> None:
        """One line; a link that is broken is noticed by its silence."""
        with self._lock, contextlib.suppress(OSError, ValueError):
            self._channel.write(json.dumps(message) + "\n")

    @property
    def address(self) -> str:
        """Where other hosts reach it."""
        return self._address or self.hello["address"] or self.host.name

    def is_lost(self, silence_seconds: float) -> bool:
        """Whether the host has gone before its workers had ended."""
        return self.end is None and not self.refused and (self.closed or self._silent_seconds() > silence_seconds)

    def reason(self) -> str:
        """Why nothing comes from there."""
        if self._complaints:
            return self._complaints[-1]
        if self.closed:
            return self._channel.end()
        return f"nothing was heard of it for {self._silent_seconds():.0f} s"

    def hang_up(self) -> None:
        """The agent ends when nobody speaks to it."""
        with self._lock:
            self._channel.hang_up()

    def leave(self, seconds: float) -> None:
        """Wait for the agent to end, but not longer than that."""
        self._channel.leave(seconds)
        for thread in self._threads[:2]:
            thread.join(timeout=1)

    def _silent_seconds(self) -> float:
        return time.monotonic() - self._heard

    def _ping(self) -> None:
        while not self.closed:
            self.send(ping=True)
            time.sleep(BEAT_SECONDS)

    def _listen(self) -> None:
        for line in self._channel.output():
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
        """Before the greeting it is the way there that speaks; afterwards the workers."""
        for line in self._channel.complaints():
            if self.hello:
                print(line, end="", file=sys.stderr, flush=True)
            elif line.strip():
                self._complaints.append(line.strip())
