"""Writing a checkpoint: every rank its own fragments, then one commit. A crash at any instant loses nothing older."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from toolkit.checkpoints import element_runs, store
from toolkit.checkpoints.format import (
    INDEX,
    STATE,
    FileEntry,
    FragmentEntry,
    Parameter,
    canonical_json,
    dump_index,
    sha256,
    tensor_key,
)
from toolkit.errors import BadInput, CheckpointFailed
from toolkit.runtime.checkpoint import safetensors_writer
from toolkit.runtime.checkpoint.fragments import Fragment
from toolkit.runtime.distributed import rng
from toolkit.runtime.distributed.process_group import broadcast_object, gather_objects

SHARD_BYTES = 10**9
"""Files above this size are split."""
WRITERS = 4
"""Files that a rank writes at a time."""
SPARE_BYTES = 1 << 20
"""Beside the tensors: index, state, manifest."""


@dataclass(frozen=True)
class FilePart:
    """One file of this rank."""

    name: str
    tensors: dict[str, torch.Tensor]
    pieces: list[tuple[str, tuple[int, ...], FragmentEntry]]
    """(parameter, its shape, what the file holds of it)."""


def parts(fragments: list[Fragment], rank: int) -> list[FilePart]:
    """The files of this rank: kinds of one piece side by side, the generators in the first file."""
    grouped: dict[tuple[str, element_runs.Region], list[Fragment]] = {}
    for fragment in fragments:
        grouped.setdefault((fragment.name, fragment.region), []).append(fragment)
    found = [FilePart(_file_name(rank, 0), dict(rng.capture()), [])]
    filled = 0
    for number, ((name, region), kinds) in enumerate(grouped.items()):
        size = sum(fragment.tensor.nbytes for fragment in kinds)
        if filled and filled + size > SHARD_BYTES:
            found.append(FilePart(_file_name(rank, len(found)), {}, []))
            filled = 0
        filled += size
        part, key = found[-1], f"{number}:{name}"
        part.tensors.update({tensor_key(key, fragment.kind): fragment.tensor for fragment in kinds})
        piece = FragmentEntry(file=part.name, key=key, kinds=tuple(f.kind for f in kinds), region=region)
        part.pieces.append((name, kinds[0].shape, piece))
    return found


class Snapshots:
    """Copies of the state that later steps do not change, in memory that is used again by the next save."""

    def __init__(self) -> None:
        self._memory: dict[str, torch.Tensor] = {}

    def take(self, found: list[FilePart]) -> list[FilePart]:
        """The same parts with copied tensors."""
        return [
            FilePart(part.name, {key: self._copy(part.name + key, t) for key, t in part.tensors.items()}, part.pieces)
            for part in found
        ]

    def _copy(self, key: str, tensor: torch.Tensor) -> torch.Tensor:
        memory = self._memory.get(key)
        if memory is None or memory.shape != tensor.shape or memory.dtype != tensor.dtype:
            # Pinned where there is a device: copies from it are several times faster.
            memory = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
            self._memory[key] = memory
        return memory.copy_(tensor.detach())


def write(
    root: Path,
    step: int,
    found: list[FilePart],
    documents: Mapping[str, bytes],
    *,
    rank: int,
    keep: int,
    group: Any = None,
    tick: Callable[[], object] = bool,
) -> Path:
    """Write and commit, all ranks together; `CheckpointFailed` on every rank if one of them could not."""
    need = sum(tensor.nbytes for part in found for tensor in part.tensors.values())
    writing = _begin(root, step, sum(gather_objects(need, group)) + SPARE_BYTES, rank, group)
    outcome = _write_parts(writing, found, tick)
    outcomes = gather_objects(outcome, group)
    final = _commit(writing, step, outcomes, documents, keep) if rank == 0 else None
    final = broadcast_object(final, group)
    if isinstance(final, Path):
        return final
    raise CheckpointFailed(f"the checkpoint of step {step} was not written: {final}\nearlier checkpoints are untouched")


def _begin(root: Path, step: int, need: int, rank: int, group: Any) -> Path:
    outcome: Path | str = ""
    if rank == 0:
        try:
            outcome = store.begin(root, step, need)
        except (BadInput, OSError) as error:
            outcome = str(error)
    outcome = broadcast_object(outcome, group)
    if isinstance(outcome, Path):
        return outcome
    raise CheckpointFailed(f"the checkpoint of step {step} was not written: {outcome}")


Outcome = tuple[dict[str, FileEntry], list[tuple[str, tuple[int, ...], FragmentEntry]], str]
"""Files written, what they hold, and the error if there was one."""


def _write_parts(writing: Path, found: list[FilePart], tick: Callable[[], object]) -> Outcome:
    """Some files at a time: hashing keeps a core busy for each, and fast disks take several streams."""

    def write_one(part: FilePart) -> FileEntry | str:
        try:
            return safetensors_writer.write(writing / part.name, part.tensors, tick=tick)
        except OSError as error:
            return f"{writing / part.name}: {error.strerror}"

    with ThreadPoolExecutor(WRITERS) as pool:
        results = list(pool.map(write_one, found))
    errors = [result for result in results if isinstance(result, str)]
    if errors:
        return {}, [], errors[0]
    files = {part.name: entry for part, entry in zip(found, results, strict=True) if isinstance(entry, FileEntry)}
    return files, [piece for part in found for piece in part.pieces], ""


def _commit(writing: Path, step: int, outcomes: list[Outcome], documents: Mapping[str, bytes], keep: int) -> Path | str:
    """Rank 0, after all have written: index, manifest, rename, `latest`, and only then prune."""
    try:
        for number, (_, _, error) in enumerate(outcomes):
            if error:
                raise BadInput(f"rank {number}", error)
        files = {name: entry for entries, _, _ in outcomes for name, entry in entries.items()}
        for name, data in {**documents, INDEX: dump_index(merge(outcomes))}.items():
            store.write_synced(writing / name, data)
            files[name] = FileEntry(len(data), sha256(writing / name))
        final = store.commit(writing, files, step)
        store.prune(writing.parent, keep)
    except (BadInput, OSError) as error:
        shutil.rmtree(writing, ignore_errors=True)
        return str(error)
    return final


def merge(outcomes: list[Outcome]) -> dict[str, Parameter]:
    """One index from every rank's pieces."""
    shapes: dict[str, tuple[int, ...]] = {}
    pieces: dict[str, list[FragmentEntry]] = {}
    for _, found, _ in outcomes:
        for name, shape, piece in found:
            assert shapes.setdefault(name, shape) == shape, f"ranks disagree on the shape of {name}"
            pieces.setdefault(name, []).append(piece)
    return {name: Parameter(shape=shapes[name], pieces=tuple(pieces[name])) for name in pieces}


def state_document(values: Mapping[str, Any]) -> dict[str, bytes]:
    """state.json."""
    return {STATE: canonical_json(dict(values))}


def _file_name(rank: int, number: int) -> str:
    return f"rank-{rank:05d}-{number}.safetensors"
