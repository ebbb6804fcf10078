"""Background transfer of updates: threads with their own connections send, fetch and beat during training."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

from toolkit.run_dir.async_islands import Membership
from toolkit.runtime.islands.async_store import Update, UpdateStore

POLL_SECONDS = 0.05
BEAT_SECONDS = 1.0
FLUSH_SECONDS = 5.0
"""Time for the last update of an island that was asked to stop."""
DEAD_SECONDS = 10.0
"""An island without a heartbeat for this long has left; it may join again."""

Task = Callable[[UpdateStore], None]


class BackgroundTransfer:
    """One rank's threads: one runs queued tasks, one fetches updates of other islands, one sends heartbeats."""

    def __init__(
        self, membership: Membership, rank: int, ranks: int, fetched: list[int], *, own_until: int, num_bytes: int
    ) -> None:
        """`fetched`: number of updates of each island that are known already. `own_until`: of this island's own
        updates, fetch only those before this serial number (of earlier incarnations); this one sends the rest itself.
        `num_bytes`: size of this rank's shard of any update.
        """
        self._membership, self._own_until, self._num_bytes = membership, own_until, num_bytes
        self._rank, self._ranks = rank, ranks
        self._fetched = list(fetched)
        self._outgoing: queue.Queue[Task] = queue.Queue()
        self._arrived: list[list[Update]] = [[] for _ in range(membership.islands)]
        self._failure: Exception | None = None
        self._beats: dict[int, tuple[int, float]] = {}
        """Newest heartbeat of each island, and when it was first seen."""
        self._ended = threading.Event()
        for work in (self._send, self._fetch, self._beat):
            threading.Thread(target=self._guarded, args=(work,), daemon=True).start()

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

    def take(self, counts: list[int]) -> list[Update]:
        """Remove and return this many fetched updates of each island, oldest first."""
        taken = [update for updates, count in zip(self._arrived, counts, strict=True) for update in updates[:count]]
        for updates, count in zip(self._arrived, counts, strict=True):
            del updates[:count]
        return taken

    def alive(self, island: int) -> bool:
        """Whether an island's heartbeat has moved within `DEAD_SECONDS`. Only the island's first rank knows."""
        _, since = self._beats.get(island, (0, time.monotonic()))
        return time.monotonic() - since < DEAD_SECONDS

    def has_left(self, island: int, beat: int) -> bool:
        """Whether an island is not alive. `beat`: its newest heartbeat, because it may have joined again since."""
        return not self.alive(island) and self._beats[island][0] == beat

    def flush(self) -> None:
        """Wait for queued tasks, for at most `FLUSH_SECONDS`."""
        deadline = time.monotonic() + FLUSH_SECONDS
        while self.sending and self._failure is None and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)

    def end(self) -> None:
        """End the threads."""
        self._ended.set()

    def _guarded(self, work: Callable[[UpdateStore], None]) -> None:
        try:
            store = UpdateStore(self._membership, self._rank, self._ranks)
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
        task(store)
        self._outgoing.task_done()

    def _fetch(self, store: UpdateStore) -> None:
        for island in range(self._membership.islands):
            published = store.num_updates(island)
            if island == self._membership.island:
                published = min(published, self._own_until)
            while self._fetched[island] < published:
                self._arrived[island].append(store.fetch(island, self._fetched[island], self._num_bytes))
                self._fetched[island] += 1
        self._ended.wait(POLL_SECONDS)

    def _beat(self, store: UpdateStore) -> None:
        if self._rank == 0:
            store.send_beat(time.time_ns())
            for island in range(self._membership.islands):
                beat = store.beat(island)
                if self._beats.get(island, (None, 0.0))[0] != beat:
                    self._beats[island] = (beat, time.monotonic())
        self._ended.wait(BEAT_SECONDS)
