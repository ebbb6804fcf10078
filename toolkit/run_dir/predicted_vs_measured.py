"""Compare predicted with measured step time and memory by part, and explain the largest deviation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from toolkit.run_dir.step_parts import COMPARED, MEMORY, measured_parts, predicted_parts

WORTH_SAYING = 0.05
"""Deviations below this share of the step are not explained: predictions are not finer."""


@dataclass(frozen=True, kw_only=True)
class Circumstances:
    """Other measurements that may explain a deviation."""

    straggler: int | None = None
    """Rank of the straggler, if there is one."""
    straggler_seconds: float = 0.0
    """How much longer its own work takes per step than that of its peers."""
    slow_rank: int | None = None
    """Rank with the slowest gradient traffic."""
    link_share: float | None = None
    """Its bandwidth relative to the link in the cluster file."""


@dataclass(frozen=True)
class ComparisonRow:
    """Predicted and measured seconds of one part of a step."""

    name: str
    words: str
    predicted: float
    measured: float

    @property
    def ratio(self) -> float | None:
        """Measured over predicted time; None without a prediction."""
        return self.measured / self.predicted if self.predicted > 0 else None


def compare(time: Mapping[str, float], parts: Mapping[str, float]) -> list[ComparisonRow]:
    """Rows for every part that was predicted or measured; empty if nothing was measured."""
    if not parts:
        return []
    predicted, measured = predicted_parts(time), measured_parts(parts)
    rows = [ComparisonRow(name, COMPARED[name][0], predicted[name], measured[name]) for name in COMPARED]
    return [row for row in rows if row.predicted > 0 or row.measured > 0]


def compare_memory(predicted: Mapping[str, int], measured: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """Bytes of each part of the peak, predicted and measured; empty if nothing was measured."""
    return {
        name: {"predicted": sum(predicted.get(key, 0) for key in keys), "measured": measured[name]}
        for name, (_, keys) in MEMORY.items()
        if name in measured
    }


def explain(rows: list[ComparisonRow], why: Circumstances) -> str:
    """A sentence on the largest deviation and its likely cause; empty without rows."""
    if not rows:
        return ""
    largest = max(rows, key=lambda row: abs(row.measured - row.predicted))
    step = max(sum(row.predicted for row in rows), sum(row.measured for row in rows))
    if abs(largest.measured - largest.predicted) < WORTH_SAYING * step:
        return f"every part is within {WORTH_SAYING:.0%} of the step's time of its prediction"
    cause = _cause(largest, why)
    return f"{_size(largest)}{f': {cause}' if cause else ''}"


def _size(row: ComparisonRow) -> str:
    if row.ratio is None:
        return f"{row.words} took {_ms(row.measured)} per step, which was not predicted"
    figures = f"{_ms(row.measured)} per step, predicted {_ms(row.predicted)}"
    return f"{row.words} took {row.ratio:.2g} × the prediction ({figures})"


def _cause(row: ComparisonRow, why: Circumstances) -> str:
    waits = row.name in ("dp_comm", "tp_comm", "sp_comm", "pp_comm", "pp_bubble")
    if row.measured < row.predicted:
        return "the cluster's figures are too low for it" if waits else ""
    # `fixed` includes the synchronisation in which ranks count tokens, so a straggler shows there, too.
    if (waits or row.name == "fixed") and why.straggler is not None:
        late = _ms(why.straggler_seconds)
        return f"rank {why.straggler} is a straggler: it works {late} longer per step, and the others wait for it"
    if row.name == "dp_comm" and why.link_share is not None and why.link_share < 1:
        return f"the link of rank {why.slow_rank} reaches {why.link_share:.0%} of the bandwidth in the cluster file"
    if row.name == "pp_bubble":
        return "stages are uneven, or wait for each other's messages"
    if row.name == "compute":
        return "the device is slower than the cluster's figures; `toolkit probe` measures them"
    if row.name == "fixed":
        return "work on the host: data, Python, and what runs between steps"
    return ""


def _ms(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"
