"""Channel to a host's agent through ssh."""

from __future__ import annotations

import contextlib
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence

from toolkit.errors import BadInput
from toolkit.launching.hostfile import Host
from toolkit.runtime.hosts.agent import AGENT, ROOT
from toolkit.runtime.hosts.agent_link import HostLink

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
