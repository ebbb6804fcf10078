"""Each rank's experts as parameters: slices of the full tensors, which DeepSpeed reduces over fewer ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from deepspeed.utils import groups as deepspeed_groups

from toolkit.runtime.distributed.mesh import Mesh
from toolkit.runtime.mixtures.expert_dispatch import Experts, ExpertsRefused
from toolkit.runtime.models.parameter_shards import Layout, mark_experts, replace_parameter, sites


def cut_experts(model: torch.nn.Module, experts: Sequence[Experts], index: int, ranks: int) -> None:
    """Reduce the experts of a skeleton to those of one rank."""
    where = sites(model)
    for each in experts:
        if each.number % ranks:
            raise ExpertsRefused(f"{ranks} ranks do not divide the {each.number} experts of {each.name}")
        second_factors = {id(second) for _, second in each.factors()}
        for full in each.parameters():
            # An adapter's second matrix has, for every output and rank, one entry per expert.
            dim, packs = (1, full.shape[1] // each.number) if id(full) in second_factors else (0, 1)
            layout = Layout(dim=dim, index=index, ranks=ranks, shape=tuple(full.shape), packs=packs)
            piece = replace_parameter(where, full, layout.slice_of(full.detach()).clone())
            mark_experts(piece, layout)


def register_groups(mesh: Mesh) -> str:
    """Tell DeepSpeed which ranks hold different experts, and which the same; the name by which parameters refer to it.

    DeepSpeed 0.19.8 keeps these groups in private tables of `deepspeed.utils.groups` and fills them for its own MoE
    layers and for AutoEP, from a mesh without other axes. If they are renamed, expert parallel fails at the start.
    """
    name = f"ep_size_{mesh.plan.ep}"
    deepspeed_groups._EXPERT_PARALLEL_GROUP[name] = mesh.expert_group
    deepspeed_groups._EXPERT_PARALLEL_GROUP_RANKS[name] = mesh.expert_ranks
    deepspeed_groups._EXPERT_DATA_PARALLEL_GROUP[name] = mesh.same_experts_group
    deepspeed_groups._EXPERT_DATA_PARALLEL_GROUP_RANKS[name] = mesh.same_experts_ranks
    return name


def hand_to_deepspeed(model: torch.nn.Module, experts: Sequence[Experts], mesh: Mesh) -> None:
    """Mark this rank's experts, so that DeepSpeed reduces and shards them over the ranks that hold the same ones."""
    name = register_groups(mesh)
    own = [parameter for each in experts for parameter in each.parameters()]
    for parameter in own:
        parameter.allreduce = False  # type: ignore[attr-defined]
        parameter.group_name = name  # type: ignore[attr-defined]
        parameter.ds_zero_placement_family = "autoep_expert"  # type: ignore[attr-defined]
        parameter.ds_zero_partition_group_name = name  # type: ignore[attr-defined]
    if any(parameter.requires_grad for parameter in own):
        model.add_module("deepspeed_sees_experts", _Mark(experts[0].number))


class _Mark(AutoEPMoELayer):  # type: ignore[misc]
    """Makes DeepSpeed 0.19.8 treat parameters with `group_name` apart: it does so only if a module has this class.

    An engine has no setting for it (`has_moe_layers`). It can go when it has one.
    """

    def __init__(self, num_experts: int) -> None:
        torch.nn.Module.__init__(self)
        self.num_experts = num_experts

    def set_deepspeed_parallelism(self, *_: Any, **__: Any) -> None:
        """Groups are registered already."""
