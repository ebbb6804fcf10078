"""What the training loop needs from an engine: steps, evaluation, state for checkpoints."""

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
    """What a step did, the same on every rank and under every strategy."""

    loss: torch.Tensor
    """Cross-entropy averaged over the counted tokens of the global batch; still on the device."""
    tokens: int
    """Counted tokens of the global batch."""
    grad_norm: float
    """Global gradient norm before clipping."""
    lr: float
    """Learning rate of the update."""
    skipped: bool = False
    """Whether no update was made, because gradients overflowed."""
    loss_scale: float | None = None
    """What the loss was multiplied by, in fp16."""
    micro_square: float | None = None
    """Mean square norm of a micro-batch's gradient, where it is measured."""
    own_faults: torch.Tensor | None = None
    """What this rank's own forward and backward pass gave that is no number; looked at only after a bad step."""


@dataclass(frozen=True)
class EvaluationSums:
    """What an evaluation adds up: the same on every rank."""

    loss: float = 0.0
    """Cross-entropies."""
    counted: int = 0
    """Tokens, or samples with a class."""
    correct: int = 0
    """Those whose likeliest value was right."""

    def __add__(self, other: EvaluationSums) -> EvaluationSums:
        return EvaluationSums(self.loss + other.loss, self.counted + other.counted, self.correct + other.correct)


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

    def evaluate(self, batch: Sequence[MicroBatch]) -> EvaluationSums:
        """Losses of this replica's share of a global batch, added up over all replicas; nothing is learned."""

    def watch(self, clock: Clock) -> None:
        """Tell a clock which part of a step runs, from now on."""
