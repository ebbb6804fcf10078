"""Between two steps: save when it is due, stop when any rank was asked to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from toolkit.errors import Preempted
from toolkit.launching.stop_signals import StopRequest
from toolkit.runtime.checkpoint.saver import Saver
from toolkit.runtime.distributed.process_group import all_max
from toolkit.runtime.metrics.comm_timer import CommTimer
from toolkit.runtime.metrics.step_clock import part


class Progress(Protocol):
    """Told what a rank gets done: see `Pulse`."""

    def watch(self, timeout_seconds: float) -> None:
        """Training begins."""

    def move(self, *, step: int | None = None, phase: str | None = None) -> None:
        """Something was done."""


@dataclass(frozen=True, kw_only=True)
class CheckpointKeeper:
    """Saves every `every` steps and after the last; a stop request is agreed on by all ranks, then saved."""

    saver: Saver
    stop: StopRequest
    pulse: Progress
    every: int
    """0: no checkpoints but the one of a stop request."""
    steps: int
    comm: CommTimer
    agree_every: int = 1
    """Steps between two questions whether to stop: islands are asked where they meet."""
    group: Any = None

    def after(self, step: int) -> None:
        self.pulse.move(step=step, phase="training")
        number = torch.tensor(int(self.stop.signal or 0))
        with self.comm.held("agree"):
            asks = step < self.steps and step % self.agree_every == 0
            stopping = int(all_max(number, self.group)) if asks else 0
        with part(self.comm.clock, "checkpoint"):
            self._save(step, stopping=bool(stopping))
        if stopping:
            raise Preempted(f"asked to stop at step {step}: checkpoint saved in {self.saver.root}")

    def due(self, step: int) -> bool:
        """Whether a checkpoint is made after this step."""
        return step % self.every == 0 or step == self.steps

    def _save(self, step: int, *, stopping: bool) -> None:
        if stopping or (self.every and self.due(step)):
            self.pulse.move(phase="saving")
            self.saver.save(step)
            self.pulse.move(phase="training")
        if stopping or step == self.steps:
            self.saver.wait()


@dataclass(frozen=True, kw_only=True)
class RoundKeeper(CheckpointKeeper):
    """For an island that shares steps out with others: it counts its own; the last state comes after all."""

    own_steps: Callable[[], int]

    def due(self, step: int) -> bool:
        return step < self.steps and step % self.agree_every == 0 and self.own_steps() % self.every == 0

    def end(self, step: int, *, complete: bool) -> None:
        """No steps are left for this island, or it was asked to stop."""
        if not complete:
            self._save(step, stopping=True)
            raise Preempted(f"asked to stop at step {step}: checkpoint saved in {self.saver.root}")
        if self.every:
            self.saver.save(self.steps)
        self.saver.wait()
