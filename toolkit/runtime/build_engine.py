"""Builds the engine of a plan: each rank builds its own part of the model, and only that."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from transformers import PreTrainedModel

from toolkit.plans.exchange import exchange_of
from toolkit.plans.job import raw_config
from toolkit.plans.pipeline_bounds import even_bounds
from toolkit.plans.pipeline_orders import rank_of, stages_of
from toolkit.plans.plan import Plan
from toolkit.plans.router_balance import Balance, balance_of
from toolkit.recipe.batch_sections import Outer
from toolkit.recipe.model_section import Model
from toolkit.recipe.objective_sections import Contrastive, Preference, Rank
from toolkit.recipe.schedules import Schedule
from toolkit.recipe.sections import Train
from toolkit.run_dir.async_islands import Membership
from toolkit.runtime.distributed.mesh import Mesh, TensorUnit
from toolkit.runtime.distributed.process_group import World
from toolkit.runtime.engine.gradient_norm import NoiseMeter
from toolkit.runtime.engine.parameter_groups import with_adapter_rate
from toolkit.runtime.engine.protocol import Engine
from toolkit.runtime.engine.replica import ReplicaEngine, ReplicaParts
from toolkit.runtime.islands.async_engine import AsyncIslandEngine
from toolkit.runtime.islands.engine import IslandEngine
from toolkit.runtime.layers import compiled_layers, fused_kernels
from toolkit.runtime.layers.recompute import recompute_layers
from toolkit.runtime.mixtures.balance_loss import Limit, Slice
from toolkit.runtime.mixtures.balancer import NoRouters, RouterWatch, watch_routers
from toolkit.runtime.mixtures.expert_dispatch import Experts, distribute, find_experts
from toolkit.runtime.mixtures.expert_exchange import ExpertGroup
from toolkit.runtime.mixtures.expert_shards import cut_experts, hand_to_deepspeed
from toolkit.runtime.mixtures.routers import RouterTable
from toolkit.runtime.models import head_loss
from toolkit.runtime.models.build import (
    DTYPES,
    build_in_place,
    build_model,
    can_start_in_place,
    emptied,
    fill,
    freed_at_once,
    hollow_model,
    open_skeleton,
    skeleton,
    unadapted,
)
from toolkit.runtime.models.embedder import add_noise
from toolkit.runtime.models.first_weights import ADAPTED, Weights, check_same_weights
from toolkit.runtime.models.loss import Loss, smoothed, summed_loss
from toolkit.runtime.models.zero3_start import sharded_model
from toolkit.runtime.objectives.contrastive_loss import ContrastiveLoss
from toolkit.runtime.objectives.distill_loss import DistillLoss
from toolkit.runtime.objectives.preference_loss import PreferenceLoss, SequenceRanks, UnpairedLoss
from toolkit.runtime.objectives.score_loss import RankLoss, RewardLoss
from toolkit.runtime.pipeline.engine import PipelineEngine, PipelineParts
from toolkit.runtime.pipeline.schedule_run import ScheduleRun
from toolkit.runtime.pipeline.split import StageSplit, analyse, count_layers
from toolkit.runtime.pipeline.stage import Chunks, Stage
from toolkit.runtime.pipeline.transfers import Transfers
from toolkit.runtime.sharding import complete_texts
from toolkit.runtime.sharding.collectives import TensorGroup
from toolkit.runtime.sharding.ring import RingGroup
from toolkit.runtime.sharding.shard_model import ReplicaCheck, loss_in_shards, shard, sum_partial_gradients
from toolkit.runtime.sharding.styles import is_wrapped
from toolkit.runtime.sharding.ulysses import SequenceGroup, SequenceShare
from toolkit.runtime.sharding.vocab_parallel_loss import VocabularyLoss, follows_head


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
    auto_steps: bool = False
    """Whether islands choose the steps between exchanges (`strategy.local_steps: auto`)."""

    @property
    def balance(self) -> Balance:
        """How routers are balanced."""
        return balance_of(self.train.router, raw_config(self.model))


def build_engine(spec: EngineSpec, world: World) -> Engine:
    """The engine that the plan's axes ask for."""
    mesh = _mesh(spec, world)
    spec = replace(spec, train=with_adapter_rate(spec.train, spec.model.lora))
    with freed_at_once():
        if spec.plan.pp > 1:
            return _pipeline(spec, mesh)
        if spec.plan.tensor_by == "autotp":
            return _autotp(spec, mesh)
        if spec.plan.tp * spec.plan.ep > 1:
            return _tensor(spec, mesh)
        return _replica(spec, mesh)


def build_async_island(spec: EngineSpec, world: World, membership: Membership) -> AsyncIslandEngine:
    """The engine of one island of asynchronous local SGD."""
    mesh = _mesh(spec, world)
    model = _full_model(spec)
    _make_noisy(model, spec)
    parts = ReplicaParts(loss=_objective(spec, _loss_in_head(spec, model), mesh), routers=_routers(spec, model, mesh))
    inner = ReplicaEngine(model, mesh, spec.train, spec.deepspeed, spec.schedule, parts)
    return AsyncIslandEngine(inner, mesh, spec.train.outer or Outer(), membership, spec.schedule.steps)


def _mesh(spec: EngineSpec, world: World) -> Mesh:
    return Mesh(spec.plan, world.rank, world.size, world.local_size)


def _sharded_model(spec: EngineSpec) -> torch.nn.Module:
    """This rank's ZeRO 3 shards; the full model is never on one rank."""
    dtype = DTYPES[spec.plan.precision]
    model: torch.nn.Module = sharded_model(spec.model, spec.train.seed, spec.deepspeed, dtype)
    fused_kernels.install(model, spec.model)
    recompute_layers(model, spec.plan.recompute, keeps_last=spec.plan.zero_stage == 3)
    return model


def _full_model(spec: EngineSpec) -> torch.nn.Module:
    """The complete model on this rank, the same on all."""
    model: torch.nn.Module
    if can_start_in_place(spec.model):
        device, dtype = get_accelerator().current_device_name(), DTYPES[spec.plan.precision]
        copied = spec.plan.zero_stage in (1, 2)
        model = build_in_place(spec.model, spec.train.seed, dtype, device, trained_are_copied=copied)
    else:
        model = build_model(spec.model, spec.train.seed)
    check_same_weights(dict(model.named_parameters()))
    fused_kernels.install(model, spec.model)
    recompute_layers(model, spec.plan.recompute, keeps_last=spec.plan.zero_stage == 3)
    return model


def _replica(spec: EngineSpec, mesh: Mesh) -> Engine:
    sharded = spec.plan.zero_stage == 3 and spec.plan.islands == 1 and can_start_in_place(spec.model)
    model = _sharded_model(spec) if sharded else _full_model(spec)
    _make_noisy(model, spec)
    compiled_layers.install(model, spec.model)
    loss = _objective(spec, _loss_in_head(spec, model), mesh)
    if spec.plan.islands > 1:
        parts = ReplicaParts(unit=TensorUnit(mesh), loss=loss, routers=_routers(spec, model, mesh))
        inner = ReplicaEngine(model, mesh, spec.train, spec.deepspeed, spec.schedule, parts)
        outer = spec.train.outer or Outer()
        exchange = exchange_of(outer, spec.auto_steps, spec.plan.local_steps)
        return IslandEngine(inner, mesh, outer, spec.schedule.steps, exchange)
    if spec.plan.token_parts == 1:
        noise = NoiseMeter(model.parameters(), mesh) if spec.noise else None
        parts = ReplicaParts(noise=noise, loss=loss, routers=_routers(spec, model, mesh))
        return ReplicaEngine(model, mesh, spec.train, spec.deepspeed, spec.schedule, parts)
    own = _sequence_slice(spec, [model], mesh)
    parts = ReplicaParts(slice_batch=own, loss=loss, routers=_routers(spec, model, mesh, own=own))
    return ReplicaEngine(model, mesh, spec.train, spec.deepspeed, spec.schedule, parts)


def _sequence_slice(spec: EngineSpec, models: Sequence[Any], mesh: Mesh) -> Slice:
    """Make a model, or its stages, attend over the tokens of all sequence ranks; return how to cut a micro-batch."""
    if spec.plan.token_parts == 1:
        return lambda micro: micro
    ring = RingGroup(mesh.ring_group, mesh.context, mesh.ring_ranks) if spec.plan.cp > 1 else None
    group = SequenceGroup(mesh.ulysses_group, mesh.ulysses, spec.plan.sp)
    share = SequenceShare(group, ring, in_turn=spec.plan.pp == 1)
    return complete_texts.install(share, group, spec.model, models)


def _tensor(spec: EngineSpec, mesh: Mesh) -> Engine:
    """A replica of which each rank builds only its part: tensor shards, its experts, or both."""
    group = tensor_group(mesh) if spec.plan.tp > 1 else None
    model, weights = open_skeleton(spec.model, spec.train.seed)
    fused_kernels.install(model, spec.model)
    experts = _own_experts(spec, model, mesh)
    tokens = _sharded(spec, model, group, _not_among(experts)) if group else _loss_in_head(spec, model)
    loss = _objective(spec, tokens, mesh)
    _fill_own(model, spec, weights)
    limit = _send_to_experts(model, experts, mesh, spec.balance)
    _make_noisy(model, spec)
    if group:
        sum_partial_gradients(model, group)
    recompute_layers(model, spec.plan.recompute, keeps_last=spec.plan.zero_stage == 3)
    compiled_layers.install(model, spec.model, is_wrapped)
    seed_rank(spec.train.seed, mesh)
    check = ReplicaCheck(model.named_parameters(), group).finish if group else None
    unit = TensorUnit(mesh) if group else None
    noise = NoiseMeter(model.parameters(), mesh) if spec.noise else None  # after the hooks that complete gradients
    own = _sequence_slice(spec, [model], mesh)
    routers = _routers(spec, model, mesh, own=own, limit=limit)
    parts = ReplicaParts(unit=unit, after_backward=check, slice_batch=own, loss=loss, routers=routers, noise=noise)
    return ReplicaEngine(model, mesh, spec.train, spec.deepspeed, spec.schedule, parts)


def _fill_own(
    model: PreTrainedModel,
    spec: EngineSpec,
    weights: Weights,
    named: Mapping[str, torch.nn.Parameter] | None = None,
) -> dict[str, torch.nn.Parameter]:
    """Give a rank's part of a skeleton its weights, one tensor at a time, in the run's precision on its device."""
    device, dtype = get_accelerator().current_device_name(), DTYPES[spec.plan.precision]
    filled = fill(model, weights, named, place=lambda own: own.to(device=device, dtype=dtype))
    weights.fill_buffers(model)
    check_same_weights(filled)
    return filled


def _make_noisy(model: Any, spec: EngineSpec) -> None:
    """Let the embeddings of training samples get noise, if the recipe asks for it."""
    if spec.train.neftune_alpha:
        add_noise(model.get_input_embeddings(), spec.train.neftune_alpha)


def _autotp(spec: EngineSpec, mesh: Mesh) -> Engine:
    """DeepSpeed's AutoTP shards the full model when the engine is made, and makes the process groups itself."""
    model = _full_model(spec)
    _make_noisy(model, spec)
    seed_rank(spec.train.seed, mesh)
    parts = ReplicaParts(loss=_objective(spec, summed_loss, mesh))
    return ReplicaEngine(model, mesh, spec.train, spec.deepspeed, spec.schedule, parts)


def _pipeline(spec: EngineSpec, mesh: Mesh) -> Engine:
    plan, seed = spec.plan, spec.train.seed
    probe = emptied(hollow_model(spec.model, seed))
    bounds = plan.pipeline_bounds or even_bounds(count_layers(probe), plan.pp * plan.chunks)
    split = analyse(probe, tuple(bounds))
    group = tensor_group(mesh) if plan.tp > 1 else None
    own = stages_of(plan.schedule, plan.pp, plan.chunks, mesh.pipe)
    stages = [_stage(spec, split, index, group, mesh) for index in own]
    chunks = Chunks(stages, functools.partial(rank_of, plan.schedule, plan.pp))
    if group:
        sum_partial_gradients(chunks, group)
    for stage in stages:
        recompute_layers(stage.model, plan.recompute)
        compiled_layers.install(stage.model, spec.model, is_wrapped)
    seed_rank(seed, mesh)
    check = ReplicaCheck(chunks.parameters_by_name.items(), group).finish if group else None
    parts = PipelineParts(
        run=Transfers if plan.schedule == "1f1b" else ScheduleRun,
        after_backward=check,
        slice_batch=_sequence_slice(spec, [stage.model for stage in stages], mesh),
    )
    return PipelineEngine(chunks, mesh, spec.train, spec.deepspeed, spec.schedule, parts)


def _stage(spec: EngineSpec, split: StageSplit, index: int, group: TensorGroup | None, mesh: Mesh) -> Stage:
    """One stage with its weights, and with this rank's shards of them if there is a tensor group."""
    model, weights = open_skeleton(spec.model, spec.train.seed)
    fused_kernels.install(model, spec.model)
    experts = _own_experts(spec, model, mesh)
    if group:
        prefix = ADAPTED if spec.model.lora else ""
        outside = _not_among(experts)
        loss = _sharded(spec, model, group, lambda name: outside(name) and index in split.owners[prefix + name])
    else:
        loss = _loss_in_head(spec, model)
    table = RouterTable.of(model)
    stage = Stage(model, split, index, DTYPES[spec.plan.precision], _objective(spec, loss, mesh))
    stage.parameters_by_name = _fill_own(model, spec, weights, stage.parameters_by_name)
    limit = _send_to_experts(model, experts, mesh, spec.balance)
    if index == 0:
        _make_noisy(model, spec)
    if spec.plan.token_parts == 1:  # else loads are not counted: rows are cut
        stage.routers = _routers(spec, model, mesh, table, limit=limit)
    return stage


def _routers(
    spec: EngineSpec,
    model: torch.nn.Module,
    mesh: Mesh,
    table: RouterTable | None = None,
    own: Slice = lambda micro: micro,
    limit: Limit | None = None,
) -> RouterWatch:
    """Balance and count the routers of a mixture; `table`: those of the full model, if this is a stage of it."""
    if spec.model.task not in (None, "causal-lm") or spec.model.compile == "layers":
        return NoRouters()
    return watch_routers(model, spec.balance, mesh, table or RouterTable.of(model), own, limit)


def _own_experts(spec: EngineSpec, model: Any, mesh: Mesh) -> list[Experts]:
    """Reduce a skeleton to this rank's experts; none without expert ranks."""
    if spec.plan.ep == 1:
        return []
    experts = find_experts(unadapted(model, spec.model))
    cut_experts(model, experts, mesh.data % spec.plan.ep, spec.plan.ep)
    return experts


def _not_among(experts: Sequence[Experts]) -> Callable[[str], bool]:
    """Whether a parameter is not one of the experts', which tensor ranks hold alike."""
    names = tuple(f"{each.name}." for each in experts)
    return lambda name: not name.startswith(names)


def _send_to_experts(model: torch.nn.Module, experts: Sequence[Experts], mesh: Mesh, balance: Balance) -> Limit:
    """Let experts compute for the tokens of all ranks that share them; a stage has only those of its own layers.

    Their limit, which the routers switch on."""
    limit = Limit(balance.capacity_factor)
    held = set(model.modules())
    experts = [each for each in experts if each.module in held]
    if experts:
        group = ExpertGroup(mesh.expert_group, mesh.data % mesh.plan.ep, mesh.plan.ep)
        overlaps = len({rank // mesh.local_size for rank in mesh.expert_ranks}) > 1
        distribute(experts, group, overlaps=overlaps, limit=limit)
        hand_to_deepspeed(model, experts, mesh)
    return limit


def _objective(spec: EngineSpec, loss: Loss, mesh: Mesh) -> Loss:
    """What the recipe minimises, given the loss of tokens."""
    train = spec.train
    settings = train.preference or Preference()
    if train.label_smoothing:
        loss = smoothed(loss, train.label_smoothing)
    if train.objective is None:
        return loss
    sharing = SequenceRanks(mesh.sequence_group, mesh.sequence == 0) if mesh.plan.token_parts > 1 else None
    if train.objective == "kto":
        return UnpairedLoss(loss, settings, sharing)
    if train.objective == "reward":
        return RewardLoss(settings)
    if train.objective == "rank":
        return RankLoss(train.rank or Rank())
    if train.objective == "contrastive":
        counts = mesh.sequence == 0
        return ContrastiveLoss(train.contrastive or Contrastive(), mesh.data, mesh.plan.dp, counts=counts)
    if train.objective == "distill":
        assert train.distill is not None
        return DistillLoss(loss, train.distill)
    return PreferenceLoss(loss, train.objective, settings, sharing)


def _needs_logits(spec: EngineSpec) -> str:
    """Why the loss needs complete logits on every rank; empty if it does not."""
    return "distillation compares them with the teacher's" if spec.train.objective == "distill" else ""


def _loss_in_head(spec: EngineSpec, model: Any) -> Loss:
    """The loss that the head computes block by block; over complete logits if the model does not allow it."""
    base: Any = unadapted(model, spec.model)
    reason = _needs_logits(spec) or head_loss.why_not(spec.model) or head_loss.unfit_head(base)
    if reason:
        print(f"the loss is computed from complete logits: {reason}")
        return summed_loss
    loss = head_loss.HeadLoss(head_loss.Transform.of(base.config))
    head_loss.install(base, loss)
    return loss


def _sharded(
    spec: EngineSpec, model: Any, group: TensorGroup, owned: Callable[[str], bool] = lambda name: True
) -> Loss:
    """Reduce a skeleton to this rank's shards; a head that is sliced by vocabulary computes the loss."""
    base = unadapted(model, spec.model)
    reason = _needs_logits(spec) or head_loss.why_not(spec.model) or head_loss.unfit_head(base)
    plain = None if base is model else skeleton(spec.model)
    sliced = not reason or (follows_head(spec.model) and not _needs_logits(spec))
    shared = spec.plan.sequence_sharded
    loss = shard(base, group, owned, sliced_logits=sliced, plain=plain, shares_tokens=shared, report=print)
    if reason or not isinstance(loss, VocabularyLoss):
        print(f"the loss is computed from logits: {reason or 'the head is not sliced by vocabulary'}")
        return loss
    return loss_in_shards(base, group, loss)


def tensor_group(mesh: Mesh) -> TensorGroup:
    """The ranks that hold the shards of this rank's stage."""
    return TensorGroup(mesh.inner_group, mesh.tensor, mesh.plan.tp)


def seed_rank(seed: int, mesh: Mesh) -> None:
    """Seed dropout: the shards of a stage draw the same numbers, replicas and stages draw different ones."""
    torch.manual_seed(seed + 7919 * (mesh.data + mesh.plan.dp * mesh.pipe))
