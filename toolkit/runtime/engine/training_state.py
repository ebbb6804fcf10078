"""The training state inside a DeepSpeed engine, as fragments of Hugging Face parameters.

DeepSpeed 0.19.8 has no interface to the fragments of masters and moments, so each of its optimizer wrappers is read by
one small function here (`_held_…`), through private attributes. A renamed attribute fails in
tests/runtime/checkpoint/test_checkpoint.py, which saves and resumes under every wrapper.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from toolkit.checkpoints import element_runs
from toolkit.checkpoints.element_runs import Region
from toolkit.errors import CheckpointFailed
from toolkit.runtime.checkpoint.fragments import AVERAGE, BUFFER, WEIGHT, Fragment, Held, held_fragments
from toolkit.runtime.distributed.mesh import Mesh
from toolkit.runtime.models.parameter_shards import holds_experts, layout_of
from toolkit.runtime.optimizers.adafactor import Adafactor
from toolkit.runtime.optimizers.packed_optimizer import PackedOptimizer
from toolkit.runtime.optimizers.schedule_free import ScheduleFree


class FullSlice(NamedTuple):
    """Position of elements of a rank's tensor in the full parameter."""

    name: str
    """Hugging Face name of the full parameter."""
    shape: tuple[int, ...]
    """Shape of the full parameter."""
    region: Region
    """The elements in the full parameter."""


SliceLocator = Callable[[str, int, int], FullSlice]
"""(name, start, stop) in this rank's tensor → position in the full parameter."""
NOT_STATES = (WEIGHT, BUFFER, "outer_momentum", "exchange_error")
"""Kinds in a checkpoint that are not states of this optimizer; neither are kinds with `@`, of other islands."""
PACKED = (PackedOptimizer, Adafactor)
"""Optimizers that store states in another form than checkpoints do."""
_SCALER_KEYS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


@dataclass(frozen=True, kw_only=True)
class Copies:
    """Which ranks hold the same elements as this one, and what this rank saves of them."""

    index: int
    """This rank among the ranks that hold a full copy of its shard."""
    count: int
    """Number of those ranks."""
    by_name: Callable[[str], tuple[int, int]] | None = None
    """(index, count) of one parameter, where it differs between parameters (experts)."""
    saves: Callable[[str], bool] = lambda name: True
    """Whether this rank's stage or tensor shard saves a name that others hold too."""

    def of(self, name: str) -> tuple[int, int]:
        """(index, count) of a parameter."""
        return self.by_name(name) if self.by_name else (self.index, self.count)


class DeepSpeedState:
    """`Stateful` over a DeepSpeed engine of any ZeRO stage and precision."""

    def __init__(
        self,
        engine: Any,
        *,
        names: Mapping[torch.Tensor, str],
        copies: Copies,
        place: SliceLocator,
        models: Sequence[torch.nn.Module] = (),
    ) -> None:
        """`names`: this rank's name of each parameter. `place`: where its elements are in the full parameter.
        `models`: the modules whose buffers are saved, if that is not the engine's; of a buffer that several of them
        have, the first is saved and all are restored.
        """
        self._engine, self.names = engine, names
        self._copies, self._place, self._models = copies, place, models or [engine.module]
        self._expanded: tuple[torch.Tensor, dict[str, Any]] | None = None
        self._sharded = isinstance(
            engine.optimizer, (DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3, BF16_Optimizer)
        )

    def fragments(self) -> Iterator[Fragment]:
        if vars(self._engine.optimizer).get("swap_optimizer"):  # only ZeRO 3 has it
            raise CheckpointFailed(
                "the optimizer's states are on NVMe, where this version can't save them; use strategy.offload=cpu"
            )
        self._expanded = None
        for own_name, held in self.held():
            copy, count = (0, 1) if self._sharded else self._copies.of(own_name)
            for fragment in held_fragments([held], self._states(held.master), copy, count):
                yield fragment if self._copies.saves(own_name) else replace(fragment, copy=count)
        seen: set[str] = set()
        for name, buffer in itertools.chain.from_iterable(map(persistent_buffers, self._models)):
            saves = self._copies.saves(name) and name not in seen
            seen.add(name)
            yield Fragment(
                name=name,
                kind=BUFFER,
                shape=tuple(buffer.shape),
                region=element_runs.flat(0, buffer.numel()),
                tensor=buffer.view(-1),
                copy=self._copies.index if saves else self._copies.count,
                copies=self._copies.count,
            )

    def drain(self) -> None:
        """Nothing to do: no communication is in transit between steps."""

    def prepare(self, kinds: Mapping[str, Collection[str]], steps: int) -> None:
        for _, item in self.held():
            wanted = {kind for kind in kinds[item.name] if kind not in NOT_STATES and "@" not in kind}
            state = self.base.state[item.master] if wanted else {}
            for kind in wanted - state.keys():
                # States that are packed afterwards need not fit on the device in fp32.
                packed = isinstance(self.base, PACKED) and kind != AVERAGE
                place = "cpu" if packed else item.master.device
                state[kind] = torch.zeros_like(item.master, memory_format=torch.preserve_format, device=place)
            if wanted:
                state["step"] = self._step_value(item.master, steps)

    @torch.no_grad()
    def refresh(self) -> None:
        optimizer = self._engine.optimizer
        if isinstance(self.base, PACKED):
            self.base.pack()
        if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
            _refresh_stage3(optimizer)
        elif isinstance(optimizer, (DeepSpeedZeroOptimizer, BF16_Optimizer)):
            optimizer.update_lp_params()
        elif isinstance(optimizer, FP16_UnfusedOptimizer):
            for masters, weights in zip(optimizer.fp32_groups, optimizer.fp16_groups, strict=True):
                for master, weight in zip(masters, weights, strict=True):
                    weight.data.copy_(master.data)

    @contextmanager
    def weights_replaced(self) -> Iterator[None]:
        """Inside this context the tensors that hold the weights may be given other data; collective under ZeRO 3.

        Gathered parameters are released before, and those that ZeRO 3 keeps gathered are gathered again afterwards.
        """
        optimizer = self._engine.optimizer
        if not isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
            yield
            return
        optimizer._partition_all_parameters()
        yield
        _gather_persistent(optimizer)

    def buffers(self) -> list[torch.Tensor]:
        """Persistent buffers of this rank's models."""
        return [buffer for model in self._models for _, buffer in persistent_buffers(model)]

    def counters(self) -> dict[str, float]:
        engine = self._engine
        steps = [int(state["step"]) for state in self.base.state.values() if "step" in state]
        return {
            "optimizer_steps": max(steps, default=0),
            "scheduler_steps": engine.lr_scheduler.last_epoch,
            "skipped_steps": engine.skipped_steps,
            **(self.base.counters if isinstance(self.base, ScheduleFree) else {}),
            **{f"loss_scale.{key}": float(value) for key, value in self._scaler().items()},
        }

    def set_counters(self, counters: dict[str, float]) -> None:
        engine, scheduler = self._engine, self._engine.lr_scheduler
        scheduler.last_epoch = int(counters["scheduler_steps"])
        for group, base, factor in zip(
            scheduler.optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True
        ):
            group["lr"] = base * factor(scheduler.last_epoch)
        scheduler._last_lr = [group["lr"] for group in scheduler.optimizer.param_groups]
        engine.skipped_steps = int(counters["skipped_steps"])
        if isinstance(self.base, ScheduleFree):
            self.base.resume_at(int(counters["optimizer_steps"]), counters)
        for key, value in self._scaler().items():
            if f"loss_scale.{key}" in counters:
                setattr(self._scaler_object, key, type(value)(counters[f"loss_scale.{key}"]))

    def _states(self, master: torch.Tensor) -> dict[torch.Tensor, dict[str, Any]]:
        """The optimizer's states of one of its tensors; packed ones in fp32, of the last tensor that was asked for."""
        if not isinstance(self.base, PACKED):
            return self.base.state  # type: ignore[no-any-return]
        if self._expanded is None or self._expanded[0] is not master:
            self._expanded = (master, self.base.expanded(master))
        return {master: self._expanded[1]}

    @property
    def base(self) -> Any:
        """The torch optimizer that does the updates."""
        optimizer = self._engine.optimizer
        return optimizer if isinstance(optimizer, torch.optim.Optimizer) else optimizer.optimizer

    @property
    def _scaler_object(self) -> Any:
        """The fp16 loss scaler. Its attribute name depends on the optimizer wrapper (DeepSpeed 0.19.8)."""
        attributes = vars(self._engine.optimizer)
        return attributes.get("loss_scaler") or attributes.get("loss_scale_config")

    def _scaler(self) -> dict[str, Any]:
        """Counters of the loss scaler; empty unless the precision is fp16."""
        counted = vars(self._scaler_object) if self._engine.fp16_enabled() else {}
        return {key: counted[key] for key in _SCALER_KEYS if isinstance(counted.get(key), int | float)}

    def _step_value(self, master: torch.Tensor, steps: int) -> Any:
        """A step count as the optimizer stores it: a tensor for torch's fused Adam, an int otherwise."""
        if isinstance(self.base, (torch.optim.Adam, torch.optim.AdamW)):
            return torch.tensor(float(steps), dtype=torch.float32, device=master.device)
        return steps

    def full_name(self, parameter: torch.Tensor) -> str:
        """Hugging Face name of a parameter."""
        return self._place(self.names[parameter], 0, 0).name

    def masters(self) -> Iterator[tuple[torch.Tensor, list[torch.Tensor]]]:
        """Every tensor that the optimizer updates, with the parameters of which it holds elements on some rank."""
        optimizer = self._engine.optimizer
        if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
            yield from zip(optimizer.fp32_partitioned_groups_flat, optimizer.fp16_groups, strict=True)
        elif isinstance(optimizer, DeepSpeedZeroOptimizer):
            yield from zip(optimizer.single_partition_of_fp32_groups, optimizer.bit16_groups, strict=True)
        elif isinstance(optimizer, BF16_Optimizer):
            yield from zip(optimizer.fp32_groups_flat_partition, optimizer.bf16_groups, strict=True)
        else:
            for parameter, master, *_ in self._found():
                yield master, [parameter]

    def held(self) -> Iterator[tuple[str, Held]]:
        """Everything that this rank's optimizer updates, with this rank's parameter name."""
        for parameter, master, start, low, high in self._found():
            name = self.names[parameter]
            whole, shape, region = self._place(name, low, high)
            if region:
                yield name, Held(name=whole, shape=shape, region=region, master=master, start=start)

    def _found(self) -> Found:
        optimizer = self._engine.optimizer
        if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
            return _held_stage3(optimizer)
        if isinstance(optimizer, DeepSpeedZeroOptimizer):
            return _held_mapped(optimizer.bit16_groups, optimizer.single_partition_of_fp32_groups)
        if isinstance(optimizer, BF16_Optimizer):
            return _held_mapped(optimizer.bf16_groups, optimizer.fp32_groups_flat_partition)
        if isinstance(optimizer, FP16_UnfusedOptimizer):
            return _held_complete(optimizer.fp16_groups, optimizer.fp32_groups)
        groups = [group["params"] for group in optimizer.param_groups]
        return _held_complete(groups, groups)


Found = Iterator[tuple[torch.Tensor, torch.Tensor, int, int, int]]
"""(model's parameter, optimizer's tensor, start in that tensor, start and stop in the flattened parameter)."""


def _held_complete(groups: list[list[torch.Tensor]], masters: list[list[torch.Tensor]]) -> Found:
    """Without ZeRO: every parameter is complete."""
    for parameters, own in zip(groups, masters, strict=True):
        for parameter, master in zip(parameters, own, strict=True):
            yield parameter, master, 0, 0, parameter.numel()


def _held_mapped(groups: list[list[Any]], partitions: list[torch.Tensor]) -> Found:
    """ZeRO 1 and 2: `_hp_mapping` maps a parameter to its part of this rank's flat partition."""
    for parameters, partition in zip(groups, partitions, strict=True):
        for parameter in parameters:
            mapping = parameter._hp_mapping
            if mapping is not None:
                inside, there = mapping.lp_fragment_address, mapping.hp_fragment_address
                yield parameter, partition, there.start, inside.start, inside.start + inside.numel


def _held_stage3(optimizer: Any) -> Found:
    """ZeRO 3: each parameter is split into equal parts, the last one padded."""
    for group in optimizer.fp16_groups:
        for parameter in group:
            number, start, length = optimizer.grad_position[optimizer.get_param_id(parameter)]
            low = optimizer._get_param_partition_rank(parameter) * length
            master = optimizer.fp32_partitioned_groups_flat[number]
            yield parameter, master, start, min(low, parameter.ds_numel), min(low + length, parameter.ds_numel)


def _refresh_stage3(optimizer: Any) -> None:
    """Copy masters to the 16-bit partitions and to the parameters that are kept gathered.

    DeepSpeed 0.19.8 does this only at the end of its own step. Without it a resumed run would compute its first forward
    pass with the old weights. It can go when ZeRO 3 has an `update_lp_params`, as ZeRO 1 and 2 have.
    """
    optimizer._partition_all_parameters()
    for number in range(len(optimizer.fp16_groups)):
        optimizer._reassign_or_swap_out_partitioned_parameters(number)
    _gather_persistent(optimizer)


def _gather_persistent(optimizer: Any) -> None:
    """Gather the parameters that stay gathered, from shards that have changed; forget hpZ's second copy of them."""
    if optimizer.persistent_parameters:
        optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)
    optimizer.invalidate_secondary_tensor()


def persistent_buffers(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Buffers that are part of the model's state dict."""
    for prefix, child in module.named_modules():
        for name, buffer in child._buffers.items():
            if buffer is not None and name not in child._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def expert_copies(named: Mapping[str, torch.nn.Parameter], mesh: Mesh) -> Callable[[str], tuple[int, int]] | None:
    """(index of this rank among those that hold a parameter's elements, their number); None without expert ranks."""
    plan = mesh.plan
    if plan.ep == 1:
        return None
    sequence_ranks = mesh.token_ranks // plan.dp

    def of(name: str) -> tuple[int, int]:
        group = plan.ep if name in named and holds_experts(named[name]) else 1
        return mesh.data // group * sequence_ranks + mesh.sequence, plan.dp // group * sequence_ranks

    return of


def placed(named: Mapping[str, torch.nn.Parameter]) -> SliceLocator:
    """Locates elements of this rank's parameters in the full parameters."""

    def place(name: str, low: int, high: int) -> FullSlice:
        parameter = named[name]
        layout = layout_of(parameter)
        if layout is None:
            return FullSlice(name, tuple(getattr(parameter, "ds_shape", parameter.shape)), element_runs.flat(low, high))
        return FullSlice(name, layout.shape, element_runs.slice_runs(layout.region(), low, high))

    return place
