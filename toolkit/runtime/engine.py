"""The DeepSpeed engine behind one call: a global batch in, loss and gradient norm out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import deepspeed
import torch
from torch.nn.functional import cross_entropy

from toolkit.plan import Plan
from toolkit.recipe import Train
from toolkit.runtime.data import IGNORE, MicroBatch
from toolkit.runtime.deepspeed_state import DeepSpeedState
from toolkit.runtime.distributed import all_sum, device
from toolkit.runtime.fragments import Stateful
from toolkit.schedule import Schedule


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a step did, the same on every rank and under every strategy."""

    loss: torch.Tensor
    """Cross-entropy averaged over the counted tokens of the global batch; still on the device."""
    tokens: int
    """Counted tokens of the global batch."""
    grad_norm: float
    """Global gradient norm before clipping."""
    lr: float
    """Learning rate of the update."""
    own_faults: torch.Tensor | None = None
    """What this rank's own forward and backward pass gave that is no number; looked at only after a bad step."""


class Engine(Protocol):
    """What the trainer drives."""

    @property
    def replica(self) -> int:
        """Which data-parallel replica this rank is part of."""

    @property
    def state(self) -> Stateful:
        """Masters and optimizer states, for checkpoints."""

    def step(self, batch: Sequence[MicroBatch]) -> StepResult:
        """Train on this replica's share of a global batch."""


class _NoNumbers(Exception):
    """The averaged gradient is NaN or infinite."""


class ReplicaEngine:
    """Data parallel and ZeRO: each rank holds a replica, or its shards of one."""

    def __init__(
        self, model: torch.nn.Module, plan: Plan, train: Train, config: dict[str, Any], schedule: Schedule
    ) -> None:
        self._plan = plan
        self._scale = float(plan.global_batch if train.grad_reduce == "sum" else 1)
        self._norm = 0.0
        self._faults = torch.zeros((), device=device())
        model.get_input_embeddings().register_forward_hook(self._watch_gradient)  # type: ignore[operator]
        self._engine, *_ = deepspeed.initialize(
            model=model,
            model_parameters=[p for p in model.parameters() if p.requires_grad],
            config=config,
            lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, schedule.factor),
        )
        if plan.zero_stage == 0 and plan.precision != "fp32" and train.optimizer == "adamw":
            _undo_first_step(self._engine.optimizer)
        self._plain = plan.zero_stage == 0 and plan.precision == "fp32"
        self._unclipped = self._engine.gradient_clipping() == 0
        if self._plain:
            # DeepSpeed (0.19) clips plain fp32 gradients without telling their norm; this tells it, clipping alike.
            self._engine.clip_fp32_gradients = lambda: self._measure(self._engine.gradient_clipping())

    @property
    def replica(self) -> int:
        return int(torch.distributed.get_rank()) if torch.distributed.is_initialized() else 0

    @property
    def state(self) -> Stateful:
        names: dict[torch.Tensor, str] = {p: name for name, p in self.module.named_parameters()}
        return DeepSpeedState(self._engine, names=names, copy=self.replica, copies=self._plan.dp)

    @property
    def module(self) -> torch.nn.Module:
        """The model inside the engine."""
        return self._engine.module  # type: ignore[no-any-return]

    def step(self, batch: Sequence[MicroBatch]) -> StepResult:
        tokens = int(all_sum(torch.tensor(sum(micro.counted for micro in batch), device=device())))
        # DeepSpeed divides by micro-batches and replicas; this makes it the mean over counted tokens.
        weight = self._scale * self._plan.grad_accum * self._plan.dp / max(tokens, 1)
        total = torch.zeros((), device=device())
        lr = float(self._engine.get_lr()[0])
        self._faults.zero_()
        try:
            for micro in batch:
                loss = self._loss_sum(micro.to(device()))
                total += loss.detach()
                self._engine.backward(loss * weight)
                if self._plain and self._unclipped and self._engine.is_gradient_accumulation_boundary():
                    self._measure(float("inf"))
                self._engine.step()
        except _NoNumbers:  # on every rank alike: the averaged gradients are the same
            self._norm = float("nan")
        faults = self._faults + (~torch.isfinite(total)).float()
        loss = all_sum(total) / max(tokens, 1)
        return StepResult(loss=loss, tokens=tokens, grad_norm=self._grad_norm(), lr=lr, own_faults=faults)

    def _loss_sum(self, micro: MicroBatch) -> torch.Tensor:
        inputs = {"input_ids": micro.input_ids, "use_cache": False}
        if micro.attention_mask is not None:
            inputs["attention_mask"] = micro.attention_mask
        logits = self._engine(**inputs).logits
        return cross_entropy(logits.flatten(0, 1).float(), micro.labels.flatten(), ignore_index=IGNORE, reduction="sum")

    def _measure(self, max_norm: float) -> None:
        parameters = [p for p in self.module.parameters() if p.grad is not None]
        self._norm = float(torch.nn.utils.clip_grad_norm_(parameters, max_norm, foreach=True))
        if not math.isfinite(self._norm):
            raise _NoNumbers  # before the update; with ZeRO, DeepSpeed itself skips it

    def _watch_gradient(self, module: Any, inputs: Any, output: torch.Tensor) -> None:
        """Count what is no number in the gradient that reaches the embeddings: a bad backward pass names its rank."""
        if output.requires_grad:
            output.register_hook(self._count_faults)  # type: ignore[no-untyped-call]

    def _count_faults(self, gradient: torch.Tensor) -> None:
        self._faults += (~torch.isfinite(gradient)).sum()

    def _grad_norm(self) -> float:
        if self._plain:
            return self._norm
        norm = self._engine.get_global_grad_norm()
        return float(norm) if norm is not None else float("nan")


def _undo_first_step(optimizer: Any) -> None:
    """Give a 16-bit optimizer without ZeRO back its fresh state.

    DeepSpeed (0.19) takes a step with zero gradients when it makes it: Adam's count is one ahead, so that
    bias correction shortens the first updates, and weight decay has already bitten.
    """
    optimizer.optimizer.state.clear()
    for masters, weights in zip(optimizer.fp32_groups, optimizer.fp16_groups, strict=True):
        for master, weight in zip(masters, weights, strict=True):
            master.data.copy_(weight.data)
