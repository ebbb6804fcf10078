"""Which parts of a run are done, where several islands share the work out among themselves: plain numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

BELOW, BEYOND = "chunks_below", "chunk."
"""Names in a checkpoint's counters: all chunks below a number are done, and these beyond it."""


@dataclass
class Chunks:
    """Chunks whose changes are in the weights; a chunk is the steps of one round, counted over all islands."""

    below: int = 0
    """All with smaller numbers are done."""
    beyond: set[int] = field(default_factory=set)

    def __contains__(self, chunk: int) -> bool:
        return chunk < self.below or chunk in self.beyond

    def __len__(self) -> int:
        return self.below + len(self.beyond)

    def add(self, chunk: int) -> None:
        """One more is done."""
        assert chunk not in self, f"chunk {chunk} is done twice"
        self.beyond.add(chunk)
        while self.below in self.beyond:
            self.beyond.remove(self.below)
            self.below += 1

    def missing(self, end: int) -> Iterable[int]:
        """Those before `end` that are not done."""
        return [chunk for chunk in range(self.below, end) if chunk not in self.beyond]

    def counters(self) -> dict[str, float]:
        """For a checkpoint."""
        return {BELOW: self.below, **{f"{BEYOND}{chunk}": 1 for chunk in sorted(self.beyond)}}

    @classmethod
    def of(cls, counters: Mapping[str, float]) -> Chunks:
        """From a checkpoint."""
        beyond = {int(name.removeprefix(BEYOND)) for name in counters if name.startswith(BEYOND)}
        return cls(int(counters.get(BELOW, 0)), beyond)
