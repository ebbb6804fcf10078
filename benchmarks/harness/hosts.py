"""Test hosts: network, process and name spaces on a bridge, each with an sshd of its own and a shared filesystem."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

TOOLS = {"ip": "iproute2", "sshd": "openssh-server", "ssh": "openssh-client", "pdsh": "pdsh", "unshare": "util-linux"}
SSHD_CONFIG = """
ListenAddress {address}
HostKey {keys}/host
AuthorizedKeysFile {keys}/authorized
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
PermitRootLogin prohibit-password
AllowAgentForwarding no
"""
SSH_CONFIG = """
Host *
  User root
  IdentityFile {keys}/user
  UserKnownHostsFile {keys}/known
  StrictHostKeyChecking yes
  LogLevel ERROR
"""


def why_not() -> str:
    """Why hosts can't be made here; empty if they can."""
    if os.geteuid() != 0:
        return "test hosts are network namespaces, which only root can make"
    missing = sorted({package for tool, package in TOOLS.items() if shutil.which(tool, path=_path()) is None})
    if missing:
        return f"test hosts need {', '.join(missing)}"
    probe = subprocess.run(["unshare", "--net", "--uts", "--pid", "--fork", "true"], capture_output=True, text=True)
    return f"namespaces can't be made here: {probe.stderr.strip()}" if probe.returncode else ""


@dataclass
class Hosts:
    """`count` hosts named `host-1`, `host-2` …; ssh reaches them by address through `env`."""

    root: Path
    count: int
    _started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __enter__(self) -> Hosts:
        self._number = os.getpid() % 10_000
        self._subnet = f"10.231.{os.getpid() % 250}"
        self._bridge = f"tkb{self._number}"
        try:
            self._make_keys()
            self._make_network()
            for index in range(self.count):
                self._start_sshd(index)
            self._wait()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._started:
            process.kill()
            process.wait()
        for index in range(self.count):
            # At once: the kernel removes it with the namespace, but later, and the next hosts take the same name.
            subprocess.run(["ip", "link", "del", self._end(index)], capture_output=True)
            subprocess.run(["ip", "netns", "del", self.space(index)], capture_output=True)
        subprocess.run(["ip", "link", "del", self._bridge], capture_output=True)

    @property
    def addresses(self) -> list[str]:
        return [f"{self._subnet}.{index + 1}" for index in range(self.count)]

    @property
    def env(self) -> dict[str, str]:
        """An environment in which `ssh` reaches the hosts."""
        return {**os.environ, "PATH": f"{self.root / 'bin'}:{_path()}"}

    def hostfile(self, slots: int, count: int | None = None) -> Path:
        path = self.root / f"hostfile-{slots}-{count}"
        path.write_text("".join(f"{address} slots={slots}\n" for address in self.addresses[:count]))
        return path

    def space(self, index: int) -> str:
        return f"tkh{self._number}-{index}"

    def processes(self, index: int, word: str = "toolkit") -> list[str]:
        """Command lines on a host that contain a word."""
        found = subprocess.run(["ip", "netns", "pids", self.space(index)], capture_output=True, text=True)
        lines = [_command_line(pid) for pid in found.stdout.split()]
        return [line for line in lines if word in line]

    def kill(self, index: int, word: str) -> None:
        """SIGKILL to the processes of a host whose command line has a word in it."""
        found = subprocess.run(["ip", "netns", "pids", self.space(index)], capture_output=True, text=True)
        for pid in found.stdout.split():
            if word in _command_line(pid):
                os.kill(int(pid), signal.SIGKILL)

    def unplug(self, index: int) -> None:
        """The host's network goes down; its processes live on."""
        _ip("link", "set", self._end(index), "down")

    def plug(self, index: int) -> None:
        _ip("link", "set", self._end(index), "up")

    def power_off(self, index: int) -> None:
        """Everything on the host ends at once: its first process takes the others along."""
        self._started[index].kill()
        self._started[index].wait()

    def power_on(self, index: int) -> None:
        self._start_sshd(index)
        self._started[index] = self._started.pop()
        self._wait()

    def _make_keys(self) -> None:
        keys = self.root / "keys"
        keys.mkdir(parents=True, mode=0o700)
        for name in ("host", "user"):
            _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(keys / name))
        shutil.copy(keys / "user.pub", keys / "authorized")
        public = " ".join((keys / "host.pub").read_text().split()[:2])
        (keys / "known").write_text("".join(f"{address} {public}\n" for address in self.addresses))
        (keys / "ssh_config").write_text(SSH_CONFIG.format(keys=keys))
        wrapper = self.root / "bin" / "ssh"
        wrapper.parent.mkdir()
        wrapper.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {keys}/ssh_config "$@"\n')
        wrapper.chmod(0o755)
        Path("/run/sshd").mkdir(exist_ok=True)  # sshd wants it

    def _end(self, index: int) -> str:
        """Name of this host's end of a link."""
        return f"tkv{self._number}-{index}"

    def _make_network(self) -> None:
        _ip("link", "add", self._bridge, "type", "bridge")
        _ip("addr", "add", f"{self._subnet}.254/24", "dev", self._bridge)
        _ip("link", "set", self._bridge, "up")
        for index, address in enumerate(self.addresses):
            space, end = self.space(index), self._end(index)
            _ip("netns", "add", space)
            _ip("link", "add", end, "type", "veth", "peer", "name", "eth0", "netns", space)
            _ip("link", "set", end, "master", self._bridge, "up")
            _ip("-n", space, "addr", "add", f"{address}/24", "dev", "eth0")
            _ip("-n", space, "link", "set", "eth0", "up")
            _ip("-n", space, "link", "set", "lo", "up")

    def _start_sshd(self, index: int) -> None:
        config = self.root / f"sshd-{index}"
        config.write_text(SSHD_CONFIG.format(address=self.addresses[index], keys=self.root / "keys"))
        sshd = f"hostname host-{index + 1} && exec {shutil.which('sshd', path=_path())} -D -e -f {config}"
        inside = ["unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", sshd]
        with (self.root / f"sshd-{index}.log").open("ab") as log:
            command = ["ip", "netns", "exec", self.space(index), *inside]
            self._started.append(subprocess.Popen(command, stdout=log, stderr=log))

    def _wait(self) -> None:
        for address in self.addresses:
            deadline = time.monotonic() + 30
            while subprocess.run(["ssh", address, "true"], env=self.env, capture_output=True).returncode:
                assert time.monotonic() < deadline, f"{address} does not answer"
                time.sleep(0.1)


def _path() -> str:
    return f"{os.environ['PATH']}:/usr/sbin:/sbin"


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.returncode == 0, f"{argv}: {done.stderr}"


def _command_line(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""
