"""Weights & Biases: one run a job, written by rank 0."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from toolkit.recipe import Wandb
from toolkit.runtime.metrics import Record


class WandbSink:
    """Offline by default: no account is needed, and `wandb sync` uploads it later."""

    def __init__(self, section: Wandb, name: str, directory: Path) -> None:
        self._section, self._name, self._directory = section, name, directory
        self._run: Any = None

    def start(self, info: Mapping[str, Any]) -> None:
        import wandb

        self._run = wandb.init(
            project=self._section.project,
            entity=self._section.entity,
            group=self._section.group,
            tags=list(self._section.tags) or None,
            name=self._name,
            dir=str(self._directory),
            mode=self._section.mode,
            config=dict(info),
            # No code, no console and no git state leave the machine, and no environment variable is stored.
            settings=wandb.Settings(
                silent=True, console="off", disable_git=True, save_code=False, x_disable_stats=True
            ),
        )

    def log(self, record: Record) -> None:
        values = asdict(record)
        self._run.log(values, step=values["step"])

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._run.summary.update(dict(summary))
        self._run.finish(exit_code=0 if summary.get("status") == "done" else 1)
