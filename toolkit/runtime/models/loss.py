"""Losses over logits, summed over counted tokens."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from torch.nn.functional import cross_entropy

from toolkit.runtime.models.micro_batch import IGNORE, MicroBatch


class Loss(Protocol):
    """Cross-entropy of logits, and how many labels the logits predict."""

    def expect(self, micro: MicroBatch) -> None:
        """Called before every forward pass: a head that computes the loss itself needs the labels."""

    def per_token(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The loss of every token; 0 where it is not counted."""

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The loss, summed over counted tokens."""

    def num_correct(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Number of counted labels that have the largest logit."""


@runtime_checkable
class PredictsTokens(Protocol):
    """A loss that knows which token has the largest logit."""

    def likeliest(self, logits: torch.Tensor) -> torch.Tensor:
        """The likeliest token after each token; of a pass without gradients."""


class SummedCrossEntropy:
    """`Loss` over complete logits. It is finite (0) even if no token is counted."""

    def __init__(self, smoothing: float = 0.0) -> None:
        self._smoothing = smoothing

    def expect(self, micro: MicroBatch) -> None:
        """Not needed: the loss gets logits and labels together."""

    def per_token(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        rows = logits.reshape(-1, logits.shape[-1]).float()
        return self._losses(rows, labels, "none").view(labels.shape)

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        rows = logits.reshape(-1, logits.shape[-1]).float()
        return self._losses(rows, labels, "sum")

    def _losses(self, rows: torch.Tensor, labels: torch.Tensor, reduction: str) -> torch.Tensor:
        smoothing = in_training(self._smoothing)
        return cross_entropy(
            rows, labels.flatten(), ignore_index=IGNORE, reduction=reduction, label_smoothing=smoothing
        )

    def num_correct(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return count_matches(self.likeliest(logits), labels)

    def likeliest(self, logits: torch.Tensor) -> torch.Tensor:
        """The token with the largest logit after each token."""
        return logits.argmax(-1)


summed_loss = SummedCrossEntropy()


def smoothed(loss: Loss, smoothing: float) -> Loss:
    """A loss with label smoothing in training; evaluations report plain cross-entropy."""
    if isinstance(loss, SummedCrossEntropy):
        return SummedCrossEntropy(smoothing)
    found: Any = loss
    found.smoothing = smoothing
    return loss


def in_training(smoothing: float) -> float:
    """The smoothing of this pass: none without gradients."""
    return smoothing if torch.is_grad_enabled() else 0.0


def count_matches(predicted: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Number of counted labels that equal the prediction."""
    return ((predicted == labels) & (labels != IGNORE)).sum()
