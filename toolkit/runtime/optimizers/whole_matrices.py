"""Computing on complete matrices where each rank holds only elements of them: ZeRO's partitions and tensor shards.

A matrix that one rank holds completely is computed there. All others are sent to one of the ranks that hold a part of
them, and every rank gets its own elements of the result back. Which rank holds what follows from the plan alone, so
nothing is exchanged to find it out.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import deepspeed.comm as dist
import torch

from toolkit.checkpoints import element_runs
from toolkit.checkpoints.element_runs import Region
from toolkit.runtime.checkpoint.fragments import Held
from toolkit.runtime.distributed.mesh import Mesh
from toolkit.runtime.models.parameter_shards import full_shape
from toolkit.runtime.optimizers.partition import Group, Partition, tensor_layout

ELEMENTS_PER_RANK = 2**24
"""Elements that a rank computes on between two exchanges, unless one matrix is larger: 64 MB in fp32."""


class Masters(Protocol):
    """The tensors that an optimizer updates, as an engine's state knows them."""

    names: Mapping[torch.Tensor, str]
    """This rank's name of each parameter."""

    def held(self) -> Iterator[tuple[str, Held]]:
        """Everything that this rank's optimizer updates, with this rank's parameter name."""

    def masters(self) -> Iterator[tuple[torch.Tensor, list[torch.Tensor]]]:
        """Every tensor that the optimizer updates, with the parameters of which it holds elements on some rank."""


@dataclass(frozen=True)
class Share:
    """The elements of a matrix that one rank holds."""

    rank: int
    """Index in the group of ranks that share matrices."""
    region: Region
    """Elements of the flattened matrix, in the order of the rank's tensor."""


@dataclass(frozen=True, eq=False)
class Matrix:
    """A matrix, and this rank's place in it."""

    shape: tuple[int, int]
    master: torch.Tensor
    """The optimizer's tensor on this rank that holds this rank's elements, if there are any."""
    start: int
    """Where they start in `master`."""
    shares: tuple[Share, ...]
    """Who holds what, this rank among them or not."""
    sliced: bool
    """Whether tensor ranks hold different parts. Of what they hold alike, each has its own `shares`."""

    def own(self, rank: int) -> Share | None:
        """This rank's share."""
        return next((share for share in self.shares if share.rank == rank), None)

    def view(self, rank: int, like_master: torch.Tensor) -> torch.Tensor:
        """This rank's elements of a tensor that is laid out like the master."""
        own = self.own(rank)
        assert own is not None
        return like_master.detach().view(-1)[self.start : self.start + element_runs.size(own.region)]

    @property
    def work(self) -> int:
        """Size of a product of the matrix with itself."""
        return math.prod(self.shape) * min(self.shape)


Read = Callable[[Matrix], torch.Tensor]
"""This rank's elements of a matrix, flat."""
Compute = Callable[[torch.Tensor], torch.Tensor]
"""A complete matrix → one of the same shape."""
Write = Callable[[Matrix, torch.Tensor], None]
"""Takes this rank's elements of the result, flat."""


class WholeMatrices:
    """The matrices in the optimizer's tensors."""

    def __init__(self, matrices: Sequence[Matrix], group: Group, dtype: torch.dtype) -> None:
        """`dtype`: in which matrices are sent and computed on."""
        self._group, self._dtype = group, dtype
        self._by_master: dict[torch.Tensor, list[Matrix]] = {}
        for matrix in matrices:
            self._by_master.setdefault(matrix.master, []).append(matrix)

    def of(self, masters: Sequence[torch.Tensor]) -> list[Matrix]:
        """All matrices of these tensors, those that only other ranks hold included."""
        return [matrix for master in masters for matrix in self._by_master.get(master, ())]

    def view(self, matrix: Matrix, like_master: torch.Tensor) -> torch.Tensor:
        """This rank's elements of a tensor that is laid out like the matrix's master."""
        return matrix.view(self._group.rank, like_master)

    def map(self, masters: Sequence[torch.Tensor], read: Read, compute: Compute, write: Write) -> None:
        """Compute on every matrix of these tensors; each rank gets its own elements. Collective."""
        load = [0] * self._group.size
        divided: list[tuple[Matrix, int]] = []
        for matrix in self.of(masters):
            if len(matrix.shares) > 1:
                divided.append((matrix, self._owner(matrix, load)))
            elif matrix.shares[0].rank == self._group.rank:
                whole = self._assembled(matrix, [read(matrix).to(self._dtype)])
                write(matrix, _taken(compute(whole), matrix.shares[0].region))
        for bucket in _buckets(divided, ELEMENTS_PER_RANK * self._group.size):
            self._exchange(bucket, read, compute, write)

    def _owner(self, matrix: Matrix, load: list[int]) -> int:
        """The rank with the least work of those that hold a part; of what tensor ranks hold alike, one in each of them.

        All ranks must come to the same answer, so work is counted for all columns of tensor ranks alike.
        """
        tensors = self._group.tensor_parts
        column = 0 if matrix.sliced else self._group.rank % tensors
        holders = [share.rank - column for share in matrix.shares]
        chosen = min(holders, key=lambda rank: (load[rank], rank))
        for rank in [chosen] if matrix.sliced else range(chosen, chosen + tensors):
            load[rank] += matrix.work
        return chosen + column

    def _exchange(self, bucket: Sequence[tuple[Matrix, int]], read: Read, compute: Compute, write: Write) -> None:
        own, size = self._group.rank, self._group.size
        held = [[m for m, owner in bucket if owner == rank and m.own(own)] for rank in range(size)]
        mine = [matrix for matrix, owner in bucket if owner == own]
        parts = [[share for m in mine for share in m.shares if share.rank == rank] for rank in range(size)]
        sent = [sum(element_runs.size(_own(m, own).region) for m in matrices) for matrices in held]
        taken = [sum(element_runs.size(share.region) for share in shares) for shares in parts]
        arrived = self._sent([read(m) for matrices in held for m in matrices], sent, taken)
        pieces: dict[tuple[int, int], torch.Tensor] = {}
        positions = [sum(taken[:rank]) for rank in range(size)]
        for number, matrix in enumerate(mine):
            for share in matrix.shares:
                length = element_runs.size(share.region)
                pieces[number, share.rank] = arrived[positions[share.rank] : positions[share.rank] + length]
                positions[share.rank] += length
        for number, matrix in enumerate(mine):
            result = compute(self._assembled(matrix, [pieces[number, share.rank] for share in matrix.shares]))
            for share in matrix.shares:
                pieces[number, share.rank].copy_(_taken(result, share.region))
        answers = self._sent([arrived], taken, sent)
        position = 0
        for matrix in itertools.chain.from_iterable(held):
            length = element_runs.size(_own(matrix, own).region)
            write(matrix, answers[position : position + length])
            position += length

    def _sent(self, pieces: Sequence[torch.Tensor], sent: list[int], taken: list[int]) -> torch.Tensor:
        """What arrives if `pieces` are sent in the order of ranks: `sent` elements to each rank, `taken` from each."""
        device = next(iter(self._by_master)).device
        outgoing = torch.cat([torch.empty(0, dtype=self._dtype, device=device), *(p.to(self._dtype) for p in pieces)])
        incoming = torch.empty(sum(taken), dtype=self._dtype, device=device)
        dist.all_to_all_single(incoming, outgoing, taken, sent, group=self._group.process_group)
        return incoming

    def _assembled(self, matrix: Matrix, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        flat = torch.empty(math.prod(matrix.shape), dtype=self._dtype, device=pieces[0].device)
        for share, piece in zip(matrix.shares, pieces, strict=True):
            for view, part in _runs(flat, share.region, piece):
                view.copy_(part)
        return flat.view(matrix.shape)


def find_matrices(state: Masters, mesh: Mesh, group: Group, wanted: Callable[[str], bool]) -> list[Matrix]:
    """Every matrix of the parameters with a `wanted` name, and of stacks of matrices each one."""
    held = {name: (piece.start, piece.region) for name, piece in state.held()}
    found: list[Matrix] = []
    for master, parameters in state.masters():
        if any(wanted(state.names[parameter]) for parameter in parameters):
            partition = Partition(parameters, group, mesh.plan.zero_stage)
            for number, parameter in enumerate(parameters):
                start, region = held.get(state.names[parameter], (0, ()))
                regions = dict(partition.regions(number))
                own = regions.get(group.rank, ())
                assert own == region, f"the rank holds {region} of {state.names[parameter]}; {own} is computed"
                found.extend(_matrices(master, parameter, start, regions, group.rank))
    return found


def _matrices(
    master: torch.Tensor, parameter: torch.Tensor, start: int, regions: Mapping[int, Region], rank: int
) -> Iterator[Matrix]:
    """The matrices of a parameter. `start`: of this rank's elements in `master`; `regions`: elements on each rank."""
    layout = tensor_layout(parameter)
    shape = layout.shape if layout else full_shape(parameter)
    size = shape[-2] * shape[-1]
    for index in range(math.prod(shape[:-2])):
        parts = {r: element_runs.within(region, index * size, (index + 1) * size) for r, region in regions.items()}
        shares = tuple(Share(r, region) for r, (_, region) in sorted(parts.items()) if region)
        inside = parts[rank][0] if rank in parts else 0
        yield Matrix((shape[-2], shape[-1]), master, start + inside, shares, layout is not None)


def _own(matrix: Matrix, rank: int) -> Share:
    own = matrix.own(rank)
    assert own is not None
    return own


def _buckets(found: Sequence[tuple[Matrix, int]], most: int) -> Iterator[list[tuple[Matrix, int]]]:
    bucket: list[tuple[Matrix, int]] = []
    filled = 0
    for matrix, owner in found:
        size = math.prod(matrix.shape)
        if bucket and filled + size > most:
            yield bucket
            bucket, filled = [], 0
        bucket.append((matrix, owner))
        filled += size
    if bucket:
        yield bucket


def _taken(matrix: torch.Tensor, region: Region) -> torch.Tensor:
    """The elements of a region, flat."""
    found = matrix.new_empty(element_runs.size(region))
    for view, part in _runs(matrix.contiguous().view(-1), region, found):
        part.copy_(view)
    return found


def _runs(flat: torch.Tensor, region: Region, piece: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(view of a flat matrix, the same elements of a piece) for every run of a region: two tensors of equal shape."""
    position = 0
    for run in region:
        rows = (run.count, run.length)
        yield (
            flat.as_strided(rows, (run.stride or run.length, 1), flat.storage_offset() + run.start),
            piece[position : position + run.size].view(rows),
        )
        position += run.size
