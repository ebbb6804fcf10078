"""Sends every record to all sinks, and keeps the totals that the summary needs."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from toolkit.runtime.metrics.record import Record, Sink


@dataclass
class Recorder:
    """The sinks of a run; empty on every rank but 0."""

    sinks: list[Sink]
    step_seconds: list[float] = field(default_factory=list)
    tokens_by_step: dict[int, int] = field(default_factory=dict)
    first_loss: float | None = None
    last: Record | None = None

    @property
    def tokens(self) -> int:
        """Counted tokens of all steps."""
        return sum(self.tokens_by_step.values())

    def start(self, info: Mapping[str, Any]) -> None:
        """Training begins."""
        for sink in self.sinks:
            sink.start(info)

    def log(self, record: Record) -> None:
        """One step."""
        self.step_seconds.append(record.step_seconds)
        self.tokens_by_step[record.step] = record.tokens
        self.last = record
        self.first_loss = record.loss if self.first_loss is None else self.first_loss
        for sink in self.sinks:
            sink.log(record)

    def evaluated(self, record: Mapping[str, Any]) -> None:
        """One evaluation."""
        for sink in self.sinks:
            sink.evaluated(record)

    def rewind(self, step: int) -> None:
        """Forget what was recorded after a step: the run has returned to it."""
        self.tokens_by_step = {at: tokens for at, tokens in self.tokens_by_step.items() if at <= step}
        for sink in self.sinks:
            sink.rewind(step)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """The run has ended, well or badly."""
        for sink in self.sinks:
            sink.finish(summary)

    def resume_at(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Count what was recorded before the run was resumed."""
        self.tokens_by_step = {record["step"]: record["tokens"] for record in records}
        if records:
            self.first_loss = records[0]["loss"]
            known = {f.name for f in fields(Record)}
            self.last = Record(**{name: value for name, value in records[-1].items() if name in known})

    def typical_step_seconds(self) -> float:
        """Median without the first steps, in which caches fill and one is measured for memory."""
        settled = self.step_seconds[3:] or self.step_seconds
        return statistics.median(settled) if settled else 0.0
