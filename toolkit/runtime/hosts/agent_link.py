"""The controller's link to one host's agent, over any channel."""

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
    """A way to reach an agent: its standard streams."""

    def write(self, line: str) -> None:
        """Write to the agent's standard input; `OSError` or `ValueError` if it is gone."""

    def output(self) -> Iterator[str]:
        """Lines of the agent's standard output, until it ends."""

    def complaints(self) -> Iterator[str]:
        """Lines of standard error."""

    def hang_up(self) -> None:
        """Close the agent's standard input."""

    def leave(self, seconds: float) -> None:
        """Wait for the agent to end, for at most this long."""

    def end(self) -> str:
        """Why the channel is closed."""


class HostLink:
    """The link to one host. Output of its workers is printed here."""

    def __init__(
        self, host: Host, channel: Channel, *, env: Mapping[str, str] | None = None, address: str = ""
    ) -> None:
        self.host = host
        self.env = dict(env or {})
        """Environment of this host's workers only."""
        self._address = address
        self.hello: dict[str, Any] = {}
        """The agent's greeting; empty until it has arrived."""
        self.refused = ""
        """Why the host has refused the order; empty if it has not."""
        self.end: dict[str, Any] | None = None
        """How the workers ended."""
        self.closed = False
        """Whether the channel is closed."""
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
        """Send one message; a broken link is detected by its silence."""
        with self._lock, contextlib.suppress(OSError, ValueError):
            self._channel.write(json.dumps(message) + "\n")

    @property
    def address(self) -> str:
        """Address at which other hosts reach this host."""
        return self._address or self.hello["address"] or self.host.name

    def is_lost(self, silence_seconds: float) -> bool:
        """Whether the host was lost before its workers ended."""
        return self.end is None and not self.refused and (self.closed or self._silent_seconds() > silence_seconds)

    def reason(self) -> str:
        """Why the host is lost."""
        if self._complaints:
            return self._complaints[-1]
        if self.closed:
            return self._channel.end()
        return f"no message for {self._silent_seconds():.0f} s"

    def hang_up(self) -> None:
        """Close the connection; the agent then ends itself and its workers."""
        with self._lock:
            self._channel.hang_up()

    def leave(self, seconds: float) -> None:
        """Wait for the agent to end, for at most this long."""
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
            except ValueError:  # not JSON: the greeting of a login shell
                self._complaints.append(line.strip())
        self.closed = True

    def _take(self, message: dict[str, Any]) -> None:
        if "out" in message:
            print(message["out"], end="", flush=True)
        self.hello = message.get("hello", self.hello)
        self.refused = message.get("refused", self.refused)
        self.end = message.get("end", self.end)

    def _complain(self) -> None:
        """Before the greeting, standard error comes from the channel (ssh); afterwards from the workers."""
        for line in self._channel.complaints():
            if self.hello:
                print(line, end="", file=sys.stderr, flush=True)
            elif line.strip():
                self._complaints.append(line.strip())
