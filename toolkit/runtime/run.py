"""One rank's run, from an order to a summary: build the model and the engine, train, record."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import IO, Any

from toolkit.errors import LossNotFinite
from toolkit.recipe import Recipe
from toolkit.run_dir import Order as RunOrder
from toolkit.run_dir import RunDir
from toolkit.runtime import comm_timer
from toolkit.runtime.build import Site, build_engine
from toolkit.runtime.console import ConsoleSink
from toolkit.runtime.data import Order, Samples, load_samples
from toolkit.runtime.distributed import World, gather_objects
from toolkit.runtime.memory_meter import MemoryMeter
from toolkit.runtime.metrics import JsonlSink, Recorder, Sink
from toolkit.runtime.model import vocabulary
from toolkit.runtime.tokenizer import load_tokenizer
from toolkit.runtime.trainer import Observer, Share, train
from toolkit.runtime.wandb_sink import WandbSink
from toolkit.schedule import make_schedule


def run_rank(order: RunOrder, run: RunDir, world: World, console: IO[str]) -> None:
    """Train as this rank; rank 0 records."""
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
    recorder = Recorder(_sinks(recipe, run, console, steps) if world.rank == 0 else [])
    observer = Observer(
        recorder=recorder,
        comm=timer,
        memory=MemoryMeter(),
        model_flops=order.model_flops,
        peak_flops=order.peak_flops * world.size,
        scales_loss=plan.precision == "fp16",
    )
    share = Share(replica=engine.replica, replicas=plan.dp, micro_batch=plan.micro_batch)
    data_order = Order(samples=len(samples), global_batch=plan.global_batch, seed=recipe.train.seed)
    info = {"recipe": asdict(recipe), "plan": asdict(plan), "deepspeed": order.deepspeed, "run_dir": str(run.path)}
    for sink in recorder.sinks:
        sink.start(info)
    started, status = time.perf_counter(), "failed"
    try:
        train(engine, samples, data_order, share, steps, observer)
        status = "done"
    except LossNotFinite:
        status = "loss_not_finite"
        raise
    finally:
        summary = _summary(order, run, recorder, observer, status, time.perf_counter() - started)
        for sink in recorder.sinks:
            sink.finish(summary)


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
    order: RunOrder, run: RunDir, recorder: Recorder, observer: Observer, status: str, seconds: float
) -> Mapping[str, Any]:
    peaks = gather_objects(observer.memory.peak_bytes) if status == "done" else [observer.memory.peak_bytes]
    return {
        "status": status,
        "steps": recorder.last.step if recorder.last else 0,
        "first_loss": recorder.first_loss,
        "final_loss": recorder.last.loss if recorder.last else None,
        "tokens": recorder.tokens,
        "seconds": seconds,
        "predicted": {"step_seconds": order.predicted_step_seconds, "memory_bytes": order.predicted_memory_bytes},
        "measured": {"step_seconds": recorder.typical_step_seconds(), "memory_bytes": max(peaks)},
        "memory_bytes_by_rank": peaks,
        "run_dir": str(run.path),
    }
