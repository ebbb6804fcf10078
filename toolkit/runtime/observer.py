"""Turns the result of a step into a record, and stops the run on NaN or infinite values."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from toolkit.errors import LossNotFinite
from toolkit.plans.noise_scale import NoiseScale, advice
from toolkit.recipe.schedules import Batches
from toolkit.runtime.distributed.process_group import gather_objects
from toolkit.runtime.engine.protocol import StepResult
from toolkit.runtime.metrics.memory import MemoryMeter
from toolkit.runtime.metrics.record import Record
from toolkit.runtime.metrics.step_breakdown import StepMeter
from toolkit.runtime.metrics.trace import Tracer
from toolkit.runtime.sinks.recorder import Recorder
from toolkit.runtime.spike_rewind import SpikeGuard


@dataclass(frozen=True, kw_only=True)
class Observer:
    """Turns what a step did into a record, and stops the run when the loss is no number."""

    recorder: Recorder
    meter: StepMeter
    memory: MemoryMeter
    model_flops: float
    """FLOPs of a step by convention."""
    hardware_flops: float
    """The same with what is computed again."""
    devices: int
    peak_flops: float
    """Of all devices."""
    guard: SpikeGuard
    all_agree: bool
    """Whether a bad loss is bad on every rank at once; not so with islands."""
    scales_loss: bool
    """Whether steps with overflowing gradients are part of the game (fp16)."""
    saved: Callable[[], int]
    """Newest checkpoint that is whole."""
    tracer: Tracer
    micro_batch: int
    """Sequences of a micro-batch."""
    batches: Batches
    """Sequences of each step."""
    noise: NoiseScale | None = None
    taken: Callable[[np.ndarray], list[int] | None] = lambda own: None
    """Told what this rank took; what all ranks took, if the recipe asks for it. Collective."""

    @contextlib.contextmanager
    def watching(self, step: int) -> Iterator[None]:
        """Memory and operations of a step, counted from 1."""
        self.tracer.before(step)
        with self.memory.step(step):
            yield
        self.tracer.after(step)

    def record(
        self,
        step: int,
        result: StepResult,
        *,
        data_seconds: float,
        step_seconds: float,
        sample_ids: list[int] | None = None,
    ) -> None:
        """One finished step."""
        loss = float(result.loss)  # on an accelerator: the step is over
        split, detail = self.meter.close(step), self.meter.detail(step)
        rate = result.tokens / step_seconds
        share = self.batches.size(step - 1) / self.batches.full
        record = Record(
            step=step,
            loss=loss,
            lr=result.lr,
            grad_norm=result.grad_norm,
            tokens=result.tokens,
            step_seconds=step_seconds,
            tokens_per_second=rate,
            tokens_per_second_per_device=rate / self.devices,
            mfu=share * self.model_flops / step_seconds / self.peak_flops,
            hfu=share * self.hardware_flops / step_seconds / self.peak_flops,
            memory_bytes=self.memory.peak_bytes,
            memory_now_bytes=self.memory.now_bytes(),
            comm_seconds=split.comm_seconds,
            data_seconds=data_seconds,
            time=split.time,
            wall_seconds=split.wall_seconds,
            parts=split.parts,
            grad_sync_seconds=split.grad_sync_seconds,
            skipped=int(result.skipped),
            loss_scale=result.loss_scale,
            noise_scale_sequences=self._noise_of(step, result),
            checkpoint_step=self.saved(),
            sample_ids=sample_ids,
        )
        self.recorder.log(replace(record, **detail.fields()) if detail else record)

    def _noise_of(self, step: int, result: StepResult) -> float | None:
        if self.noise is None or result.micro_square is None or not math.isfinite(result.grad_norm):
            return None
        whole = self.batches.size(step - 1)
        if whole > self.micro_batch:  # a batch that grows may begin as one micro-batch, which tells nothing
            self.noise.add(result.micro_square, self.micro_batch, result.grad_norm**2, whole)
        return self.noise.sequences

    def noise_summary(self) -> dict[str, Any]:
        """What a run's summary says of its batch size."""
        found = self.noise.sequences if self.noise else None
        return {"noise_scale_sequences": found, "batch_advice": advice(found, self.batches.full)} if found else {}

    def check(self, step: int, result: StepResult, ids: np.ndarray) -> None:
        """Stop, on every rank alike, if loss or gradient is no number; no update was made of it."""
        loss, norm = float(result.loss), result.grad_norm
        # ZeRO skips updates whose gradient is no number, for ever and without a word; with fp16 that is how the
        # loss scale is found.
        if math.isfinite(loss) and (math.isfinite(norm) or self.scales_loss):
            self.guard.look(step, loss)
            return
        bad = result.own_faults is not None and float(result.own_faults) > 0
        found = gather_objects((ids.tolist(), bad)) if self.all_agree else [(ids.tolist(), False)]
        culprits = [f"rank {rank} (samples {_few(own)})" for rank, (own, at_fault) in enumerate(found) if at_fault]
        what = f"the loss is {loss}" if not math.isfinite(loss) else f"the gradient norm is {norm}"
        nobody = "no single rank" if self.all_agree else "an island"  # others may still train: they can't be asked
        where = ", ".join(culprits) or f"{nobody}; samples {_few([i for own, _ in found for i in own])}"
        raise LossNotFinite(
            f"{what} at step {step}, from {where}; no update was made of it; lower train.lr, or look at these samples"
        )


def _few(ids: list[int]) -> str:
    shown = ", ".join(str(i) for i in ids[:16])
    return shown + (f" and {len(ids) - 16} more" if len(ids) > 16 else "")
