"""events.jsonl: what happened besides steps, read off the records."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from toolkit.runtime.metrics.record import Record


class EventSink:
    """One line for each start, checkpoint, rewind, skipped step, new straggler and end."""

    def __init__(self, path: Path, say: Callable[[str], object] = lambda text: None) -> None:
        self._path, self._say = path, say
        self._file: IO[str] | None = None
        self._last: Record | None = None
        self._late: int | None = None

    def start(self, info: Mapping[str, Any]) -> None:
        self._file = self._path.open("a", encoding="utf-8", buffering=1)
        done, plan = int(info.get("done", 0)), info.get("plan", {})
        ranks = f"{info.get('world_size', 1)} ranks, {plan.get('strategy', '')}"
        if done or self._path.stat().st_size:
            self._write("resume", done, f"went on after step {done} with {ranks}")
        else:
            self._write("start", 0, f"started with {ranks}")

    def log(self, record: Record) -> None:
        last = self._last
        if last is not None and record.step <= last.step:
            self._write("rewind", record.step, f"went back from step {last.step} to before step {record.step}")
        if last is not None and record.checkpoint_step > last.checkpoint_step:
            self._write("checkpoint", record.checkpoint_step, f"checkpoint of step {record.checkpoint_step} is whole")
        if record.skipped:
            text = f"update skipped: gradients overflowed; the loss scale is now {record.loss_scale:g}"
            self._write("skipped", record.step, text)
        if record.ranks is not None:
            self._straggler(record)
        self._last = record

    def _straggler(self, record: Record) -> None:
        """Told when it is another rank than before."""
        late = record.straggler
        rank = int(late["rank"]) if late else None
        if late and rank != self._late:
            text = f"rank {rank} holds the others up: its own work takes {late['seconds'] * 1000:.0f} ms a step longer"
            self._write("straggler", record.step, text)
            self._say(f"step {record.step}: {text}")
        self._late = rank

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._write("end", int(summary.get("steps", 0)), f"ended: {summary.get('status')}")
        if self._file is not None:
            self._file.close()

    def _write(self, kind: str, step: int, text: str) -> None:
        assert self._file is not None
        self._file.write(json.dumps({"time": time.time(), "step": step, "kind": kind, "text": text}) + "\n")
