"""The training loop: one screen, the same for every strategy."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Protocol

from toolkit.errors import LossNotFinite
from toolkit.runtime.comm_timer import CommTimer
from toolkit.runtime.data import Order, Samples, micro_batches
from toolkit.runtime.engine import Engine, StepResult
from toolkit.runtime.memory_meter import MemoryMeter
from toolkit.runtime.metrics import Record, Recorder


@dataclass(frozen=True, kw_only=True)
class Share:
    """Which part of every global batch this rank computes."""

    replica: int
    replicas: int
    micro_batch: int


class Keeper(Protocol):
    """What happens between two steps."""

    def after(self, step: int) -> None:
        """`step` steps are done: save if it is time; `Preempted` if the run was asked to stop."""


def train(
    engine: Engine, samples: Samples, order: Order, share: Share, steps: range, observer: Observer, keeper: Keeper
) -> None:
    """One update for each of `steps`, counted from 0, on the recipe's samples."""
    for step in steps:
        started = time.perf_counter()
        batch = list(
            micro_batches(
                samples, order.step(step), replica=share.replica, replicas=share.replicas, micro_batch=share.micro_batch
            )
        )
        loaded = time.perf_counter()
        with observer.memory.step(step + 1):
            result = engine.step(batch)
        observer.record(step + 1, result, data_seconds=loaded - started, step_seconds=time.perf_counter() - started)
        keeper.after(step + 1)


@dataclass(frozen=True, kw_only=True)
class Observer:
    """Turns what a step did into a record, and stops the run when the loss is no number."""

    recorder: Recorder
    comm: CommTimer
    memory: MemoryMeter
    model_flops: float
    """FLOPs of a step by convention."""
    peak_flops: float
    """Of all devices."""
    scales_loss: bool
    """Whether steps with overflowing gradients are part of the game (fp16)."""

    def record(self, step: int, result: StepResult, *, data_seconds: float, step_seconds: float) -> None:
        """One finished step."""
        loss = float(result.loss)
        self.recorder.log(
            Record(
                step=step,
                loss=loss,
                lr=result.lr,
                grad_norm=result.grad_norm,
                tokens=result.tokens,
                step_seconds=step_seconds,
                tokens_per_second=result.tokens / step_seconds,
                mfu=self.model_flops / step_seconds / self.peak_flops,
                memory_bytes=self.memory.peak_bytes,
                comm_seconds=self.comm.take(),
                data_seconds=data_seconds,
            )
        )
        if not math.isfinite(loss):
            raise LossNotFinite(f"the loss is {loss} at step {step}; lower train.lr, or look at the data of this step")
        # ZeRO skips updates whose gradient is no number, for ever and without a word; with fp16 that is how the
        # loss scale is found.
        if not math.isfinite(result.grad_norm) and not self.scales_loss:
            raise LossNotFinite(f"the gradient norm is {result.grad_norm} at step {step}; lower train.lr")
