"""Passes each record on to every sink."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from toolkit.runtime.metrics.record import Record, Sink
from toolkit.runtime.sinks.local_files import JsonlSink


@dataclass
class Recorder:
    """Sends records to every sink and keeps what the summary needs."""

    sinks: list[Sink]
    step_seconds: list[float] = field(default_factory=list)
    tokens: int = 0
    first_loss: float | None = None
    last: Record | None = None

    def log(self, record: Record) -> None:
        """One step."""
        self.step_seconds.append(record.step_seconds)
        self.tokens += record.tokens
        self.last = record
        self.first_loss = record.loss if self.first_loss is None else self.first_loss
        for sink in self.sinks:
            sink.log(record)

    def resume_at(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Count what was recorded before the run was resumed."""
        self.tokens = sum(record["tokens"] for record in records)
        if records:
            self.first_loss = records[0]["loss"]
            known = {f.name for f in fields(Record)}
            self.last = Record(**{name: value for name, value in records[-1].items() if name in known})

    def rewind(self, step: int) -> None:
        """Forget what was recorded after a step: the run has gone back to it."""
        for sink in self.sinks:
            if isinstance(sink, JsonlSink):
                self.resume_at(sink.rewind(step))

    def typical_step_seconds(self) -> float:
        """Median without the first steps, in which caches fill and one is watched for memory."""
        settled = self.step_seconds[3:] or self.step_seconds
        return statistics.median(settled) if settled else 0.0
