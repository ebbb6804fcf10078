"""How an island comes in: first of all, afresh with the others, or into a run that goes on without it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from toolkit.run_dir.async_islands import CompletedRounds, Membership
from toolkit.runtime.islands.async_store import UpdateStore
from toolkit.runtime.islands.async_transfer import DEAD_SECONDS
from toolkit.runtime.islands.checkpoint_state import AsyncIslandState

POLL_SECONDS = 0.1
DELIVERY_SECONDS = 600.0
"""For a snapshot over a slow link; then another island is asked."""
Agree = Callable[[Callable[[], Any]], Any]
"""Asks on the first rank; the answer on every rank."""


@dataclass
class Joined:
    """An island's place in the run."""

    life: int
    """How often it has come in."""
    seen: list[int]
    """Letters of each island that are in its state."""
    own_letters: int
    """Letters that it had sent before."""
    sent: int = 0
    """And since."""
    answered: int = 0
    """Requests for snapshots that it has looked at."""
    dropped: int = 0
    """Own letters below this number were taken out of the mailbox."""


def join(
    mailbox: UpdateStore, member: Membership, state: AsyncIslandState, agree: Agree, tick: Callable[[], object]
) -> Joined | None:
    """Come in with the state at hand, or with another island's; None: the run is over. Collective over the island."""
    life = agree(lambda: mailbox.number(f"joined/{member.island}", 1))
    ways = Ways(mailbox, member, life, state.chunks)
    while True:
        way = agree(ways.next)
        if way == "wait":
            tick()
            time.sleep(POLL_SECONDS)
            continue
        if way == "over":
            return None
        if isinstance(way, int):
            snapshot = mailbox.given(way)
            state.take(snapshot.content.view(torch.float32), CompletedRounds.of(snapshot.counters))
            own = agree(lambda: mailbox.letters(member.island))
            return Joined(life, snapshot.seen, own, dropped=own)
        seen, own = agree(lambda: (ways.letters(), mailbox.letters(member.island)))
        return Joined(life, [0] * member.islands if way == "fresh" else seen, own, dropped=own)


class Ways:
    """What the first rank finds out."""

    def __init__(self, mailbox: UpdateStore, member: Membership, life: int, chunks: CompletedRounds) -> None:
        self._mailbox, self._member, self._life, self._chunks = mailbox, member, life, chunks
        self._request: int | None = None
        self._served_at: float | None = None
        self._heard: tuple[list[int], float] = ([], time.monotonic())

    def letters(self) -> list[int]:
        """Letters of every island."""
        return [self._mailbox.letters(island) for island in range(self._member.islands)]

    def next(self) -> str | int:
        """`wait`, `over`, `fresh`, `founded`, or the number of a request that was answered."""
        mailbox, own = self._mailbox, self._member.island
        if mailbox.number("complete"):
            return "over"
        epoch = mailbox.number("founded")
        if epoch == 0:
            return self._found(0) if own == self._member.founder else "wait"
        if self._life == 1 and not len(self._chunks) and self._request is None and not mailbox.number("base"):
            mailbox.write(f"seen/{own}", [0] * self._member.islands)  # before the look: nothing is dropped any more
            if not sum(self.letters()):
                return "fresh"
        if self._request is None:
            self._request = mailbox.number("want/count", 1) - 1
            mailbox.write(f"want/{self._request}", own)
        if mailbox.complete(self._request):
            return self._request
        if self._server_is_lost(self._request):
            self._request = self._served_at = None
        return self._found(epoch) if self._nobody_lives() else "wait"

    def _found(self, epoch: int) -> str:
        """Begin with this island's own state: what is not in it is to be done again."""
        mailbox = self._mailbox
        if not mailbox.first(f"founding/{epoch}"):
            return "wait"
        end = mailbox.number("next") if epoch else max(self._chunks.beyond, default=self._chunks.below - 1) + 1
        for chunk in self._chunks.missing(end):
            mailbox.write(f"redo/{mailbox.number('redo/count')}", chunk)
            mailbox.number("redo/count", 1)
        if not epoch:
            mailbox.number("next", end)
            mailbox.number("base", end)
        mailbox.number("founded", 1)
        return "founded"

    def _server_is_lost(self, request: int) -> bool:
        """Whether an island has promised a snapshot, and does not deliver."""
        if self._served_at is None and self._mailbox.number(f"want/{request}/served"):
            self._served_at = time.monotonic()
        return self._served_at is not None and time.monotonic() - self._served_at > DELIVERY_SECONDS

    def _nobody_lives(self) -> bool:
        """Whether no island has given a sign of life for long."""
        beats = [self._mailbox.number(f"beat/{island}") for island in range(self._member.islands)]
        if beats != self._heard[0]:
            self._heard = (beats, time.monotonic())
        return time.monotonic() - self._heard[1] > DEAD_SECONDS
