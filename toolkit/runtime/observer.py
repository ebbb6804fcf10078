"""Turns the result of a step into a record for the sinks."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from toolkit.plans.noise_scale import NoiseScale, advice
from toolkit.recipe.schedules import Batches
from toolkit.run_dir import router_load
from toolkit.runtime.between_steps import FinishedStep
from toolkit.runtime.engine.protocol import StepResult
from toolkit.runtime.layers.compiled_layers import compiled_graphs
from toolkit.runtime.metrics.memory import MemoryMeter
from toolkit.runtime.metrics.record import Record
from toolkit.runtime.metrics.step_breakdown import StepMeter
from toolkit.runtime.metrics.trace import Tracer
from toolkit.runtime.sinks.build import Recorder


@dataclass(frozen=True, kw_only=True)
class Observer:
    """Measures each step and records it."""

    recorder: Recorder
    meter: StepMeter
    memory: MemoryMeter
    model_flops: float
    """FLOPs per step that the model needs: no recompute."""
    hardware_flops: float
    """FLOPs per step, recomputed layers included."""
    devices: int
    peak_flops: float
    """Of all devices together."""
    saved: Callable[[], int]
    """Step of the newest complete checkpoint."""
    tracer: Tracer
    micro_batch: int
    """Sequences per micro-batch."""
    batches: Batches
    """Sequences of each step."""
    noise: NoiseScale | None = None
    gather_ids: Callable[[np.ndarray], list[int] | None] = lambda own: None
    """Sample ids of all replicas, given this rank's, if the recipe asks for them. Collective."""
    _last_read: list[float] = field(default_factory=list)
    """When the step before was done."""

    @contextlib.contextmanager
    def watching(self, step: int) -> Iterator[None]:
        """Memory and operations of a step, counted from 1."""
        self.tracer.before(step)
        with self.memory.step(step):
            yield
        self.tracer.after(step)

    def record(self, step: FinishedStep) -> None:
        """Record one finished step."""
        number, result = step.number, step.result
        loss = result.loss  # waits for the device: the step is over when this returns
        step_seconds = self._seconds_of(step)
        with self.meter.part("agree"):
            sample_ids = self.gather_ids(step.sample_ids)
        split, detail = self.meter.close(number), self.meter.detail(number)
        rate = result.tokens / step_seconds
        share = self.batches.size(number - 1) / self.batches.full
        figures = result.figures
        compares = figures is not None and "margin" in figures
        record = Record(
            step=number,
            loss=loss,
            lr=result.lr,
            grad_norm=result.grad_norm,
            tokens=result.tokens,
            step_seconds=step_seconds,
            tokens_per_second=rate,
            tokens_per_second_per_device=rate / self.devices,
            mfu=share * self.model_flops / step_seconds / self.peak_flops,
            hfu=share * self.hardware_flops / step_seconds / self.peak_flops,
            memory_bytes=step.memory.bytes,
            memory_reserved_bytes=step.memory.reserved_bytes,
            memory_now_bytes=self.memory.now_bytes(),
            comm_seconds=split.comm_seconds,
            data_seconds=step.data_seconds,
            time=split.time,
            wall_seconds=split.wall_seconds,
            parts=split.parts,
            grad_sync_seconds=split.grad_sync_seconds,
            compiled_graphs=compiled_graphs(),
            preference=figures if compares else None,
            objective=None if compares else figures,
            exchange=None if result.exchange is None else dict(result.exchange),
            router=router_load.summarise(result.numbers.routers),
            skipped=int(result.skipped),
            loss_scale=result.loss_scale,
            noise_scale_sequences=self._noise_of(number, result),
            checkpoint_step=self.saved(),
            sample_ids=sample_ids,
        )
        self.recorder.log(replace(record, **detail.fields(), router_load=_shares(result)) if detail else record)

    def _seconds_of(self, step: FinishedStep) -> float:
        """Seconds since the step was started, or since the step before was done, if that came later."""
        now = time.perf_counter()
        since = max(step.started, *self._last_read) if self._last_read else step.started
        self._last_read[:] = [now]
        return now - since

    def _noise_of(self, step: int, result: StepResult) -> float | None:
        if self.noise is None or result.micro_square is None or not math.isfinite(result.grad_norm):
            return None
        full = self.batches.size(step - 1)
        if full > self.micro_batch:  # a ramp may begin with a single micro-batch, which shows no noise
            self.noise.add(result.micro_square, self.micro_batch, result.grad_norm**2, full)
        return self.noise.sequences

    def noise_summary(self) -> dict[str, Any]:
        """Gradient noise scale and advice on the batch size, for the summary."""
        found = self.noise.sequences if self.noise else None
        return {"noise_scale_sequences": found, "batch_advice": advice(found, self.batches.full)} if found else {}


def _shares(result: StepResult) -> list[list[float]] | None:
    """Load of every expert over the mean, for the heat map; None for dense models."""
    return router_load.shares(router_load.loads_of(result.numbers.routers)) or None
