"""The store through which ranks find each other: a private file on one host, else the address of the job and no other.

A store has no password: whoever connects reads and changes all keys, among them the addresses of the ranks. On one host
it is therefore a file in a directory that only this user can enter: other users can connect to loopback. torch
2.13's `TCPStore` listens on every address of the host, whatever address it is given, unless it gets a socket that is
already bound. This can go when `ss -ltn` shows the given address for `TCPStore("127.0.0.1", 0, is_master=True)`.
"""

from __future__ import annotations

import datetime
import errno
import ipaddress
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch.distributed import FileStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from toolkit.launching.environment import RENDEZVOUS

BACKLOG = 2048
"""Ranks that may connect at the same moment."""


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """Where the ranks of a job meet."""

    host: str
    port: int
    hosted_by_agent: bool = False
    """Whether torchrun's agent serves the store; it has taken the port, so no rank can."""
    attempt: str = "0"
    """Number of restarts: the keys of an earlier attempt stay in an agent's store."""
    file: str = ""
    """Where the ranks meet instead, if all of them are on one host."""

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Meeting:
        """Read what the launcher has set."""
        return cls(
            host=env["MASTER_ADDR"],
            port=int(env["MASTER_PORT"]),
            hosted_by_agent=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            attempt=env.get("TORCHELASTIC_RESTART_COUNT", "0"),
            file=env.get(RENDEZVOUS, ""),
        )

    def open(
        self, rank: int, world: int, timeout: datetime.timedelta, *, several_hosts: bool, say: Callable[[str], object]
    ) -> Store:
        """Serve the store on rank 0, connect to it on the others. Keep it for as long as the process group lives."""
        if self.file and not several_hosts:
            private = FileStore(f"{self.file}.{self.attempt}", world)
            private.set_timeout(timeout)
            return private
        if rank == 0 and not self.hosted_by_agent:
            return self._serve(world, timeout, several_hosts=several_hosts, say=say)
        store = TCPStore(self.host, self.port, world, False, timeout=timeout, wait_for_workers=False)
        # Only an agent's store outlives an attempt; agents of several hosts may count restarts differently.
        return PrefixStore(f"toolkit/{self.attempt}", store) if self.hosted_by_agent else store

    def _serve(
        self, world: int, timeout: datetime.timedelta, *, several_hosts: bool, say: Callable[[str], object]
    ) -> TCPStore:
        try:
            own = _resolve(self.host, self.port)
            if several_hosts and ipaddress.ip_address(own.partition("%")[0]).is_loopback:
                why = f"its name leads to {own} here, which other hosts can't reach"
            else:
                return serve(self.host, self.port, timeout, world)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            why = "it is not an address of this host (NAT, or a service name)"
        say(
            f"WARNING: the rendezvous store listens on ALL addresses of {socket.gethostname()}, port {self.port}: "
            f"MASTER_ADDR is {self.host}, and {why}; whoever reaches the port can disturb the run: "
            "set MASTER_ADDR to an address of rank 0's host, or close the port to others with a firewall"
        )
        return TCPStore(self.host, self.port, world, True, timeout=timeout, wait_for_workers=False)


def serve(host: str, port: int, timeout: datetime.timedelta, world: int | None = None) -> TCPStore:
    """Serve a store at one address from this process for as long as the object lives; port 0 picks a free one."""
    listener = listen_at(host, port)
    taken = listener.getsockname()[1]
    # The store closes the descriptor: without `detach`, Python would close it a second time.
    return TCPStore(
        host, taken, world, True, timeout=timeout, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def listen_at(host: str, port: int) -> socket.socket:
    """Return a socket that listens at this address alone; port 0 picks a free one."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        # A restarted run takes the same port: without this it would have to wait for a minute.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def _resolve(host: str, port: int) -> str:
    return str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
