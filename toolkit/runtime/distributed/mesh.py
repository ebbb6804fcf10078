"""The mesh of ranks: which replica, stage and shard this process is, and its process group along each axis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import deepspeed.comm as dist
import torch

from toolkit.plans.plan import Plan
from toolkit.runtime.distributed.process_group import RunningSum, all_sum


class Mesh:
    """`rank = (pipe · dp + data) · inner + place`, DeepSpeed's own order; `place = sequence · tp + tensor`.

    Sequence ranks are `context · sp + ulysses`: rings of `cp` groups that each exchange tokens for heads.
    """

    def __init__(self, plan: Plan, rank: int, size: int, local_size: int | None = None) -> None:
        assert plan.devices == size, f"the plan is for {plan.devices} ranks; there are {size}"
        assert plan.islands == 1 or plan.tp * plan.pp * plan.token_parts * plan.ep == 1, "islands are data-parallel"
        self.plan, self.rank, self.size = plan, rank, size
        self.local_size = local_size or size
        """Number of ranks on this host."""
        inner = plan.tp * plan.token_parts
        island_size = size // plan.islands
        self.island, local = divmod(rank, island_size)
        self.pipe, rest = divmod(local, plan.dp * inner)
        self.data, place = divmod(rest, inner)
        self.sequence, self.tensor = divmod(place, plan.tp)
        self.context, self.ulysses = divmod(self.sequence, plan.sp)
        pipes, datas, sequences, tensors = map(range, (plan.pp, plan.dp, plan.token_parts, plan.tp))

        def at(p: int, d: int, s: int, t: int) -> int:
            return ((p * plan.dp + d) * plan.token_parts + s) * plan.tp + t

        stages = [[at(p, d, s, t) for t in tensors] for p in pipes for d in datas for s in sequences]
        data = [[at(p, d, s, t) for d in datas for s in sequences] for p in pipes for t in tensors]
        replicas = [[at(p, d, s, t) for p in pipes for t in tensors] for d in datas for s in sequences]
        rings, exchanges = _sequence_groups(plan, at)
        data = [[first + rank for rank in ranks] for first in range(0, size, island_size) for ranks in data]
        stages = stages if plan.islands == 1 else [[rank] for rank in range(size)]
        replicas = replicas if plan.islands == 1 else [[rank] for rank in range(size)]
        self.island_group = self._own([list(range(place, size, island_size)) for place in range(island_size)])
        """The ranks with this one's index in every island."""
        self.inner_group = self._own(stages)
        """Ranks that hold the shards of one stage."""
        self.ring_ranks = next((ranks for ranks in rings if rank in ranks), [rank])
        self.ring_group = self._own(rings) if plan.cp > 1 else None
        """Ranks that pass keys and values on to one another."""
        self.ulysses_group = self._own(exchanges) if plan.sp > 1 else None
        """Ranks that exchange tokens for heads."""
        shares = [[at(p, d, s, t) for s in sequences] for p in pipes for d in datas for t in tensors]
        self.sequence_group = self._own(shares) if plan.token_parts > 1 else None
        """Ranks that hold the tokens of one sequence together."""
        self.data_group = self._own(data)
        """Ranks that hold the same shard: those of every replica, and of every share of its sequences."""
        self.replica_group = self._own(replicas)
        """Ranks that hold one replica together."""
        self.data_ranks = next(ranks for ranks in data if rank in ranks)
        firsts = range(0, plan.dp, plan.ep) if plan.ep > 1 else ()
        experts = [
            [at(p, first + place, s, t) for place in range(plan.ep)]
            for p in pipes for s in sequences for t in tensors for first in firsts
        ]  # fmt: skip
        same = [  # sequence ranks see different tokens: gradients of experts are summed over them, too
            [at(p, d, s, t) for d in range(place, plan.dp, plan.ep) for s in sequences]
            for p in pipes for t in tensors for place in (range(plan.ep) if plan.ep > 1 else ())
        ]  # fmt: skip
        self.expert_group, self.expert_ranks = self._made(experts)
        """Ranks that hold the experts of a layer together, and their numbers."""
        self.same_experts_group, self.same_experts_ranks = self._made(same)
        """Ranks that hold the same experts as this one, and their numbers."""
        self.token_host_group = self._on_hosts(data)
        """Ranks that see different tokens, for numbers in host memory."""

    def between_islands(self) -> Any:
        """A new gloo group of the ranks with this one's index in every island. Collective."""
        size = self.plan.devices // self.plan.islands
        made = [
            torch.distributed.new_group(list(range(place, self.plan.devices, size)), backend="gloo")
            for place in range(size)
        ]
        return made[self.rank % size]

    def stage_group(self) -> Any:
        """A new group of all ranks of this rank's pipeline stage; None: the world. Collective."""
        stage = self.size // self.plan.pp
        return self._own([list(range(first, first + stage)) for first in range(0, self.size, stage)])

    @property
    def token_ranks(self) -> int:
        """Number of ranks that see different tokens: replicas times sequence ranks."""
        return self.plan.dp * self.plan.token_parts

    def sum_over_tokens(self, values: torch.Tensor) -> torch.Tensor:
        """All-reduce in place over the ranks that see different tokens."""
        if self.token_ranks == 1:
            return values
        return all_sum(values, self.data_group)

    def start_sum_over_tokens(self, values: torch.Tensor) -> RunningSum:
        """Start `sum_over_tokens`, which runs beside what follows."""
        return RunningSum(values, self.data_group, self.token_ranks)

    def sum_over_shards(self, values: torch.Tensor) -> torch.Tensor:
        """All-reduce in place over the stages and tensor shards of this replica."""
        return all_sum(values, self.replica_group) if self.plan.tp * self.plan.pp > 1 else values

    def _on_hosts(self, groups: Sequence[Sequence[int]]) -> Any:
        """This rank's group among those that see different tokens, over gloo; None if it is the world or not needed."""
        if self.token_ranks == 1:
            return None
        if torch.distributed.get_backend() == "gloo":
            return self.data_group
        made = [(ranks, torch.distributed.new_group(list(ranks), backend="gloo")) for ranks in groups]
        return next(group for ranks, group in made if self.rank in ranks)

    def _made(self, groups: Sequence[Sequence[int]]) -> tuple[Any, list[int]]:
        """Create all groups (every rank must), of one rank too, and return this rank's; nothing if there are none."""
        made = [(list(ranks), dist.new_group(list(ranks))) for ranks in groups]
        return next(((group, ranks) for ranks, group in made if self.rank in ranks), (None, []))

    def _own(self, groups: Sequence[Sequence[int]]) -> Any:
        """Create all groups (every rank must) and return this rank's. None if it is the world or this rank alone."""
        if len(groups) == 1 or all(len(ranks) == 1 for ranks in groups):
            return None
        made = [(ranks, dist.new_group(list(ranks))) for ranks in groups]
        return next(group for ranks, group in made if self.rank in ranks)


def _sequence_groups(plan: Plan, at: Callable[[int, int, int, int], int]) -> tuple[list[list[int]], list[list[int]]]:
    """(rings, groups that exchange tokens for heads). `at`: rank by stage, replica, sequence and tensor index."""
    pipes, datas, tensors = map(range, (plan.pp, plan.dp, plan.tp))
    rings = [
        [at(p, d, c * plan.sp + u, t) for c in range(plan.cp)]
        for p in pipes for d in datas for u in range(plan.sp) for t in tensors
    ]  # fmt: skip
    exchanges = [
        [at(p, d, c * plan.sp + u, t) for u in range(plan.sp)]
        for p in pipes for d in datas for c in range(plan.cp) for t in tensors
    ]  # fmt: skip
    return rings, exchanges


class TensorUnit:
    """The Megatron-like `mpu` that DeepSpeed asks for tensor and data groups, over a mesh."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._alone = dist.get_world_group()
        self._islands = mesh.plan.islands > 1
        # DeepSpeed 0.19.8 has no "no group": it reads None as the world and would reduce over all ranks. A group of one
        # rank stands for "nothing to reduce". It can go once `mpu` may return None for that.
        if mesh.token_ranks == 1 or self._islands:
            groups = [dist.new_group([rank]) for rank in range(mesh.plan.devices)]
            self._alone = groups[dist.get_rank()]

    def get_model_parallel_group(self) -> Any:
        """The ranks that hold the shards of one replica."""
        return self._alone if self._islands else self._mesh.inner_group or dist.get_world_group()

    def get_model_parallel_rank(self) -> int:
        """Index of this rank in the model-parallel group."""
        return self._mesh.tensor

    def get_model_parallel_world_size(self) -> int:
        """Size of the model-parallel group."""
        return self._mesh.plan.tp

    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size

    def get_pipeline_model_parallel_world_size(self) -> int:
        """Number of pipeline stages: always 1 here."""
        return 1

    def get_data_parallel_group(self) -> Any:
        """The ranks that hold the same shard of every replica."""
        return self._mesh.data_group or self._alone

    def get_data_parallel_group_ranks(self) -> list[int]:
        """Global ranks of the data-parallel group."""
        return self._mesh.data_ranks

    def get_data_parallel_rank(self) -> int:
        """Index of this rank in the data-parallel group."""
        return self._mesh.data * self._mesh.plan.token_parts + self._mesh.sequence

    def get_data_parallel_world_size(self) -> int:
        """Size of the data-parallel group: sequence ranks hold the same shards as replicas do."""
        return self._mesh.token_ranks
