"""One rank's run, from an order to a summary: build the model and the engine, train, record."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import IO, Any

from toolkit.errors import LossNotFinite, Preempted
from toolkit.recipe import Recipe
from toolkit.run_dir import Order as RunOrder
from toolkit.run_dir import RunDir
from toolkit.runtime import checkpoint, comm_timer
from toolkit.runtime.build import Site, build_engine
from toolkit.runtime.console import ConsoleSink
from toolkit.runtime.data import Order, Samples, load_samples
from toolkit.runtime.distributed import World, gather_objects, host_group
from toolkit.runtime.engine import Engine
from toolkit.runtime.keeper import CheckpointKeeper, Moving
from toolkit.runtime.memory_meter import MemoryMeter
from toolkit.runtime.metrics import JsonlSink, Recorder, Sink, keep_until
from toolkit.runtime.model import vocabulary
from toolkit.runtime.rewind import Rewind
from toolkit.runtime.tokenizer import load_tokenizer
from toolkit.runtime.trainer import Observer, Share, Spike, SpikeGuard, train
from toolkit.runtime.wandb_sink import WandbSink
from toolkit.schedule import make_schedule
from toolkit.stop import StopRequest


@dataclass(frozen=True)
class Watched:
    """What ties a rank to those who started it."""

    console: IO[str]
    """The terminal, for progress."""
    stop: StopRequest
    pulse: Moving


def run_rank(order: RunOrder, run: RunDir, world: World, watched: Watched) -> None:
    """Train as this rank; rank 0 records."""
    console = watched.console
    recipe, plan = order.recipe, order.plan
    samples = _samples(recipe, vocabulary(recipe.model))
    steps = num_steps(recipe, len(samples))
    timer = comm_timer.install()
    site = Site(
        model=recipe.model,
        train=recipe.train,
        plan=plan,
        deepspeed=order.deepspeed,
        schedule=make_schedule(recipe.train, steps),
    )
    engine = build_engine(site, world)
    data_order = Order(samples=len(samples), global_batch=plan.global_batch, seed=recipe.train.seed)
    done, data_order = _go_on(recipe, run, world, engine, data_order, _speaker(world, console))
    recorder = Recorder(_sinks(recipe, run, console, steps) if world.rank == 0 else [])
    if world.rank == 0:
        recorder.go_on(keep_until(run.metrics, done))
    observer = Observer(
        recorder=recorder,
        comm=timer,
        memory=MemoryMeter(),
        model_flops=order.model_flops,
        peak_flops=order.peak_flops * world.size,
        guard=SpikeGuard(recipe.train.spike_factor if recipe.train.on_spike == "rewind" else float("inf")),
        scales_loss=plan.precision == "fp16",
    )
    keeper = _keeper(order, run, world, engine, data_order, watched, steps=steps, done=done)
    share = Share(replica=engine.replica, replicas=plan.dp, micro_batch=plan.micro_batch)
    info = {"recipe": asdict(recipe), "plan": asdict(plan), "deepspeed": order.deepspeed, "run_dir": str(run.path)}
    for sink in recorder.sinks:
        sink.start(info)
    watched.pulse.watch(recipe.train.hang_timeout_seconds)
    started, status = time.perf_counter(), "failed"
    try:
        rewind = Rewind(engine.state, keeper.saver, recorder, _speaker(world, console))
        while done < steps:
            try:
                train(engine, samples, data_order, share, range(done, steps), observer, keeper)
                done = steps
            except Spike as spike:
                done, data_order = rewind.before(spike)
        status = "done"
    except LossNotFinite:
        status = "loss_not_finite"
        raise
    except Preempted:
        status = "preempted"
        raise
    finally:
        summary = _summary(order, run, recorder, observer, status, time.perf_counter() - started, done)
        summary["save_seconds"] = keeper.saver.stalls
        for sink in recorder.sinks:
            sink.finish(summary)


def _go_on(
    recipe: Recipe, run: RunDir, world: World, engine: Engine, order: Order, say: checkpoint.Say
) -> tuple[int, Order]:
    """Steps already done, and where the data goes on: from a checkpoint, or from the start."""
    reader = checkpoint.find(recipe.checkpoint, run.checkpoints, world, say)
    return (0, order) if reader is None else checkpoint.resume(reader, engine.state, order, recipe, world)


def _keeper(
    order: RunOrder,
    run: RunDir,
    world: World,
    engine: Engine,
    data_order: Order,
    watched: Watched,
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
        tick=watched.pulse.move,
    )
    every = order.recipe.checkpoint.every
    return CheckpointKeeper(
        saver=saver, stop=watched.stop, pulse=watched.pulse, every=every, steps=steps, group=host_group()
    )


def _speaker(world: World, console: IO[str]) -> checkpoint.Say:
    """Rank 0 speaks to the terminal and to its log; the others to theirs."""

    def say(text: str) -> None:
        print(text, flush=True)
        if world.rank == 0:
            print(text, file=console, flush=True)

    return say


def num_steps(recipe: Recipe, num_samples: int) -> int:
    """Steps of the run: given, or enough for the epochs."""
    if recipe.train.steps is not None:
        return recipe.train.steps
    assert recipe.train.epochs is not None
    return max(1, -(-round(recipe.train.epochs * num_samples) // recipe.train.global_batch))


def _samples(recipe: Recipe, vocab: int) -> Samples:
    if recipe.data.path == "synthetic":
        return load_samples(recipe.data, load_tokenizer("bytes", None), vocab)
    tokenizer = load_tokenizer(
        recipe.data.tokenizer, recipe.model.path, trust_remote_code=recipe.model.trust_remote_code
    )
    return load_samples(recipe.data, tokenizer, vocab)


def _sinks(recipe: Recipe, run: RunDir, console: IO[str], steps: int) -> list[Sink]:
    sinks: list[Sink] = [JsonlSink(run.metrics, run.summary)]
    if recipe.metrics.console:
        sinks.append(ConsoleSink(console, steps, recipe.metrics.every))
    if recipe.metrics.wandb.mode != "disabled":
        sinks.append(WandbSink(recipe.metrics.wandb, recipe.name, run.path))
    return sinks


def _summary(
    order: RunOrder, run: RunDir, recorder: Recorder, observer: Observer, status: str, seconds: float, done: int
) -> dict[str, Any]:
    peaks = gather_objects(observer.memory.peak_bytes) if status == "done" else [observer.memory.peak_bytes]
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
        "run_dir": str(run.path),
    }
