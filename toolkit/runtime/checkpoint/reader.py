"""Read a checkpoint into any engine: each rank reads the elements that it holds, whichever rank wrote them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from toolkit.checkpoints import element_runs
from toolkit.checkpoints import format as fmt
from toolkit.checkpoints.element_runs import Region
from toolkit.errors import BadInput, Problem
from toolkit.runtime.checkpoint.fragments import BUFFER, Fragment, Stateful
from toolkit.runtime.distributed import rng
from toolkit.runtime.distributed.process_group import gather_objects


def verify_together(path: Path, rank: int, size: int) -> list[Problem]:
    """All problems of a checkpoint, equal on every rank; each file is hashed by one rank. Collective."""
    try:
        names = sorted(fmt.read_manifest(path)[0])
    except BadInput:
        names = []
    found = fmt.file_problems(path, names[rank::size])
    if rank == 0:
        found = fmt.layout_problems(path) + found
        found += [] if found else fmt.content_problems(path)
    gathered = gather_objects([[problem.where, problem.what] for problem in found])
    return list(dict.fromkeys(Problem(*problem) for problems in gathered for problem in problems))


@dataclass
class Reader:
    """An open checkpoint whose files have been verified."""

    path: Path
    index: fmt.Index
    state: dict[str, Any]

    @classmethod
    def open(cls, path: Path) -> Reader:
        """Read index and state; the caller must have verified the files."""
        return cls(path, *fmt.read_contents(path))

    def __post_init__(self) -> None:
        self._files: dict[str, Any] = {}

    def read(self, name: str, kind: str, region: Region) -> torch.Tensor:
        """These elements of a parameter's state, as a flat tensor."""
        parameter = self.index[name]
        result: torch.Tensor | None = None
        filled = 0
        for piece in parameter.pieces:
            shared = list(element_runs.overlaps(region, piece.region)) if kind in piece.kinds else []
            if not shared:
                continue
            low = min(overlap.second for overlap in shared)
            high = max(overlap.second + overlap.length for overlap in shared)
            source = self._tensor(piece, kind, low, high)
            if result is None:
                result = torch.empty(element_runs.size(region), dtype=source.dtype)
            for overlap in shared:
                begin = overlap.second - low
                result[overlap.first : overlap.first + overlap.length] = source[begin : begin + overlap.length]
                filled += overlap.length
        if result is None or filled != result.numel():
            raise BadInput(str(self.path), f"{name} ({kind}) is not complete in the index")
        return result

    def full(self, name: str, kind: str) -> torch.Tensor:
        """The complete state of a parameter in its shape."""
        shape = self.index[name].shape
        numel = 1
        for n in shape:
            numel *= n
        return self.read(name, kind, element_runs.flat(0, numel)).view(shape) if numel else torch.zeros(shape)

    def generators(self, rank: int) -> dict[str, torch.Tensor]:
        """State of the random generators of a rank; empty if the saved run had no such rank."""
        name = f"rank-{rank:05d}-0.safetensors"
        if not (self.path / name).is_file():
            return {}
        file = self._open(name)
        return {key: file.get_tensor(key) for key in file.keys() if rng.is_rng(key)}  # noqa: SIM118 - not a dict

    def _tensor(self, piece: fmt.FragmentEntry, kind: str, low: int, high: int) -> torch.Tensor:
        key = fmt.tensor_key(piece.key, kind)
        try:
            stored = self._open(piece.file).get_slice(key)
            if stored.get_shape() != [element_runs.size(piece.region)]:
                raise BadInput(f"{self.path}/{piece.file}", f"{key} has another size than its index entry")
            return stored[low:high]  # type: ignore[no-any-return]
        except SafetensorError as error:
            raise BadInput(f"{self.path}/{piece.file}", f"{key} can't be read: {error}") from None

    def _open(self, file: str) -> Any:
        if file not in self._files:
            try:
                self._files[file] = safe_open(str(self.path / file), framework="pt")
            except (SafetensorError, OSError) as error:
                raise BadInput(f"{self.path}/{file}", f"is not a safetensors file: {error}") from None
        return self._files[file]


def load(reader: Reader, engine: Stateful, rank: int) -> None:
    """Load the checkpoint into an engine: weights, optimizer states, counters, random generators. Collective."""
    wanted = {fragment.name: fragment.shape for fragment in engine.fragments()}
    _check_same_model(reader, gather_objects(wanted))
    kinds = {name: parameter.kinds() for name, parameter in reader.index.items()}
    counters = reader.state["counters"]
    engine.prepare(kinds, int(counters["optimizer_steps"]))
    for fragment in engine.fragments():
        if fragment.kind in kinds[fragment.name]:
            _fill(fragment, reader.read(fragment.name, fragment.kind, fragment.region))
    engine.refresh()
    engine.set_counters(counters)
    generators = reader.generators(rank)
    if generators:
        rng.restore(generators)


@torch.no_grad()
def _fill(fragment: Fragment, value: torch.Tensor) -> None:
    if value.dtype != fragment.tensor.dtype:
        raise BadInput(
            fragment.name, f"{fragment.kind} is {value.dtype} in the checkpoint, {fragment.tensor.dtype} here"
        )
    fragment.tensor.copy_(value)


def _check_same_model(reader: Reader, by_rank: list[dict[str, Sequence[int]]]) -> None:
    """`BadInput` unless names and shapes over all ranks equal those of the checkpoint."""
    wanted: Mapping[str, Sequence[int]] = {name: shape for ranks in by_rank for name, shape in ranks.items()}
    problems = list(_differences(reader.index, wanted))
    if problems:
        shown = problems[:5] + ([Problem("...", f"{len(problems) - 5} more")] if len(problems) > 5 else [])
        raise BadInput(f"{reader.path} holds another model than the recipe's", shown)


def _differences(index: fmt.Index, wanted: Mapping[str, Sequence[int]]) -> Iterator[Problem]:
    for name, parameter in index.items():
        if name not in wanted:
            if parameter.kinds() != {BUFFER}:
                yield Problem(name, "is in the checkpoint, but not among the trained parameters of the recipe's model")
        elif tuple(wanted[name]) != parameter.shape:
            yield Problem(
                name, f"has shape {list(parameter.shape)} in the checkpoint, {list(wanted[name])} in the model"
            )
    for name in wanted.keys() - index.keys():
        yield Problem(name, "is trained by the recipe, but not in the checkpoint")
