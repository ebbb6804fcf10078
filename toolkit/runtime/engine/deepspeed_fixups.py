"""Corrections to a new DeepSpeed engine before its first step."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator
from typing import Any

import deepspeed
import torch
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

from toolkit.checkpoints import element_runs
from toolkit.plans.plan import Plan
from toolkit.runtime.distributed.mesh import Mesh
from toolkit.runtime.distributed.process_group import all_max, all_sum, device
from toolkit.runtime.engine.training_state import DeepSpeedState
from toolkit.runtime.models.parameter_shards import layout_of, model_shape
from toolkit.runtime.optimizers.adafactor import Adafactor, Layout, factors
from toolkit.runtime.optimizers.muon import Muon
from toolkit.runtime.optimizers.onebit_adam import OneBitAdam, OneBitExchange
from toolkit.runtime.optimizers.own_optimizers import LayerwiseOptimizer
from toolkit.runtime.optimizers.packed_optimizer import PackedOptimizer
from toolkit.runtime.optimizers.packed_states import Packing, Piece, blocks, cut_blocks, rounded
from toolkit.runtime.optimizers.partition import Group, Partition
from toolkit.runtime.optimizers.schedule_free import ScheduleFree
from toolkit.runtime.optimizers.update_rules import Layers, Span
from toolkit.runtime.optimizers.whole_matrices import WholeMatrices, find_matrices


@contextlib.contextmanager
def without_broadcast() -> Iterator[None]:
    """Make an engine that does not send the weights of the first replica to all others.

    Every rank has read or drawn its own weights, and ranks have compared them (`weight_digests.py`). The broadcast of
    DeepSpeed 0.19.8 (`DeepSpeedEngine._broadcast_model`) takes as long as reading them. This can go when there is a
    setting for it.
    """
    engine: Any = DeepSpeedEngine
    broadcast = engine._broadcast_model
    engine._broadcast_model = lambda self: None
    try:
        yield
    finally:
        engine._broadcast_model = broadcast


def follow_as_one(model: torch.nn.Module) -> None:
    """Let ZeRO 3 not look into modules that hold a matrix per expert.

    DeepSpeed 0.19.8 fetches ahead by the order in which modules ran, those without parameters included. LongCat's
    experts call an identity only if a token visits it, so ranks fetched in different orders, and waited for ever.
    This can go when modules without parameters are left out of that order.
    """
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        matrices = any(len(getattr(one, "ds_shape", one.shape)) == 3 for one in own)
        if matrices and next(module.children(), None) and len(own) == len(list(module.parameters())):
            deepspeed.utils.set_z3_leaf_module(module, True)


def undo_first_step(optimizer: Any) -> None:
    """Give a 16-bit optimizer without ZeRO its fresh state back.

    DeepSpeed 0.19.8 takes a step with zero gradients when it creates one (`FP16_UnfusedOptimizer.
    initialize_optimizer_states`). Adam's step count is then one ahead, so bias correction shortens the first updates,
    and weight decay has been applied once. The losses of bf16 data parallel then differ from those of ZeRO 1. This can
    go when `optimizer.optimizer.state` is empty after `deepspeed.initialize`.
    """
    if not isinstance(optimizer, FP16_UnfusedOptimizer):
        return
    optimizer.optimizer.state.clear()
    for masters, weights in zip(optimizer.fp32_groups, optimizer.fp16_groups, strict=True):
        for master, weight in zip(masters, weights, strict=True):
            master.data.copy_(weight.data)


def skip_batch_check(engine: Any) -> None:
    """Remove AutoTP's check of the first batch, which unpickles what other ranks send.

    DeepSpeed 0.19.8 broadcasts the batch as pickled objects in a forward pre-hook, `first_dataloader_check`, to compare
    it within the tensor group; here the ranks of a group get the same samples by construction. This can go when
    `DeepSpeedEngine` no longer calls `broadcast_object_list`.
    """
    check = getattr(engine, "first_dataloader_check", None)
    if check is not None:
        check.remove()
        engine.first_dataloader_check = None


def begin(engine: Any, state: DeepSpeedState, mesh: Mesh) -> None:
    """Give an optimizer of ours its exchange, layers or matrices, and let it take steps from now on. Collective."""
    if isinstance(state.base, OneBitAdam):
        _begin_one_bit(engine, state.base, mesh)
    if isinstance(state.base, LayerwiseOptimizer):
        whole = mesh.plan.zero_stage == 0 and mesh.plan.tp == 1
        state.base.begin(Layers() if whole else _sharded(state, mesh))
    if isinstance(state.base, Muon):
        _begin_muon(state, state.base, mesh)
    if isinstance(state.base, ScheduleFree):
        state.base.begin()
    if isinstance(state.base, Adafactor):
        state.base.begin(dict(_factored(state, mesh)))
    if isinstance(state.base, PackedOptimizer):
        _begin_packed(state, state.base, mesh)


def _begin_packed(state: DeepSpeedState, optimizer: PackedOptimizer, mesh: Mesh) -> None:
    """Tell the optimizer which elements of which parameters its tensors hold, and which blocks ranks share."""
    group = Group.of(mesh)
    pieces: dict[torch.Tensor, list[Piece]] = {}
    for _, held in state.held():
        pieces.setdefault(held.master, []).append(Piece(held.name, held.start, held.region))
    packings: dict[torch.Tensor, Packing] = {}
    for master, parameters in state.masters():
        own = pieces.get(master, [])
        if optimizer.states == "bf16":
            packings[master] = rounded(own)
            continue
        partition = Partition(parameters, group, mesh.plan.zero_stage)
        cut = sorted(
            block
            for number, parameter in enumerate(parameters)
            for block in cut_blocks(state.full_name(parameter), [region for _, region in partition.regions(number)])
        )
        together = functools.partial(all_max, group=group.process_group)
        packings[master] = blocks(own, cut, together if group.size > 1 else lambda values: values, master.device)
    optimizer.begin(packings)


def _begin_muon(state: DeepSpeedState, optimizer: Muon, mesh: Mesh) -> None:
    """Tell Muon which ranks hold the matrices, and print how many parameters each of its rules updates."""
    group = Group.of(mesh)
    matched = {name for parameter, name in state.names.items() if optimizer.matches(name, model_shape(parameter))}
    matrices = find_matrices(state, mesh, group, matched.__contains__)
    # In fp32, ranks that sum in another order still agree to 1e-6. In 16 bits, bf16 is as exact as the gradients.
    optimizer.begin(WholeMatrices(matrices, group, torch.float32 if mesh.plan.precision == "fp32" else torch.bfloat16))
    sizes = {name: math.prod(model_shape(parameter)) for parameter, name in state.names.items()}
    trained = [name for parameter, name in state.names.items() if parameter.requires_grad]
    whole, orthogonal = sum(sizes[name] for name in trained), sum(sizes[name] for name in trained if name in matched)
    print(
        f"muon: {len(matrices)} matrices with {orthogonal:,} parameters ({orthogonal / max(whole, 1):.1%}) get "
        f"orthogonal updates, the other {whole - orthogonal:,} AdamW's"
    )


def _factored(state: DeepSpeedState, mesh: Mesh) -> Iterator[tuple[torch.Tensor, Layout]]:
    """Which rows and columns of which parameters each of Adafactor's tensors holds on this rank."""
    held = {name: Piece(name, piece.start, piece.region) for name, piece in state.held()}
    for master, parameters in state.masters():
        pieces = [held.get(state.names[parameter]) for parameter in parameters]
        sliced = torch.tensor([layout_of(parameter) is not None for parameter in parameters], device=master.device)
        shapes = [model_shape(parameter) for parameter in parameters]
        yield master, Layout(factors(shapes, pieces), sliced, functools.partial(_summed, mesh))


def _summed(mesh: Mesh, values: torch.Tensor, sliced: torch.Tensor) -> torch.Tensor:
    """Over the ranks that share a partition, then over tensor ranks, which all hold what is not sliced."""
    if mesh.plan.zero_stage:
        values = mesh.sum_over_tokens(values)
    return values if mesh.plan.tp == 1 else torch.where(sliced, all_sum(values.clone(), mesh.inner_group), values)


def _begin_one_bit(engine: Any, optimizer: OneBitAdam, mesh: Mesh) -> None:
    """Switch off the engine's gradient reduction once the optimizer exchanges compressed momentum itself.

    DeepSpeed removed its own 1-bit Adam in 0.19.7, and with it the switch that did this.
    """
    ranks = mesh.plan.dp
    optimizer.begin(OneBitExchange(ranks, mesh.data, mesh.data_group) if ranks > 1 else None)
    reduce = engine.allreduce_gradients
    engine.allreduce_gradients = lambda *args, **kwargs: None if optimizer.compresses else reduce(*args, **kwargs)


def _sharded(state: DeepSpeedState, mesh: Mesh) -> Layers:
    """The layers inside ZeRO's flat partitions, which hold pieces of many layers, and inside tensor shards."""
    numbers = {name: number for number, name in enumerate(sorted(state.names.values()))}
    sliced = torch.zeros(len(numbers), dtype=torch.bool, device=device())
    for parameter, name in state.names.items():
        sliced[numbers[name]] = layout_of(parameter) is not None
    spans: dict[torch.Tensor, list[Span]] = {}
    for name, held in state.held():
        stop = held.start + element_runs.size(held.region)
        spans.setdefault(held.master, []).append(Span(numbers[name], held.start, stop))

    return Layers(spans, len(numbers), lambda squares: _summed(mesh, squares, sliced))


class Scaling:
    """Loss scale and skipped updates of fp16, as DeepSpeed counts them.

    Without ZeRO, DeepSpeed 0.19.8 divides gradients by a loss scale that it never multiplied the loss by, and reports a
    norm that is not divided by it. Small gradients then underflow, and no scale is ever found too large. So here we
    multiply the loss and divide the norm. This can go when `tests/runtime/engine/test_loss_scale.py` passes without it.
    """

    def __init__(self, engine: Any, plan: Plan) -> None:
        self._engine = engine
        self._scales = plan.precision == "fp16"
        self._by_us = self._scales and plan.zero_stage == 0
        self._used = 1.0
        self._skipped = 0

    def begin(self) -> None:
        """Start a step; its loss scale stays the same until its end."""
        if self._by_us:
            self._used = float(self._engine.optimizer.loss_scale)

    def prepared(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss, with a hook that scales its gradient as the engine expects."""
        if self._by_us and loss.requires_grad:
            loss.register_hook(lambda gradient: gradient * self._used)  # type: ignore[no-untyped-call]
        return loss

    def unscaled(self, norm: torch.Tensor | float) -> torch.Tensor | float:
        """Remove the loss scale from a norm that the engine reports."""
        return norm / self._used if self._by_us else norm

    def last(self) -> tuple[float | None, bool]:
        """(loss scale of the next step, whether the last step was skipped)."""
        if not self._scales:
            return None, False
        before, self._skipped = self._skipped, int(self._engine.skipped_steps)
        return float(self._engine.optimizer.loss_scale), self._skipped > before
