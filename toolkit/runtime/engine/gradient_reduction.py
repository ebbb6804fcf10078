"""Gradient reductions that DeepSpeed does not have: buckets under ZeRO 0, hierarchical, to the owners under ZeRO 2."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import deepspeed.comm as dist
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from toolkit.errors import BadInput
from toolkit.recipe.batch_sections import Reduce
from toolkit.runtime.distributed.mesh import Mesh


def install(engine: Any, section: Reduce, mesh: Mesh) -> None:
    """Replace methods of the engine and its optimizer that DeepSpeed 0.19.8 gives no setting for.

    - `buffered_allreduce_fallback` has its bucket of 500 million elements as a default argument: under ZeRO 0 the
      recipe's `bucket_elements` would have no effect.
    - `allreduce_bucket` always uses one flat all-reduce.
    - ZeRO 1 and 2 all-reduce every bucket, although each rank only uses its own shard: twice the bytes of a
      reduce-scatter. `use_multi_rank_bucket_allreduce: false` sends each piece to its owner only, but waits for the
      device before every piece if communication overlaps.
    They can go when DeepSpeed's config has keys for the first two, and its reduction neither sends more nor waits.
    """
    if section.bucket_elements is not None:
        reduce = engine.buffered_allreduce_fallback
        size = section.bucket_elements
        engine.buffered_allreduce_fallback = lambda grads=None, **_: reduce(grads=grads, elements_per_buffer=size)
    if section.algorithm == "hierarchical":
        hierarchy = Hierarchy(mesh)
        engine.allreduce_bucket = lambda bucket, *_args, **_kwargs: averaged(engine, bucket, hierarchy)
    if isinstance(engine.optimizer, DeepSpeedZeroOptimizer):
        engine.optimizer.allreduce_and_copy_with_multiple_ranks = functools.partial(reduce_to_owners, engine.optimizer)


def reduce_to_owners(
    optimizer: DeepSpeedZeroOptimizer,
    pieces: Sequence[torch.Tensor],
    communication_data_type: torch.dtype,
    *,
    bucket_ranks: Sequence[frozenset[int]],
    output_bucket: Sequence[torch.Tensor | None],
    **settings: Any,
) -> None:
    """Sum the pieces of a bucket on the ranks that own them: half the bytes of the all-reduce that this replaces.

    Takes the arguments of DeepSpeed's `allreduce_and_copy_with_multiple_ranks`, and runs on the same stream.
    """
    rank = dist.get_rank(group=settings["process_group"])
    waits_for_stream = optimizer.overlap_comm and not get_accelerator().resolves_data_dependency()
    for (owner,), places in _by_owner(bucket_ranks).items():
        own = [pieces[place] for place in places]
        total = optimizer.allreduce_bucket(own, communication_data_type, rank=owner, **settings)
        if waits_for_stream:
            total.record_stream(optimizer.reduction_stream)
        if rank != owner:
            continue
        for place, summed in zip(places, optimizer.unflatten(total, own), strict=True):
            optimizer._add_to_grad_partition_buffer(output_bucket[place], summed)
            pieces[place].copy_(summed)
            if waits_for_stream:
                pieces[place].record_stream(optimizer.reduction_stream)


def _by_owner(owners: Sequence[frozenset[int]]) -> dict[frozenset[int], list[int]]:
    """Owner → places of its pieces, in the order of the bucket, which is the same on every rank."""
    found: dict[frozenset[int], list[int]] = {}
    for place, owner in enumerate(owners):
        found.setdefault(owner, []).append(place)
    return found


class Hierarchy:
    """All-reduce in three phases: reduce-scatter inside a host, all-reduce between hosts, all-gather inside a host."""

    def __init__(self, mesh: Mesh) -> None:
        self.ranks, self.local = mesh.size, mesh.local_size
        if self.ranks == self.local or self.ranks % self.local:
            what = f"hierarchical needs several hosts with equally many ranks; {self.local} of {self.ranks} are here"
            raise BadInput("train.reduce.algorithm", f"{what}; use auto")
        firsts = range(0, self.ranks, self.local)
        hosts = [list(range(first, first + self.local)) for first in firsts]
        places = [[first + place for first in firsts] for place in range(self.local)]
        self._inside, self._between = _own(hosts, mesh.rank), _own(places, mesh.rank)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum a flat tensor over all ranks."""
        width = -(-values.numel() // self.local)
        whole = torch.nn.functional.pad(values, (0, width * self.local - values.numel()))
        piece = whole.new_empty(width)
        if self.local == 1:
            piece = whole
        else:
            dist.reduce_scatter_fn(piece, whole, group=self._inside)
        dist.all_reduce(piece, group=self._between)
        if self.local > 1:
            dist.allgather_fn(whole, piece, group=self._inside)
        return whole[: values.numel()]


def averaged(engine: Any, bucket: Sequence[torch.Tensor], hierarchy: Hierarchy) -> torch.Tensor:
    """The flat mean of a bucket under the engine's settings, as DeepSpeed's `allreduce_bucket` returns it."""
    flat: torch.Tensor = engine.flatten(bucket)
    before = engine.gradient_predivide_factor() if engine.postscale_gradients() else float(hierarchy.ranks)
    total = hierarchy.sum(flat.to(engine.communication_data_type) / before)
    return (total * (before / hierarchy.ranks)).to(flat.dtype)


def _own(groups: Sequence[Sequence[int]], rank: int) -> Any:
    """Create all groups (every rank must) and return the one that this rank is in."""
    made = [(ranks, dist.new_group(list(ranks))) for ranks in groups]
    return next(group for ranks, group in made if rank in ranks)
