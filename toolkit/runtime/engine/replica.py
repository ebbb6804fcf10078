"""Engine of data parallel, ZeRO, tensor and sequence parallel: DeepSpeed's engine behind one call per step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import deepspeed
import torch

from toolkit.recipe.schedules import Schedule, scaled_lr
from toolkit.recipe.sections import Train
from toolkit.runtime.distributed.mesh import Mesh, TensorUnit
from toolkit.runtime.distributed.process_group import HostSum, device
from toolkit.runtime.engine import gradient_reduction, host_waits, weight_average
from toolkit.runtime.engine.deepspeed_fixups import (
    Scaling,
    begin,
    follow_as_one,
    skip_batch_check,
    undo_first_step,
    without_broadcast,
)
from toolkit.runtime.engine.gradient_norm import GradientNormMeter, NoiseMeter
from toolkit.runtime.engine.nonfinite import NonFiniteCounter
from toolkit.runtime.engine.parameter_groups import parameter_groups
from toolkit.runtime.engine.protocol import EvaluationSums, StepNumbers, StepResult
from toolkit.runtime.engine.training_state import Copies, DeepSpeedState, expert_copies, placed
from toolkit.runtime.metrics.step_clock import Clock, NoClock, part
from toolkit.runtime.mixtures.balancer import NoRouters, RouterWatch
from toolkit.runtime.models.attention import forward
from toolkit.runtime.models.loss import Loss, PredictsTokens, summed_loss
from toolkit.runtime.models.micro_batch import MicroBatch
from toolkit.runtime.models.parameter_shards import is_tensor_slice
from toolkit.runtime.objectives.objective import figures_of, first_pass
from toolkit.runtime.optimizers.own_optimizers import own_optimizer


@dataclass(frozen=True, kw_only=True)
class ReplicaParts:
    """What only some strategies add to a replica."""

    unit: TensorUnit | None = None
    """Tensor and data groups for DeepSpeed; None: every rank is a replica."""
    after_backward: Callable[[], None] | None = None
    """Check called once, after the first backward pass."""
    slice_batch: Callable[[MicroBatch], MicroBatch] = lambda micro: micro
    """This rank's tokens of a micro-batch (sequence parallel)."""
    loss: Loss = summed_loss
    noise: NoiseMeter | None = None
    """Measures the gradient noise scale."""
    routers: RouterWatch = field(default_factory=NoRouters)
    """Balances and counts the routers of a mixture."""


class ReplicaEngine:
    """`Engine` of one rank whose forward pass runs the complete model, or its tensor shards, in one call."""

    def __init__(
        self,
        model: torch.nn.Module,
        mesh: Mesh,
        train: Train,
        config: dict[str, Any],
        schedule: Schedule,
        parts: ReplicaParts | None = None,
    ) -> None:
        parts = parts or ReplicaParts()
        self._noise = parts.noise
        self._mesh = mesh
        self._loss = parts.loss
        self._slice_batch = parts.slice_batch
        self._after_backward = parts.after_backward
        self._routers = parts.routers
        self._sums = train.grad_reduce == "sum"
        self._accumulated = mesh.plan.grad_accum
        self._nonfinite = NonFiniteCounter(device())
        self._clock: Clock = NoClock()
        model.get_input_embeddings().register_forward_hook(self._nonfinite.after_embedding)  # type: ignore[operator]
        optimizer, config = own_optimizer(train, config)
        follow_as_one(model)
        with without_broadcast():
            self._engine, *_ = deepspeed.initialize(
                model=model,
                model_parameters=parameter_groups(model.named_parameters(), train, scaled_lr(train)),
                config=config,
                optimizer=optimizer,
                lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, schedule.factor),
                mpu=parts.unit,
            )
        self._routers.attach()
        undo_first_step(self._engine.optimizer)
        skip_batch_check(self._engine)
        begin(self._engine, self.state, mesh)
        if train.ema:
            weight_average.install(self._engine, self.state.base, train.ema)
        gradient_reduction.install(self._engine, train.reduce, mesh)
        host_waits.let_streams_wait(self._engine, mesh.plan)
        self._norm = GradientNormMeter(self._engine, mesh)
        self._scaling = Scaling(self._engine, mesh.plan)

    @property
    def replica(self) -> int:
        return self._mesh.data

    @property
    def loss(self) -> Loss:
        return self._loss

    @property
    def state(self) -> DeepSpeedState:
        named = dict(self.module.named_parameters())
        return DeepSpeedState(
            self._engine,
            names={p: name for name, p in named.items()},
            copies=Copies(
                index=self._mesh.data * self._mesh.plan.token_parts + self._mesh.sequence,
                count=self._mesh.token_ranks,  # sequence ranks hold full copies, as replicas do
                by_name=expert_copies(named, self._mesh),
                saves=lambda name: self._mesh.tensor == 0 or (name in named and is_tensor_slice(named[name])),
            ),
            place=placed(named),
        )

    @property
    def module(self) -> torch.nn.Module:
        """The model inside the engine."""
        return self._engine.module  # type: ignore[no-any-return]

    def step(self, batch: Sequence[MicroBatch]) -> StepResult:
        counted, weighed = count_tokens([self._slice_batch(micro) for micro in batch], self._mesh)
        first_pass(self, batch, self._mesh.sum_over_tokens)
        self._routers.begin(batch, self._sum_scale(len(batch)))
        self._accumulate(len(batch))
        total = torch.zeros((), device=device())
        lr = float(self._engine.get_lr()[0])
        self._nonfinite.reset()
        self._scaling.begin()
        for number, micro in enumerate(batch, 1):
            with part(self._clock, "forward"):
                loss = self._loss_of(micro)
                total += loss.detach()
                if number == len(batch):
                    nonfinite = (~torch.isfinite(total)).float()
                    # Ranks exchange the loss during the last backward pass: after the step, all would wait for it.
                    summed = self._mesh.start_sum_over_tokens(total)
            with part(self._clock, "backward"):
                self._engine.backward(self._scaling.prepared(loss * self._weight(len(batch), weighed.total)))
            self._check_once()
            with part(self._clock, "optimizer"):
                self._engine.step()
        scale, skipped = self._scaling.last()
        return StepResult(
            numbers=StepNumbers(
                loss=summed.values / max(weighed.total, 1),
                grad_norm=self._scaling.unscaled(self._norm.last()),
                micro_square=self._noise.take(len(batch)) if self._noise else None,
                figures=figures_of(self._loss, weighed.total, self._mesh.sum_over_tokens, total),
                routers=self._routers.finish(),
            ),
            tokens=counted.total,
            lr=lr,
            skipped=skipped,
            loss_scale=scale,
            own_nonfinite=self._nonfinite.count + nonfinite,
        )

    def _loss_of(self, micro: MicroBatch) -> torch.Tensor:
        """Forward pass: the loss summed over this rank's tokens of a micro-batch."""
        whole = micro.located().to(device())
        own = self._slice_batch(whole)
        self._routers.expect(whole)
        self._loss.expect(own)
        return self._loss(forward(self._engine, own).logits, own.labels)

    def _weight(self, micro_batches: int, tokens: int) -> float:
        """Factor of the summed loss: DeepSpeed divides by micro-batches and ranks; the result is a mean over tokens."""
        return micro_batches * self._mesh.token_ranks / max(tokens, 1) * self._sum_scale(micro_batches)

    def _sum_scale(self, micro_batches: int) -> float:
        """If gradients are summed, they are those of the mean times the sequences of the global batch."""
        plan = self._mesh.plan
        return float(plan.global_batch // plan.grad_accum * micro_batches) if self._sums else 1.0

    def watch(self, clock: Clock) -> None:
        self._clock = clock
        time_gradient_sync(self._engine, clock)

    def look(self, batch: Sequence[MicroBatch]) -> None:
        with part(self._clock, "forward"):
            self._sums_of(batch)

    def evaluate(self, batch: Sequence[MicroBatch]) -> EvaluationSums:
        _, weighed = count_tokens([self._slice_batch(micro) for micro in batch], self._mesh)
        sums = first_pass(self, batch, self._mesh.sum_over_tokens)
        if sums is None:
            sums = self._sums_of(batch)
        total, correct = self._mesh.sum_over_tokens(sums).tolist()
        return EvaluationSums(total, weighed.total, int(correct))

    def _sums_of(self, batch: Sequence[MicroBatch]) -> torch.Tensor:
        """Loss and number of correct predictions of this rank's batch, without gradients."""
        sums = torch.zeros(2, dtype=torch.float64, device=device())
        self._engine.eval()
        with torch.no_grad():
            for micro in batch:
                own = self._slice_batch(micro.located().to(device()))
                self._loss.expect(own)
                logits = forward(self._engine, own).logits
                loss = self._loss(logits, own.labels)
                correct = self._loss.num_correct(logits, own.labels)
                sums += torch.stack([value.double() for value in (loss, correct)])
        self._engine.train()
        return sums

    def predict(self, micro: MicroBatch) -> torch.Tensor:
        """The likeliest token after each token of a micro-batch, which is the same on every rank. Collective."""
        assert isinstance(self._loss, PredictsTokens), "this loss predicts no tokens"
        self._engine.eval()
        with torch.no_grad():
            own = micro.located().to(device())
            self._loss.expect(own)
            found = self._loss.likeliest(forward(self._engine, own).logits)
        self._engine.train()
        return found

    def _accumulate(self, micro_batches: int) -> None:
        """Set the number of micro-batches per step, which grows under a batch ramp.

        DeepSpeed 0.19.8's `set_train_batch_size` keeps the micro-step counter, and a step ends where that counter is a
        multiple of the new number: the next step would end too early or too late. So the counter is set to 0. This can
        go when `set_train_batch_size` resets `micro_steps`.
        """
        if micro_batches != self._accumulated:
            engine, self._accumulated = self._engine, micro_batches
            size = engine.train_micro_batch_size_per_gpu() * engine.dp_world_size
            engine.set_train_batch_size(size * micro_batches)
            engine.micro_steps = 0

    def _check_once(self) -> None:
        check, self._after_backward = self._after_backward, None
        if check is not None:
            check()


def time_gradient_sync(engine: Any, clock: Clock) -> None:
    """Attribute the end of the engine's gradient reduction, after a backward pass, to the part `grad_sync`."""
    finish = engine.allreduce_gradients

    def timed(*args: Any, **kwargs: Any) -> Any:
        with part(clock, "grad_sync"):
            return finish(*args, **kwargs)

    engine.allreduce_gradients = timed


def count_tokens(batch: Sequence[MicroBatch], mesh: Mesh) -> tuple[HostSum, HostSum]:
    """Start to count, from the host's batch: (tokens of the global batch that count, what the loss is averaged over).

    Collective.
    """
    tokens = HostSum(sum(micro.counted for micro in batch), mesh.token_host_group, mesh.token_ranks)
    if all(micro.pairs is None for micro in batch):
        return tokens, tokens
    return tokens, HostSum(sum(micro.weighed for micro in batch), mesh.token_host_group, mesh.token_ranks)
