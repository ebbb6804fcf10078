"""Sinks as a user writes them."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from toolkit.runtime.metrics.record import Record


class CsvSink:
    """Ten lines: loss by step as CSV."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / "loss.csv"

    def start(self, info: Mapping[str, Any]) -> None:
        self.path.write_text(f"# {info['recipe']['name']}\n")

    def log(self, record: Record) -> None:
        with self.path.open("a") as file:
            file.write(f"{record.step},{record.loss!r}\n")

    def finish(self, summary: Mapping[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(f"# {summary['status']}\n")


class BrokenSink(CsvSink):
    """Fails in the second step."""

    def log(self, record: Record) -> None:
        if record.step == 2:
            raise OSError("the disk of the sink is full")


class NoSink:
    """Has nothing to log with."""


class BusySink:
    """Leaves a daemon thread behind that goes in and out of native code until the process ends."""

    def __init__(self, run_dir: Path) -> None:
        self.thread = threading.Thread(target=self._work, daemon=True)

    def start(self, info: Mapping[str, Any]) -> None: ...

    def log(self, record: Record) -> None: ...

    def finish(self, summary: Mapping[str, Any]) -> None:
        self.thread.start()

    def _work(self) -> None:
        while True:
            torch.zeros(8).add_(1).sum().item()
