"""How a worker is told that its island is one of several that meet in a mailbox."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from toolkit.errors import BadInput

MAILBOX, ISLAND = "TOOLKIT_MAILBOX", "TOOLKIT_ISLAND"
"""Environment variables: `host:port`, and `island/islands/founder`."""


@dataclass(frozen=True)
class Membership:
    """One island among several."""

    host: str
    port: int
    island: int
    islands: int
    founder: int = 0
    """Whose state all begin with."""

    def env(self) -> dict[str, str]:
        """For its workers."""
        return {MAILBOX: f"{self.host}:{self.port}", ISLAND: f"{self.island}/{self.islands}/{self.founder}"}

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Membership | None:
        """None: the run has no mailbox."""
        if MAILBOX not in env:
            return None
        host, port = parse_address(env[MAILBOX])
        return cls(host, port, *(int(word) for word in env[ISLAND].split("/")))


def parse_address(text: str) -> tuple[str, int]:
    """`host:port`."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise BadInput("--mailbox", f"{text!r} given; HOST:PORT is required, as `toolkit mailbox` prints it")
    return host, int(port)
