"""The gradient norm of a step, and what happens when it is no number."""

from __future__ import annotations

import math
from typing import Any

import torch

from toolkit.runtime.distributed import device
from toolkit.runtime.grad_norm import clip_gradients
from toolkit.runtime.mesh import Mesh
from toolkit.runtime.onebit import OneBitAdam


class NoNumbers(Exception):
    """The averaged gradient is NaN or infinite."""


class NormMeter:
    """The gradient norm of the last step, whatever the optimizer.

    DeepSpeed (0.19) tells it under ZeRO and in 16 bits. Plain fp32 gradients it clips without telling, in a pipeline
    by the first stage's norm and with tied weights counted twice; there we measure and clip ourselves.
    """

    def __init__(self, engine: Any, mesh: Mesh) -> None:
        self._engine = engine
        self._mesh = mesh
        self._norm = float("nan")
        self._apart = mesh.token_ranks > 1 and isinstance(engine.basic_optimizer, OneBitAdam)
        self._plain = mesh.plan.zero_stage == 0 and mesh.plan.precision == "fp32"
        if self._plain:
            limit = engine.gradient_clipping() or float("inf")
            engine.gradient_clipping = lambda: limit  # above 0: the engine then calls what follows at every step
            engine.clip_fp32_gradients = lambda: self._clip(limit)

    def last(self) -> float:
        """Before clipping."""
        if self._plain:
            return self._norm
        norm = self._engine.get_global_grad_norm()
        return self._together(float(norm)) if norm is not None else float("nan")

    def _together(self, own: float) -> float:
        """Gradients that the optimizer exchanges itself differ between ranks: their root mean square, on all alike."""
        if not self._apart:
            return own
        squares = torch.tensor(own**2, dtype=torch.float64, device=device())
        return math.sqrt(float(self._mesh.sum_over_tokens(squares)) / self._mesh.token_ranks)

    def _clip(self, limit: float) -> None:
        self._norm = self._together(clip_gradients(self._engine.module.parameters(), self._mesh, limit))
        if not math.isfinite(self._norm):
            raise NoNumbers  # before the update; with ZeRO, DeepSpeed itself skips it
