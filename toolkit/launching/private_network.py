"""A network namespace for the ranks of one host, in which gloo's sockets are out of reach for other users of the host.

gloo (torch 2.13) asks nobody who connects for a secret: at loopback, another user could take the place of a rank. A
namespace has a loopback of its own. Only gloo's sockets are in it, because a socket belongs to the namespace of the
thread that made it: everything else in a worker (W&B, downloads, NCCL) uses the host's network as before.

Root makes a network namespace at once. Other users first need a user namespace that owns it, which many kernels allow.
Where neither is allowed, gloo listens at the host's loopback.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NETWORK = "TOOLKIT_NETWORK"
"""Environment variable with the namespaces that a worker enters, separated by a colon: the user namespace that owns the
network, if there is one, and the network."""
CHOICES = {"GLOO_SOCKET_IFNAME", "TORCH_GLOO_LAZY_INIT"}
"""Environment variables by which a user chooses another network for gloo."""
_NEW_USER, _NEW_NETWORK = 0x10000000, 0x40000000
_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 1
_DUMPABLE = 4
_CAPABILITIES = 0x20080522
"""Version 3 of the structure that `capset` takes."""
HELPER_SECONDS = 20.0
"""Time for the helper process to make the namespaces; without an answer there are none."""


@dataclass(frozen=True)
class Network:
    """A private network that this process has entered with one thread."""

    thread: ThreadPoolExecutor

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function inside: its sockets, and those of the threads that it starts, are in the private network."""
        return self.thread.submit(function, *args, **kwargs).result()


@contextmanager
def private_network(env: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Make a private network for the time of the context: variables for its ranks, or none where there can't be one.

    `env` is that of this process, with a PYTHONPATH that leads to the toolkit. A user who has chosen an interface for
    gloo, or that it connects on first use (from whatever thread), gets that and no private network.
    """
    with ExitStack() as held:
        try:
            opened = [] if CHOICES & env.keys() else _make_namespaces(env)
        except OSError:
            opened = []
        for descriptor in opened:
            held.callback(os.close, descriptor)
        paths = [f"/proc/{os.getpid()}/fd/{descriptor}" for descriptor in opened]
        yield {NETWORK: ":".join(paths)} if paths else {}


def enter(env: Mapping[str, str]) -> Network | None:
    """Enter the private network that the supervisor has made; None if there is none, or another one was chosen.

    Call it before this process has a second thread: the kernel lets no other process change its user namespace.
    """
    paths = [path for path in env.get(NETWORK, "").split(":") if path]
    if not paths or CHOICES & env.keys():
        return None
    with ExitStack() as held:
        # All are opened first: from inside a user namespace, the kernel shows no descriptors of a process outside.
        opened = [os.open(path, os.O_RDONLY | os.O_CLOEXEC) for path in paths]
        for descriptor in opened:
            held.callback(os.close, descriptor)
        *owner, network = opened
        for descriptor in owner:
            _set_namespace(descriptor, _NEW_USER)
        thread = ThreadPoolExecutor(1, thread_name_prefix="private-network")
        thread.submit(_set_namespace, network, _NEW_NETWORK).result()
    if owner:
        for drop in (thread.submit(_drop_capabilities).result, _drop_capabilities):
            drop()
        # The kernel now hides /proc/PID of this process, also from the supervisor, unless it is told otherwise.
        _libc().prctl(_DUMPABLE, 1, 0, 0, 0)
    return Network(thread)


def _make_namespaces(env: Mapping[str, str]) -> list[int]:
    """Descriptors of a new network namespace, behind that of the user namespace that owns it if one is needed."""
    if not sys.platform.startswith("linux"):
        raise OSError("only Linux has network namespaces")
    if os.geteuid() == 0:
        try:
            with ThreadPoolExecutor(1) as thread:  # this thread stays in the host's network
                return [thread.submit(new_network).result()]
        except OSError:  # root of a container, which may not
            pass
    return _ask_helper(env)


def new_network() -> int:
    """Put this thread into a new network with loopback up; return its descriptor."""
    if _libc().unshare(_NEW_NETWORK) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sh14x", b"lo", 0)
        (flags_now,) = struct.unpack("16xh14x", fcntl.ioctl(any_socket, _GET_FLAGS, request))
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sh14x", b"lo", flags_now | _UP))
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _ask_helper(env: Mapping[str, str]) -> list[int]:
    """Let a process of its own make a user namespace and a network in it: a process with threads may not."""
    ours, helpers = socket.socketpair()
    argv = [sys.executable, "-P", "-m", "toolkit.launching.private_network", str(helpers.fileno())]
    with ours, helpers:
        process = subprocess.Popen(argv, env=env, pass_fds=[helpers.fileno()], stderr=subprocess.DEVNULL)
        helpers.close()
        ours.settimeout(HELPER_SECONDS)
        try:
            _, descriptors, _, _ = socket.recv_fds(ours, 1, 2)
        finally:
            process.kill()
            process.wait()
    if len(descriptors) != 2:
        raise OSError("user namespaces are not allowed here")
    return descriptors


def _help(channel: socket.socket) -> None:
    """The helper process: make both namespaces and send their descriptors."""
    user, group = os.geteuid(), os.getegid()
    network = _new_network_of_own_user(user, group)
    owner = os.open("/proc/self/ns/user", os.O_RDONLY)
    socket.send_fds(channel, [b"."], [owner, network])
    channel.recv(1)


def _new_network_of_own_user(user: int, group: int) -> int:
    if _libc().unshare(_NEW_USER) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    _libc().prctl(_DUMPABLE, 1, 0, 0, 0)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    return new_network()


def _set_namespace(descriptor: int, kind: int) -> None:
    if _libc().setns(descriptor, kind) != 0:
        number = ctypes.get_errno()
        why = f"{os.strerror(number)}: can't enter the private network of the run"
        raise OSError(number, f"{why}; GLOO_SOCKET_IFNAME=lo does without")


def _drop_capabilities() -> None:
    """Drop what the user namespace has given to this thread: a read-only file of the user must stay read-only."""
    header = struct.pack("Ii", _CAPABILITIES, 0)
    if _libc().capset(header, bytes(24)) != 0:
        raise OSError(ctypes.get_errno(), "capset")


def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


if __name__ == "__main__":
    _help(socket.socket(fileno=int(sys.argv[1])))
