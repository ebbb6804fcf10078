"""Background transfer of updates: threads with their own connections send, fetch and beat during training."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable

from toolkit.run_dir.async_islands import Membership
from toolkit.runtime.islands.async_store import BEAT, JOINING, Update, UpdateStore
from toolkit.runtime.islands.flat_masters import Layout
from toolkit.runtime.islands.quantize import Encoding

POLL_SECONDS = 0.05
SLOWEST_POLL_SECONDS = 0.5
"""Pause between two looks for updates while none arrive: each look is a request per island, and costs training time."""
BEAT_SECONDS = 1.0
FLUSH_SECONDS = 5.0
"""Time for the last update of an island that was asked to stop."""
DEAD_SECONDS = 10.0
"""An island without a heartbeat for this long has left; it may join again."""
FIRST_BEATS_SECONDS = 3 * BEAT_SECONDS
"""Time for the first heartbeats that an island sees of another one."""
KEEP_SECONDS = 60.0
"""Updates are kept for an island without a heartbeat for this long: one that was stopped or cut off can catch up."""

Task = Callable[[UpdateStore], None]


class BackgroundTransfer:
    """One rank's threads: one runs queued tasks, one fetches updates of other islands, one sends heartbeats."""

    def __init__(self, membership: Membership, rank: int, ranks: int, layout: Layout, encoding: Encoding) -> None:
        """`layout`: of this rank's part. `encoding`: of all updates."""
        self._membership, self._own_until = membership, 0
        self._layout, self._encoding = layout, encoding
        self._rank, self._ranks = rank, ranks
        self._fetched: list[int] = []
        self._published: list[int] = []
        """Updates that each island has published, as last seen."""
        self._outgoing: queue.Queue[Task] = queue.Queue()
        self._arrived: list[list[Update]] = [[] for _ in range(membership.islands)]
        self._failure: Exception | None = None
        self._beats: dict[tuple[str, int], tuple[int, float]] = {}
        """Newest heartbeat of each kind and island, and when it was first seen."""
        self._moving: set[int] = set()
        """Islands whose heartbeat has moved while this one has watched."""
        self.num_requests = 0
        """Snapshots that joining islands have requested, as last seen. Only the island's first rank knows."""
        self._kind = JOINING
        self._beaten = time.monotonic()
        self.was_away = False
        """Whether the others could take this island for one that has left: updates are kept for it for a while only."""
        self._ended = threading.Event()
        self._pause_seconds = POLL_SECONDS
        self._hurried = threading.Event()
        self.sent_bytes = self.received_bytes = 0
        """Encoded updates that this rank has sent and fetched."""
        self.busy_seconds = 0.0
        """Time that this rank took to send."""
        self._stores: list[UpdateStore] = []
        """Connections of the threads."""
        self._start(self._send)
        self._start(self._beat)

    def start(self, fetched: list[int], own_until: int) -> None:
        """The island has joined: fetch updates of others.

        `fetched`: number of updates of each island that are known already. `own_until`: of this island's own updates,
        fetch only those before this serial number (of earlier incarnations); this one sends the rest itself.
        """
        self._fetched, self._own_until, self._kind = list(fetched), own_until, BEAT
        self._published = list(fetched)
        self._start(self._fetch)

    @property
    def num_islands(self) -> int:
        """Islands of the run, as far as this rank knows."""
        return len(self._arrived)

    @property
    def num_published(self) -> int:
        """Updates that all islands have published, as far as this rank knows."""
        return sum(self._published)

    def hurry(self) -> None:
        """Look for updates now: training waits for them."""
        self._pause_seconds = POLL_SECONDS
        self._hurried.set()

    def send(self, task: Task) -> None:
        """Run a task in the background, after those queued before it."""
        self._outgoing.put(task)

    @property
    def sending(self) -> bool:
        """Whether a task is queued or running."""
        return self._outgoing.unfinished_tasks > 0

    def waiting(self) -> list[int]:
        """Number of fetched updates of each island; an error of a background thread is raised here."""
        if self._failure is not None:
            raise self._failure
        return [len(updates) for updates in self._arrived]

    def before(self, rounds: range, counts: list[int]) -> list[int]:
        """How many of these fetched updates of each island come before the first one of these rounds."""
        return [
            next((place for place, update in enumerate(updates[:count]) if update.round in rounds), count)
            for updates, count in zip(self._arrived, counts, strict=False)
        ]

    def take(self, counts: list[int]) -> list[Update]:
        """Remove and return this many fetched updates of each island, oldest first."""
        taken = [update for updates, count in zip(self._arrived, counts, strict=False) for update in updates[:count]]
        for updates, count in zip(self._arrived, counts, strict=False):
            del updates[:count]
        return taken

    def alive(self, island: int) -> bool:
        """Whether an island's heartbeat has moved within `DEAD_SECONDS`. Only the island's first rank knows."""
        return self._silence(island, BEAT) < DEAD_SECONDS

    def is_awaited(self, island: int) -> bool:
        """Whether an island is alive, as far as others wait for it or reckon with its updates.

        One whose heartbeat has not moved since this island came is so for a few beats only: most have left long before.
        """
        limit = DEAD_SECONDS if island in self._moving else FIRST_BEATS_SECONDS
        return self._silence(island, BEAT) < limit

    def needs_updates(self, island: int) -> bool:
        """Whether an island trains, waits to, or may yet come back: updates are kept for it."""
        return min(self._silence(island, BEAT), self._silence(island, JOINING)) < KEEP_SECONDS

    def _silence(self, island: int, kind: str) -> float:
        """Seconds since an island's heartbeat has moved; 0 for one that was never asked for."""
        now = time.monotonic()
        return now - self._beats.get((kind, island), (0, now))[1]

    def has_left(self, island: int, beat: int) -> bool:
        """Whether an island is not alive. `beat`: its newest heartbeat, because it may have joined again since."""
        return not self.alive(island) and self._beats[BEAT, island][0] == beat

    def rejected(self) -> Counter[int]:
        """Island → keys whose values this rank's threads have ignored, as in `UpdateStore.rejected`."""
        return sum((store.rejected() for store in self._stores), Counter())

    def flush(self) -> None:
        """Wait for queued tasks, for at most `FLUSH_SECONDS`."""
        deadline = time.monotonic() + FLUSH_SECONDS
        while self.sending and self._failure is None and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)

    def end(self) -> None:
        """End the threads."""
        self._ended.set()
        self._hurried.set()

    def _start(self, work: Callable[[UpdateStore], None]) -> None:
        threading.Thread(target=self._guarded, args=(work,), daemon=True).start()

    def _guarded(self, work: Callable[[UpdateStore], None]) -> None:
        try:
            store = UpdateStore(self._membership, self._rank, self._ranks)
            self._stores.append(store)
            while not self._ended.is_set():
                work(store)
        except Exception as error:  # any error is raised in the main thread, by `waiting`
            if not self._ended.is_set():
                self._failure = error

    def _send(self, store: UpdateStore) -> None:
        try:
            task = self._outgoing.get(timeout=POLL_SECONDS)
        except queue.Empty:
            return
        started = time.perf_counter()
        task(store)
        self.busy_seconds += time.perf_counter() - started
        self._outgoing.task_done()

    def _fetch(self, store: UpdateStore) -> None:
        islands = store.num_islands()
        self._fetched += [0] * (islands - len(self._fetched))
        self._published += [0] * (islands - len(self._published))
        self._arrived += [[] for _ in range(islands - len(self._arrived))]
        known = sum(self._fetched)
        for island in range(islands):
            published = self._published[island] = store.num_updates(island)
            if island == self._membership.island:
                published = min(published, self._own_until)
            while self._fetched[island] < published:
                update = store.fetch(island, self._fetched[island], self._layout, self._encoding)
                self.received_bytes += sum(piece.content.numel() for piece in update.pieces)
                self._arrived[island].append(update)
                self._fetched[island] += 1
        longer = min(1.5 * self._pause_seconds, SLOWEST_POLL_SECONDS)
        self._pause_seconds = POLL_SECONDS if sum(self._fetched) > known else longer
        self._hurried.wait(self._pause_seconds)
        self._hurried.clear()

    def _beat(self, store: UpdateStore) -> None:
        if self._rank == 0:
            store.send_beat(time.time_ns(), self._kind)
            before, self._beaten = self._beaten, time.monotonic()
            self.was_away |= self._beaten - before > DEAD_SECONDS
            self.num_requests = store.number("want/count")
            for key in itertools.product((BEAT, JOINING), range(store.num_islands())):
                beat = store.beat(key[1], key[0])
                if self._beats.get(key, (None, 0.0))[0] != beat:
                    if key in self._beats and key[0] == BEAT:
                        self._moving.add(key[1])
                    self._beats[key] = (beat, time.monotonic())
        self._ended.wait(BEAT_SECONDS)
