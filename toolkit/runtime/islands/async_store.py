"""The store that asynchronous islands share: published updates, claimed rounds, heartbeats, snapshots.

An update is the change of an island's weights in one round, sharded as the island is: a rank writes for, and reads
from, the ranks with its index in other islands. It holds numbers and raw bytes only; nothing is ever unpickled.
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
from toolkit.runtime.distributed import rendezvous

PIECE_BYTES = 4 << 20
"""Larger values are split. torch 2.13's TCPStore closes the connection on values above 8 MiB; it can go when a `set` of
16 MiB works."""
TIMEOUT = datetime.timedelta(seconds=60)


@dataclass(frozen=True)
class Update:
    """One rank's shard of the change of an island's weights in one round."""

    island: int
    serial: int
    """Number among the updates of its island."""
    round: int
    """Round in which the island was trained, counted over all islands."""
    weight: float
    """Weight of the change, equal on every island."""
    content: torch.Tensor
    """The encoded change, as bytes."""


@dataclass(frozen=True)
class Snapshot:
    """One rank's shard of the shared weights, for an island that joins."""

    seen: list[int]
    """Updates of every island that it includes."""
    counters: dict[str, float]
    """Rounds that it includes, as `CompletedRounds.counters` writes them."""
    content: torch.Tensor
    """The weights, as bytes."""


def serve(host: str, port: int) -> TCPStore:
    """Serve a store at this address alone, for as long as the object lives; port 0 picks a free one."""
    return rendezvous.serve(host, port, TIMEOUT)


class UpdateStore:
    """One rank's connection to the store. A connection answers one call at a time, so each thread has its own.

    Keys keep the names of the first version ("letter", "chunk", "life"), so that islands of different versions can meet
    in one store.
    """

    def __init__(self, membership: Membership, rank: int, ranks: int) -> None:
        self._membership, self._rank, self._ranks = membership, rank, ranks
        host, port = membership.host, membership.port
        try:
            self._store = TCPStore(host, port, None, False, wait_for_workers=False, timeout=TIMEOUT)
        except Exception as error:
            raise RankFailed(f"the update store at {host}:{port} can't be reached: {error}") from None

    def number(self, key: str, plus: int = 0) -> int:
        """Add `plus` to a shared counter and return it; counters start at 0."""
        return int(self._store.add(key, plus))

    def first(self, key: str) -> bool:
        """Whether this is the first call with this key, over all islands."""
        return self.number(key, 1) == 1

    def write(self, key: str, value: Any) -> None:
        """Write a small value as JSON."""
        self._store.set(key, json.dumps(value))

    def read(self, key: str, default: Any = None) -> Any:
        """Read a JSON value; `default` if the key is absent."""
        return json.loads(self._store.get(key)) if self._store.check([key]) else default

    def publish(self, update: Update, incarnation: int) -> None:
        """Publish this rank's shard; the update becomes visible once every rank of the island has done so."""
        place = f"letter/{update.island}/{update.serial}/{incarnation}"
        self._put(f"{place}/{self._rank}", update.content)
        if self.number(f"{place}/parts", 1) == self._ranks:
            head = {"chunk": update.round, "weight": update.weight, "life": incarnation}
            self.write(f"letter/{update.island}/{update.serial}", head)
            self.number(f"letters/{update.island}", 1)

    def num_updates(self, island: int) -> int:
        """Number of updates that an island has published."""
        return self.number(f"letters/{island}")

    def fetch(self, island: int, serial: int) -> Update:
        """This rank's shard of a published update."""
        head = self.read(f"letter/{island}/{serial}")
        content = self._get(f"letter/{island}/{serial}/{head['life']}/{self._rank}")
        return Update(island, serial, head["chunk"], head["weight"], content)

    def drop(self, serials: Iterable[int]) -> None:
        """Remove this rank's shards of own updates that all islands have."""
        for serial in serials:
            head = self.read(f"letter/{self._membership.island}/{serial}")
            self._remove(f"letter/{self._membership.island}/{serial}/{head['life']}/{self._rank}")

    def put_snapshot(self, request: int, snapshot: Snapshot) -> None:
        """Write this rank's shard of a snapshot that a joining island has requested."""
        self._put(f"snapshot/{request}/{self._rank}", snapshot.content)
        if self._rank == 0:
            self.write(f"snapshot/{request}", [snapshot.seen, snapshot.counters])
        self.number(f"snapshot/{request}/parts", 1)

    def has_snapshot(self, request: int) -> bool:
        """Whether all shards of a requested snapshot have arrived."""
        return self.number(f"snapshot/{request}/parts") == self._ranks

    def take_snapshot(self, request: int) -> Snapshot:
        """Read this rank's shard of a requested snapshot and remove it from the store."""
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
