"""Checkpoints of a running job: when they are due, what goes into them, and where a run goes on."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from toolkit import checkpoint_store as store
from toolkit.checkpoint_format import FORMAT, MANIFEST, canonical_json, step_of
from toolkit.errors import BadInput, Problem
from toolkit.plan import Plan
from toolkit.recipe import Checkpoint, Recipe
from toolkit.recipe_file import dump_recipe
from toolkit.runtime import checkpoint_reader, checkpoint_writer
from toolkit.runtime.checkpoint_reader import Reader
from toolkit.runtime.data import Order
from toolkit.runtime.distributed import World, broadcast_object
from toolkit.runtime.fragments import Stateful, share

PACKAGES = ("torch", "deepspeed", "transformers", "safetensors", "numpy", "peft")
Say = Callable[[str], object]


@dataclass(kw_only=True)
class Saver:
    """Writes the checkpoints of one run, all ranks together."""

    root: Path
    state: Stateful
    recipe: Recipe
    plan: Plan
    order: Order
    world: World
    group: Any = None
    """Host group for the commit; of its own, because an asynchronous save talks while the run trains."""
    last_step: int = 0
    """Newest step that is saved."""
    tick: Callable[[], object] = bool
    """Called while bytes go to the disk: a large save is no hang."""
    stalls: list[float] = field(default_factory=list)
    """Seconds for which each save held the training up."""

    def __post_init__(self) -> None:
        self._writing: threading.Thread | None = None
        self._failure: Exception | None = None
        self._snapshots = checkpoint_writer.Snapshots()

    def save(self, step: int) -> None:
        """Save; under `asynchronous`, return as soon as the state is copied."""
        if step == self.last_step:
            return
        started = time.perf_counter()
        self.wait()
        found = checkpoint_writer.parts(share(self.state.fragments()), self.world.rank)
        documents = self._documents(step)
        if self.recipe.checkpoint.asynchronous:
            found = self._snapshots.take(found)
            self._writing = threading.Thread(target=self._write_behind, args=(step, found, documents), daemon=True)
            self._writing.start()
        else:
            self._write(step, found, documents)
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

    def _write_behind(self, step: int, found: list[checkpoint_writer.Part], documents: dict[str, bytes]) -> None:
        try:
            self._write(step, found, documents)
        except Exception as error:  # whatever it is, it belongs to the run's own thread
            self._failure = error

    def _write(self, step: int, found: list[checkpoint_writer.Part], documents: dict[str, bytes]) -> None:
        checkpoint_writer.write(
            self.root,
            step,
            found,
            documents,
            rank=self.world.rank,
            keep=self.recipe.checkpoint.keep,
            group=self.group,
            tick=self.tick,
        )

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
        return {
            "state.json": canonical_json(state),
            "recipe.yaml": dump_recipe(self.recipe).encode(),
            "plan.json": canonical_json(asdict(self.plan)),
        }


def find(section: Checkpoint, own: Path, world: World, say: Say) -> Reader | None:
    """The checkpoint to go on from, verified on all ranks; None: start anew."""
    if section.resume == "none":
        return None
    reader = _newest_whole(own, world, say, set_aside=True)
    if reader is not None or section.resume == "auto":
        return reader
    given = Path(section.resume)
    if broadcast_object(_is_checkpoint(given)):
        faults = checkpoint_reader.verify_together(given, world.rank, world.size)
        if faults:
            raise BadInput(f"{given} is damaged", faults)
        return _opened(given, say)
    roots = [root for root in (given / "checkpoints", given) if root.is_dir()]
    reader = _newest_whole(roots[0], world, say, set_aside=False) if roots else None
    if reader is None:
        raise BadInput("checkpoint.resume", f"{given} holds no checkpoint; give auto, none, a checkpoint or a run")
    return reader


def _newest_whole(root: Path, world: World, say: Say, *, set_aside: bool) -> Reader | None:
    """Newest first; what is damaged is named, and the one before it is tried."""
    damaged: list[Problem] = []
    for step in broadcast_object(store.steps(root)):
        path = store.path_of(root, step)
        faults = checkpoint_reader.verify_together(path, world.rank, world.size)
        if not faults:
            return _opened(path, say)
        damaged.extend(Problem(f"{path.name}/{fault.where}", fault.what) for fault in faults)
        say(f"checkpoint {path} is damaged and not used: {faults[0]}")
        if set_aside and world.rank == 0:
            aside = store.set_aside(path)
            say(f"it is kept as {aside}")
    if damaged:
        fix = Problem("checkpoint.resume", "set it to `none` in a new run directory to start again")
        raise BadInput(f"{root}: no checkpoint is whole", [*damaged, fix])
    return None


def _opened(path: Path, say: Say) -> Reader:
    reader = Reader.open(path)
    say(f"going on from {path} (step {reader.state['step']}), every byte verified")
    return reader


def _is_checkpoint(path: Path) -> bool:
    return (path / MANIFEST).is_file() or step_of(path.name) is not None


def resume(reader: Reader, state: Stateful, order: Order, recipe: Recipe, world: World) -> tuple[int, Order]:
    """Load; the steps that are done, and the order that goes on at the next sample."""
    saved = reader.state
    problems = []
    if saved["optimizer"] != recipe.train.optimizer:
        what = f"{recipe.train.optimizer} given; the checkpoint holds the states of {saved['optimizer']}"
        problems.append(Problem("train.optimizer", what))
    if saved["data"] != {"samples": order.samples, "seed": order.seed}:
        what = (
            f"{order.samples} samples with seed {order.seed}; the checkpoint was made on {saved['data']['samples']} "
            f"with seed {saved['data']['seed']}, so the next sample is not defined; restore data and train.seed"
        )
        problems.append(Problem("data", what))
    if problems:
        raise BadInput(str(reader.path), problems)
    checkpoint_reader.load(reader, state, world.rank)
    step = int(saved["step"])
    return step, order.moved(step, int(saved["samples"]))


def versions() -> dict[str, str]:
    """What a checkpoint was written with."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
