"""From a plan's axes to an engine: each rank builds its own part of the model, and only that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from toolkit.plans.pipeline_bounds import even_bounds
from toolkit.plans.plan import Plan
from toolkit.recipe.batch_sections import Outer
from toolkit.recipe.schedules import Schedule
from toolkit.recipe.sections import Model, Train
from toolkit.run_dir.async_islands import Membership
from toolkit.runtime.distributed.mesh import Mesh, TensorUnit
from toolkit.runtime.distributed.process_group import World
from toolkit.runtime.engine.gradient_norm import NoiseMeter
from toolkit.runtime.engine.protocol import Engine
from toolkit.runtime.engine.replica import ReplicaEngine, ReplicaParts
from toolkit.runtime.islands.async_engine import AsyncIslandEngine
from toolkit.runtime.islands.engine import IslandEngine
from toolkit.runtime.models.build import build_model, check_same_weights, fill, open_weights, recompute_layers, skeleton
from toolkit.runtime.pipeline.engine import PipelineEngine
from toolkit.runtime.pipeline.split import analyse, find_layers
from toolkit.runtime.pipeline.stage import Stage
from toolkit.runtime.sharding.collectives import TensorGroup
from toolkit.runtime.sharding.shard_model import ReplicaCheck, shard, sum_partial_gradients
from toolkit.runtime.sharding.ulysses import SequenceGroup, SequenceShare
from toolkit.runtime.sharding.vocab_parallel_loss import follows_head

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """Everything that an engine is built from."""

    model: Model
    train: Train
    plan: Plan
    deepspeed: dict[str, Any]
    schedule: Schedule
    noise: bool = False
    """Whether the gradient noise scale is measured."""
    member: Membership | None = None
    """This island among others that never wait for one another."""


def build_engine(site: EngineSpec, world: World) -> Engine:
    """The engine that the plan's axes ask for."""
    mesh = Mesh(site.plan, world.rank, world.size, world.local_size)
    if site.plan.pp > 1:
        return _pipeline(site, mesh)
    if site.plan.tensor_by == "autotp":
        return _autotp(site, mesh)
    if site.plan.tp > 1:
        return _tensor(site, mesh)
    return _replica(site, mesh)


def _replica(site: EngineSpec, mesh: Mesh) -> Engine:
    model = build_model(site.model, site.train.seed)
    check_same_weights(model)
    if site.plan.recompute == "full":
        recompute_layers(model)
    if site.member is not None:
        inner = ReplicaEngine(model, mesh, site.train, site.deepspeed, site.schedule)
        return AsyncIslandEngine(inner, mesh, site.train.outer or Outer(), site.member, site.schedule.steps)
    if site.plan.islands > 1:
        unit = TensorUnit(mesh)
        inner = ReplicaEngine(model, mesh, site.train, site.deepspeed, site.schedule, ReplicaParts(unit=unit))
        return IslandEngine(inner, mesh, site.train.outer or Outer(), site.schedule.steps)
    if site.plan.sp == 1:
        noise = NoiseMeter(model.parameters(), mesh) if site.noise else None
        return ReplicaEngine(model, mesh, site.train, site.deepspeed, site.schedule, ReplicaParts(noise=noise))
    share = SequenceShare(SequenceGroup(mesh.inner_group, mesh.sequence, site.plan.sp))
    share.install(model)
    parts = ReplicaParts(slice_batch=share.slice_batch)
    return ReplicaEngine(model, mesh, site.train, site.deepspeed, site.schedule, parts)


def _tensor(site: EngineSpec, mesh: Mesh) -> Engine:
    group = tensor_group(mesh)
    model = skeleton(site.model)
    loss = shard(model, group, sliced_logits=follows_head(site.model))
    fill(model, open_weights(site.model, site.train.seed))
    sum_partial_gradients(model, group)
    if site.plan.recompute == "full":
        recompute_layers(model)
    seed_rank(site.train.seed, mesh)
    check = ReplicaCheck(model.named_parameters(), group)
    parts = ReplicaParts(unit=TensorUnit(mesh), after_backward=check.finish, loss=loss)
    return ReplicaEngine(model, mesh, site.train, site.deepspeed, site.schedule, parts)


def _autotp(site: EngineSpec, mesh: Mesh) -> Engine:
    """DeepSpeed cuts the whole model when it makes the engine, and makes the groups itself."""
    model = build_model(site.model, site.train.seed)
    check_same_weights(model)
    if site.plan.recompute == "full":
        recompute_layers(model)
    seed_rank(site.train.seed, mesh)
    return ReplicaEngine(model, mesh, site.train, site.deepspeed, site.schedule)


def _pipeline(site: EngineSpec, mesh: Mesh) -> Engine:
    plan, seed = site.plan, site.train.seed
    model = skeleton(site.model)
    bounds = plan.pipeline_bounds or even_bounds(len(find_layers(model)[1]), plan.pp)
    split = analyse(skeleton(site.model), tuple(bounds))
    group = tensor_group(mesh) if plan.tp > 1 else None
    loss = None
    if group:
        owned = lambda name: mesh.pipe in split.owners[name]  # noqa: E731
        loss = shard(model, group, owned, sliced_logits=follows_head(site.model))
    stage = Stage(model, split, mesh.pipe, DTYPES[plan.precision], loss)
    stage.parameters_by_name = fill(model, open_weights(site.model, seed), stage.parameters_by_name)
    if group:
        sum_partial_gradients(model, group)
    if plan.recompute == "full":
        recompute_layers(model)
    seed_rank(seed, mesh)
    check = ReplicaCheck(stage.parameters_by_name.items(), group).finish if group else None
    return PipelineEngine(stage, mesh, site.train, site.deepspeed, site.schedule, check)


def tensor_group(mesh: Mesh) -> TensorGroup:
    """The ranks that hold the shards of this rank's stage."""
    return TensorGroup(mesh.inner_group, mesh.tensor, mesh.plan.tp)


def seed_rank(seed: int, mesh: Mesh) -> None:
    """Random numbers of dropout: shards of one stage draw the same, replicas and stages do not."""
    torch.manual_seed(seed + 7919 * (mesh.data + mesh.plan.dp * mesh.pipe))
