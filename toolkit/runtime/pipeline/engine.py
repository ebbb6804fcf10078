"""Engine of pipeline parallel: DeepSpeed's pipeline with one stage per rank, behind one call per step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import deepspeed
import deepspeed.comm as dist
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe import schedule as instructions
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

from toolkit.recipe.schedules import Schedule, scaled_lr
from toolkit.recipe.sections import Train
from toolkit.runtime.distributed.mesh import Mesh
from toolkit.runtime.engine import gradient_reduction, weight_average
from toolkit.runtime.engine.deepspeed_fixups import Scaling, begin, undo_first_step, without_broadcast
from toolkit.runtime.engine.gradient_norm import GradientNormMeter
from toolkit.runtime.engine.parameter_groups import parameter_groups
from toolkit.runtime.engine.protocol import EvaluationSums, StepNumbers, StepResult
from toolkit.runtime.engine.replica import count_tokens
from toolkit.runtime.engine.training_state import Copies, DeepSpeedState, expert_copies, placed
from toolkit.runtime.metrics.step_clock import Clock, part
from toolkit.runtime.models.loss import Loss
from toolkit.runtime.models.micro_batch import MicroBatch
from toolkit.runtime.models.parameter_shards import is_tensor_slice
from toolkit.runtime.objectives.objective import TwoPass, figures_of, first_pass
from toolkit.runtime.optimizers.own_optimizers import own_optimizer
from toolkit.runtime.pipeline.schedule_run import ScheduleRun
from toolkit.runtime.pipeline.stage import Chunks
from toolkit.runtime.pipeline.transfers import EXCHANGES, Transfers


@dataclass(frozen=True, kw_only=True)
class PipelineParts:
    """What differs between pipelines."""

    run: type[Transfers] | type[ScheduleRun] = Transfers
    """Runs the order of forward and backward passes: DeepSpeed's 1F1B, or one with several chunks per rank."""
    after_backward: Callable[[], None] | None = None
    """Check called once, after the first backward pass."""
    slice_batch: Callable[[MicroBatch], MicroBatch] = lambda micro: micro
    """This rank's tokens of a micro-batch (sequence and ring ranks in a stage)."""


class PipelineEngine:
    """`Engine` of one rank of a pipeline."""

    def __init__(
        self,
        chunks: Chunks,
        mesh: Mesh,
        train: Train,
        config: dict[str, Any],
        schedule: Schedule,
        parts: PipelineParts | None = None,
    ) -> None:
        parts = parts or PipelineParts()
        self._mesh = mesh
        self._after_backward = parts.after_backward
        self._slice_batch = parts.slice_batch
        self._chunks = chunks
        self._routers = chunks.routers
        self._sums = train.grad_reduce == "sum"
        self._accumulated = mesh.plan.grad_accum
        module = StagedModule(chunks, mesh)
        optimizer, config = own_optimizer(train, config)
        with without_broadcast():
            self._engine, *_ = deepspeed.initialize(
                model=module,
                model_parameters=parameter_groups(chunks.parameters_by_name.items(), train, scaled_lr(train)),
                config=config,
                optimizer=optimizer,
                lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, schedule.factor),
            )
        self._routers.attach()
        module.sums_apart = bool(vars(self._engine.optimizer).get("use_grad_accum_attribute"))
        undo_first_step(self._engine.optimizer)
        begin(self._engine, self.state, mesh)
        if train.ema:
            weight_average.install(self._engine, self.state.base, train.ema)
        gradient_reduction.install(self._engine, train.reduce, mesh)
        self._norm = GradientNormMeter(self._engine, mesh)
        self._scaling = Scaling(self._engine, mesh.plan)
        self._run = parts.run(self._engine, mesh, chunks)
        chunks.last.prepared = self._scaling.prepared

    @property
    def replica(self) -> int:
        return self._mesh.data

    @property
    def loss(self) -> Loss:
        return self._chunks.last.loss

    @property
    def state(self) -> DeepSpeedState:
        named = self._chunks.parameters_by_name
        return DeepSpeedState(
            self._engine,
            names={p: name for name, p in named.items()},
            copies=Copies(
                index=self._mesh.data * self._mesh.plan.token_parts + self._mesh.sequence,
                count=self._mesh.token_ranks,  # sequence ranks hold full copies, as replicas do
                by_name=expert_copies(named, self._mesh),
                saves=self._saves,
            ),
            place=placed(named),
            models=self.models,
        )

    def _saves(self, name: str) -> bool:
        """The first rank that holds a name saves it: tensor rank 0, or all tensor ranks if they hold slices."""
        named = self._chunks.parameters_by_name
        if name not in named:  # a buffer: a layer is on one stage, everything else on all
            of_layer = name.startswith(tuple(f"{layers}." for layers in self._chunks.split.layers))
            return self._mesh.tensor == 0 and (of_layer or self._mesh.pipe == 0)
        sliced = is_tensor_slice(named[name])
        return self._mesh.pipe == self._chunks.owners(name)[0] and (sliced or self._mesh.tensor == 0)

    @property
    def module(self) -> torch.nn.Module:
        """This rank's part of the model: under the full model's names, unless it has several chunks."""
        return self.models[0] if len(self.models) == 1 else torch.nn.ModuleList(self.models)

    @property
    def models(self) -> list[torch.nn.Module]:
        """The part of the model in each of this rank's chunks, under the full model's names."""
        return [stage.model for stage in self._chunks]

    def step(self, batch: Sequence[MicroBatch]) -> StepResult:
        plan, whole = self._mesh.plan, batch
        batch = self._own(batch)
        tokens, weighed = (one.total for one in count_tokens(batch, self._mesh))
        first_pass(self, whole, self._mesh.sum_over_tokens)
        self._run.follow(batch)
        # DeepSpeed divides by micro-batches and replicas; this weight makes the result the mean over counted tokens.
        self._accumulate(len(batch))
        sequences = float(plan.global_batch // plan.grad_accum * len(batch) if self._sums else 1)
        self._chunks.feed(batch, sequences * len(batch) * self._mesh.token_ranks / max(weighed, 1))
        self._routers.begin(batch, sequences)
        lr = float(self._engine.get_lr()[0])
        self._scaling.begin()
        loss = self._engine.train_batch()
        if self._after_backward is not None:
            self._after_backward()
            self._after_backward = None
        scale, skipped = self._scaling.last()
        return StepResult(
            numbers=StepNumbers(
                loss=loss.squeeze() / sequences,
                grad_norm=self._scaling.unscaled(self._norm.last()),
                figures=figures_of(self.loss, weighed, self._over_replicas, loss),
                routers=self._routers.finish(),
            ),
            tokens=tokens,
            lr=lr,
            skipped=skipped,
            loss_scale=scale,
            own_nonfinite=torch.stack([stage.nonfinite.count for stage in self._chunks]).sum(0),
        )

    def _accumulate(self, micro_batches: int) -> None:
        """Set the number of micro-batches per step, which grows under a batch ramp."""
        if micro_batches != self._accumulated:
            engine, self._accumulated = self._engine, micro_batches
            engine.set_train_batch_size(engine.train_micro_batch_size_per_gpu() * engine.dp_world_size * micro_batches)

    def watch(self, clock: Clock) -> None:
        """Attribute each instruction of DeepSpeed's schedule to a part of the step (`_INSTRUCTION_MAP` of 0.19.8)."""
        self._run.clock = clock
        known = type(self._engine)._INSTRUCTION_MAP
        self._engine._INSTRUCTION_MAP = {kind: _timed(run, _PARTS[kind], clock) for kind, run in known.items()}

    def look(self, batch: Sequence[MicroBatch]) -> None:
        self._mean(self._own(batch))

    def _own(self, batch: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        """This rank's tokens of micro-batches."""
        return batch if self._mesh.plan.token_parts == 1 else [self._slice_batch(micro) for micro in batch]

    def evaluate(self, batch: Sequence[MicroBatch]) -> EvaluationSums:
        whole, batch = batch, self._own(batch)
        weighed = count_tokens(batch, self._mesh)[1].total
        if isinstance(self.loss, TwoPass):
            own = first_pass(self, whole, self._mesh.sum_over_tokens)
            nothing = torch.zeros(2, dtype=torch.float64, device=self._engine.device)
            total, correct = self._over_replicas(nothing if own is None else own).tolist()
            return EvaluationSums(total, weighed, int(correct))
        mean = self._mean(batch)
        hits = self._over_replicas(torch.stack([stage.correct for stage in self._chunks]).sum(0))
        return EvaluationSums(float(mean) * len(batch) * self._mesh.token_ranks, weighed, int(hits))

    def _mean(self, batch: Sequence[MicroBatch]) -> torch.Tensor:
        """Mean loss of all micro-batches of all replicas, without gradients."""
        self._run.follow(batch)
        self._chunks.feed(batch, 1.0)
        mean: torch.Tensor = self._engine.eval_batch(iter(()), num_micro_batches=len(batch))
        self._engine.module.train()
        return mean

    def _over_replicas(self, values: torch.Tensor) -> torch.Tensor:
        """Sum of the last stages' values, on every rank: their tensor ranks have the same, other stages have 0."""
        return self._mesh.sum_over_shards(self._mesh.sum_over_tokens(values)) / self._mesh.plan.tp


_PARTS = {
    instructions.LoadMicroBatch: "data",
    instructions.ForwardPass: "forward",
    instructions.BackwardPass: "backward",
    **dict.fromkeys(EXCHANGES, "pp_comm"),
    instructions.ReduceGrads: "grad_sync",
    instructions.ReduceTiedGrads: "grad_sync",
    instructions.OptimizerStep: "optimizer",
}


def _timed(run: Callable[..., Any], name: str, clock: Clock) -> Callable[..., Any]:
    def instruction(engine: Any, *args: Any, **kwargs: Any) -> Any:
        with part(clock, name):
            return run(engine, *args, **kwargs)

    return instruction


class StagedModule(PipelineModule):  # type: ignore[misc]
    """DeepSpeed's `PipelineModule` with one layer per rank: its stages. Shared parameters come from our own split."""

    def __init__(self, chunks: Chunks, mesh: Mesh) -> None:
        plan, ranks = mesh.plan, mesh.token_ranks  # to DeepSpeed, sequence ranks are data-parallel ranks
        self._shared: list[tuple[torch.nn.Parameter, Any]] = []
        self.sums_apart = False
        """Whether DeepSpeed's ZeRO optimizer sums gradients in an attribute of its own."""
        topology = PipeModelDataParallelTopology(num_pp=plan.pp, num_mp=plan.tp, num_dp=ranks)
        layers = [_Built(chunks) for _ in range(plan.pp)]
        super().__init__(layers=layers, topology=topology, partition_method="uniform", dynamic_shape=False)

    def _index_tied_modules(self) -> dict[str, Any]:
        """Create the groups that sum gradients of shared parameters; mark what counts in DeepSpeed's gradient norm.

        DeepSpeed 0.19.8 calls this private method once, to find `TiedLayerSpec`s; we have none. Without the marks its
        norm under ZeRO 1 counts shared parameters twice and misses shards. If the method is renamed, the pipeline tests
        with tied embeddings fail.
        """
        chunks: Chunks = self.forward_funcs[0]
        for parameter in chunks.parameters():
            # ZeRO 1 counts marked parameters on every rank of a replica, and others on its first rank only.
            counts = is_tensor_slice(parameter) or self._grid.get_slice_parallel_rank() == 0
            parameter.model_parallel = counts  # type: ignore[attr-defined]
        groups: dict[tuple[int, ...], tuple[Any, list[int]]] = {}
        for name, stages in chunks.shared:
            if stages not in groups:
                groups[stages] = self._shared_group(stages)
            group, ranks = groups[stages]
            if self.global_rank in ranks:
                parameter = chunks.parameters_by_name[name]
                self._shared.append((parameter, group))
                parameter.ds_pipe_replicated = self.global_rank != ranks[0]  # type: ignore[attr-defined]
        return {}

    def _shared_group(self, stages: tuple[int, ...]) -> tuple[Any, list[int]]:
        """The group of these stages' ranks with this rank's replica and shard; every rank creates every group."""
        own: tuple[Any, list[int]] = (None, [])
        for data in range(self._grid.data_parallel_size):
            for model in range(self._grid.get_slice_parallel_world_size()):
                ranks = [self._grid.stage_to_global(stage_id=stage, data=data, model=model) for stage in stages]
                group = dist.new_group(ranks=ranks)
                if self.global_rank in ranks:
                    own = (group, ranks)
        return own

    def get_tied_weights_and_groups(self) -> list[tuple[torch.nn.Parameter, Any]]:
        """Shared parameters whose gradients DeepSpeed sums after the backward passes.

        DeepSpeed 0.19.8 skips a parameter without a gradient (`_exec_reduce_tied_grads`). If another stage has one,
        that stage waits forever. So missing gradients become zeros. This can go when it reduces missing gradients too.
        It also looks for gradients in `grad` only; ZeRO in 16 bits that sums micro-batches in fp32 has them in
        `grad_accum`, which is summed here. That can go when the test of tied weights with offload passes without it.
        """
        if self.sums_apart:
            for parameter, group in self._shared:
                if parameter.grad_accum is None:  # type: ignore[attr-defined]
                    parameter.grad_accum = torch.zeros_like(parameter, dtype=torch.float32)  # type: ignore[attr-defined]
                dist.all_reduce(parameter.grad_accum, group=group)  # type: ignore[attr-defined]
            return []
        for parameter, _ in self._shared:
            if parameter.grad is None and getattr(parameter, "_hp_grad", None) is None:
                parameter.grad = torch.zeros_like(parameter)
        return self._shared


class _Built(LayerSpec):  # type: ignore[misc]
    """A layer spec whose module exists already; DeepSpeed builds only the specs of this rank's stage."""

    def __init__(self, chunks: Chunks) -> None:
        super().__init__(Chunks)
        self._chunks = chunks

    def build(self, log: bool = False) -> Chunks:
        return self._chunks
