"""The demo's model under ZeRO with everything that observes a run, which can be turned off: what benchmarks compare."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed.comm.comm as comm
import torch

from toolkit.plans.deepspeed_config import deepspeed_config
from toolkit.plans.plan import Plan
from toolkit.recipe.file import load_recipe
from toolkit.recipe.metrics_sections import Wandb
from toolkit.recipe.schedules import Batches, make_schedule
from toolkit.recipe.sections import Train
from toolkit.runtime.build_engine import EngineSpec, build_engine
from toolkit.runtime.distributed.process_group import broadcast_object, current_world, host_group
from toolkit.runtime.engine.replica import ReplicaEngine
from toolkit.runtime.machine.counters import make_counters
from toolkit.runtime.metrics import comm_timer
from toolkit.runtime.metrics.memory import MemoryMeter
from toolkit.runtime.metrics.record import Sink
from toolkit.runtime.metrics.step_breakdown import StepMeter
from toolkit.runtime.metrics.step_clock import Clock, Lap, NoClock, make_clock
from toolkit.runtime.metrics.trace import Tracer
from toolkit.runtime.models.micro_batch import MicroBatch
from toolkit.runtime.observer import Observer
from toolkit.runtime.sinks.build import GuardedSink, Recorder
from toolkit.runtime.sinks.local_files import EventSink, JsonlSink, TensorboardSink
from toolkit.runtime.sinks.wandb_sink import WandbSink
from toolkit.runtime.supervision.warm_pool import call_on_ranks, first_failure

DEMO = Path(__file__).resolve().parent.parent / "recipes" / "demo.yaml"
PROCESSES = 2
DETAIL_EVERY = 10
"""As recipes have it by default."""


class Switch:
    """A clock that can be off."""

    def __init__(self) -> None:
        self.watcher: Callable[[str], object] | None = None
        self.on: Clock = make_clock()
        self.now: Clock = self.on

    @property
    def part_name(self) -> str:
        return self.now.part_name

    def enter(self, part: str) -> None:
        self.now.enter(part)

    def leave(self) -> None:
        self.now.leave()

    def hide(self, part: str, seconds: float) -> None:
        self.now.hide(part, seconds)

    def lap(self, *, sample_next: bool) -> Lap:
        return self.now.lap(sample_next=sample_next)


@dataclass
class Observed:
    """One rank of a run."""

    engine: ReplicaEngine
    observer: Observer
    batch: list[MicroBatch]
    plan: Plan
    clock: Switch
    timed: object
    """DeepSpeed's communication with our timer before it, and without."""
    plain: object

    def turn(self, *, on: bool) -> None:
        """Metrics on or off from here."""
        comm.cdb = self.timed if on else self.plain
        self.clock.now = self.clock.on if on else NoClock()
        self.observer.meter.begin()

    def finish(self) -> None:
        """Close every sink."""
        for sink in self.observer.recorder.sinks:
            sink.finish({"status": "done"})


def sinks(directory: Path) -> list[Sink]:
    """Every sink that ships, but the terminal."""
    return [
        JsonlSink(directory / "metrics.jsonl", directory / "summary.json"),
        EventSink(directory / "events.jsonl"),
        GuardedSink("W&B", WandbSink(Wandb(), "overhead", directory), print),
        GuardedSink("TensorBoard", TensorboardSink(directory), print),
    ]


def observed(stage: int, directory: Path, accumulate: int = 2) -> Observed:
    """As one rank of a group that is joined."""
    recipe, world = load_recipe(DEMO), current_world()
    plan = Plan(
        strategy="zero", dp=world.size, zero_stage=stage, zero_group=world.size, micro_batch=4, grad_accum=accumulate,
        precision="fp32",
    )  # fmt: skip
    train = Train(global_batch=plan.global_batch, steps=10**6)
    clock, plain = Switch(), comm.cdb
    timer = comm_timer.install(clock, 1)
    config = deepspeed_config(plan, train, params=10**7, backend="cpu")
    site = EngineSpec(
        model=recipe.model, train=train, plan=plan, deepspeed=config, schedule=make_schedule(train, 10**6)
    )
    engine = build_engine(site, world)
    assert isinstance(engine, ReplicaEngine)
    engine.watch(clock)
    counters, _ = make_counters()
    memory = MemoryMeter()
    memory.peak_bytes = 1  # the watch on memory is a step of its own, not a cost of every step
    recorder = Recorder(sinks(directory) if world.rank == 0 else [])
    observer = Observer(
        recorder=recorder,
        meter=StepMeter(plan, clock, timer, memory, counters, DETAIL_EVERY, host_group()),
        memory=memory,
        model_flops=1.0,
        hardware_flops=1.0,
        devices=world.size,
        peak_flops=1.0,
        saved=lambda: 0,
        tracer=Tracer(None, directory, world.rank),
        micro_batch=plan.micro_batch,
        batches=Batches(plan.global_batch),
    )
    for sink in recorder.sinks:
        sink.start({})
    counters.start()
    ids = torch.randint(0, 256, (plan.micro_batch, recipe.data.seq_len + 1))
    batch = [MicroBatch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())] * plan.grad_accum
    return Observed(engine, observer, batch, plan, clock, timer, plain)


def first_decides(going_on: bool) -> bool:
    """What rank 0 would do, on every rank."""
    return broadcast_object(going_on)


def measured_on_ranks(measure: Callable[[int, float, str], Any], about: str) -> list[Any]:
    """What `measure(stage, seconds, directory)` finds as each rank, with the stage and seconds of the command line."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--stage", type=int, default=2, help="ZeRO stage")
    parser.add_argument("--seconds", type=float, default=80)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        results: list[Any] = call_on_ranks(
            measure, args.stage, args.seconds, directory, nproc=PROCESSES, timeout_seconds=3600
        )
    failure = first_failure(results)
    assert failure is None, failure
    return results
