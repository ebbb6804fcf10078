"""How an island joins (as founder, with the others at the start, or into a run in progress), and claims rounds."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from toolkit.run_dir.async_islands import CompletedRounds, Membership
from toolkit.runtime.islands.async_store import UpdateStore
from toolkit.runtime.islands.async_transfer import DEAD_SECONDS, BackgroundTransfer
from toolkit.runtime.islands.checkpoint_state import AsyncIslandState

POLL_SECONDS = 0.1
NOBODY = -1
"""In the place of an island: the round was given back."""
DELIVERY_SECONDS = 600.0
"""Time for a snapshot over a slow link; after that another island is asked."""
Agree = Callable[[Callable[[], Any]], Any]
"""Calls a function on the island's first rank and returns its answer on every rank."""


@dataclass
class Joined:
    """Position of an island in the run."""

    incarnation: int
    """How often the island has joined, this time included."""
    seen: list[int]
    """Updates of each island that are part of its state."""
    own_updates: int
    """Updates that earlier incarnations have published."""
    sent: int = 0
    """Updates that this incarnation has published."""
    answered: int = 0
    """Snapshot requests that it has looked at."""
    dropped: int = 0
    """Its updates with smaller serial numbers were removed from the store."""

    def count(self, island: int) -> int:
        """Updates of an island that are part of the state; islands that are not listed yet have none."""
        return self.seen[island] if island < len(self.seen) else 0

    def add(self, island: int) -> None:
        """Count one more update of an island."""
        self.seen += [0] * (island + 1 - len(self.seen))
        self.seen[island] += 1


def join(
    store: UpdateStore,
    membership: Membership,
    state: AsyncIslandState,
    agree: Agree,
    agree_all: Callable[[bool], bool],
    tick: Callable[[], object],
) -> Joined | None:
    """Join with the state at hand or with another island's; None if the run is over. Collective over the island.

    `agree_all`: whether a condition holds on all ranks of the island.
    """
    own = membership.island
    incarnation = agree(lambda: store.number(f"joined/{own}", 1))
    store.put_layout(incarnation, state.layout)
    protocol = JoinProtocol(store, membership, incarnation, state.completed)
    while True:
        decision = agree(protocol.next)
        if decision == "wait":
            tick()
            time.sleep(POLL_SECONDS)
            continue
        if decision == "over":
            return None
        if isinstance(decision, int):
            snapshot = store.read_snapshot(decision, state.layout)
            if not agree_all(snapshot is not None):
                protocol.ask_again()
                continue
            assert snapshot is not None
            agree(partial(store.remove_snapshot, decision))
            state.adopt(snapshot.weights, CompletedRounds.of(snapshot.counters))
            published = agree(lambda: store.num_updates(own))
            return Joined(incarnation, snapshot.seen, published, dropped=published)
        seen, published = agree(lambda: (protocol.num_updates(), store.num_updates(own)))
        return Joined(incarnation, [0] * len(seen) if decision == "fresh" else seen, published, dropped=published)


def ask_to_redo(store: UpdateStore, number: int) -> None:
    """Let any island do a round again."""
    store.write(f"redo/{store.number('redo/count', 1) - 1}", number)


class JoinProtocol:
    """Decides how to join. Used on the island's first rank."""

    def __init__(
        self, store: UpdateStore, membership: Membership, incarnation: int, completed: CompletedRounds
    ) -> None:
        self._store, self._membership = store, membership
        self._incarnation, self._completed = incarnation, completed
        self._request: int | None = None
        self._served_at: float | None = None
        self._heard: tuple[list[int], float] = ([], time.monotonic())

    def num_updates(self) -> list[int]:
        """Number of published updates of every island."""
        return [self._store.num_updates(island) for island in range(self._store.num_islands())]

    def next(self) -> str | int:
        """`wait`, `over`, `fresh`, `founded`, or the number of a snapshot request that was answered."""
        store, own = self._store, self._membership.island
        if store.number("complete"):
            return "over"
        epoch = store.number("founded")
        if epoch == 0:
            return self._found(0) if own == self._membership.founder else "wait"
        if (
            self._incarnation == 1
            and not len(self._completed)
            and self._request is None
            and not store.read("first_round", 0)
        ):
            store.write(f"seen/{own}", [])  # written first: from here on nothing is dropped
            if not sum(self.num_updates()):
                return "fresh"
        if self._request is None:
            if store.read(f"seen/{own}") is None:
                store.write(f"seen/{own}", [])  # from here on nothing is dropped
            self._request = store.number("want/count", 1) - 1
            store.write(f"want/{self._request}", own)
        if store.has_snapshot(self._request):
            return self._request
        if self._server_is_lost(self._request):
            self._request = self._served_at = None
        return self._found(epoch) if self._all_are_silent() else "wait"

    def ask_again(self) -> None:
        """Request another snapshot: what came was damaged."""
        self._request = self._served_at = None

    def _found(self, epoch: int) -> str:
        """Start the run with this island's own state: rounds that are missing from it are done again."""
        store = self._store
        if not store.first(f"founding/{epoch}"):
            return "wait"
        if epoch:
            end = int(store.read("first_round", 0)) + store.number("next")
        else:
            end = max(self._completed.beyond, default=self._completed.below - 1) + 1
        for number in self._completed.missing(end):
            ask_to_redo(store, number)
        if not epoch:
            store.write("first_round", end)
        store.number("founded", 1)
        return "founded"

    def _server_is_lost(self, request: int) -> bool:
        """Whether an island has promised the snapshot but does not deliver it in time."""
        if self._served_at is None and self._store.exists(f"served/{request}"):
            self._served_at = time.monotonic()
        return self._served_at is not None and time.monotonic() - self._served_at > DELIVERY_SECONDS

    def _all_are_silent(self) -> bool:
        """Whether no island's heartbeat has moved for `DEAD_SECONDS`."""
        beats = [self._store.beat(island) for island in range(self._store.num_islands())]
        if beats != self._heard[0]:
            self._heard = (beats, time.monotonic())
        return time.monotonic() - self._heard[1] > DEAD_SECONDS


@dataclass(frozen=True)
class Limits:
    """What bounds the claims of an island."""

    island: int
    num_rounds: int
    """Rounds of the run, over all islands."""
    max_staleness: int
    """Rounds of others that an island may miss before they wait for it; 0: see `Claims`."""

    @property
    def in_turns(self) -> bool:
        """Whether islands wait for one another after every round."""
        return self.max_staleness == 0


class Claims:
    """Which round an island does next. Used on the island's first rank.

    In turns: as many rounds as there are islands are a turn, of which each island does one. It begins when all rounds
    of the turn before are merged, so all rounds of a turn begin with the same weights. The first one waits for all
    islands. Rounds of an island that has left are done by the others, one after the other.
    """

    def __init__(
        self,
        store: UpdateStore,
        joined: Joined,
        transfer: BackgroundTransfer,
        state: AsyncIslandState,
        limits: Limits,
    ) -> None:
        self._store, self._joined, self._transfer, self._state = store, joined, transfer, state
        self._limits, self._own = limits, limits.island
        self.dropped_rounds: set[int] = set()
        """Rounds whose updates were dropped: somebody has to do them again."""
        self._held: int | None = None
        """A round that is claimed and whose turn has not come."""
        self._latest = -1
        """The round that was claimed last."""
        self._absent: list[int] = []
        """Islands that the first turn waits for."""
        self._bases: dict[int, int] = {}
        """Island → updates that were published when it last began a round, as last read: the number only grows."""
        self._redone = 0
        """Requests to do a round again that have been taken, as last read: the number only grows."""
        self._lost: tuple[set[int], float] = (set(), 0.0)
        """Rounds that are missing although nobody works on one, and since when they are."""

    def next(self, rounds_done: int) -> int | str:
        """Claim a round: its number, `wait` or `end`. `rounds_done`: by this incarnation of the island."""
        store, own, completed = self._store, self._own, self._state.completed
        if self._joined.count(own) < self._joined.own_updates or self._too_far_ahead():
            return "wait"
        if len(completed) == self._limits.num_rounds:
            return "end"
        if self._held is not None:
            return self._in_turn(self._held)
        unfinished = store.read(f"open/{own}") if rounds_done == 0 else None
        if unfinished is not None and self._take_over(unfinished):
            return int(unfinished)  # an earlier incarnation of this island had claimed it
        if self._limits.in_turns and (self._is_ahead() or not self._all_have_come()):
            return "wait"
        if self._has_requests():
            number = self._redo(store.number("redo/taken", 1) - 1)
            number = number if number >= 0 and self._take_over(number) else -1
        else:
            number = self._next(1) - 1
        if number >= self._limits.num_rounds:
            number = next((orphan for orphan in self._orphans() if self._take_over(orphan)), -1)
        if number < 0:
            return "wait"
        self._latest = number
        return self._in_turn(number) if self._limits.in_turns else self._begin(number)

    def _begin(self, number: int) -> int:
        self._store.write(f"base/{self._own}", self._transfer.num_published)
        self._store.write(f"open/{self._own}", number)
        return number

    def _in_turn(self, number: int) -> int | str:
        """A claimed round if its turn has come, else a round before it that an island has left behind, or `wait`."""
        first = number - number % self._transfer.num_islands
        if self._state.completed.below >= first:
            self._held = None
            return self._begin(number)
        self._held = number
        before = (orphan for orphan in self._orphans() if orphan < first and self._take_over(orphan))
        return next((self._begin(orphan) for orphan in before), "wait")

    def too_early(self) -> range:
        """Rounds whose updates must wait: of the turn in which this island may still begin a round, and later ones."""
        found = self._held if self._held is not None else self._next()
        end = self._limits.num_rounds
        return range(end, end) if found >= end else range(found - found % self._transfer.num_islands, end)

    def _all_have_come(self) -> bool:
        """Whether every island has joined once. Who came after the first round would begin with other weights."""
        islands = (island for island in range(self._transfer.num_islands) if island != self._own)
        absent = [island for island in islands if not self._store.beat(island)]
        if absent and absent != self._absent:
            names = ", ".join(map(str, absent))
            print(
                f"train.outer.max_staleness 0: the first turn waits for islands that have not joined: {names}",
                flush=True,
            )
        self._absent = absent
        return not absent

    def _is_ahead(self) -> bool:
        """Whether the next round is one of the turn in which this island has done its own, and others can do it."""
        islands = self._transfer.num_islands
        if self._latest < 0 or self._next() // islands != self._latest // islands:
            return False
        return any(self._transfer.alive(island) for island in range(islands) if island != self._own)

    def holds(self, number: int) -> bool:
        """Whether a claimed round is still this island's: nobody has taken it over."""
        return bool(self._store.read(f"taker/{number}", self._self) == self._self)

    def give_back(self, number: int) -> None:
        """Let another island do a round that this one has claimed.

        The island may be killed between any two of these writes: its open round is removed last, so that others find
        the round either among the requests or as that of an island that has left. Only one of them can take it over.
        """
        self._store.write(f"taker/{number}", [NOBODY, *self._self])
        ask_to_redo(self._store, number)
        self._store.write(f"open/{self._own}", None)

    @functools.cached_property
    def _first(self) -> int:
        """The first round of the run, which does not change once an island has joined."""
        return int(self._store.read("first_round", 0))

    def _next(self, plus: int = 0) -> int:
        """Claim `plus` rounds and return the number of the first that nobody has claimed."""
        return self._first + self._store.number("next", plus)

    def _has_requests(self) -> bool:
        """Whether there may be a round to do again."""
        count = self._store.number("redo/count")
        if self._redone < count:
            self._redone = self._store.number("redo/taken")
        return self._redone < count

    def _redo(self, index: int) -> int:
        """The round of a request to do one again; -1 if its island was killed before it wrote the number.

        The number is written just after the request is counted.
        """
        deadline = time.monotonic() + DEAD_SECONDS
        while (number := self._store.read(f"redo/{index}")) is None and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        return -1 if number is None else int(number)

    def _take_over(self, number: int) -> bool:
        """Claim a round that an earlier incarnation or a lost island did not finish; False if another island has it."""
        taker = self._store.read(f"taker/{number}")
        taken = taker is not None and taker[0] not in (NOBODY, self._own) and self._transfer.alive(taker[0])
        if number in self._state.completed or taken or not self._store.first(f"again/{number}/{taker}"):
            return False
        self._store.write(f"taker/{number}", self._self)
        return True

    @property
    def _self(self) -> list[int]:
        return [self._own, self._joined.incarnation]

    def _orphans(self) -> list[int]:
        """Unfinished rounds of islands that have left, rounds whose updates were dropped, and lost ones."""
        others = [island for island in range(self._transfer.num_islands) if island != self._own]
        left = [i for i in others if self._transfer.has_left(i, self._store.beat(i))]
        found = {self._store.read(f"open/{island}") for island in left}
        in_work = {self._store.read(f"open/{island}") for island in others if island not in left}
        found |= self.dropped_rounds - in_work
        if all(number is None or number in self._state.completed for number in in_work):
            found |= self._lost_rounds()
        return sorted(number for number in found if number is not None and number not in self._state.completed)

    def _lost_rounds(self) -> set[int]:
        """Rounds of islands that were killed between claiming them and writing so. Asked while nobody works.

        An island that has just claimed a round looks like this for a moment, hence the wait.
        """
        missing = set(self._state.completed.missing(self._limits.num_rounds))
        if missing != self._lost[0]:
            self._lost = (missing, time.monotonic())
        return missing if time.monotonic() - self._lost[1] > DEAD_SECONDS else set()

    def _too_far_ahead(self) -> bool:
        """Whether a live island would fall behind by more updates than `max_staleness` allows."""
        if self._limits.in_turns:
            return False
        others = (island for island in range(self._transfer.num_islands) if island != self._own)
        return any(self._transfer.is_awaited(island) and self._lags(island) for island in others)

    def _lags(self, island: int) -> bool:
        """Whether others must wait for an island. The store is asked only if what is known of it leaves that open."""
        published, most = self._transfer.num_published, self._limits.max_staleness
        if published - self._bases.get(island, 0) < most:
            return False
        self._bases[island] = base = int(self._store.read(f"base/{island}", 0))
        if published - base < most:
            return False
        number = self._store.read(f"open/{island}")
        return number is not None and number not in self._state.completed
