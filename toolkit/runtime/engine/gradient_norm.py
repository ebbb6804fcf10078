"""The gradient norm of a step, and what happens when it is no number."""

from __future__ import annotations

import math
from typing import Any

import torch
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

from toolkit.runtime.distributed.mesh import Mesh
from toolkit.runtime.distributed.process_group import device
from toolkit.runtime.engine.grad_norm import clip_gradients, gradient_norm
from toolkit.runtime.engine.onebit_adam import OneBitAdam


class NoNumbers(Exception):
    """The averaged gradient is NaN or infinite."""


class NormMeter:
    """The gradient norm of the last step, whatever the optimizer.

    DeepSpeed (0.19) tells it under ZeRO. Plain fp32 gradients it clips without telling, in a pipeline by the first
    stage's norm and with tied weights counted twice; there we measure and clip ourselves. Plain 16-bit gradients it
    clips by a norm of the first tensor rank's shards, without experts; there we measure, and it clips by our norm.
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
        if isinstance(engine.optimizer, FP16_UnfusedOptimizer):
            self._correct(engine.optimizer)

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

    def _correct(self, optimizer: FP16_UnfusedOptimizer) -> None:
        """Have the optimizer clip by, and tell, the norm of all gradients, which are in fp32 by then."""
        clip = optimizer.unscale_and_clip_grads

        def clip_by_all(total_norm: float, apply_scale: bool = True) -> Any:
            groups = zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)
            pairs = (pair for weights, masters in groups for pair in zip(weights, masters, strict=True))
            held = [(weight, master.grad) for weight, master in pairs if master.grad is not None]
            optimizer._global_grad_norm = gradient_norm(held, self._mesh)
            return clip(optimizer._global_grad_norm, apply_scale)

        optimizer.unscale_and_clip_grads = clip_by_all

    def _clip(self, limit: float) -> None:
        self._norm = self._together(clip_gradients(self._engine.module.parameters(), self._mesh, limit))
        if not math.isfinite(self._norm):
            raise NoNumbers  # before the update; with ZeRO, DeepSpeed itself skips it
