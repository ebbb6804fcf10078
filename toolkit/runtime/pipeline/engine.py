"""Engine of pipeline parallel: DeepSpeed's pipeline with one stage per rank, behind one call per step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from toolkit.runtime.engine import gradient_reduction
from toolkit.runtime.engine.deepspeed_fixups import Scaling, begin, undo_first_step
from toolkit.runtime.engine.gradient_norm import GradientNormMeter
from toolkit.runtime.engine.optimizers import own_optimizer
from toolkit.runtime.engine.parameter_groups import parameter_groups
from toolkit.runtime.engine.protocol import EvaluationSums, StepNumbers, StepResult, figures_of
from toolkit.runtime.engine.replica import count_tokens
from toolkit.runtime.engine.training_state import Copies, DeepSpeedState, expert_copies, placed
from toolkit.runtime.metrics.step_clock import Clock, part
from toolkit.runtime.models.loss import Loss
from toolkit.runtime.models.micro_batch import MicroBatch
from toolkit.runtime.models.parameter_shards import is_tensor_slice
from toolkit.runtime.pipeline.stage import Stage
from toolkit.runtime.pipeline.transfers import EXCHANGES, Transfers


class PipelineEngine:
    """`Engine` of one rank of a pipeline."""

    def __init__(
        self,
        stage: Stage,
        mesh: Mesh,
        train: Train,
        config: dict[str, Any],
        schedule: Schedule,
        after_backward: Callable[[], None] | None = None,
    ) -> None:
        self._mesh = mesh
        self._after_backward = after_backward
        self._stage = stage
        self._shape: torch.Size | None = None
        self._scale = float(mesh.plan.global_batch if train.grad_reduce == "sum" else 1)
        module = StagedModule(stage, mesh)
        optimizer, config = own_optimizer(train, config)
        self._engine, *_ = deepspeed.initialize(
            model=module,
            model_parameters=parameter_groups(stage.parameters_by_name.items(), train, scaled_lr(train)),
            config=config,
            optimizer=optimizer,
            lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, schedule.factor),
        )
        stage.routers.attach()
        undo_first_step(self._engine.optimizer)
        begin(self._engine, self.state, mesh)
        gradient_reduction.install(self._engine, train.reduce, mesh)
        self._norm = GradientNormMeter(self._engine, mesh)
        self._scaling = Scaling(self._engine, mesh.plan)
        self._transfers = Transfers(self._engine, mesh)
        stage.prepared = self._scaling.prepared

    @property
    def replica(self) -> int:
        return self._mesh.data

    @property
    def loss(self) -> Loss:
        return self._stage.loss

    @property
    def state(self) -> DeepSpeedState:
        named = self._stage.parameters_by_name
        return DeepSpeedState(
            self._engine,
            names={p: name for name, p in named.items()},
            copies=Copies(
                index=self._mesh.data,
                count=self._mesh.plan.dp,
                by_name=expert_copies(named, self._mesh),
                saves=self._saves,
            ),
            place=placed(named),
            model=self._stage.model,
        )

    def _saves(self, name: str) -> bool:
        """The first stage that holds a name saves it: tensor rank 0, or all tensor ranks if they hold slices."""
        split, named = self._stage.split, self._stage.parameters_by_name
        if name not in named:  # a buffer: a layer is on one stage, everything else on all
            return self._mesh.tensor == 0 and (name.startswith(f"{split.layers}.") or self._mesh.pipe == 0)
        sliced = is_tensor_slice(named[name])
        return self._mesh.pipe == min(split.owners[name]) and (sliced or self._mesh.tensor == 0)

    @property
    def module(self) -> torch.nn.Module:
        """This stage's part of the model, under the full model's names."""
        model: torch.nn.Module = self._stage.model
        return model

    def step(self, batch: Sequence[MicroBatch]) -> StepResult:
        plan = self._mesh.plan
        tokens, weighed = (one.total for one in count_tokens(batch, self._mesh))
        self._follow_shape(batch[0])
        # DeepSpeed divides by micro-batches and replicas; this weight makes the result the mean over counted tokens.
        self._stage.feed(batch, self._scale * plan.grad_accum * plan.dp / max(weighed, 1))
        self._stage.routers.begin(batch, self._scale)
        lr = float(self._engine.get_lr()[0])
        self._scaling.begin()
        loss = self._engine.train_batch()
        if self._after_backward is not None:
            self._after_backward()
            self._after_backward = None
        scale, skipped = self._scaling.last()
        return StepResult(
            numbers=StepNumbers(
                loss=loss.squeeze() / self._scale,
                grad_norm=self._scaling.unscaled(self._norm.last()),
                figures=figures_of(self._stage.loss, weighed, self._over_replicas, loss),
                routers=self._stage.routers.finish(),
            ),
            tokens=tokens,
            lr=lr,
            skipped=skipped,
            loss_scale=scale,
            own_nonfinite=self._stage.nonfinite.count.clone(),
        )

    def watch(self, clock: Clock) -> None:
        """Attribute each instruction of DeepSpeed's schedule to a part of the step (`_INSTRUCTION_MAP` of 0.19.8)."""
        self._transfers.clock = clock
        known = type(self._engine)._INSTRUCTION_MAP
        self._engine._INSTRUCTION_MAP = {kind: _timed(run, _PARTS[kind], clock) for kind, run in known.items()}

    def evaluate(self, batch: Sequence[MicroBatch]) -> EvaluationSums:
        weighed = count_tokens(batch, self._mesh)[1].total
        self._follow_shape(batch[0])
        self._stage.feed(batch, 1.0)
        mean = self._engine.eval_batch(iter(()), num_micro_batches=len(batch))  # over all micro-batches
        self._engine.module.train()
        correct = self._over_replicas(self._stage.correct)
        return EvaluationSums(float(mean) * len(batch) * self._mesh.plan.dp, weighed, int(correct))

    def _over_replicas(self, values: torch.Tensor) -> torch.Tensor:
        """Sum of the last stages' values, on every rank: their tensor ranks have the same, other stages have 0."""
        return self._mesh.sum_over_shards(self._mesh.sum_over_tokens(values)) / self._mesh.plan.tp

    def _follow_shape(self, micro: MicroBatch) -> None:
        """Reset the receive buffers if the shape of the batch has changed.

        DeepSpeed 0.19.8 sends shapes only once and keeps its receive buffers; a batch of another length would be cut or
        hang. Its `dynamic_shape` sends shapes for every micro-batch instead, which costs a message each.
        """
        if self._shape not in (None, micro.shape):
            self._engine.reset_activation_shape()
            self._transfers.reset()
        self._shape = micro.shape


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
    """DeepSpeed's `PipelineModule` with one layer per rank: the stage. Shared parameters come from our own split."""

    def __init__(self, stage: Stage, mesh: Mesh) -> None:
        plan = mesh.plan
        self._shared: list[tuple[torch.nn.Parameter, Any]] = []
        topology = PipeModelDataParallelTopology(num_pp=plan.pp, num_mp=plan.tp, num_dp=plan.dp)
        layers = [_Built(stage) for _ in range(plan.pp)]
        super().__init__(layers=layers, topology=topology, partition_method="uniform", dynamic_shape=False)

    def _index_tied_modules(self) -> dict[str, Any]:
        """Create the groups that sum gradients of shared parameters; mark what counts in DeepSpeed's gradient norm.

        DeepSpeed 0.19.8 calls this private method once, to find `TiedLayerSpec`s; we have none. Without the marks its
        norm under ZeRO 1 counts shared parameters twice and misses shards. If the method is renamed, the pipeline tests
        with tied embeddings fail.
        """
        stage: Stage = self.forward_funcs[0]
        for parameter in stage.parameters():
            # ZeRO 1 counts marked parameters on every rank of a replica, and others on its first rank only.
            counts = is_tensor_slice(parameter) or self._grid.get_slice_parallel_rank() == 0
            parameter.model_parallel = counts  # type: ignore[attr-defined]
        groups: dict[tuple[int, ...], tuple[Any, list[int]]] = {}
        for name, stages in stage.split.shared:
            if stages not in groups:
                groups[stages] = self._shared_group(stages)
            group, ranks = groups[stages]
            if self.global_rank in ranks:
                parameter = stage.parameters_by_name[name]
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
        """
        for parameter, _ in self._shared:
            if parameter.grad is None and getattr(parameter, "_hp_grad", None) is None:
                parameter.grad = torch.zeros_like(parameter)
        return self._shared


class _Built(LayerSpec):  # type: ignore[misc]
    """A layer spec whose module exists already; DeepSpeed builds only the specs of this rank's stage."""

    def __init__(self, stage: Stage) -> None:
        super().__init__(Stage)
        self._stage = stage

    def build(self, log: bool = False) -> Stage:
        return self._stage
