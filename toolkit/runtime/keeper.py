"""Between two steps: save when it is due, stop when any rank was asked to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from toolkit.errors import Preempted
from toolkit.runtime.checkpoint import Saver
from toolkit.runtime.distributed import all_max
from toolkit.stop import StopRequest


@dataclass(frozen=True, kw_only=True)
class CheckpointKeeper:
    """Saves every `every` steps and after the last; a stop request is agreed on by all ranks, then saved."""

    saver: Saver
    stop: StopRequest
    every: int
    """0: no checkpoints but the one of a stop request."""
    steps: int
    group: Any = None

    def after(self, step: int) -> None:
        number = torch.tensor(int(self.stop.signal or 0))
        stopping = int(all_max(number, self.group)) if step < self.steps else 0
        if stopping or (self.every and (step % self.every == 0 or step == self.steps)):
            self.saver.save(step)
        if stopping or step == self.steps:
            self.saver.wait()
        if stopping:
            raise Preempted(f"asked to stop at step {step}: checkpoint saved in {self.saver.root}")
