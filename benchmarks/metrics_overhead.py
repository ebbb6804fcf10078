"""What the metrics cost: steps with everything on against steps with everything off, in turn, in one run.

python benchmarks/metrics_overhead.py [--stage 2] [--blocks 20] [--block-steps 6]

On means: every collective timed, the step split into parts, ranks gathered every tenth step, device counters, and
records to metrics.jsonl, W&B (offline) and TensorBoard. `wall` is the ratio of median step times; `cpu` that of the
processor time of the rank that records, which a busy machine disturbs less; `record_cpu` is what the training thread
itself spends on a record.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import deepspeed.comm.comm as comm
import torch

from toolkit.batches import Batches
from toolkit.deepspeed_config import deepspeed_config
from toolkit.plan import Plan
from toolkit.recipe import Train, Wandb
from toolkit.recipe_file import load_recipe
from toolkit.runtime import comm_timer
from toolkit.runtime.build import Site, build_engine
from toolkit.runtime.clock import Clock, HostClock, Lap, NoClock
from toolkit.runtime.counters import Counters, host_reader
from toolkit.runtime.data import MicroBatch
from toolkit.runtime.distributed import current_world, host_group
from toolkit.runtime.event_sink import EventSink
from toolkit.runtime.groups import call_on_ranks, first_failure
from toolkit.runtime.memory_meter import MemoryMeter
from toolkit.runtime.metrics import JsonlSink, Recorder, Sink
from toolkit.runtime.step_meter import StepMeter
from toolkit.runtime.tensorboard_sink import TensorboardSink
from toolkit.runtime.trace import Tracer
from toolkit.runtime.trainer import Observer, SpikeGuard
from toolkit.runtime.wandb_sink import WandbSink
from toolkit.schedule import make_schedule

DEMO = Path(__file__).resolve().parent.parent / "recipes" / "demo.yaml"


class Switch:
    """A clock that can be off."""

    def __init__(self) -> None:
        self.on: Clock = HostClock()
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


def sinks(directory: Path) -> list[Sink]:
    """Every sink that ships, but the terminal."""
    return [
        JsonlSink(directory / "metrics.jsonl", directory / "summary.json"),
        EventSink(directory / "events.jsonl"),
        WandbSink(Wandb(), "overhead", directory),
        TensorboardSink(directory),
    ]


def measure(plan: Plan, blocks: int, block_steps: int, directory: str) -> dict[str, list[float]]:
    """As one rank: wall and processor seconds of every step, on and off."""
    torch.manual_seed(0)
    recipe, world = load_recipe(DEMO), current_world()
    train = Train(global_batch=plan.global_batch, steps=10**6)
    clock, plain = Switch(), comm.cdb
    timer = comm_timer.install(clock, 1)
    config = deepspeed_config(plan, train, params=10**7, backend="cpu")
    engine = build_engine(
        Site(model=recipe.model, train=train, plan=plan, deepspeed=config, schedule=make_schedule(train, 10**6)), world
    )
    engine.watch(clock)
    counters, memory = Counters([host_reader()]), MemoryMeter()
    recorder = Recorder(sinks(Path(directory)) if world.rank == 0 else [])
    observer = Observer(
        recorder=recorder,
        meter=StepMeter(plan, clock, timer, memory, counters, 10, host_group()),
        memory=memory,
        model_flops=1.0,
        hardware_flops=1.0,
        devices=world.size,
        peak_flops=1.0,
        guard=SpikeGuard(float("inf")),
        all_agree=True,
        noise=None,
        micro_batch=plan.micro_batch,
        batches=Batches(plan.global_batch),
        scales_loss=False,
        saved=lambda: 0,
        tracer=Tracer(None, Path(directory), world.rank),
    )
    for sink in recorder.sinks:
        sink.start({})
    counters.start()
    memory.peak_bytes = 1  # the watch on memory is a step of its own, not a cost of every step
    ids = torch.randint(0, 256, (plan.micro_batch, recipe.data.seq_len + 1))
    batch = [MicroBatch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())] * plan.grad_accum
    found: dict[str, list[float]] = {"on": [], "off": [], "on_cpu": [], "off_cpu": [], "record_cpu": []}
    for block in range(2 * blocks):
        name = "off" if block % 2 else "on"
        comm.cdb = timer if name == "on" else plain
        clock.now = clock.on if name == "on" else NoClock()
        observer.meter.begin()
        for step in range(block_steps):
            wall, cpu = time.perf_counter(), time.process_time()
            result = engine.step(batch)
            if name == "on":
                number = block // 2 * block_steps + step + 1
                began = time.thread_time()
                observer.record(number, result, data_seconds=0.0, step_seconds=time.perf_counter() - wall)
                found["record_cpu"].append(time.thread_time() - began)
            else:
                float(result.loss)
            if block >= 2:  # the first of each warm up
                found[name].append(time.perf_counter() - wall)
                found[f"{name}_cpu"].append(time.process_time() - cpu)
    for sink in recorder.sinks:
        sink.finish({"status": "done"})
    return found


def main() -> None:
    """Print the ratios as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--stage", type=int, default=2, help="ZeRO stage")
    parser.add_argument("--blocks", type=int, default=20)
    parser.add_argument("--block-steps", type=int, default=6)
    args = parser.parse_args()
    plan = Plan(
        strategy="zero", dp=2, zero_stage=args.stage, zero_group=2, micro_batch=4, grad_accum=2, precision="fp32"
    )
    with tempfile.TemporaryDirectory() as directory:
        results: list[Any] = call_on_ranks(
            measure, plan, args.blocks, args.block_steps, directory, nproc=2, timeout_seconds=3600
        )
    failure = first_failure(results)
    assert failure is None, failure
    medians = {name: statistics.median(values) for name, values in results[0].items()}
    wall, cpu = medians["on"] / medians["off"], medians["on_cpu"] / medians["off_cpu"]
    print(json.dumps({"median_seconds": medians, "wall": wall, "cpu": cpu, "steps": len(results[0]["on"])}, indent=1))


if __name__ == "__main__":
    main()
