"""Builds the sinks of a run: built-in ones, and classes that the user brings."""

from __future__ import annotations

import importlib
import queue
import re
import statistics
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from importlib.metadata import entry_points
from typing import IO, Any

from deepspeed.accelerator import get_accelerator

from toolkit.checkpoints.format import versions
from toolkit.errors import BadInput
from toolkit.launching.environment import environment
from toolkit.recipe.metrics_sections import Metrics
from toolkit.recipe.schema import nearest
from toolkit.run_dir.layout import RunDir, RunSpec
from toolkit.runtime.distributed.process_group import World
from toolkit.runtime.metrics.record import Record, Sink
from toolkit.runtime.sinks.console import ConsoleSink
from toolkit.runtime.sinks.local_files import EventSink, JsonlSink, TensorboardSink
from toolkit.runtime.sinks.wandb_sink import WandbSink
from toolkit.secrets import secrets_in

Say = Callable[[str], object]


def make_sinks(order: RunSpec, run: RunDir, console: IO[str], steps: int, own: list[Any]) -> list[Sink]:
    """The sinks of rank 0; `own` are classes that the user brings."""
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
    """The user's sink classes, loaded on every rank so that all ranks fail alike if one is missing."""
    trace = metrics.trace
    if trace is not None and max(trace.ranks) >= world.size:
        what = f"{list(trace.ranks)} given; the run has ranks 0 to {world.size - 1}"
        raise BadInput("metrics.trace.ranks", what)
    return [load_sink(name) for name in metrics.sinks]


def sink_info(order: RunSpec, run: RunDir, world: World, done: int) -> dict[str, Any]:
    """What sinks receive at the start."""
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


GROUP = "toolkit.sinks"
PATH_RULE = "the current directory is not searched"
_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_METHODS = ("start", "log", "finish")


def load_sink(name: str) -> Any:
    """The class of a name; `BadInput` if there is none, or if it lacks a method."""
    found = _by_path(name) if ":" in name else _by_entry_point(name)
    missing = [method for method in _METHODS if not callable(getattr(found, method, None))]
    if missing:
        raise BadInput("metrics.sinks", f"{name} is not a sink: it has no {', '.join(missing)}; see docs/metrics.md")
    return found


def _by_path(name: str) -> Any:
    if not _PATH.fullmatch(name):
        raise BadInput("metrics.sinks", f"{name!r} given; module:Class is required")
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except ImportError as error:
        raise BadInput(
            "metrics.sinks", f"{name}: {error}; add the module's folder to PYTHONPATH: {PATH_RULE}"
        ) from None
    except AttributeError:
        raise BadInput("metrics.sinks", f"{name}: {module} has no {attribute}") from None


def _by_entry_point(name: str) -> Any:
    points = {point.name: point for point in entry_points(group=GROUP)}
    if name not in points:
        what = f"{name!r} is neither module:Class nor an entry point of {GROUP}{nearest(name, list(points))}"
        raise BadInput("metrics.sinks", what)
    return points[name].load()


WAITING_CALLS = 1024
"""Calls of a sink that may wait for its thread; a sink that is further behind holds up training."""


class GuardedSink:
    """Runs a sink in a thread of its own, in order: a slow network holds up no step.

    A failing sink does not end the run: the first error is reported, then the sink is disabled.
    """

    def __init__(self, name: str, sink: Any, say: Callable[[str], object]) -> None:
        self._name, self._sink, self._say = name, sink, say
        self._failed = False
        # Optional in a user's sink.
        self._evaluated = getattr(sink, "evaluated", lambda record: None)
        self._rewind = getattr(sink, "rewind", lambda step: None)
        self._calls: queue.Queue[Callable[[], object] | None] = queue.Queue(WAITING_CALLS)
        self._thread = threading.Thread(target=self._work, name=f"sink {name}", daemon=True)

    def start(self, info: Mapping[str, Any]) -> None:
        self._try(partial(self._sink.start, info))
        self._thread.start()

    def log(self, record: Record) -> None:
        self._calls.put(partial(self._sink.log, record))

    def evaluated(self, record: Mapping[str, Any]) -> None:
        self._calls.put(partial(self._evaluated, record))

    def rewind(self, step: int) -> None:
        self._calls.put(partial(self._rewind, step))

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Let the thread end first: everything before is written."""
        if self._thread.is_alive():
            self._calls.put(None)
            self._thread.join()
        self._try(partial(self._sink.finish, summary))

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            self._try(call)

    def _try(self, call: Callable[[], object]) -> None:
        if self._failed:
            return
        try:
            call()
        except Exception as error:  # whatever a user's code or a network raises
            self._failed = True
            what = f"{type(error).__name__}: {error}"
            self._say(f"{self._name} failed and is disabled; the run continues, metrics.jsonl is complete ({what})")


@dataclass
class Recorder:
    """The sinks of a run; empty on every rank but 0."""

    sinks: list[Sink]
    step_seconds: list[float] = field(default_factory=list)
    tokens_by_step: dict[int, int] = field(default_factory=dict)
    first_loss: float | None = None
    last: Record | None = None

    @property
    def tokens(self) -> int:
        """Counted tokens of all steps."""
        return sum(self.tokens_by_step.values())

    def start(self, info: Mapping[str, Any]) -> None:
        """Training begins."""
        for sink in self.sinks:
            sink.start(info)

    def log(self, record: Record) -> None:
        """One step."""
        self.step_seconds.append(record.step_seconds)
        self.tokens_by_step[record.step] = record.tokens
        self.last = record
        self.first_loss = record.loss if self.first_loss is None else self.first_loss
        for sink in self.sinks:
            sink.log(record)

    def evaluated(self, record: Mapping[str, Any]) -> None:
        """One evaluation."""
        for sink in self.sinks:
            sink.evaluated(record)

    def rewind(self, step: int) -> None:
        """Forget what was recorded after a step: the run has returned to it."""
        self.tokens_by_step = {at: tokens for at, tokens in self.tokens_by_step.items() if at <= step}
        for sink in self.sinks:
            sink.rewind(step)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """The run has ended, well or badly."""
        for sink in self.sinks:
            sink.finish(summary)

    def resume_at(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Count what was recorded before the run was resumed."""
        self.tokens_by_step = {record["step"]: record["tokens"] for record in records}
        if records:
            self.first_loss = records[0]["loss"]
            known = {f.name for f in fields(Record)}
            self.last = Record(**{name: value for name, value in records[-1].items() if name in known})

    def typical_step_seconds(self) -> float:
        """Median without the first steps, in which caches fill and one is measured for memory."""
        settled = self.step_seconds[3:] or self.step_seconds
        return statistics.median(settled) if settled else 0.0
