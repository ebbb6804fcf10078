"""Step time by part on this rank and, every few steps, statistics over all ranks."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from toolkit.plans.plan import Plan
from toolkit.run_dir.step_parts import BETWEEN_STEPS, COMMUNICATION
from toolkit.runtime.machine.counters import Counters
from toolkit.runtime.metrics.comm_timer import CommTimer, Tally
from toolkit.runtime.metrics.memory import MemoryMeter
from toolkit.runtime.metrics.step_clock import RECEIVE, Clock, Lap, part
from toolkit.runtime.metrics.stragglers import Straggler, StragglerWatch, gather


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Times of one step on this rank."""

    time: float
    """End of the step, in seconds since 1970."""
    wall_seconds: float
    parts: dict[str, float]
    grad_sync_seconds: float | None
    """Duration of gradient synchronisation, hidden or not."""
    comm_seconds: float


@dataclass(frozen=True, kw_only=True)
class Detail:
    """Fields that are added to a record every few steps."""

    ranks: dict[str, dict[str, float]]
    collectives: dict[str, dict[str, float]]
    """Collectives of this step on this rank, by kind and purpose."""
    straggler: Straggler | None
    bubble_by_stage: list[float] | None

    def fields(self) -> dict[str, Any]:
        """The fields of a record."""
        late = self.straggler
        return {
            "ranks": self.ranks,
            "collectives": self.collectives,
            "straggler": {"rank": late.rank, "seconds": late.seconds} if late else None,
            "bubble_by_stage": self.bubble_by_stage,
        }


@dataclass
class StepMeter:
    """Collects the times of each step."""

    plan: Plan
    clock: Clock
    comm: CommTimer
    memory: MemoryMeter
    counters: Counters
    every: int
    """Steps between two statistics over all ranks; 0: none, and nothing is sampled."""
    group: Any = None
    """Gloo group of all ranks."""
    _window: list[dict[str, float]] = field(default_factory=list)
    _tallies: dict[str, Tally] = field(default_factory=dict)
    _fastest_receive: float = float("inf")
    _watch: StragglerWatch = field(default_factory=StragglerWatch)

    def part(self, name: str) -> AbstractContextManager[None]:
        """Attribute the time inside the `with` to this part."""
        return part(self.clock, name)

    def begin(self) -> None:
        """Start of training: the time before belongs to no step."""
        self.clock.lap(sample_next=self.every == 1)
        self.comm.take()

    def samples_around(self, step: int) -> bool:
        """Whether parts are measured on the device in this step or in the next: they must not run into each other."""
        return self.every > 0 and (step % self.every == 0 or (step + 1) % self.every == 0)

    def close(self, step: int) -> StepTimes:
        """Finish a step, counted from 1, and return its times."""
        lap, now = self.clock.lap(sample_next=self.every > 0 and (step + 1) % self.every == 0), time.time()
        traffic = self.comm.take()
        self._tallies = traffic.tallies
        parts = self._parts(lap)
        if parts:
            self._window.append(_row(lap, parts))
        exposed = parts.get("grad_sync")
        return StepTimes(
            time=now,
            wall_seconds=lap.wall_seconds,
            parts={name: round(seconds, 6) for name, seconds in parts.items()} if self.every else {},
            grad_sync_seconds=None if exposed is None else round(exposed + lap.hidden.get("grad_sync", 0.0), 6),
            comm_seconds=traffic.seconds,
        )

    def detail(self, step: int) -> Detail | None:
        """Statistics of all ranks over the last steps, every `every` steps. Collective then."""
        if not self.every or step % self.every:
            return None
        window, self._window = self._window, []
        values = {name: _usual(sorted(row[name] for row in window)) for name in window[0]} if window else {}
        values["busy_spread_seconds"] = _spread(sorted(row["busy_seconds"] for row in window))
        values |= {"memory_bytes": self.memory.peak_bytes, "memory_now_bytes": self.memory.now_bytes()}
        with self.comm.held("agree"):
            gathered = gather(values | self.counters.take(), self.group)
        ranks_per_stage = self.plan.devices // self.plan.pp
        return Detail(
            ranks=gathered.stats(),
            collectives={
                name: {"calls": tally.calls, "bytes": round(tally.bytes), "seconds": round(tally.seconds, 6)}
                for name, tally in sorted(self._tallies.items())
            },
            straggler=self._watch.look(gathered.latest(ranks_per_stage)),
            bubble_by_stage=gathered.bubble_by_stage(ranks_per_stage) if self.plan.pp > 1 else None,
        )

    def _parts(self, lap: Lap) -> dict[str, float]:
        """Split receives into transfer (as long as the fastest so far) and bubble (waiting for the other stage)."""
        parts = dict(lap.parts)
        if lap.receives:
            self._fastest_receive = min(self._fastest_receive, *lap.receives)
            transfers = self._fastest_receive * len(lap.receives)
            parts["bubble"] = max(0.0, parts.pop(RECEIVE) - transfers)
            parts["pp_comm"] = parts.get("pp_comm", 0.0) + transfers
        return parts


def _row(lap: Lap, parts: dict[str, float]) -> dict[str, float]:
    """This rank's values for one step."""
    held = sum(parts.get(name, 0.0) for name in COMMUNICATION)
    computed = parts.get("forward", 0.0) + parts.get("backward", 0.0)
    waits = sum(parts.get(name, 0.0) for name in ("tp_comm", "sp_comm", "pp_comm", "bubble"))
    return {
        "wall_seconds": lap.wall_seconds,
        "busy_seconds": lap.wall_seconds - held - sum(parts.get(name, 0.0) for name in BETWEEN_STEPS),
        "comm_seconds": held,
        "data_seconds": parts.get("data", 0.0),
        "pipeline_busy_seconds": computed,
        "pipeline_seconds": computed + waits,
    }


def _usual(ordered: list[float]) -> float:
    """The lower quartile: it shows a rank that is always slow, and is hardly affected by other load on the machine."""
    return ordered[(len(ordered) - 1) // 4]


def _spread(ordered: list[float]) -> float:
    """Difference between the median and the fastest step: the noise of `_usual`."""
    return ordered[(len(ordered) - 1) // 2] - ordered[0] if ordered else 0.0
