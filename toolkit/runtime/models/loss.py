"""Losses over logits, summed over counted tokens."""

from __future__ import annotations

from typing import Protocol

import torch
from torch.nn.functional import cross_entropy

from toolkit.runtime.models.micro_batch import IGNORE


class Loss(Protocol):
    """Cross-entropy of logits, and how many labels the logits predict."""

    def expect(self, labels: torch.Tensor) -> None:
        """Called with the labels before every forward pass: a head that computes the loss itself needs them."""

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The loss, summed over counted tokens."""

    def num_correct(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Number of counted labels that have the largest logit."""


class SummedCrossEntropy:
    """`Loss` over complete logits. It is finite (0) even if no token is counted."""

    def expect(self, labels: torch.Tensor) -> None:
        """Not needed: the loss gets logits and labels together."""

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        rows = logits.reshape(-1, logits.shape[-1]).float()
        return cross_entropy(rows, labels.flatten(), ignore_index=IGNORE, reduction="sum")

    def num_correct(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return count_matches(logits.argmax(-1), labels)


summed_loss = SummedCrossEntropy()


def count_matches(predicted: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Number of counted labels that equal the prediction."""
    return ((predicted == labels) & (labels != IGNORE)).sum()
