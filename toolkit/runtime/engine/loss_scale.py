"""The loss scale of fp16: what small gradients are multiplied by so that they are not lost."""

from __future__ import annotations

from typing import Any

import torch

from toolkit.plans.plan import Plan


class Scaling:
    """Loss scale and skipped updates of fp16, as DeepSpeed counts them.

    Without ZeRO, DeepSpeed (0.19.8) divides gradients by a loss scale that it has not multiplied the loss by, and tells
    a norm that is not divided by it: small gradients are lost, and no scale is ever found too large. There we multiply
    and divide.
    """

    def __init__(self, engine: Any, plan: Plan) -> None:
        self._engine = engine
        self._scales = plan.precision == "fp16"
        self._by_us = self._scales and plan.zero_stage == 0
        self._used = 1.0
        self._skipped = 0

    def begin(self) -> None:
        """A step begins; its scale stays the same to the end."""
        if self._by_us:
            self._used = float(self._engine.optimizer.loss_scale)

    def prepared(self, loss: torch.Tensor) -> torch.Tensor:
        """The same loss, with gradients that are scaled as the engine expects them."""
        if self._by_us and loss.requires_grad:
            loss.register_hook(lambda gradient: gradient * self._used)  # type: ignore[no-untyped-call]
        return loss

    def unscaled(self, norm: float) -> float:
        """A norm as the engine tells it, without the scale."""
        return norm / self._used if self._by_us else norm

    def last(self) -> tuple[float | None, bool]:
        """Of the last step: the scale for the next one, and whether it was skipped."""
        if not self._scales:
            return None, False
        before, self._skipped = self._skipped, int(self._engine.skipped_steps)
        return float(self._engine.optimizer.loss_scale), self._skipped > before
