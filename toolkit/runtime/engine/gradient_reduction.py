"""What the recipe says about the reduction of gradients, where DeepSpeed has no setting for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import deepspeed.comm as dist
import torch

from toolkit.errors import BadInput
from toolkit.recipe.batch_sections import Reduce
from toolkit.runtime.distributed.mesh import Mesh


def install(engine: Any, section: Reduce, mesh: Mesh) -> None:
    """Take over what DeepSpeed (0.19) fixes in code: the bucket of ZeRO 0, and the all-reduce itself."""
    if section.bucket_elements is not None:
        whole = engine.buffered_allreduce_fallback
        size = section.bucket_elements
        engine.buffered_allreduce_fallback = lambda grads=None, **_: whole(grads=grads, elements_per_buffer=size)
    if section.algorithm == "hierarchical":
        hierarchy = Hierarchy(mesh)
        engine.allreduce_bucket = lambda bucket, *_args, **_kwargs: averaged(engine, bucket, hierarchy)


class Hierarchy:
    """All-reduce over hosts with several ranks: every shard crosses the network once, not every gradient."""

    def __init__(self, mesh: Mesh) -> None:
        self.ranks, self.local = mesh.size, mesh.local_size
        if self.ranks == self.local or self.ranks % self.local:
            what = f"hierarchical needs several hosts with equally many ranks; {self.local} of {self.ranks} are here"
            raise BadInput("train.reduce.algorithm", f"{what}; use auto")
        firsts = range(0, self.ranks, self.local)
        hosts = [list(range(first, first + self.local)) for first in firsts]
        places = [[first + place for first in firsts] for place in range(self.local)]
        self._inside, self._between = _own(hosts, mesh.rank), _own(places, mesh.rank)

    def add_up(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks of a flat tensor."""
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
    """What DeepSpeed's `allreduce_bucket` gives: the mean of a bucket, flat, with its settings heeded."""
    flat: torch.Tensor = engine.flatten(bucket)
    before = engine.gradient_predivide_factor() if engine.postscale_gradients() else float(hierarchy.ranks)
    total = hierarchy.add_up(flat.to(engine.communication_data_type) / before)
    return (total * (before / hierarchy.ranks)).to(flat.dtype)


def _own(groups: Sequence[Sequence[int]], rank: int) -> Any:
    """Make all groups, as every rank must; the one that this rank is in."""
    made = [(ranks, dist.new_group(list(ranks))) for ranks in groups]
    return next(group for ranks, group in made if rank in ranks)
