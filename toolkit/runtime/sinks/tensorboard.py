"""TensorBoard: the same values as everywhere, in `tensorboard/` of the run directory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolkit.runtime.metrics.record import Record
from toolkit.runtime.sinks.wandb import flat


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
        values = flat({name: value for name, value in vars(record).items() if value is not None})
        for name, value in values.items():
            if name not in ("step", "time"):
                self._writer.add_scalar(name, value, record.step, walltime=record.time)

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._writer.close()
