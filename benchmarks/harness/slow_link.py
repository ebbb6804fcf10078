"""Two network namespaces with a link between them, and workers that live in them and slow the link down."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any

from toolkit.runtime.engine.replica import ReplicaEngine
from toolkit.runtime.supervision.warm_pool import enter_worker

SLOW_FROM_STEP = 8
RATE = "25mbit"
PREFIX = "tkslow"


def why_not() -> str:
    """Why there can be no such link here; empty if there can."""
    if os.geteuid() != 0:
        return "network namespaces can only be made by root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} missing: apt-get install iproute2"
    with Link() as link:
        probe = subprocess.run(limit(link.space(0)), capture_output=True, text=True)
    return f"this kernel can't limit a link: {probe.stderr.strip()}" if probe.returncode else ""


def limit(space: str | None = None) -> list[str]:
    inside = ["ip", "netns", "exec", space] if space else []
    how = ["tbf", "rate", RATE, "burst", "64kb", "latency", "50ms"]
    return [*inside, "tc", "qdisc", "add", "dev", "eth0", "root", *how]


class Link:
    """Made on entry, gone on exit."""

    def space(self, rank: int) -> str:
        return f"{PREFIX}{os.getpid() % 100_000}-{rank}"

    def __enter__(self) -> Link:
        try:
            for rank in (0, 1):
                _ip("netns", "add", self.space(rank))
            first, second = self.space(0), self.space(1)
            _ip("-n", first, *["link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns"], second)
            for rank in (0, 1):
                _ip("-n", self.space(rank), "addr", "add", f"{address(rank)}/24", "dev", "eth0")
                _ip("-n", self.space(rank), "link", "set", "eth0", "up")
                _ip("-n", self.space(rank), "link", "set", "lo", "up")
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for rank in (0, 1):
            subprocess.run(["ip", "netns", "del", self.space(rank)], capture_output=True)


def address(rank: int) -> str:
    return f"10.239.7.{rank + 1}"


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


class Enter:
    """A worker inside its namespace; from a step on, it limits what it sends."""

    def __init__(self, spaces: list[str]) -> None:
        self.spaces = spaces

    def __call__(self, argv: tuple[str, ...], env: dict[str, str]) -> None:
        move_into(Path("/run/netns") / self.spaces[int(env["RANK"])])
        ReplicaEngine.step = slowing(ReplicaEngine.step)  # type: ignore[method-assign]
        enter_worker(argv, {**env, "MASTER_ADDR": address(0), "GLOO_SOCKET_IFNAME": "eth0"})


def move_into(space: Path) -> None:
    """This process's network from now on."""
    libc = ctypes.CDLL(None, use_errno=True)
    with space.open() as file:
        if libc.setns(file.fileno(), 0):
            raise OSError(ctypes.get_errno(), f"setns {space}")


def slowing(step: Any) -> Any:
    count = [0]

    def run(*args: Any) -> Any:
        count[0] += 1
        if count[0] == SLOW_FROM_STEP:
            subprocess.run(limit(), check=True)
        return step(*args)

    return run
