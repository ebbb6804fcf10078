"""The way to a host's agent through ssh."""

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
    """A process of ssh."""

    def __init__(self, argv: Sequence[str]) -> None:
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

    def write(self, line: str) -> None:
        """To the agent."""
        assert self._process.stdin is not None
        self._process.stdin.write(line)
        self._process.stdin.flush()

    def output(self) -> Iterator[str]:
        """What the agent says."""
        assert self._process.stdout is not None
        yield from self._process.stdout

    def complaints(self) -> Iterator[str]:
        """What ssh and the workers say on standard error."""
        assert self._process.stderr is not None
        yield from self._process.stderr

    def hang_up(self) -> None:
        """No more input."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def leave(self, seconds: float) -> None:
        """Wait for the agent to end; ssh is not waited for any longer."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def end(self) -> str:
        """Why nothing more comes."""
        return f"ssh ended with exit code {self._process.wait()}"


def ssh_links(hosts: Sequence[Host], backend: str) -> list[HostLink]:
    """A link to every host."""
    if shutil.which("ssh") is None:
        raise BadInput("--hostfile", "ssh is not installed here; install openssh-client")
    return [HostLink(host, SshChannel(_argv(host)), env=_visible(host, backend)) for host in hosts]


def _argv(host: Host) -> tuple[str, ...]:
    """ssh hands its words to a shell on the other side: they are quoted, and hold no setting of the user."""
    remote = ["env", f"PYTHONPATH={ROOT}", sys.executable, *AGENT]
    return (*SSH, "--", host.name, shlex.join(remote))


def _visible(host: Host, backend: str) -> dict[str, str]:
    """Which devices a host's workers see; all ranks of a host count from 0."""
    names = {"cuda": "CUDA_VISIBLE_DEVICES", "rocm": "HIP_VISIBLE_DEVICES"}
    return {names[backend]: ",".join(map(str, host.slots))} if backend in names else {}
