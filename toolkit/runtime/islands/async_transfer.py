"""Letters come and go behind the training: threads of their own, with connections of their own."""

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
"""For the last letter of an island that was asked to stop."""
DEAD_SECONDS = 10.0
"""An island that gives no sign of life for so long has left; it may come back."""

Task = Callable[[UpdateStore], None]


class BackgroundTransfer:
    """Of one rank: sends what it is given, and fetches what others send."""

    def __init__(self, member: Membership, rank: int, ranks: int, fetched: list[int], *, own_from: int) -> None:
        """`fetched`: letters of each island that are known; from `own_from` on it sends those of its own."""
        self._member, self._own_from = member, own_from
        self._rank, self._ranks = rank, ranks
        self._fetched = list(fetched)
        self._outgoing: queue.Queue[Task] = queue.Queue()
        self._arrived: list[list[Update]] = [[] for _ in range(member.islands)]
        self._failure: Exception | None = None
        self._lives: dict[int, tuple[int, float]] = {}
        self._beats = rank == 0
        self._ended = threading.Event()
        for work in (self._send, self._fetch, self._beat):
            threading.Thread(target=self._guarded, args=(work,), daemon=True).start()

    def send(self, errand: Task) -> None:
        """Run it soon, after those before it."""
        self._outgoing.put(errand)

    @property
    def sending(self) -> bool:
        """Whether something is still on its way out."""
        return self._outgoing.unfinished_tasks > 0

    def waiting(self) -> list[int]:
        """How many letters of each island can be taken; what went wrong is raised here."""
        if self._failure is not None:
            raise self._failure
        return [len(letters) for letters in self._arrived]

    def take(self, counts: list[int]) -> list[Update]:
        """So many of each island, in their order."""
        taken = [letter for letters, count in zip(self._arrived, counts, strict=True) for letter in letters[:count]]
        for letters, count in zip(self._arrived, counts, strict=True):
            del letters[:count]
        return taken

    def alive(self, island: int) -> bool:
        """Whether an island has given a sign of life lately. Known to the first rank only."""
        _, since = self._lives.get(island, (0, time.monotonic()))
        return time.monotonic() - since < DEAD_SECONDS

    def has_left(self, island: int, beat: int) -> bool:
        """Whether it has not, though asked just now: it may have come in since the last look."""
        return not self.alive(island) and self._lives[island][0] == beat

    def flush(self) -> None:
        """Give what is on its way out a little time."""
        deadline = time.monotonic() + FLUSH_SECONDS
        while self.sending and self._failure is None and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)

    def end(self) -> None:
        """Nothing more is sent or fetched."""
        self._ended.set()

    def _guarded(self, work: Callable[[UpdateStore], None]) -> None:
        try:
            mailbox = UpdateStore(self._member, self._rank, self._ranks)
            while not self._ended.is_set():
                work(mailbox)
        except Exception as error:  # whatever it is, it belongs to the run's own thread
            if not self._ended.is_set():
                self._failure = error

    def _send(self, mailbox: UpdateStore) -> None:
        try:
            errand = self._outgoing.get(timeout=POLL_SECONDS)
        except queue.Empty:
            return
        errand(mailbox)
        self._outgoing.task_done()

    def _fetch(self, mailbox: UpdateStore) -> None:
        for island in range(self._member.islands):
            there = mailbox.letters(island)
            there = min(there, self._own_from) if island == self._member.island else there
            while self._fetched[island] < there:
                self._arrived[island].append(mailbox.fetch(island, self._fetched[island]))
                self._fetched[island] += 1
        self._ended.wait(POLL_SECONDS)

    def _beat(self, mailbox: UpdateStore) -> None:
        if self._beats:
            mailbox.number(f"beat/{self._member.island}", 1)
            for island in range(self._member.islands):
                beat = mailbox.number(f"beat/{island}")
                if self._lives.get(island, (None, 0.0))[0] != beat:
                    self._lives[island] = (beat, time.monotonic())
        self._ended.wait(BEAT_SECONDS)
