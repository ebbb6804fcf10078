"""One rank's run, from an order to a summary: build the model and the engine, train, record."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass
from functools import partial
from typing import IO, Any

from toolkit.errors import LossNotFinite, Preempted
from toolkit.launching.stop_signals import StopRequest
from toolkit.plans.noise_scale import NoiseScale
from toolkit.recipe.schedules import make_schedule
from toolkit.recipe.sections import Recipe
from toolkit.run_dir.async_islands import Membership
from toolkit.run_dir.layout import RunDir
from toolkit.run_dir.layout import RunSpec as RunOrder
from toolkit.run_dir.predicted_vs_measured import compare_memory
from toolkit.runtime.between_steps import CheckpointKeeper, Progress, RoundKeeper
from toolkit.runtime.build_engine import EngineSpec, build_engine
from toolkit.runtime.checkpoint import resume
from toolkit.runtime.checkpoint import saver as checkpoint
from toolkit.runtime.data.load import load_data
from toolkit.runtime.data.prefetch import Share
from toolkit.runtime.data.sample_order import SampleOrder, gather_sample_ids
from toolkit.runtime.data.samples import Samples
from toolkit.runtime.data.streaming import Streamed
from toolkit.runtime.distributed.process_group import World, gather_objects, host_group
from toolkit.runtime.distributed.rank_zero_first import AllRanks
from toolkit.runtime.engine.protocol import Engine
from toolkit.runtime.evaluate import EvaluatingKeeper, make_evaluator
from toolkit.runtime.islands.async_engine import AsyncIslandEngine, Waits
from toolkit.runtime.loop import train
from toolkit.runtime.machine.counters import make_counters
from toolkit.runtime.metrics import comm_timer
from toolkit.runtime.metrics.comm_timer import CommTimer
from toolkit.runtime.metrics.memory import MemoryMeter
from toolkit.runtime.metrics.step_breakdown import StepMeter
from toolkit.runtime.metrics.step_clock import Clock, NoClock, make_clock
from toolkit.runtime.metrics.summary import Averages
from toolkit.runtime.metrics.trace import Tracer
from toolkit.runtime.metrics.trace import report as trace_report
from toolkit.runtime.models.input_spec import input_spec_of
from toolkit.runtime.observer import Observer
from toolkit.runtime.sinks.build import load_own, make_sinks, sink_info
from toolkit.runtime.sinks.local_files import keep_until
from toolkit.runtime.sinks.recorder import Recorder
from toolkit.runtime.spike_rewind import Rewind, Spike, SpikeGuard


@dataclass(frozen=True)
class RankContext:
    """What ties a rank to those who started it."""

    console: IO[str]
    """The terminal, for progress."""
    stop: StopRequest
    pulse: Progress
    member: Membership | None = None
    """This island among others that never wait for one another."""


def run_rank(order: RunOrder, run: RunDir, world: World, watched: RankContext) -> None:
    """Train as this rank; rank 0 records."""
    gc.freeze()  # half a million objects of imported modules: neither collected nor searched for tensors
    console = watched.console
    recipe, plan = order.recipe, order.plan
    own = load_own(recipe.metrics, world)
    loaded = load_data(recipe, input_spec_of(recipe.model), AllRanks(world), console)
    data_order = loaded.order(recipe, plan.global_batch)
    steps = num_steps(recipe, data_order)
    clock: Clock = make_clock() if recipe.metrics.detail_every else NoClock()
    timer = comm_timer.install(clock, plan.tp * plan.sp)
    site = EngineSpec(
        model=recipe.model,
        train=recipe.train,
        plan=plan,
        deepspeed=order.deepspeed,
        schedule=make_schedule(recipe.train, steps),
        noise=recipe.metrics.noise_scale,
        member=watched.member,
    )
    engine = build_engine(site, world)
    engine.watch(clock)
    say = _speaker(world, console)
    tell = say if recipe.metrics.console else print
    for note in loaded.notes if world.rank == 0 else ():
        tell(f"data: {note}")
    done, data_order = _go_on(recipe, run, world, engine, loaded.train, data_order, say)
    averages = Averages(order.predicted_parts, order.link_bytes_per_second)
    recorder = Recorder([averages, *make_sinks(order, run, console, steps, own)] if world.rank == 0 else [])
    if world.rank == 0:
        recorder.resume_at(keep_until(run.metrics, done))
    counters, missing = make_counters()
    if missing:
        _speaker(world, console)(missing)
    memory = MemoryMeter(clock)
    # Islands meet every `local_steps` steps only, and then for this too.
    every = -(-recipe.metrics.detail_every // plan.local_steps) * plan.local_steps
    group = host_group()
    meter = StepMeter(plan, clock, timer, memory, counters, every, group)
    keeper = _keeper(order, run, world, engine, loaded.train, data_order, watched, timer, steps=steps, done=done)
    observer = Observer(
        taken=partial(gather_sample_ids, replica=engine.replica, group=group)
        if recipe.metrics.sample_ids
        else lambda own: None,
        recorder=recorder,
        meter=meter,
        memory=memory,
        model_flops=order.model_flops,
        hardware_flops=order.hardware_flops,
        devices=world.size,
        peak_flops=order.peak_flops * world.size,
        guard=SpikeGuard(recipe.train.spike_factor if recipe.train.on_spike == "rewind" else float("inf")),
        all_agree=plan.islands == 1,
        scales_loss=plan.precision == "fp16",
        saved=lambda: keeper.saver.written_step,
        noise=NoiseScale() if recipe.metrics.noise_scale else None,
        micro_batch=plan.micro_batch,
        batches=data_order.batches,
        tracer=Tracer(recipe.metrics.trace, run.trace, world.rank),
    )
    share = Share(replica=engine.replica, replicas=plan.dp * plan.islands, micro_batch=plan.micro_batch)
    evaluator = None
    if loaded.held_out is not None:
        evaluator = make_evaluator(recipe, run, engine, loaded.held_out, share, recorder, tell, watched.pulse)
        evaluator.resume_at(done)
    info = sink_info(order, run, world, done)
    for sink in recorder.sinks:
        sink.start(info)
    watched.pulse.watch(recipe.train.hang_timeout_seconds)
    started, status = time.perf_counter(), "failed"
    if recipe.metrics.detail_every:
        counters.start()
    meter.begin()
    try:
        rewind = Rewind(engine.state, keeper.saver, recorder, say)
        outer = keeper if evaluator is None else EvaluatingKeeper.around(keeper, evaluator, recipe)
        if isinstance(engine, AsyncIslandEngine):
            assert isinstance(keeper, RoundKeeper)
            waits = Waits(watched.pulse.move, lambda: watched.stop.signal is not None)
            for chunk in engine.rounds(waits):
                train(engine, loaded.train, data_order, share, chunk, observer, outer)
                done = chunk.stop
            keeper.end(done, complete=engine.complete)
            done = steps
        while done < steps:
            try:
                train(engine, loaded.train, data_order, share, range(done, steps), observer, outer)
                done = steps
            except Spike as spike:
                done, data_order = rewind.before(spike)
                if evaluator is not None:
                    evaluator.resume_at(done)
        status = "done"
    except LossNotFinite:
        status = "loss_not_finite"
        raise
    except Preempted:
        status = "preempted"
        raise
    finally:
        summary = _summary(order, run, recorder, observer, status, time.perf_counter() - started, done)
        counters.stop()
        summary |= {"save_seconds": keeper.saver.stalls, **averages.summary()}
        if evaluator is not None:
            summary["eval"] = {"last": evaluator.last, "best": evaluator.best}
        for sink in recorder.sinks:
            sink.finish(summary)
        if recipe.metrics.trace and world.rank == 0:
            for line in trace_report(run.trace, run.metrics, recipe.metrics.trace):
                _speaker(world, console)(line)


def _go_on(
    recipe: Recipe, run: RunDir, world: World, engine: Engine, samples: Samples, order: SampleOrder, say: resume.Say
) -> tuple[int, SampleOrder]:
    """Steps already done, and where the data goes on: from a checkpoint, or from the start."""
    reader = resume.find(recipe.checkpoint, run.checkpoints, world, say)
    if reader is None:
        return 0, order
    found = resume.resume(reader, engine.state, order, recipe, world)
    if isinstance(samples, Streamed):
        say(samples.resume_at(reader.state.get("stream")))
    return found


def _keeper(
    order: RunOrder,
    run: RunDir,
    world: World,
    engine: Engine,
    samples: Samples,
    data_order: SampleOrder,
    watched: RankContext,
    timer: CommTimer,
    *,
    steps: int,
    done: int,
) -> CheckpointKeeper:
    saver = checkpoint.Saver(
        root=run.checkpoints,
        state=engine.state,
        recipe=order.recipe,
        plan=order.plan,
        order=data_order,
        world=world,
        group=host_group(),
        last_step=done,
        stream=samples.mark if isinstance(samples, Streamed) else None,
        tick=watched.pulse.move,
    )
    shared: dict[str, Any] = {
        "saver": saver,
        "stop": watched.stop,
        "pulse": watched.pulse,
        "every": order.recipe.checkpoint.every,
        "steps": steps,
        "comm": timer,
        "group": host_group(),
        "agree_every": order.plan.local_steps,
    }
    if isinstance(engine, AsyncIslandEngine):
        return RoundKeeper(**shared, own_steps=lambda: engine.own_steps)
    return CheckpointKeeper(**shared)


def _speaker(world: World, console: IO[str]) -> resume.Say:
    """Rank 0 speaks to the terminal and to its log; the others to theirs."""

    def say(text: str) -> None:
        print(text, flush=True)
        if world.rank == 0:
            print(text, file=console, flush=True)

    return say


def num_steps(recipe: Recipe, order: SampleOrder) -> int:
    """Steps of the run: given, or enough for the epochs."""
    if recipe.train.steps is not None:
        return recipe.train.steps
    assert order.total is not None
    return order.batches.steps_for(order.total)


def _summary(
    order: RunOrder, run: RunDir, recorder: Recorder, observer: Observer, status: str, seconds: float, done: int
) -> dict[str, Any]:
    memory = (observer.memory.peak_bytes, observer.memory.parts())
    by_rank = gather_objects(memory) if status == "done" else [memory]
    peaks = [peak for peak, _ in by_rank]
    return {
        "status": status,
        "steps": recorder.last.step if recorder.last else done,
        "first_loss": recorder.first_loss,
        "final_loss": recorder.last.loss if recorder.last else None,
        "tokens": recorder.tokens,
        "seconds": seconds,
        "predicted": {"step_seconds": order.predicted_step_seconds, "memory_bytes": order.predicted_memory_bytes},
        "measured": {"step_seconds": recorder.typical_step_seconds(), "memory_bytes": max(peaks)},
        "memory_bytes_by_rank": peaks,
        "memory_parts": compare_memory(order.predicted_memory, max(by_rank, key=lambda one: one[0])[1]),
        "run_dir": str(run.path),
        **observer.noise_summary(),
    }
