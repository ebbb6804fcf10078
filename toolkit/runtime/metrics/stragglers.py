"""Statistics over ranks (minimum, mean and maximum with their ranks) and straggler detection."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed

EVIDENCE = ((2, 0.25), (5, 0.1))
"""(windows in a row, fraction of a step by which a rank was slower than its peers in each of them). A much slower rank
is reported soon, a slightly slower one later, and a rank that was slow by chance not at all."""

SECONDS = (
    "wall_seconds",
    "busy_seconds",
    "busy_spread_seconds",
    "comm_seconds",
    "data_seconds",
    "pipeline_busy_seconds",
    "pipeline_seconds",
)
BYTES = ("memory_bytes", "memory_now_bytes")
COUNTERS = (
    "cpu_percent",
    "host_memory_bytes",
    "device_percent",
    "device_bandwidth_percent",
    "power_watts",
    "temperature_celsius",
    "nvlink_bytes_per_second",
    "pcie_bytes_per_second",
)
VALUES = (*SECONDS, *BYTES, *COUNTERS)
"""Values that each rank contributes, in this order; NaN if it has none."""


@dataclass(frozen=True)
class Straggler:
    """A rank that is slower than its peers in several windows in a row."""

    rank: int
    seconds: float
    """Extra time per step of its own work, communication excluded, compared with its peers."""


def straggler_sentence(rank: int, seconds: float) -> str:
    """One sentence for the terminal and the event list; `seconds` is the extra time per step."""
    return f"rank {rank} is a straggler: {seconds * 1000:.0f} ms slower per step than its peers, communication excluded"


@dataclass(frozen=True)
class Late:
    """The slowest rank of one window."""

    rank: int
    seconds: float
    """Extra time per step compared with its peers."""
    share: float
    """`seconds` as a fraction of the step time."""


@dataclass(frozen=True)
class Gathered:
    """Values of all ranks: one row per rank, one column per entry of `VALUES`."""

    table: list[list[float]]

    def column(self, name: str) -> list[float]:
        """One value of every rank."""
        place = VALUES.index(name)
        return [row[place] for row in self.table]

    def stats(self) -> dict[str, dict[str, float]]:
        """Minimum, mean and maximum with their ranks, for every value that at least one rank has."""
        return {name: found for name in VALUES if (found := _stats(self.column(name)))}

    def latest(self, ranks_per_stage: int) -> Late | None:
        """The rank that was slowest compared with ranks that do the same work, if the difference exceeds the noise."""
        busy, spread = self.column("busy_seconds"), self.column("busy_spread_seconds")
        seconds, rank = max((own - _peers(busy, rank, ranks_per_stage), rank) for rank, own in enumerate(busy))
        noise = max(spread[rank], _peers(spread, rank, ranks_per_stage))
        wall = statistics.fmean(self.column("wall_seconds"))
        return Late(rank, seconds, seconds / wall) if len(busy) > 1 and wall > 0 and seconds > noise else None

    def bubble_by_stage(self, ranks_per_stage: int) -> list[float]:
        """Fraction of the pipeline's time in which each stage does not compute."""
        window = max(self.column("pipeline_seconds"))
        busy = self.column("pipeline_busy_seconds")
        stages = [busy[low : low + ranks_per_stage] for low in range(0, len(busy), ranks_per_stage)]
        return [round(max(0.0, 1 - statistics.fmean(stage) / window), 4) if window > 0 else 0.0 for stage in stages]


class StragglerWatch:
    """Reports a straggler when several windows in a row agree on the rank."""

    def __init__(self) -> None:
        self._windows: deque[Late | None] = deque(maxlen=max(windows for windows, _ in EVIDENCE))

    def look(self, late: Late | None) -> Straggler | None:
        """Add a window; return the straggler, if there is one."""
        self._windows.append(late)
        if late is None or not any(self._agree(late.rank, windows, share) for windows, share in EVIDENCE):
            return None
        return Straggler(late.rank, round(late.seconds, 6))

    def _agree(self, rank: int, windows: int, share: float) -> bool:
        last = list(self._windows)[-windows:]
        return len(last) == windows and all(late and late.rank == rank and late.share > share for late in last)


def _peers(busy: Sequence[float], rank: int, ranks_per_stage: int) -> float:
    """Median of the other ranks of the same stage, or of all other ranks if the stage has one rank."""
    first = rank // ranks_per_stage * ranks_per_stage
    peers = [busy[other] for other in range(first, first + ranks_per_stage) if other != rank]
    return statistics.median(peers or [own for other, own in enumerate(busy) if other != rank] or [busy[rank]])


def _stats(values: Sequence[float]) -> dict[str, float]:
    known = [(value, rank) for rank, value in enumerate(values) if value == value]
    if not known:
        return {}
    (low, low_rank), (high, high_rank) = min(known), max(known)
    mean = statistics.fmean(value for value, _ in known)
    found = {"min": low, "mean": mean, "max": high}
    return {**{key: round(value, 6) for key, value in found.items()}, "min_rank": low_rank, "max_rank": high_rank}


def gather(values: dict[str, float], group: Any) -> Gathered:
    """The values of all ranks, on every rank; `group` is a gloo group. Collective."""
    own = torch.tensor([values.get(name, float("nan")) for name in VALUES], dtype=torch.float64)
    if group is None:
        return Gathered([own.tolist()])
    rows = [torch.empty_like(own) for _ in range(torch.distributed.get_world_size(group))]
    torch.distributed.all_gather(rows, own, group=group)
    return Gathered([row.tolist() for row in rows])
