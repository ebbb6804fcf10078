"""What a run records, and where it goes. A sink is any object with `start`, `log` and `finish`."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import IO, Any, Protocol


@dataclass(frozen=True, kw_only=True)
class Record:
    """One line of metrics.jsonl."""

    step: int
    """Counted from 1."""
    loss: float
    """Cross-entropy averaged over the counted tokens of the global batch."""
    lr: float
    grad_norm: float
    """Global norm before clipping."""
    tokens: int
    """Counted tokens of this step, over all ranks."""
    step_seconds: float
    tokens_per_second: float
    mfu: float
    """Model FLOPs a second (6 a parameter and token, attention over the full square, no recompute) over the peak."""
    memory_bytes: int
    """Peak of this rank so far."""
    comm_seconds: float
    """Time that this rank was held by collectives."""
    data_seconds: float
    """Time that this rank waited for its batch."""
    time: float = 0.0
    """When the step ended, seconds since 1970."""
    hfu: float = 0.0
    """As `mfu`, with what the backward pass computes again."""
    tokens_per_second_per_device: float = 0.0
    wall_seconds: float = 0.0
    """Since the end of the step before: the step and what stood between the two."""
    parts: dict[str, float] = field(default_factory=dict)
    """`wall_seconds` of this rank by part, as in `run_dir.step_parts`; on an accelerator in detailed steps only."""
    grad_sync_seconds: float | None = None
    """Gradient synchronisation from start to end; `parts.grad_sync` is what of it was exposed."""
    memory_now_bytes: int = 0
    """Held by tensors when the step ended; on a CPU, by the process."""
    skipped: int = 0
    """1: no update was made, because gradients overflowed in fp16."""
    loss_scale: float | None = None
    """What the loss was multiplied by, in fp16."""
    noise_scale_sequences: float | None = None
    """Gradient noise scale, a running mean, where `metrics.noise_scale` asks for it."""
    checkpoint_step: int = 0
    """Newest checkpoint that is whole."""
    sample_ids: list[int] | None = None
    """Samples of this step, over all replicas, where `metrics.sample_ids` asks for them."""
    ranks: dict[str, dict[str, float]] | None = None
    """Over all ranks, every `metrics.detail_every` steps: smallest, mean, largest and their ranks."""
    collectives: dict[str, dict[str, float]] | None = None
    """Calls, bytes and seconds of this step on this rank, by kind and purpose; in detailed steps."""
    straggler: dict[str, float] | None = None
    """Rank that holds the others up, and by how many seconds a step; in detailed steps."""
    bubble_by_stage: list[float] | None = None
    """Share of the pipeline's time in which each stage does not compute; in detailed steps."""


class Sink(Protocol):
    """Where records go. Ten lines make a new one."""

    def start(self, info: Mapping[str, Any]) -> None:
        """Recipe, plan and run directory, before the first step."""

    def log(self, record: Record) -> None:
        """One step."""

    def finish(self, summary: Mapping[str, Any]) -> None:
        """The end, good or bad."""


class JsonlSink:
    """metrics.jsonl and summary.json in the run directory."""

    def __init__(self, metrics: Path, summary: Path) -> None:
        self._metrics, self._summary = metrics, summary
        self._file: IO[str] | None = None

    def start(self, info: Mapping[str, Any]) -> None:
        self._file = self._metrics.open("a", encoding="utf-8", buffering=1)

    def log(self, record: Record) -> None:
        assert self._file is not None
        values = {name: value for name, value in vars(record).items() if value is not None}
        self._file.write(json.dumps(values) + "\n")

    def rewind(self, step: int) -> list[dict[str, Any]]:
        """Cut the file after a step; the lines that stay."""
        assert self._file is not None
        self._file.close()
        kept = keep_until(self._metrics, step)
        self.start({})
        return kept

    def finish(self, summary: Mapping[str, Any]) -> None:
        if self._file is not None:
            self._file.close()
        temporary = self._summary.with_suffix(".tmp")
        temporary.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        os.replace(temporary, self._summary)


def keep_until(metrics: Path, step: int) -> list[dict[str, Any]]:
    """Cut metrics.jsonl after a step, so that a resumed run writes no step twice; the lines that stay."""
    kept = []
    for line in metrics.read_text(encoding="utf-8", errors="replace").splitlines() if metrics.exists() else []:
        try:
            record = json.loads(line)
            if record["step"] <= step:
                kept.append(record)
        except (ValueError, KeyError, TypeError):  # a line that a crash cut short
            continue
    if metrics.exists():
        temporary = metrics.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
        os.replace(temporary, metrics)
    return kept


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

    def go_on(self, records: Sequence[Mapping[str, Any]]) -> None:
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
                self.go_on(sink.rewind(step))

    def typical_step_seconds(self) -> float:
        """Median without the first steps, in which caches fill and one is watched for memory."""
        settled = self.step_seconds[3:] or self.step_seconds
        return statistics.median(settled) if settled else 0.0
