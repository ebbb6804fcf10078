"""Checkpoints of a running job: when they are due, what goes into them, and where a run goes on."""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from deepspeed.accelerator import get_accelerator
from torch.optim.optimizer import register_optimizer_step_pre_hook

from toolkit.checkpoints.format import FORMAT, canonical_json, versions
from toolkit.errors import CheckpointFailed
from toolkit.plans.deepspeed_rules import unkeepable
from toolkit.plans.plan import Plan
from toolkit.recipe.file import dump_recipe
from toolkit.recipe.sections import Recipe
from toolkit.runtime.checkpoint import writer
from toolkit.runtime.checkpoint.fragments import BUFFER, Fragment, Stateful, share
from toolkit.runtime.data.sample_order import SampleOrder
from toolkit.runtime.distributed.process_group import World


@dataclass(kw_only=True)
class Saver:
    """Writes the checkpoints of one run, all ranks together."""

    root: Path
    state: Stateful
    recipe: Recipe
    plan: Plan
    order: SampleOrder
    world: World
    group: Any = None
    """Host group for the commit; of its own, because an asynchronous save talks while the run trains."""
    last_step: int = 0
    """Newest step that is saved, or about to be."""
    stream: Callable[[int], dict[str, Any]] | None = None
    """Of streamed data: from where to read on, if a position is the next."""
    tick: Callable[[], object] = bool
    """Called while bytes go to the disk: a large save is no hang."""
    stalls: list[float] = field(default_factory=list)
    """Seconds for which each save held the training up."""

    def __post_init__(self) -> None:
        self.written_step = self.last_step
        """Newest step whose checkpoint is whole."""
        self._writing: threading.Thread | None = None
        self._failure: Exception | None = None
        self._snapshots = writer.Snapshots()
        self._copied = threading.Event()
        self._copied.set()
        if self.recipe.checkpoint.asynchronous:
            register_optimizer_step_pre_hook(lambda *_: self._hold_update())

    def save(self, step: int) -> None:
        """Save; under `asynchronous`, return at once: the next update waits until the state is copied."""
        if step == self.last_step:
            return
        if why := unkeepable(self.plan):
            raise CheckpointFailed(f"the state of step {step} is not saved: {why}")
        started = time.perf_counter()
        self.wait()
        self.state.drain()
        documents = self._documents(step)
        if self.recipe.checkpoint.asynchronous:
            found = writer.parts(share(_steady(self.state.fragments())), self.world.rank)
            self._copied.clear()
            device = get_accelerator().current_device()
            arguments = (step, found, documents, device)
            self._writing = threading.Thread(target=self._write_behind, args=arguments, daemon=True)
            self._writing.start()
        else:
            self._write(step, writer.parts(share(self.state.fragments()), self.world.rank), documents)
        self.last_step = step
        self.stalls.append(time.perf_counter() - started)

    def wait(self) -> None:
        """Until nothing is being written; a failure behind the scenes is raised here."""
        if self._writing is not None:
            self._writing.join()
            self._writing = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _hold_update(self) -> None:
        """Forward and backward passes leave masters and moments alone; an update must wait for the copy of them."""
        if not self._copied.is_set():
            started = time.perf_counter()
            self._copied.wait()
            self.stalls[-1] += time.perf_counter() - started

    def _write_behind(self, step: int, found: list[writer.FilePart], documents: dict[str, bytes], device: int) -> None:
        try:
            get_accelerator().set_device(device)  # a thread starts on the first one
            try:
                copies = self._snapshots.take(found)
            finally:
                self._copied.set()
            self._write(step, copies, documents)
        except Exception as error:  # whatever it is, it belongs to the run's own thread
            self._failure = error

    def _write(self, step: int, found: list[writer.FilePart], documents: dict[str, bytes]) -> None:
        writer.write(
            self.root,
            step,
            found,
            documents,
            rank=self.world.rank,
            keep=self.recipe.checkpoint.keep,
            group=self.group,
            tick=self.tick,
        )
        self.written_step = step

    def _documents(self, step: int) -> dict[str, bytes]:
        """The small files, the same on every rank."""
        state = {
            "format": FORMAT,
            "step": step,
            "samples": self.order.position(step),
            "data": {"samples": self.order.samples, "seed": self.order.seed},
            "optimizer": self.recipe.train.optimizer,
            "precision": self.plan.precision,
            "counters": self.state.counters(),
            "world_size": self.world.size,
            "versions": versions(),
            "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        }
        if self.stream is not None:
            state["stream"] = self.stream(self.order.position(step))
        return {
            "state.json": canonical_json(state),
            "recipe.yaml": dump_recipe(self.recipe).encode(),
            "plan.json": canonical_json(asdict(self.plan)),
        }


def _steady(fragments: Iterable[Fragment]) -> Iterator[Fragment]:
    """The same, with copies of what a forward pass changes."""
    for fragment in fragments:
        yield replace(fragment, tensor=fragment.tensor.clone()) if fragment.kind == BUFFER else fragment
