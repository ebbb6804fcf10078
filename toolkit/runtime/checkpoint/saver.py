"""Saving checkpoints of a running job: what goes into one, how all ranks write and commit it, in the background or not.

Every rank writes its own fragments; then rank 0 commits. A crash at any moment leaves the older checkpoints intact.
"""

from __future__ import annotations

import contextlib
import datetime
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch.optim.optimizer import register_optimizer_step_pre_hook

from toolkit.checkpoints import element_runs, store
from toolkit.checkpoints.format import (
    FORMAT,
    INDEX,
    FileEntry,
    FragmentEntry,
    Parameter,
    canonical_json,
    dump_index,
    sha256,
    tensor_key,
    versions,
)
from toolkit.errors import BadInput, CheckpointFailed
from toolkit.plans.plan import Plan, unkeepable
from toolkit.recipe.file import dump_recipe
from toolkit.recipe.sections import Recipe
from toolkit.runtime.checkpoint import safetensors_writer
from toolkit.runtime.checkpoint.fragments import BUFFER, Fragment, Stateful, share
from toolkit.runtime.data.sample_order import SampleOrder
from toolkit.runtime.distributed import rng
from toolkit.runtime.distributed.process_group import World, broadcast_object, gather_objects

SHARD_BYTES = 10**9
"""Files above this size are split."""
WRITERS = 4
"""Files that a rank writes at a time."""
SPARE_BYTES = 1 << 20
"""Space reserved beside the tensors, for index, state and manifest."""


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
    """Gloo group for the commit. It has no other user, because an asynchronous save communicates during training."""
    last_step: int = 0
    """Newest step that is saved or being saved."""
    stream: Callable[[int], dict[str, Any]] | None = None
    """For streamed data: where to continue reading if the given position comes next."""
    tick: Callable[[], object] = bool
    """Called while bytes go to the disk, so that a large save is not taken for a hang."""
    stalls: list[float] = field(default_factory=list)
    """Seconds for which each save blocked training."""

    def __post_init__(self) -> None:
        self.written_step = self.last_step
        """Newest step whose checkpoint is complete."""
        self._writing: threading.Thread | None = None
        self._failure: Exception | None = None
        self._snapshots = Snapshots()
        self._copied = threading.Event()
        self._copied.set()
        if self.recipe.checkpoint.asynchronous:
            register_optimizer_step_pre_hook(lambda *_: self._wait_for_copy())

    def save(self, step: int) -> None:
        """Save; with `asynchronous`, return at once: the next update waits until the state is copied."""
        if step == self.last_step:
            return
        if why := unkeepable(self.plan):
            raise CheckpointFailed(f"the state of step {step} is not saved: {why}")
        started = time.perf_counter()
        self.wait()
        self.state.drain()
        documents = self._documents(step)
        if self.recipe.checkpoint.asynchronous:
            files = rank_files(share(_with_copied_buffers(self.state.fragments())), self.world.rank)
            self._copied.clear()
            arguments = (step, files, documents, _reached())
            self._writing = threading.Thread(target=self._write_in_background, args=arguments, daemon=True)
            self._writing.start()
        else:
            self._write(step, rank_files(share(self.state.fragments()), self.world.rank), documents)
        self.last_step = step
        self.stalls.append(time.perf_counter() - started)

    def wait(self) -> None:
        """Wait until nothing is being written; an error of the background thread is raised here."""
        if self._writing is not None:
            self._writing.join()
            self._writing = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _wait_for_copy(self) -> None:
        """Before an update: forward and backward passes do not change masters and moments, an update does."""
        if not self._copied.is_set():
            started = time.perf_counter()
            self._copied.wait()
            self.stalls[-1] += time.perf_counter() - started

    def _write_in_background(
        self, step: int, files: list[RankFile], documents: dict[str, bytes], reached: Reached
    ) -> None:
        try:
            try:
                with copying_after(reached):
                    copies = self._snapshots.copy(files)
            finally:
                self._copied.set()
            self._write(step, copies, documents)
        except Exception as error:  # any error is raised in the main thread, by `wait`
            self._failure = error

    def _write(self, step: int, files: list[RankFile], documents: dict[str, bytes]) -> None:
        keep = self.recipe.checkpoint.keep
        writer = Writer(root=self.root, rank=self.world.rank, keep=keep, group=self.group, tick=self.tick)
        writer.write(step, files, documents)
        self.written_step = step

    def _documents(self, step: int) -> dict[str, bytes]:
        """The small files, equal on every rank."""
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
            "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        }
        if self.stream is not None:
            state["stream"] = self.stream(self.order.position(step))
        return {
            "state.json": canonical_json(state),
            "recipe.yaml": dump_recipe(self.recipe).encode(),
            "plan.json": canonical_json(asdict(self.plan)),
        }


def _with_copied_buffers(fragments: Iterable[Fragment]) -> Iterator[Fragment]:
    """Fragments with copies of buffers: a forward pass changes those before the background thread has copied them."""
    for fragment in fragments:
        yield replace(fragment, tensor=fragment.tensor.clone()) if fragment.kind == BUFFER else fragment


Piece = tuple[str, tuple[int, ...], FragmentEntry]
"""(parameter, its shape, what a file holds of it)."""


@dataclass(frozen=True)
class RankFile:
    """One safetensors file of this rank."""

    name: str
    tensors: dict[str, torch.Tensor]
    pieces: list[Piece]


def rank_files(fragments: list[Fragment], rank: int) -> list[RankFile]:
    """The files of this rank: all kinds of a piece in one file, the random generators in the first."""
    grouped: dict[tuple[str, element_runs.Region], list[Fragment]] = {}
    for fragment in fragments:
        grouped.setdefault((fragment.name, fragment.region), []).append(fragment)
    files = [RankFile(_file_name(rank, 0), dict(rng.capture()), [])]
    filled = 0
    for number, ((name, region), kinds) in enumerate(grouped.items()):
        size = sum(fragment.tensor.nbytes for fragment in kinds)
        if filled and filled + size > SHARD_BYTES:
            files.append(RankFile(_file_name(rank, len(files)), {}, []))
            filled = 0
        filled += size
        file, key = files[-1], f"{number}:{name}"
        file.tensors.update({tensor_key(key, fragment.kind): fragment.tensor for fragment in kinds})
        entry = FragmentEntry(file=file.name, key=key, kinds=tuple(f.kind for f in kinds), region=region)
        file.pieces.append((name, kinds[0].shape, entry))
    return files


def _file_name(rank: int, number: int) -> str:
    return f"rank-{rank:05d}-{number}.safetensors"


@dataclass(frozen=True)
class Reached:
    """How far the computation has come when a save begins."""

    device: int
    event: Any
    """Of the compute stream; None where the host is the device."""


def _reached() -> Reached:
    accelerator = get_accelerator()
    if accelerator.is_synchronized_device():
        return Reached(accelerator.current_device(), None)
    event = accelerator.Event()
    event.record()
    return Reached(accelerator.current_device(), event)


@contextlib.contextmanager
def copying_after(reached: Reached) -> Iterator[None]:
    """Copies inside this context, in any thread, run on a stream of their own, beside steps that are started later.

    They wait for what was started before the save, and are done when the context ends.
    """
    accelerator = get_accelerator()
    accelerator.set_device(reached.device)  # a new thread starts on device 0
    if reached.event is None:
        yield
        return
    stream = accelerator.Stream()
    stream.wait_event(reached.event)
    with accelerator.stream(stream):
        yield
    stream.synchronize()


class Snapshots:
    """Copies of the state in host memory, which the next save uses again."""

    def __init__(self) -> None:
        self._memory: dict[str, torch.Tensor] = {}

    def copy(self, files: list[RankFile]) -> list[RankFile]:
        """These files with copied tensors, which later steps do not change."""
        return [
            RankFile(file.name, {key: self._copy(file.name + key, t) for key, t in file.tensors.items()}, file.pieces)
            for file in files
        ]

    def _copy(self, key: str, tensor: torch.Tensor) -> torch.Tensor:
        memory = self._memory.get(key)
        if memory is None or memory.shape != tensor.shape or memory.dtype != tensor.dtype:
            # Pinned if the tensor is on a GPU: the copy is then several times faster.
            memory = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
            self._memory[key] = memory
        return memory.copy_(tensor.detach(), non_blocking=True)  # `copying_after` waits for all copies together


Outcome = tuple[dict[str, FileEntry], list[Piece], str]
"""Files written, what they hold, and the error message if there was one."""


@dataclass(frozen=True, kw_only=True)
class Writer:
    """Writes files of all ranks into a checkpoint and commits it. Collective."""

    root: Path
    rank: int
    keep: int
    """Newest checkpoints that are kept."""
    group: Any = None
    tick: Callable[[], object] = bool

    def write(self, step: int, files: list[RankFile], documents: Mapping[str, bytes]) -> Path:
        """Write and commit; `CheckpointFailed` on every rank if one of them could not write."""
        need = sum(tensor.nbytes for file in files for tensor in file.tensors.values())
        writing = self._begin(step, sum(gather_objects(need, self.group)) + SPARE_BYTES)
        outcomes = gather_objects(_outcome_to_json(self._write_files(writing, files)), self.group)
        final: Path | str = ""
        if self.rank == 0:
            final = _commit(writing, step, [_outcome_from_json(each) for each in outcomes], documents, self.keep)
        path, error = self._told(final)
        if path is not None:
            return path
        raise CheckpointFailed(
            f"the checkpoint of step {step} was not written: {error}\nearlier checkpoints are untouched"
        )

    def _begin(self, step: int, need: int) -> Path:
        outcome: Path | str = ""
        if self.rank == 0:
            try:
                outcome = store.begin(self.root, step, need)
            except (BadInput, OSError) as error:
                outcome = str(error)
        path, why = self._told(outcome)
        if path is not None:
            return path
        raise CheckpointFailed(f"the checkpoint of step {step} was not written: {why}")

    def _told(self, outcome: Path | str) -> tuple[Path | None, str]:
        """Rank 0's outcome on every rank: a path, or an error message. Collective."""
        is_path, text = broadcast_object([isinstance(outcome, Path), str(outcome)], self.group)
        return (Path(text), "") if is_path else (None, text)

    def _write_files(self, writing: Path, files: list[RankFile]) -> Outcome:
        """Several files at a time: hashing one file occupies one core, and fast disks accept several streams."""

        def write_one(file: RankFile) -> FileEntry | str:
            try:
                return safetensors_writer.write(writing / file.name, file.tensors, tick=self.tick)
            except OSError as error:
                return f"{writing / file.name}: {error.strerror}"

        with ThreadPoolExecutor(WRITERS) as pool:
            results = list(pool.map(write_one, files))
        errors = [result for result in results if isinstance(result, str)]
        if errors:
            return {}, [], errors[0]
        entries = {file.name: entry for file, entry in zip(files, results, strict=True) if isinstance(entry, FileEntry)}
        return entries, [piece for file in files for piece in file.pieces], ""


def _outcome_to_json(outcome: Outcome) -> list[Any]:
    entries, pieces, error = outcome
    return [
        {name: [entry.bytes, entry.sha256] for name, entry in entries.items()},
        [[name, shape, e.file, e.key, e.kinds, element_runs.to_json(e.region)] for name, shape, e in pieces],
        error,
    ]


def _outcome_from_json(given: list[Any]) -> Outcome:
    entries, pieces, error = given
    return (
        {name: FileEntry(*entry) for name, entry in entries.items()},
        [
            (
                name,
                tuple(shape),
                FragmentEntry(file=file, key=key, kinds=tuple(kinds), region=element_runs.from_json(runs)),
            )
            for name, shape, file, key, kinds, runs in pieces
        ],
        error,
    )


def _commit(writing: Path, step: int, outcomes: list[Outcome], documents: Mapping[str, bytes], keep: int) -> Path | str:
    """On rank 0, after all ranks have written: index, manifest, rename, `latest`, and only then prune."""
    try:
        for number, (_, _, error) in enumerate(outcomes):
            if error:
                raise BadInput(f"rank {number}", error)
        files = {name: entry for entries, _, _ in outcomes for name, entry in entries.items()}
        for name, data in {**documents, INDEX: dump_index(_merge(outcomes))}.items():
            store.write_synced(writing / name, data)
            files[name] = FileEntry(len(data), sha256(writing / name))
        final = store.commit(writing, files, step)
        store.prune(writing.parent, keep)
    except (BadInput, OSError) as error:
        shutil.rmtree(writing, ignore_errors=True)
        return str(error)
    return final


def _merge(outcomes: list[Outcome]) -> dict[str, Parameter]:
    """One index from the pieces of all ranks."""
    shapes: dict[str, tuple[int, ...]] = {}
    entries: dict[str, list[FragmentEntry]] = {}
    for _, pieces, _ in outcomes:
        for name, shape, entry in pieces:
            assert shapes.setdefault(name, shape) == shape, f"ranks disagree on the shape of {name}"
            entries.setdefault(name, []).append(entry)
    return {name: Parameter(shape=shapes[name], pieces=tuple(entries[name])) for name in entries}
