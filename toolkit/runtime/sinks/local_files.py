"""Sinks that write local files: metrics.jsonl and summary.json, events.jsonl, TensorBoard."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from toolkit.run_dir.router_load import advice, recovered
from toolkit.runtime.metrics.record import Record
from toolkit.runtime.metrics.stragglers import straggler_sentence
from toolkit.runtime.sinks.wandb_sink import flat


class EventSink:
    """One line for each start, checkpoint, rewind, skipped step, new straggler, collapse of routing and end."""

    def __init__(self, path: Path, say: Callable[[str], object] = lambda text: None) -> None:
        self._path, self._say = path, say
        self._file: IO[str] | None = None
        self._last: Record | None = None
        self._late: int | None = None
        self._collapsed = False

    def start(self, info: Mapping[str, Any]) -> None:
        self._file = self._path.open("a", encoding="utf-8", buffering=1)
        if _is_cut_short(self._path):
            self._file.write("\n")  # else the first event of this run would be lost in the same line
        done, plan = int(info.get("done", 0)), info.get("plan", {})
        ranks = f"{info.get('world_size', 1)} ranks, {plan.get('strategy', '')}"
        if done or self._path.stat().st_size:
            self._write("resume", done, f"resumed after step {done} with {ranks}")
        else:
            self._write("start", 0, f"started with {ranks}")

    def log(self, record: Record) -> None:
        last = self._last
        if last is not None and record.step <= last.step:
            self._write("rewind", record.step, f"rewound from step {last.step} to before step {record.step}")
        if last is not None and record.checkpoint_step > last.checkpoint_step:
            self._write(
                "checkpoint", record.checkpoint_step, f"checkpoint of step {record.checkpoint_step} is complete"
            )
        if record.skipped:
            text = f"update skipped: gradients overflowed; the loss scale is now {record.loss_scale:g}"
            self._write("skipped", record.step, text)
        if record.ranks is not None:
            self._straggler(record)
        self._routing(record)
        self._last = record

    def evaluated(self, record: Mapping[str, Any]) -> None:
        """Generated texts; figures are in eval.jsonl."""
        for sample in record.get("samples", ()):
            self._write("sample", int(record["step"]), f"{sample['prompt']} → {sample['text']}")

    def rewind(self, step: int) -> None:
        """The next record shows it: its step is not above the last one."""

    def _straggler(self, record: Record) -> None:
        """Report a straggler when it is another rank than before."""
        late = record.straggler
        rank = int(late["rank"]) if late else None
        if late and rank != self._late:
            text = straggler_sentence(int(late["rank"]), late["seconds"])
            self._write("straggler", record.step, text)
            self._say(f"step {record.step}: {text}")
        self._late = rank

    def _routing(self, record: Record) -> None:
        """Report when routing collapses; once, until it recovers."""
        text = advice(record.router)
        if text and not self._collapsed:
            self._write("routing", record.step, text)
            self._say(f"step {record.step}: {text}")
        self._collapsed = bool(text) or (self._collapsed and not recovered(record.router))

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._write("end", int(summary.get("steps", 0)), f"ended: {summary.get('status')}")
        if self._file is not None:
            self._file.close()

    def _write(self, kind: str, step: int, text: str) -> None:
        assert self._file is not None
        self._file.write(json.dumps({"time": time.time(), "step": step, "kind": kind, "text": text}) + "\n")


class TensorboardSink:
    """Written by tensorboardX, which needs no TensorFlow and no server."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory / "tensorboard"
        self._writer: Any = None

    def start(self, info: Mapping[str, Any]) -> None:
        from tensorboardX import SummaryWriter

        # What a crashed attempt wrote after the checkpoint is hidden by TensorBoard.
        self._writer = SummaryWriter(str(self._directory), purge_step=int(info.get("done", 0)) + 1)

    def log(self, record: Record) -> None:
        # One event for all values of a step: each `add_scalar` wakes the thread that writes, 25 times per step.
        from tensorboardX.proto.summary_pb2 import Summary

        values = flat({name: value for name, value in vars(record).items() if value is not None})
        shown = [
            Summary.Value(tag=name, simple_value=float(value))
            for name, value in values.items()
            if name not in ("step", "time")
        ]
        self._writer.file_writer.add_summary(Summary(value=shown), record.step, record.time)

    def evaluated(self, record: Mapping[str, Any]) -> None:
        for name, value in record.items():
            if name == "samples":
                for number, sample in enumerate(value):
                    self._writer.add_text(f"sample {number}", f"{sample['prompt']} → {sample['text']}", record["step"])
            elif name != "step":
                self._writer.add_scalar(f"eval/{name}", value, int(record["step"]))

    def rewind(self, step: int) -> None:
        """TensorBoard shows the later of two values of a step."""

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._writer.close()


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

    def evaluated(self, record: Mapping[str, Any]) -> None:
        """Evaluations are in eval.jsonl."""

    def rewind(self, step: int) -> None:
        assert self._file is not None
        self._file.close()
        keep_until(self._metrics, step)
        self.start({})

    def finish(self, summary: Mapping[str, Any]) -> None:
        if self._file is not None:
            self._file.close()
        temporary = self._summary.with_suffix(".tmp")
        temporary.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        os.replace(temporary, self._summary)


def _is_cut_short(path: Path) -> bool:
    """Whether the last line has no end: a crash or a full disk has cut it short."""
    with path.open("rb") as file:
        if not file.seek(0, os.SEEK_END):
            return False
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"


def keep_until(
    metrics: Path, step: int, say: Callable[[str], object] = print, needs: Sequence[str] = ("step",)
) -> list[dict[str, Any]]:
    """Cut metrics.jsonl after a step, so that a resumed run writes no step twice; the lines that stay.

    A last line without end was cut short by a crash, and is dropped. Any other line that is no record (`needs` are its
    numbers) is reported, and the file is copied first.
    """
    if not metrics.exists():
        return []
    *lines, _ = metrics.read_bytes().split(b"\n")
    records = [_record(line, needs) for line in lines]
    broken = [number for number, record in enumerate(records, 1) if record is None]
    if broken:
        copy = _free_name(metrics)
        shutil.copyfile(metrics, copy)
        shown = ", ".join(map(str, broken[:5])) + (" …" if len(broken) > 5 else "")
        say(f"{metrics}: {len(broken)} lines can't be read and are left out (line {shown}); the file is kept as {copy}")
    kept = [record for record in records if record is not None and record["step"] <= step]
    temporary = metrics.with_suffix(".tmp")
    temporary.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
    os.replace(temporary, metrics)
    return kept


def _record(line: bytes, needs: Sequence[str]) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    valid = isinstance(found, dict) and all(type(found.get(name)) in (int, float) for name in needs)
    return found if valid else None


def _free_name(metrics: Path) -> Path:
    names = (metrics.with_name(f"{metrics.name}.damaged-{number}") for number in range(1, 1000))
    return next((path for path in names if not path.exists()), metrics.with_name(f"{metrics.name}.damaged"))
