"""Which ranks hold which elements of a parameter: ZeRO's partitions of tensor shards, as they follow from the plan."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from toolkit.checkpoints import element_runs
from toolkit.checkpoints.element_runs import Region
from toolkit.runtime.distributed.mesh import Mesh
from toolkit.runtime.models.parameter_shards import Layout, full_shape, holds_experts, layout_of

ALIGNMENT = 2
"""DeepSpeed 0.19.8 pads flat groups to a multiple of this times the ranks (`nccl_start_alignment_factor`)."""


@dataclass(frozen=True)
class Group:
    """The ranks that together hold complete matrices: replicas of a stage if states are sharded, times tensor ranks."""

    rank: int
    data_parts: int
    tensor_parts: int
    process_group: Any

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.data_parts * self.tensor_parts

    @classmethod
    def of(cls, mesh: Mesh) -> Group:
        """The group of this rank. Collective."""
        parts, tensors = mesh.token_ranks if mesh.plan.zero_stage else 1, mesh.plan.tp
        data = mesh.data * mesh.plan.token_parts + mesh.sequence if parts > 1 else 0
        if parts == 1 or tensors == 1:
            group = mesh.inner_group if parts == 1 else mesh.data_group
        else:
            group = mesh.stage_group()
        return cls(data * tensors + mesh.tensor, parts, tensors, group)


class Partition:
    """How the parameters in one of the optimizer's tensors are distributed over the ranks of a group."""

    def __init__(self, parameters: Sequence[torch.Tensor], group: Group, zero_stage: int) -> None:
        self._parameters, self._group, self._stage = parameters, group, zero_stage
        self._sizes = {tensor: self._sizes_of(tensor) for tensor in range(group.tensor_parts)}
        self._before = {tensor: [0, *itertools.accumulate(sizes)] for tensor, sizes in self._sizes.items()}

    def _sizes_of(self, tensor: int) -> list[int]:
        return [element_runs.size(_region(parameter, tensor)) for parameter in self._parameters]

    def regions(self, number: int) -> Iterator[tuple[int, Region]]:
        """(rank, elements of the full parameter) for every rank that holds some of parameter `number`.

        Of what tensor ranks hold alike: only for those in this rank's column.
        """
        parameter, tensors = self._parameters[number], self._group.tensor_parts
        for tensor in range(tensors) if tensor_layout(parameter) else [self._group.rank % tensors]:
            region = _region(parameter, tensor)
            for part, low, high in self._parts(number, tensor):
                if low < high:
                    yield part * tensors + tensor, element_runs.slice_runs(region, low, high)

    def _parts(self, number: int, tensor: int) -> Iterator[tuple[int, int, int]]:
        """(part, first element and last + 1 of the tensor shard): ZeRO's partition of it."""
        parts, length = self._group.data_parts, self._sizes[tensor][number]
        if parts == 1:
            yield 0, 0, length
        elif self._stage == 3:  # each parameter is split into equal parts
            each = -(-length // parts)
            yield from ((part, part * each, min((part + 1) * each, length)) for part in range(parts))
        else:  # the group is one flat tensor, which is split
            before, total = self._before[tensor][number], self._before[tensor][-1]
            each = ALIGNMENT * -(-total // (ALIGNMENT * parts))
            for part in range(before // each, min(parts, -(-(before + length) // each))):
                yield part, max(part * each - before, 0), min((part + 1) * each - before, length)


def tensor_layout(parameter: torch.Tensor) -> Layout | None:
    """How tensor ranks cut a parameter; None if they hold it alike."""
    return None if holds_experts(parameter) else layout_of(parameter)


def _region(parameter: torch.Tensor, tensor: int) -> Region:
    layout = tensor_layout(parameter)
    if layout is None:
        return element_runs.flat(0, math.prod(full_shape(parameter)))
    return replace(layout, index=tensor).region()
