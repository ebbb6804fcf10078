"""summary.json: how a run ended, predicted against measured by part, and why they differ."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any

from toolkit.run_dir.predicted_vs_measured import Circumstances, ComparisonRow, compare, explain
from toolkit.runtime.metrics.record import Record

WARMING = 3
"""First steps, in which caches fill and one is watched for memory."""


@dataclass
class Averages:
    """A sink that keeps what the summary says of all steps."""

    time: dict[str, float]
    """Predicted seconds a step by part."""
    link_bytes_per_second: float = 0.0
    """What the cluster's file says of one rank's link; 0: unknown."""
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
        """Bytes a second of gradient traffic in this step."""
        found = [one for name, one in (record.collectives or {}).items() if name.endswith("/grad_sync")]
        seconds = sum(one["seconds"] for one in found)
        if seconds > 0:
            self._rates.append(sum(one["bytes"] for one in found) / seconds)

    def summary(self) -> dict[str, Any]:
        """What is added to the summary."""
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
