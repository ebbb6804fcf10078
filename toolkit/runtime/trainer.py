"""The training loop: one screen, the same for every strategy."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from toolkit.errors import LossNotFinite
from toolkit.runtime.comm_timer import CommTimer
from toolkit.runtime.data import Order, Samples, micro_batches, own_share
from toolkit.runtime.distributed import gather_objects
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
        ids = order.step(step)
        batch = list(
            micro_batches(samples, ids, replica=share.replica, replicas=share.replicas, micro_batch=share.micro_batch)
        )
        loaded = time.perf_counter()
        with observer.memory.step(step + 1):
            result = engine.step(batch)
        observer.record(step + 1, result, data_seconds=loaded - started, step_seconds=time.perf_counter() - started)
        observer.check(step + 1, result, own_share(ids, replica=share.replica, replicas=share.replicas))
        keeper.after(step + 1)


class Spike(Exception):
    """The loss jumped; everything up to and with `step` is to be left behind."""

    def __init__(self, step: int, loss: float, usual: float) -> None:
        self.step = step
        super().__init__(f"the loss is {loss:.4g} at step {step}, usually {usual:.4g}")


@dataclass
class SpikeGuard:
    """Compares each loss with the median of those before it."""

    factor: float
    """How many times the median is a spike; infinite: none is."""
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=20))

    def look(self, step: int, loss: float) -> None:
        """`Spike` if this loss is one."""
        usual = statistics.median(self.recent) if len(self.recent) >= 5 else float("inf")
        if loss > self.factor * usual:
            raise Spike(step, loss, usual)
        self.recent.append(loss)


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
    guard: SpikeGuard
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

    def check(self, step: int, result: StepResult, ids: np.ndarray) -> None:
        """Stop, on every rank alike, if loss or gradient is no number; no update was made of it."""
        loss, norm = float(result.loss), result.grad_norm
        # ZeRO skips updates whose gradient is no number, for ever and without a word; with fp16 that is how the
        # loss scale is found.
        if math.isfinite(loss) and (math.isfinite(norm) or self.scales_loss):
            self.guard.look(step, loss)
            return
        bad = result.own_faults is not None and float(result.own_faults) > 0
        found = gather_objects((ids.tolist(), bad))
        culprits = [f"rank {rank} (samples {_few(own)})" for rank, (own, at_fault) in enumerate(found) if at_fault]
        what = f"the loss is {loss}" if not math.isfinite(loss) else f"the gradient norm is {norm}"
        where = ", ".join(culprits) or f"no single rank; samples {_few([i for own, _ in found for i in own])}"
        raise LossNotFinite(
            f"{what} at step {step}, from {where}; no update was made of it; lower train.lr, or look at these samples"
        )


def _few(ids: list[int]) -> str:
    shown = ", ".join(str(i) for i in ids[:16])
    return shown + (f" and {len(ids) - 16} more" if len(ids) > 16 else "")
