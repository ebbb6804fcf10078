"""The sinks of a run, and what they are told at its start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import IO, Any

from deepspeed.accelerator import get_accelerator

from toolkit.errors import BadInput
from toolkit.launching.launchers import environment
from toolkit.recipe.metrics_sections import Metrics
from toolkit.run_dir.layout import Order, RunDir
from toolkit.runtime.checkpoint.saver import versions
from toolkit.runtime.distributed.process_group import World
from toolkit.runtime.metrics.record import JsonlSink, Sink
from toolkit.runtime.sinks.console import ConsoleSink
from toolkit.runtime.sinks.events import EventSink
from toolkit.runtime.sinks.guarded import GuardedSink
from toolkit.runtime.sinks.plugins import load_sink
from toolkit.runtime.sinks.tensorboard import TensorboardSink
from toolkit.runtime.sinks.wandb import WandbSink
from toolkit.secrets import secrets_in

Say = Callable[[str], object]


def make_sinks(order: Order, run: RunDir, console: IO[str], steps: int, own: list[Any]) -> list[Sink]:
    """Where rank 0's records go; `own` are classes that the user brings."""
    metrics = order.recipe.metrics
    say: Say = partial(print, file=console, flush=True)
    sinks: list[Sink] = [
        JsonlSink(run.metrics, run.summary),
        EventSink(run.events, say if metrics.console else lambda text: None),
    ]
    if metrics.console:
        sinks.append(ConsoleSink(console, steps, metrics.every, order.memory_limit_bytes))
    others: list[tuple[str, Sink]] = []
    if metrics.wandb.mode != "disabled":
        hidden, resumable = secrets_in(environment()), order.recipe.checkpoint.every > 0
        wandb = WandbSink(metrics.wandb, order.recipe.name, run.path, hidden=hidden, resumable=resumable, say=say)
        others.append(("W&B", wandb))
    if metrics.tensorboard:
        others.append(("TensorBoard", TensorboardSink(run.path)))
    others += [(f"sink {kind.__name__}", kind(run.path)) for kind in own]
    return sinks + [GuardedSink(name, sink, say) for name, sink in others]


def load_own(metrics: Metrics, world: World) -> list[Any]:
    """The user's sinks, on every rank, so that all fail alike if one can't be had."""
    trace = metrics.trace
    if trace is not None and max(trace.ranks) >= world.size:
        what = f"{list(trace.ranks)} given; the run has ranks 0 to {world.size - 1}"
        raise BadInput("metrics.trace.ranks", what)
    return [load_sink(name) for name in metrics.sinks]


def sink_info(order: Order, run: RunDir, world: World, done: int) -> dict[str, Any]:
    """What sinks are told at the start."""
    return {
        "recipe": asdict(order.recipe),
        "plan": asdict(order.plan),
        "deepspeed": order.deepspeed,
        "run_dir": str(run.path),
        "predicted": {
            "step_seconds": order.predicted_step_seconds,
            "memory_bytes": order.predicted_memory_bytes,
            "parts": order.predicted_parts,
        },
        "environment": {"versions": versions(), "device": str(get_accelerator().device_name())},
        "world_size": world.size,
        "done": done,
    }
