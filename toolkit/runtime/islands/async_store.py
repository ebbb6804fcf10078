"""What islands that never wait for one another share: a store with letters, claims and signs of life.

A letter is what an island has learned in a round, cut as its ranks hold it: a rank writes to, and reads from, those
with its place in other islands. Numbers and raw bytes only: nothing here is ever unpickled.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from toolkit.errors import RankFailed
from toolkit.run_dir.async_islands import Membership

PIECE_BYTES = 4 << 20
"""A store (torch 2.13) takes no value above 8 MiB."""
PATIENCE = datetime.timedelta(seconds=60)


@dataclass(frozen=True)
class Update:
    """One rank's part of what an island has learned in a round."""

    island: int
    serial: int
    """Number among the letters of its island."""
    chunk: int
    """Which steps it was learned in."""
    weight: float
    """With what share it counts, on every island alike."""
    content: torch.Tensor
    """Bytes."""


@dataclass(frozen=True)
class Snapshot:
    """One rank's part of what an island shares with the others."""

    seen: list[int]
    """Letters of every island that are in it."""
    counters: dict[str, float]
    """Chunks that are in it: see `Chunks`."""
    content: torch.Tensor


def serve(host: str, port: int) -> TCPStore:
    """A mailbox in this process, for as long as the object lives; port 0: any."""
    return TCPStore(host, port, None, True, wait_for_workers=False, timeout=PATIENCE)


class UpdateStore:
    """One connection of one rank. Each thread has its own: a store answers one question at a time."""

    def __init__(self, member: Membership, rank: int, ranks: int) -> None:
        self._member, self._rank, self._ranks = member, rank, ranks
        try:
            self._store = TCPStore(member.host, member.port, None, False, wait_for_workers=False, timeout=PATIENCE)
        except Exception as error:
            raise RankFailed(f"the mailbox at {member.host}:{member.port} can't be reached: {error}") from None

    def number(self, key: str, plus: int = 0) -> int:
        """A number that all share, after `plus` was added to it; 0 at first."""
        return int(self._store.add(key, plus))

    def first(self, key: str) -> bool:
        """Whether nobody has asked this before: one of all who ask gets true."""
        return self.number(key, 1) == 1

    def write(self, key: str, value: Any) -> None:
        """A small value, as JSON."""
        self._store.set(key, json.dumps(value))

    def read(self, key: str, default: Any = None) -> Any:
        """The same."""
        return json.loads(self._store.get(key)) if self._store.check([key]) else default

    def post(self, letter: Update, life: int) -> None:
        """Leave this rank's part; the letter is there once every rank has done so."""
        place = f"letter/{letter.island}/{letter.serial}/{life}"
        self._put(f"{place}/{self._rank}", letter.content)
        if self.number(f"{place}/parts", 1) == self._ranks:
            head = {"chunk": letter.chunk, "weight": letter.weight, "life": life}
            self.write(f"letter/{letter.island}/{letter.serial}", head)
            self.number(f"letters/{letter.island}", 1)

    def letters(self, island: int) -> int:
        """How many letters of an island are there."""
        return self.number(f"letters/{island}")

    def fetch(self, island: int, serial: int) -> Update:
        """This rank's part of a letter that is there."""
        head = self.read(f"letter/{island}/{serial}")
        content = self._get(f"letter/{island}/{serial}/{head['life']}/{self._rank}")
        return Update(island, serial, head["chunk"], head["weight"], content)

    def drop(self, serials: Iterable[int]) -> None:
        """Letters of this island that everybody has."""
        for serial in serials:
            head = self.read(f"letter/{self._member.island}/{serial}")
            self._remove(f"letter/{self._member.island}/{serial}/{head['life']}/{self._rank}")

    def give(self, request: int, snapshot: Snapshot) -> None:
        """This rank's part of what a newcomer has asked for."""
        self._put(f"snapshot/{request}/{self._rank}", snapshot.content)
        if self._rank == 0:
            self.write(f"snapshot/{request}", [snapshot.seen, snapshot.counters])
        self.number(f"snapshot/{request}/parts", 1)

    def complete(self, request: int) -> bool:
        """Whether all of what was asked for is there."""
        return self.number(f"snapshot/{request}/parts") == self._ranks

    def given(self, request: int) -> Snapshot:
        """This rank's part of what was asked for; it is then taken away."""
        seen, counters = self.read(f"snapshot/{request}")
        content = self._get(f"snapshot/{request}/{self._rank}")
        self._remove(f"snapshot/{request}/{self._rank}")
        return Snapshot(seen, counters, content)

    def _put(self, key: str, content: torch.Tensor) -> None:
        pieces = range(0, content.numel(), PIECE_BYTES)
        for number, start in enumerate(pieces):
            self._store.set(f"{key}/{number}", content[start : start + PIECE_BYTES].numpy().tobytes())  # type: ignore[arg-type]
        self.write(f"{key}/pieces", len(pieces))

    def _get(self, key: str) -> torch.Tensor:
        pieces = [self._store.get(f"{key}/{number}") for number in range(self.read(f"{key}/pieces"))]
        return torch.frombuffer(bytearray(b"".join(pieces)), dtype=torch.uint8)

    def _remove(self, key: str) -> None:
        for number in range(self.read(f"{key}/pieces", 0)):
            self._store.delete_key(f"{key}/{number}")
        self._store.delete_key(f"{key}/pieces")
