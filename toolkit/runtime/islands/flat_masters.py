"""A rank's part of an island's fp32 masters, as one flat tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import deepspeed.comm as dist
import torch

from toolkit.checkpoints import element_runs
from toolkit.runtime.checkpoint.fragments import WEIGHT, Fragment, Stateful
from toolkit.runtime.distributed.mesh import Mesh
from toolkit.runtime.distributed.process_group import device

EVERYTHING = slice(None)


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
