"""The interface between the training loop and an engine: steps, evaluation, state for checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from toolkit.runtime.checkpoint.fragments import Stateful
from toolkit.runtime.metrics.step_clock import Clock
from toolkit.runtime.models.micro_batch import MicroBatch


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Result of a step, equal on every rank and under every strategy."""

    loss: torch.Tensor
    """Cross-entropy averaged over the counted tokens of the global batch; still on the device."""
    tokens: int
    """Counted tokens of the global batch."""
    grad_norm: float
    """Global gradient norm before clipping."""
    lr: float
    """Learning rate of the update."""
    skipped: bool = False
    """Whether the update was skipped because gradients overflowed."""
    loss_scale: float | None = None
    """Loss scale of fp16 for the next step; None in other precisions."""
    micro_square: float | None = None
    """Mean squared norm of a micro-batch's gradient, if measured."""
    own_nonfinite: torch.Tensor | None = None
    """Passes in which this rank turned finite values into NaN or infinity; read only after a bad step."""


@dataclass(frozen=True)
class EvaluationSums:
    """Sums of an evaluation, equal on every rank."""

    loss: float = 0.0
    """Sum of cross-entropies."""
    counted: int = 0
    """Number of counted tokens, or of samples with a class."""
    correct: int = 0
    """Number of those that the model predicts correctly."""

    def __add__(self, other: EvaluationSums) -> EvaluationSums:
        return EvaluationSums(self.loss + other.loss, self.counted + other.counted, self.correct + other.correct)


class Engine(Protocol):
    """An engine that the training loop drives."""

    @property
    def replica(self) -> int:
        """Index of the data-parallel replica that this rank is part of."""

    @property
    def state(self) -> Stateful:
        """Masters and optimizer states, for checkpoints."""

    def step(self, batch: Sequence[MicroBatch]) -> StepResult:
        """Train on this replica's share of a global batch."""

    def evaluate(self, batch: Sequence[MicroBatch]) -> EvaluationSums:
        """Losses of this replica's share of a global batch, summed over all replicas; no update."""

    def watch(self, clock: Clock) -> None:
        """Report to this clock which part of a step is running, from now on."""
