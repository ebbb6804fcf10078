"""Losses over logits, summed over counted tokens."""

from __future__ import annotations

from typing import Protocol

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


class SummedCrossEntropy:
    """`Loss` over complete logits. It is finite (0) even if no token is counted."""

    def expect(self, micro: MicroBatch) -> None:
        """Not needed: the loss gets logits and labels together."""

    def per_token(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        rows = logits.reshape(-1, logits.shape[-1]).float()
        return cross_entropy(rows, labels.flatten(), ignore_index=IGNORE, reduction="none").view(labels.shape)

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        rows = logits.reshape(-1, logits.shape[-1]).float()
        return cross_entropy(rows, labels.flatten(), ignore_index=IGNORE, reduction="sum")

    def num_correct(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return count_matches(logits.argmax(-1), labels)


summed_loss = SummedCrossEntropy()


def count_matches(predicted: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Number of counted labels that equal the prediction."""
    return ((predicted == labels) & (labels != IGNORE)).sum()
