"""Recipe sections on optimizers that have settings of their own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from toolkit.errors import Problem
from toolkit.recipe.schema import number


@dataclass(frozen=True, kw_only=True)
class Muon:
    """Settings of `optimizer: muon`, which makes the update of each matrix of the layers orthogonal."""

    momentum: float = number(0.95, least=0, most=1)
    """Decay rate of the momentum of matrices. All other parameters are updated by AdamW, with `betas` and `eps`."""
    nesterov: bool = True
    """Whether the update looks one step ahead (Nesterov) or is the momentum itself."""
    iterations: int = number(5, least=1, most=50)
    """Newton-Schulz iterations."""
    adamw: tuple[str, ...] = ()
    """Patterns of names of further matrices that AdamW updates, such as `*.mlp.gate.*` for routers."""


@dataclass(frozen=True, kw_only=True)
class Ema:
    """A moving average of the weights, sharded as they are; `toolkit export` writes it instead of the last weights."""

    decay: float = number(0.999, above=0, most=1)
    """Share of the average that a step keeps; less in the first steps: (1 + steps) / (10 + steps)."""
    evaluate: bool = True
    """Whether evaluations use the average instead of the last weights."""


PACKABLE = ("adamw", "lion")
"""Optimizers with element-wise rules, whose states may be stored in fewer bits."""


def average_problems(optimizer: str, schedule: str, ema: Ema | None) -> Iterator[Problem]:
    """Settings that contradict the average of `schedule_free`."""
    if optimizer == "schedule_free" and ema is not None:
        yield Problem("train.ema", "given with schedule_free, which averages the weights itself; remove it")
    if optimizer == "schedule_free" and schedule != "constant":
        yield Problem("train.schedule", f"{schedule} given; schedule_free needs constant, and a warm-up if you like")


def optimizer_problems(optimizer: str, section: Muon | None, states: str) -> Iterator[Problem]:
    """Settings that the optimizer ignores or can't have."""
    if states != "fp32" and optimizer not in PACKABLE:
        yield Problem("train.states", f"{states} given; {optimizer} keeps fp32 states; use adamw or lion, or fp32")
    if section is not None and optimizer != "muon":
        yield Problem("train.muon", f"unused with optimizer {optimizer}; remove it, or use muon")
    if section is not None and section.momentum >= 1:
        yield Problem("train.muon.momentum", f"{section.momentum:g} given; below 1 is required: 1 never moves")
