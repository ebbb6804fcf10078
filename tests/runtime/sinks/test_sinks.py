"""TensorBoard, sinks of the user, the trace and the terminal, in real runs."""

from __future__ import annotations

import io
import json
import struct
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from tensorboardX.proto.event_pb2 import Event

from tests.conftest import Trainer
from toolkit import cli
from toolkit.errors import BadInput
from toolkit.runtime.metrics.record import Record
from toolkit.runtime.metrics.trace import RANK_IDS
from toolkit.runtime.sinks.build import GuardedSink, load_sink
from toolkit.runtime.sinks.console import ConsoleSink
from toolkit.runtime.sinks.wandb_sink import flat


def scalars(directory: Path) -> Iterator[tuple[int, str, float]]:
    """Read event files: length, checksum, event, checksum, over and over."""
    for path in sorted(directory.glob("events.*")):
        raw, place = path.read_bytes(), 0
        while place < len(raw):
            (length,) = struct.unpack("<Q", raw[place : place + 8])
            event = Event.FromString(raw[place + 12 : place + 12 + length])
            place += 16 + length
            for value in event.summary.value:
                yield event.step, value.tag, value.simple_value


def test_every_sink_gets_every_step_and_a_broken_one_does_not_end_the_run(train: Trainer) -> None:
    done = train(
        "metrics.tensorboard=true",
        "metrics.sinks=['tests.helpers.own_sinks:CsvSink', 'tests.helpers.own_sinks:BrokenSink']",
        "metrics.trace={steps: [3, 4], ranks: [0, 1]}",
        "metrics.detail_every=2",
        "strategy.name=zero",
        "strategy.zero_stage=2",
        "train.steps=5",
    )
    assert done.summary["status"] == "done"
    lines = (done.run.path / "loss.csv").read_text().splitlines()
    assert lines == ["# tiny", *(f"{i},{loss!r}" for i, loss in enumerate(done.losses, 1)), "# done"]
    check_tensorboard(done.run.path, done.records)
    check_trace(done.run.path)


@dataclass
class SlowSink:
    """Notes what it is told, after a while."""

    told: list[str] = field(default_factory=list)

    def start(self, info: Mapping[str, Any]) -> None:
        self.told.append("start")

    def log(self, record: Record) -> None:
        time.sleep(0.05)
        self.told.append(f"step {record.step}")

    def rewind(self, step: int) -> None:
        self.told.append(f"rewind to {step}")

    def finish(self, summary: Mapping[str, Any]) -> None:
        self.told.append(str(summary["status"]))


def test_a_slow_sink_holds_up_no_step_and_misses_nothing() -> None:
    slow, said = SlowSink(), list[str]()
    sink = GuardedSink("slow", slow, said.append)
    sink.start({})
    began = time.monotonic()
    for step in (1, 2, 3):
        sink.log(SimpleNamespace(step=step))  # type: ignore[arg-type]
    sink.rewind(1)
    sink.log(SimpleNamespace(step=2))  # type: ignore[arg-type]
    waited = time.monotonic() - began
    sink.finish({"status": "done"})
    assert slow.told == ["start", "step 1", "step 2", "step 3", "rewind to 1", "step 2", "done"]
    assert waited < 0.05
    assert not said


def check_tensorboard(run: Path, records: list[dict[str, Any]]) -> None:
    found = {(step, tag): value for step, tag, value in scalars(run / "tensorboard")}
    expected = {
        (record["step"], tag): value
        for record in records
        for tag, value in flat(record).items()
        if tag not in ("step", "time")
    }
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key] == pytest.approx(value, rel=1e-6), key


def check_trace(run: Path) -> None:
    trace = json.loads((run / "trace" / "trace.json").read_text())
    names = {event["args"]["name"] for event in trace["traceEvents"] if event.get("name") == "process_name"}
    assert names == {"rank 0", "rank 1"}
    complete = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    by_rank = {rank: [e for e in complete if e["pid"] // RANK_IDS == rank] for rank in (0, 1)}
    for events in by_rank.values():
        assert any(event["name"] == "aten::mm" for event in events)
        assert any("allreduce" in event["name"] or "all_reduce" in event["name"] for event in events)
    starts = [min(event["ts"] for event in events) for events in by_rank.values()]
    assert abs(starts[0] - starts[1]) < 5e6  # microseconds: one time axis
    log = (run / "logs" / "rank-0.log").read_text()
    assert "ui.perfetto.dev" in log
    assert "exposed communication" in log
    assert "aten::" in log


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("tests.helpers.own_sinks:NoSink", "it has no start, log, finish"),
        ("tests.helpers.own_sinks:Missing", "has no Missing"),
        ("no_such_module_at_all:Sink", "No module named"),
        ("csv", "neither module:Class nor an entry point"),
        ("a b:c", "module:Class is required"),
    ],
)
def test_what_is_no_sink_is_refused(name: str, reason: str) -> None:
    with pytest.raises(BadInput, match=reason):
        load_sink(name)


@pytest.mark.parametrize(
    ("override", "where"),
    [
        ("metrics.trace={steps: [1, 2]}", "metrics.trace.steps"),
        ("metrics.trace={steps: [9, 4]}", "metrics.trace.steps"),
        ("metrics.trace={steps: [5]}", "metrics.trace.steps"),
        ("metrics.trace={steps: [5, 6], ranks: [-1]}", "metrics.trace.ranks"),
    ],
)
def test_traces_that_cannot_be_are_refused(override: str, where: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "recipes/demo.yaml", override, "--dry-run"]) == BadInput.exit_code
    assert where in capsys.readouterr().err


def record(step: int) -> Record:
    parts = {"forward": 0.06, "grad_sync": 0.03, "other": 0.01}
    return Record(
        step=step, loss=2.5, lr=1e-3, grad_norm=1.0, tokens=100, step_seconds=0.1, tokens_per_second=1000.0, mfu=0.4,
        memory_bytes=2**29, comm_seconds=0.03, data_seconds=0.0, wall_seconds=0.1, parts=parts,
    )  # fmt: skip


def test_lines_where_there_is_no_terminal() -> None:
    stream = io.StringIO()
    sink = ConsoleSink(stream, steps=20, every=10, memory_limit_bytes=2**30)
    for step in range(1, 21):
        sink.log(record(step))
    lines = stream.getvalue().splitlines()
    assert [line.split(" · ")[0] for line in lines] == ["step 1/20", "step 10/20", "step 20/20"]
    assert "exposed communication 30%" in lines[0]
    assert "\x1b" not in stream.getvalue()


def test_a_terminal_shows_progress_memory_and_communication(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(Console, "_environ", {"COLUMNS": "200", "TERM": "xterm"})
    stream = Terminal()
    sink = ConsoleSink(stream, steps=20, every=10, memory_limit_bytes=2**30)
    sink.start({})
    sink.log(record(7))
    sink.finish({"status": "failed"})
    shown = Console(file=io.StringIO()).render_str(stream.getvalue()).plain
    rates = ("loss 2.5000", "1,000 tokens/s", "MFU 40.0%", "exposed communication 30%")
    for text in ("7/20", *rates, "████░░░░ 512 MiB of 1.00 GiB"):
        assert text in shown, text
