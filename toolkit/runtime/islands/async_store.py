"""The store that asynchronous islands share: published updates, claimed rounds, heartbeats, snapshots.

An update is the change of an island's weights in one round, sharded as the island is: a rank writes its part, and reads
what it needs of the parts of other islands, whose layouts they publish when they join. It holds numbers and raw bytes
only; nothing is ever unpickled. All values are signed with the run's secret (`signed_store.py`); what other islands
publish is checked before it counts.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from toolkit.checkpoints.element_runs import Overlap
from toolkit.run_dir.async_islands import EXTRA, Membership
from toolkit.runtime.islands.flat_masters import Layout
from toolkit.runtime.islands.quantize import Encoding
from toolkit.runtime.islands.signed_store import SignedStore
from toolkit.runtime.islands.store_access import read_key
from toolkit.runtime.islands.transports import open_transport

BEAT, JOINING = "beat", "joining"
"""Kinds of heartbeats: of islands that train, and of those that wait to."""
PIECE_BYTES = 4 << 20
"""Larger values are split, so that a slow link never carries a request of minutes."""


@dataclass(frozen=True)
class Piece:
    """One rank's part of a change, as bytes, and which of its numbers are this rank's."""

    size: int
    """Numbers in the part."""
    content: torch.Tensor
    overlaps: tuple[Overlap, ...] = ()
    """Positions in this rank's part (first) and in the other's (second)."""

    def copy_into(self, own: torch.Tensor, values: torch.Tensor) -> None:
        """Write the decoded numbers of the other part to their places."""
        for one in self.overlaps:
            own[one.first : one.first + one.length] = values[one.second : one.second + one.length]


@dataclass(frozen=True)
class Update:
    """What this rank needs of the change of an island's weights in one round."""

    island: int
    serial: int
    """Number among the updates of its island."""
    round: int
    """Round in which the island was trained, counted over all islands; negative if it is not known."""
    weight: float
    """Weight of the change, equal on every island."""
    pieces: tuple[Piece, ...] = ()
    """What its ranks hold of this rank's part, encoded."""
    problem: str = ""
    """Why the update must not be applied; empty: nothing is known against it."""


@dataclass(frozen=True)
class Snapshot:
    """One rank's part of the shared weights, for an island that joins."""

    seen: list[int]
    """Updates of every island that it includes."""
    counters: dict[str, float]
    """Rounds that it includes, as `CompletedRounds.counters` writes them."""
    weights: torch.Tensor
    incarnation: int = 0
    """Of the island that has written it."""


class UpdateStore:
    """One rank's connection to the store. A connection answers one call at a time, so each thread has its own."""

    def __init__(self, membership: Membership, rank: int, ranks: int) -> None:
        self._membership, self._rank, self._ranks = membership, rank, ranks
        key = read_key(membership.key_file)
        self._store = SignedStore(open_transport(membership.address, key), key)
        self._neighbours: dict[tuple[int, int], list[tuple[int, Layout, tuple[Overlap, ...]]] | str] = {}
        """(island, incarnation) → its ranks whose parts overlap with this one's, or what is wrong with its layouts."""
        self.number, self.first, self.exists = self._store.number, self._store.first, self._store.exists
        self.write, self.read = self._store.write, self._store.read

    def rejected(self) -> Counter[int]:
        """Island → keys under its name with values of a wrong signature or an old version; -1: keys of no island."""
        found: Counter[int] = Counter()
        for key in list(self._store.rejected):
            name = key.split("/")[1:2]
            found[int(name[0]) if name and name[0].isdecimal() else -1] += 1
        return found

    def num_islands(self) -> int:
        """Islands that belong to the run, whether they live or not: those of the plan, and all that have joined."""
        return self._membership.islands + self.number(EXTRA)

    def beat(self, island: int, kind: str = BEAT) -> int:
        """Newest heartbeat of an island: a number that grows while it lives; 0 before its first."""
        return int(self.read(f"{kind}/{island}", 0))

    def send_beat(self, number: int, kind: str = BEAT) -> None:
        """Write this island's heartbeat."""
        self.write(f"{kind}/{self._membership.island}", number)

    def put_layout(self, incarnation: int, layout: Layout) -> None:
        """Publish where this rank's elements are in its updates."""
        self.write(f"layout/{self._membership.island}/{incarnation}/{self._rank}", layout.to_json())

    def neighbours(
        self, island: int, incarnation: int, own: Layout
    ) -> list[tuple[int, Layout, tuple[Overlap, ...]]] | str:
        """Ranks of an island with elements of this rank's part: (rank, layout, overlaps); or what is wrong."""
        key = island, incarnation
        if key not in self._neighbours:
            found, rank = [], 0
            while (given := self.read(f"layout/{island}/{incarnation}/{rank}")) is not None:
                try:
                    layout = Layout.from_json(given)
                except (TypeError, ValueError):
                    return f"the layout of its rank {rank} is malformed"
                if shared := own.overlaps(layout):
                    found.append((rank, layout, shared))
                rank += 1
            covered = sum(one.length for _, _, shared in found for one in shared)
            if covered != own.num_elements:
                return f"its {rank} ranks hold {covered} of the {own.num_elements} numbers of this rank's part"
            self._neighbours[key] = found
        return self._neighbours[key]

    def publish(self, update: Update, incarnation: int) -> None:
        """Publish this rank's part; the update becomes visible once every rank of the island has done so."""
        place = f"update/{update.island}/{update.serial}"
        self._put(f"{place}/{incarnation}/{self._rank}", update.pieces[0].content)
        if self.number(f"{place}/{incarnation}/done", 1) == self._ranks:
            self.write(f"{place}/head", [update.round, update.weight, incarnation])
            self.number(f"updates/{update.island}", 1)

    def num_updates(self, island: int) -> int:
        """Number of updates that an island has published."""
        return self.number(f"updates/{island}")

    def fetch(self, island: int, serial: int, own: Layout, encoding: Encoding) -> Update:
        """What a part with the layout `own` needs of a published update; with its problem, if it has one."""
        empty = Update(island, serial, -1, 0.0)
        head = self.read(f"update/{island}/{serial}/head")
        if not _is_head(head):
            return replace(empty, problem="its head is missing or malformed")
        found = replace(empty, round=head[0], weight=float(head[1]))
        pieces = self._pieces(f"update/{island}/{serial}/{head[2]}", (island, head[2]), own, encoding)
        return replace(found, problem=pieces) if isinstance(pieces, str) else replace(found, pieces=pieces)

    def _pieces(self, place: str, sender: tuple[int, int], own: Layout, encoding: Encoding) -> tuple[Piece, ...] | str:
        """The parts of the sender's ranks that overlap with this one; or what is wrong. `sender`: with incarnation."""
        neighbours, pieces = self.neighbours(*sender, own), []
        if isinstance(neighbours, str):
            return neighbours
        for rank, layout, shared in neighbours:
            num_bytes = encoding.num_bytes(layout.size)
            content = self._get(f"{place}/{rank}", num_bytes)
            if content is None:
                return f"its rank {rank} does not have the {num_bytes} signed bytes of its part"
            pieces.append(Piece(layout.size, content, shared))
        return tuple(pieces)

    def report_seen(self, seen: list[int]) -> None:
        """Say which updates of every island this one has: nobody keeps them for it any longer."""
        self.write(f"seen/{self._membership.island}", seen)

    def drop(self, serials: Iterable[int]) -> None:
        """Remove this rank's shards of own updates that all islands have."""
        for serial in serials:
            place = f"update/{self._membership.island}/{serial}"
            head = self.read(f"{place}/head")
            if head is not None:
                self._remove(f"{place}/{head[2]}/{self._rank}")

    def put_snapshot(self, request: int, snapshot: Snapshot) -> None:
        """Write this rank's part of a snapshot that a joining island has requested."""
        self._put(f"snapshot/{request}/{self._rank}", snapshot.weights.view(torch.uint8))
        if self.number(f"snapshot/{request}/done", 1) == self._ranks:
            sender = [self._membership.island, snapshot.incarnation]
            self.write(f"snapshot/{request}/head", [snapshot.seen, snapshot.counters, sender, self._ranks])

    def has_snapshot(self, request: int) -> bool:
        """Whether all parts of a requested snapshot have arrived."""
        return self.exists(f"snapshot/{request}/head")

    def read_snapshot(self, request: int, own: Layout) -> Snapshot | None:
        """What a part with the layout `own` needs of a requested snapshot; None if it is damaged."""
        head = self.read(f"snapshot/{request}/head")
        if not isinstance(head, list) or len(head) != 4:
            return None
        pieces = self._pieces(f"snapshot/{request}", (int(head[2][0]), int(head[2][1])), own, Encoding())
        if isinstance(pieces, str):
            print(f"the snapshot of island {head[2][0]} can't be used: {pieces}", flush=True)
            return None
        weights = torch.zeros(own.size)
        for piece in pieces:
            piece.copy_into(weights, piece.content.view(torch.float32))
        return Snapshot(head[0], head[1], weights) if bool(torch.isfinite(weights).all()) else None

    def remove_snapshot(self, request: int) -> None:
        """Remove a snapshot that all ranks of the joining island have read."""
        head = self.read(f"snapshot/{request}/head") or [0, 0, 0, 0]
        for rank in range(int(head[3])):
            self._remove(f"snapshot/{request}/{rank}")

    def _put(self, key: str, content: torch.Tensor) -> None:
        for number, start in enumerate(range(0, content.numel(), PIECE_BYTES)):
            self._store.put(f"{key}/{number}", content[start : start + PIECE_BYTES].numpy().tobytes())
        self.write(f"{key}/bytes", [content.numel(), _hash(content)])

    def _get(self, key: str, num_bytes: int) -> torch.Tensor | None:
        """The bytes under a key; None unless they are signed, as many as expected, and those that were written."""
        head = self.read(f"{key}/bytes")
        if not isinstance(head, list) or head[:1] != [num_bytes]:
            return None
        pieces = [self._store.get(f"{key}/{number}") for number in range(-(-num_bytes // PIECE_BYTES))]
        found = bytearray(b"".join(piece for piece in pieces if piece is not None))
        if len(found) != num_bytes:
            return None
        content = torch.frombuffer(found, dtype=torch.uint8) if found else torch.zeros(0, dtype=torch.uint8)
        return content if head[1:] == [_hash(content)] else None

    def _remove(self, key: str) -> None:
        head = self.read(f"{key}/bytes")
        num_bytes = int(head[0]) if isinstance(head, list) else 0
        for number in range(-(-num_bytes // PIECE_BYTES)):
            self._store.delete(f"{key}/{number}")
        self._store.delete(f"{key}/bytes")


def _hash(content: torch.Tensor) -> str:
    """Of all pieces together: each is signed, but only this shows that they are of one and the same value."""
    return hashlib.sha256(content.numpy().tobytes()).hexdigest()


def _is_head(head: Any) -> bool:
    """Whether a value is the head of an update: its round, its weight and its sender's incarnation."""
    return (
        isinstance(head, list)
        and len(head) == 3
        and isinstance(head[0], int)
        and isinstance(head[1], int | float)
        and math.isfinite(head[1])
        and isinstance(head[2], int)
    )
