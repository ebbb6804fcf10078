"""Losses over logits, summed over counted tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import cross_entropy

from toolkit.runtime.models.micro_batch import IGNORE

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Logits and labels → the sum over counted tokens."""


def summed_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross-entropy added up over counted tokens: a number even where none counts."""
    rows = logits.reshape(-1, logits.shape[-1]).float()
    return cross_entropy(rows, labels.flatten(), ignore_index=IGNORE, reduction="sum")
