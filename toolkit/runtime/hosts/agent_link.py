"""The controller's link to one host's agent, over any channel."""

from __future__ import annotations

import contextlib
import json
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from toolkit.errors import BadInput
from toolkit.launching.hostfile import Host
from toolkit.runtime.hosts.agent import AGENT, BEAT_SECONDS, ROOT


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


SSH = ("ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=5")


class SshChannel:
    """An ssh process that runs the agent."""

    def __init__(self, argv: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,  # the controller forwards Ctrl-C itself
        )

    def write(self, line: str) -> None:
        """Write to the agent's standard input."""
        assert self._process.stdin is not None
        self._process.stdin.write(line)
        self._process.stdin.flush()

    def output(self) -> Iterator[str]:
        """Lines of the agent's standard output."""
        assert self._process.stdout is not None
        yield from self._process.stdout

    def complaints(self) -> Iterator[str]:
        """Lines that ssh and the workers write to standard error."""
        assert self._process.stderr is not None
        yield from self._process.stderr

    def hang_up(self) -> None:
        """Close the agent's standard input."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def leave(self, seconds: float) -> None:
        """Wait for the agent to end, for at most this long; then kill ssh."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def end(self) -> str:
        """Why the channel is closed."""
        return f"ssh ended with exit code {self._process.wait()}"


def ssh_links(hosts: Sequence[Host], backend: str) -> list[HostLink]:
    """A link to each host."""
    if shutil.which("ssh") is None:
        raise BadInput("--hostfile", "ssh is not installed here; install openssh-client")
    return [HostLink(host, SshChannel(_argv(host)), env=_visible(host, backend)) for host in hosts]


def _argv(host: Host) -> tuple[str, ...]:
    """The ssh command. A remote shell parses its words, so they are quoted. It holds no settings of the user."""
    remote = ["env", f"PYTHONPATH={ROOT}", sys.executable, *AGENT]
    return (*SSH, "--", host.name, shlex.join(remote))


def _visible(host: Host, backend: str) -> dict[str, str]:
    """Environment that limits a host's workers to its slots; ranks of a host count devices from 0."""
    names = {"cuda": "CUDA_VISIBLE_DEVICES", "rocm": "HIP_VISIBLE_DEVICES"}
    return {names[backend]: ",".join(map(str, host.slots))} if backend in names else {}
