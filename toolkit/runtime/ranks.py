"""What all ranks did, reduced to smallest, mean and largest with the rank of each extreme; who holds the others up."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed

LATE_SHARE = 0.1
"""A rank whose own work takes longer than its peers' by this share of a step is a straggler."""

SECONDS = (
    "wall_seconds",
    "busy_seconds",
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
"""What each rank brings to a gathering, in this order; not-a-number where it has none."""


@dataclass(frozen=True)
class Straggler:
    """A rank that holds the others up."""

    rank: int
    seconds: float
    """How much longer a step of its own work takes than its peers'."""

    def words(self) -> str:
        """For the terminal and the list of events."""
        return f"rank {self.rank} holds the others up: its own work takes {self.seconds * 1000:.0f} ms a step longer"


@dataclass(frozen=True)
class Gathered:
    """One row a rank, one column a value of `VALUES`."""

    table: list[list[float]]

    def column(self, name: str) -> list[float]:
        """A value of every rank."""
        place = VALUES.index(name)
        return [row[place] for row in self.table]

    def stats(self) -> dict[str, dict[str, float]]:
        """Smallest, mean and largest with their ranks, for every value that a rank has."""
        return {name: found for name in VALUES if (found := _stats(self.column(name)))}

    def straggler(self, ranks_per_stage: int) -> Straggler | None:
        """The rank whose own work takes clearly longer than that of the ranks that do the same."""
        busy, wall = self.column("busy_seconds"), statistics.fmean(self.column("wall_seconds"))
        late = [(own - _peers(busy, rank, ranks_per_stage), rank) for rank, own in enumerate(busy)]
        seconds, rank = max(late)
        return Straggler(rank, round(seconds, 6)) if len(busy) > 1 and seconds > LATE_SHARE * wall else None

    def bubble_by_stage(self, ranks_per_stage: int) -> list[float]:
        """Share of the pipeline's time in which a stage does not compute; the first stage is there from end to end."""
        window = max(self.column("pipeline_seconds"))
        busy = self.column("pipeline_busy_seconds")
        stages = [busy[low : low + ranks_per_stage] for low in range(0, len(busy), ranks_per_stage)]
        return [round(max(0.0, 1 - statistics.fmean(stage) / window), 4) if window > 0 else 0.0 for stage in stages]


def _peers(busy: Sequence[float], rank: int, ranks_per_stage: int) -> float:
    """Usual work of the other ranks of the same stage; of all others where a stage is one rank."""
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
    """Every rank's values, on every rank; the group is one of the hosts' memory. Collective."""
    own = torch.tensor([values.get(name, float("nan")) for name in VALUES], dtype=torch.float64)
    if group is None:
        return Gathered([own.tolist()])
    rows = [torch.empty_like(own) for _ in range(torch.distributed.get_world_size(group))]
    torch.distributed.all_gather(rows, own, group=group)
    return Gathered([row.tolist() for row in rows])
