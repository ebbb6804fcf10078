"""summary.json: how a run ended, predicted against measured by part, and why they differ."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any

from toolkit.run_dir.layout import RunDir, RunSpec
from toolkit.run_dir.predicted_vs_measured import Circumstances, ComparisonRow, compare, compare_memory, explain
from toolkit.runtime.distributed.process_group import gather_objects
from toolkit.runtime.layers.fused_kernels import kernels_of
from toolkit.runtime.metrics.record import Record
from toolkit.runtime.observer import Observer

WARMING = 3
"""First steps, in which caches fill and one is measured for memory."""


@dataclass(frozen=True)
class RunEnd:
    """How a run ended."""

    status: str
    """`done`, `failed`, `loss_not_finite` or `preempted`."""
    step: int
    """Steps done."""
    seconds: float


@dataclass
class Averages:
    """A sink that averages over all steps for the summary."""

    time: dict[str, float]
    """Predicted seconds per step, by part."""
    link_bytes_per_second: float = 0.0
    """Bandwidth of one rank's link according to the cluster file; 0: unknown."""
    _steps: int = 0
    _counted: int = 0
    _parts: dict[str, float] = field(default_factory=dict)
    _named: dict[int, list[float]] = field(default_factory=dict)
    _details: int = 0
    _rates: list[float] = field(default_factory=list)
    _skipped: int = 0
    _last_detail: Record | None = None

    def start(self, info: Any) -> None:
        """Nothing to do."""

    def evaluated(self, record: Any) -> None:
        """Nothing to do."""

    def rewind(self, step: int) -> None:
        """Repeated steps count twice: they took their time."""

    def finish(self, summary: Any) -> None:
        """Nothing to do."""

    def log(self, record: Record) -> None:
        """One step."""
        self._steps += 1
        self._skipped += record.skipped
        if record.parts and self._steps > WARMING:
            self._counted += 1
            for name, seconds in record.parts.items():
                self._parts[name] = self._parts.get(name, 0.0) + seconds
        if record.ranks is not None:
            self._details += 1
            self._last_detail = record
            self._rate(record)
        if record.straggler:
            self._named.setdefault(int(record.straggler["rank"]), []).append(record.straggler["seconds"])

    def _rate(self, record: Record) -> None:
        """Bytes per second of gradient traffic in this step."""
        found = [one for name, one in (record.collectives or {}).items() if name.endswith("/grad_sync")]
        seconds = sum(one["seconds"] for one in found)
        if seconds > 0:
            self._rates.append(sum(one["bytes"] for one in found) / seconds)

    def summary(self) -> dict[str, Any]:
        """Averages by part, stragglers and traffic, as keys of the summary."""
        rows = compare(self.time, {name: seconds / self._counted for name, seconds in self._parts.items()})
        detail = self._last_detail
        return {
            "parts": {row.name: {"predicted": row.predicted, "measured": row.measured} for row in rows},
            "explanation": explain(rows, self._circumstances(rows)),
            "skipped_steps": self._skipped,
            "stragglers": {str(rank): statistics.fmean(late) for rank, late in self._named.items()},
            "collectives": (detail.collectives if detail else None) or {},
            "bubble_by_stage": detail.bubble_by_stage if detail else None,
        }

    def _circumstances(self, rows: list[ComparisonRow]) -> Circumstances:
        often = {rank: late for rank, late in self._named.items() if len(late) * 2 >= self._details}
        rank = max(often, key=lambda one: statistics.fmean(often[one]), default=None)
        share = None
        if self._rates and self.link_bytes_per_second > 0:
            share = statistics.median(self._rates) / self.link_bytes_per_second
        ranks = self._last_detail.ranks if self._last_detail and self._last_detail.ranks else {}
        slow = ranks.get("comm_seconds", {}).get("max_rank")
        return Circumstances(
            straggler=rank,
            straggler_seconds=statistics.fmean(often[rank]) if rank is not None else 0.0,
            slow_rank=int(slow) if slow is not None else 0,
            link_share=share,
        )


def summarise(spec: RunSpec, run: RunDir, observer: Observer, end: RunEnd) -> dict[str, Any]:
    """summary.json: the contract's keys. Collective if the run is done: ranks report their peak memory."""
    recorder = observer.recorder
    memory = (observer.memory.largest_bytes, observer.memory.parts())
    by_rank = gather_objects(memory) if end.status == "done" else [memory]
    peaks = [peak for peak, _ in by_rank]
    return {
        "status": end.status,
        "steps": recorder.last.step if recorder.last else end.step,
        "first_loss": recorder.first_loss,
        "final_loss": recorder.last.loss if recorder.last else None,
        "tokens": recorder.tokens,
        "seconds": end.seconds,
        "predicted": {"step_seconds": spec.predicted_step_seconds, "memory_bytes": spec.predicted_memory_bytes},
        "measured": {"step_seconds": recorder.typical_step_seconds(), "memory_bytes": max(peaks)},
        "memory_bytes_by_rank": peaks,
        "memory_parts": compare_memory(spec.predicted_memory, max(by_rank, key=lambda one: one[0])[1]),
        "kernels": list(kernels_of(spec.recipe.model)) if end.status in ("done", "preempted") else [],
        "compile": spec.recipe.model.compile,
        "run_dir": str(run.path),
        **observer.noise_summary(),
    }
