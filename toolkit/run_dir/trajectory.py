"""Losses and gradient norms of a run, the difference between two runs, and the tolerances for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

LOSS_TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 2e-2}
"""Largest relative difference of the loss at any step, by precision, for which two runs of a recipe are equal."""
NORM_TOLERANCE = {"fp32": 1e-4, "bf16": 1e-1, "fp16": 1e-1}
"""Largest relative difference of the gradient norm: Adam hides wrong scales from the loss, not from the norm."""
TINY_LOSS_TOLERANCE = 2e-5
"""`LOSS_TOLERANCE` for tiny fp32 models: a step averages the loss over 64 tokens only, so rounding shows more."""
TINY_NORM_TOLERANCE = NORM_TOLERANCE["fp32"]
"""`NORM_TOLERANCE` for tiny fp32 models: the same."""


@dataclass(frozen=True)
class Trajectory:
    """Losses and gradient norms, one of each per step."""

    loss: tuple[float, ...]
    grad_norm: tuple[float, ...]


def largest_difference(expected: Sequence[float], got: Sequence[float]) -> float:
    """Largest relative difference; infinite if lengths differ or a value is NaN or infinite."""
    if len(expected) != len(got) or not all(map(math.isfinite, [*expected, *got])):
        return math.inf
    return max(abs(a - b) / max(abs(a), 1e-12) for a, b in zip(expected, got, strict=True))
