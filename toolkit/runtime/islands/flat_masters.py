"""A rank's part of an island's fp32 masters, as one flat tensor, and where other islands find its elements."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import deepspeed.comm as dist
import torch

from toolkit.checkpoints import element_runs
from toolkit.checkpoints.element_runs import Overlap, StridedRange
from toolkit.runtime.checkpoint.fragments import WEIGHT, Fragment, Stateful
from toolkit.runtime.distributed.mesh import Mesh
from toolkit.runtime.distributed.process_group import device

EVERYTHING = slice(None)


@dataclass(frozen=True)
class Layout:
    """Which elements of which parameters a rank's part holds, so that islands of another size find theirs in it."""

    size: int
    """Numbers of the part, with padding at its end."""
    regions: tuple[tuple[str, element_runs.Region], ...]
    """Parameter and elements, in the order of the part."""

    def to_json(self) -> list[Any]:
        """As plain JSON values."""
        runs = [[name, [[r.start, r.length, r.stride, r.count] for r in region]] for name, region in self.regions]
        return [self.size, runs]

    @classmethod
    def from_json(cls, given: Any) -> Layout:
        """Of plain JSON values; raises `ValueError` or `TypeError` if they are not a layout."""
        size, runs = given
        regions = tuple((str(name), tuple(StridedRange(*map(int, run)) for run in region)) for name, region in runs)
        found = cls(int(size), regions)
        if not 0 <= found.num_elements <= found.size or any(r.length < 1 or r.count < 1 for _, g in regions for r in g):
            raise ValueError("not a layout")
        return found

    @property
    def num_elements(self) -> int:
        """Elements without padding."""
        return sum(element_runs.size(region) for _, region in self.regions)

    def overlaps(self, theirs: Layout) -> tuple[Overlap, ...]:
        """What this part (first) and another rank's (second) share; neighbours are joined."""
        places: dict[str, list[tuple[int, element_runs.Region]]] = {}
        for begin, name, region in theirs._placed():
            places.setdefault(name, []).append((begin, region))
        found = [
            Overlap(own + one.first, begin + one.second, one.length)
            for own, name, region in self._placed()
            for begin, other in places.get(name, ())
            for one in element_runs.overlaps(region, other)
        ]
        joined: list[Overlap] = []
        for one in sorted(found, key=lambda overlap: overlap.first):
            last = joined[-1] if joined else None
            if last and (last.first + last.length, last.second + last.length) == (one.first, one.second):
                joined[-1] = Overlap(last.first, last.second, last.length + one.length)
            else:
                joined.append(one)
        return tuple(joined)

    def _placed(self) -> Iterator[tuple[int, str, element_runs.Region]]:
        """(position in the part, parameter, elements)."""
        begin = 0
        for name, region in self.regions:
            yield begin, name, region
            begin += element_runs.size(region)


class FlatMasters:
    """Under ZeRO a rank's own fragments; otherwise an equal part of the masters, which all ranks of the island hold."""

    def __init__(self, state: Stateful, mesh: Mesh) -> None:
        self._state, self._mesh = state, mesh
        self._shares = mesh.plan.zero_stage == 0 and mesh.plan.dp > 1

    def part(self, where: slice = EVERYTHING) -> torch.Tensor:
        """A copy of this rank's part in host memory, concatenated, or of a range of it."""
        whole = flat([fragment.tensor for fragment in self._weights()])
        if not self._shares:
            return whole[where].cpu()
        width = -(-whole.numel() // self._mesh.plan.dp)
        padded = torch.nn.functional.pad(whole, (0, width * self._mesh.plan.dp - whole.numel()))
        return padded[self._mesh.data * width : (self._mesh.data + 1) * width][where].cpu().clone()

    def change_since(self, origin: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """`origin` minus this rank's part, written to `out`."""
        if self._shares:
            return torch.sub(origin, self.part(), out=out)
        begin = 0
        for fragment in self._weights():
            end = begin + fragment.tensor.numel()
            own = fragment.tensor.detach().flatten().to(origin.device)
            torch.sub(origin[begin:end], own, out=out[begin:end])
            begin = end
        return out

    def write(self, part: torch.Tensor, where: slice = EVERYTHING) -> None:
        """Overwrite the masters with the parts of all ranks of the island, or a range of each. Collective over it."""
        begin, pieces = where.start or 0, [part]
        weights = self._weights()
        width = -(-sum(fragment.tensor.numel() for fragment in weights) // self._mesh.plan.dp)
        if self._shares:
            found = torch.empty(part.numel() * self._mesh.plan.dp, device=device())
            dist.all_gather_into_tensor(found, part.to(device()), group=self._mesh.data_group)
            pieces = list(found.view(self._mesh.plan.dp, -1))
        for rank, piece in enumerate(pieces):
            _overwrite(weights, piece, rank * width + begin)
        self._state.refresh()

    def layout(self) -> Layout:
        """Where the elements of `part` are in the parameters."""
        part = self.part()
        return Layout(part.numel(), tuple((one.name, one.region) for one in self.fragments(WEIGHT, part)))

    def fragments(self, kind: str, state: torch.Tensor) -> Iterator[Fragment]:
        """Views of a tensor laid out as `part`, as fragments of the parameters."""
        weights = self._weights()
        low = self._mesh.data * len(state) if self._shares else 0
        begin = 0
        for fragment in weights:
            size = fragment.tensor.numel()
            start, stop = max(low - begin, 0), min(low + len(state) - begin, size)
            if start < stop:
                tensor = state[begin + start - low : begin + stop - low]
                region = element_runs.slice_runs(fragment.region, start, stop)
                yield Fragment(name=fragment.name, kind=kind, shape=fragment.shape, region=region, tensor=tensor)
            begin += size

    def _weights(self) -> list[Fragment]:
        return [fragment for fragment in self._state.fragments() if fragment.kind == WEIGHT]


def _overwrite(weights: Sequence[Fragment], values: torch.Tensor, begin: int) -> None:
    """Write values over the elements from `begin` on, counted over all fragments; beyond the last is padding."""
    end, at = begin + values.numel(), 0
    for fragment in weights:
        size = fragment.tensor.numel()
        low, high = max(begin, at), min(end, at + size)
        if low < high:
            fragment.tensor.view(-1)[low - at : high - at].copy_(values[low - begin : high - begin])
        at += size


def flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """A copy of all tensors, concatenated."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors]) if tensors else torch.zeros(0, device=device())
