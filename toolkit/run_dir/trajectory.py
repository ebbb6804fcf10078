"""Losses and gradient norms of a run, and how far two runs are apart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Trajectory:
    """Losses and gradient norms, one a step."""

    loss: tuple[float, ...]
    grad_norm: tuple[float, ...]


def largest_difference(expected: Sequence[float], got: Sequence[float]) -> float:
    """Largest relative difference; infinite if one is shorter or not a number."""
    if len(expected) != len(got) or not all(map(math.isfinite, [*expected, *got])):
        return math.inf
    return max(abs(a - b) / max(abs(a), 1e-12) for a, b in zip(expected, got, strict=True))
