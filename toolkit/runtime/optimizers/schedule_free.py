"""Schedule-free AdamW (Defazio et al. 2024): an average of the weights takes the place of a falling learning rate.

Gradients are computed at `y`, between the average `x` and a sequence `z` of plain updates. `y` is the model's weight
during training; `x` is what is evaluated and exported, so it is stored as the moving average of `train.ema` is. Keeping
`x` beside `z` takes one more value per parameter than deriving it from `y`, which would lose a digit in each step.
Element-wise, so exact under every partition.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from toolkit.recipe.sections import Train
from toolkit.runtime.checkpoint.fragments import AVERAGE
from toolkit.runtime.optimizers.update_rules import kept

BASE = "z"
"""State of the plain updates."""


class ScheduleFree(torch.optim.Optimizer):
    """Schedule-free AdamW; `step` does nothing before `begin` (see `LayerwiseOptimizer`)."""

    def __init__(self, parameters: Iterable[Any], train: Train, lr: float) -> None:
        self._train = train
        self._begun = False
        self._weights = {0: (0.0, 0.0)}
        super().__init__(parameters, {"lr": lr, "weight_decay": train.weight_decay})

    def begin(self) -> None:
        """Take steps from now on."""
        self._begun = True

    @property
    def counters(self) -> dict[str, float]:
        """Sum of the weights of all steps so far, and the largest learning rate, for checkpoints."""
        total, largest = self._weights[max(self._weights)]
        return {"schedule_free.weights": total, "schedule_free.lr": largest}

    def resume_at(self, step: int, counters: dict[str, float]) -> None:
        """Continue after `step` updates."""
        if "schedule_free.weights" in counters:
            self._weights = {step: (counters["schedule_free.weights"], counters["schedule_free.lr"])}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every tensor that has a gradient."""
        for group in self.param_groups if self._begun else ():
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update(weight, float(group["lr"]), float(group["weight_decay"]))

    def _update(self, weight: torch.Tensor, lr: float, decay: float) -> None:
        assert weight.grad is not None
        (first, second), state = self._train.betas, self.state[weight]
        for name in (BASE, AVERAGE):
            if name not in state:
                state[name] = weight.detach().clone()
        step = int(state.get("step", 0))
        lr *= math.sqrt(1 - second ** (step + 1))
        square = kept(state, "exp_avg_sq", weight)
        square.mul_(second).addcmul_(weight.grad, weight.grad, value=1 - second)
        change = weight.grad.div(square.sqrt().add_(self._train.eps)).add_(weight, alpha=decay)
        base, average = state[BASE].sub_(change, alpha=lr), state[AVERAGE]
        average.lerp_(base, self._share(step, lr))
        torch.lerp(base, average, first, out=weight)
        state["step"] = step + 1

    def _share(self, step: int, lr: float) -> float:
        """Share of this step in the average: steps weigh as the square of the largest learning rate so far.

        A step has one share, that of the first tensor: groups may have other learning rates, but follow one schedule.
        """
        total, largest = self._weights[step]
        if step + 1 not in self._weights:
            largest = max(largest, lr)
            self._weights = {step: (total, self._weights[step][1]), step + 1: (total + largest**2, largest)}
        after, largest = self._weights[step + 1]
        return largest**2 / after
