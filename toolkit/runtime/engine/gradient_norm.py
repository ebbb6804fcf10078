"""Global gradient norm of a step and clipping by it; NaN and infinite gradients stop the update."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

from toolkit.runtime.distributed.mesh import Mesh
from toolkit.runtime.distributed.process_group import device
from toolkit.runtime.engine.onebit_adam import OneBitAdam
from toolkit.runtime.models.parameter_shards import layout_of


class NonFiniteGradients(Exception):
    """The averaged gradient is NaN or infinite."""


class GradientNormMeter:
    """The gradient norm of the last step, under any optimizer.

    Under ZeRO, DeepSpeed reports a correct norm. Without ZeRO, DeepSpeed 0.19.8 does not:
    - fp32: it clips without reporting a norm, in a pipeline by the first stage's norm, and counts tied weights twice.
      Losses then differ from one process. We measure and clip ourselves.
    - 16 bits: it clips by the norm of the first tensor rank's shards, without experts. We give it our norm.
    Both can go when the parity tests of pipeline and tensor parallel pass with ZeRO 0 and without this class.
    """

    def __init__(self, engine: Any, mesh: Mesh) -> None:
        self._engine = engine
        self._mesh = mesh
        self._norm = float("nan")
        self._differs_by_rank = mesh.token_ranks > 1 and isinstance(engine.basic_optimizer, OneBitAdam)
        self._plain = mesh.plan.zero_stage == 0 and mesh.plan.precision == "fp32"
        if self._plain:
            limit = engine.gradient_clipping() or float("inf")
            engine.gradient_clipping = lambda: (
                limit
            )  # above 0, so that the engine calls `clip_fp32_gradients` each step
            engine.clip_fp32_gradients = lambda: self._clip(limit)
        if isinstance(engine.optimizer, FP16_UnfusedOptimizer):
            self._correct(engine.optimizer)

    def last(self) -> float:
        """The norm before clipping."""
        if self._plain:
            return self._norm
        norm = self._engine.get_global_grad_norm()
        return self._over_ranks(float(norm)) if norm is not None else float("nan")

    def _over_ranks(self, own: float) -> float:
        """With 1-bit Adam gradients differ between ranks: the root mean square of their norms, equal on all ranks."""
        if not self._differs_by_rank:
            return own
        squares = torch.tensor(own**2, dtype=torch.float64, device=device())
        return math.sqrt(float(self._mesh.sum_over_tokens(squares)) / self._mesh.token_ranks)

    def _correct(self, optimizer: FP16_UnfusedOptimizer) -> None:
        """Make the optimizer clip by, and report, the norm of all gradients, which are fp32 at that point."""
        clip = optimizer.unscale_and_clip_grads

        def clip_by_all(total_norm: float, apply_scale: bool = True) -> Any:
            groups = zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)
            pairs = (pair for weights, masters in groups for pair in zip(weights, masters, strict=True))
            held = [(weight, master.grad) for weight, master in pairs if master.grad is not None]
            optimizer._global_grad_norm = gradient_norm(held, self._mesh)
            return clip(optimizer._global_grad_norm, apply_scale)

        optimizer.unscale_and_clip_grads = clip_by_all

    def _clip(self, limit: float) -> None:
        self._norm = self._over_ranks(clip_gradients(self._engine.module.parameters(), self._mesh, limit))
        if not math.isfinite(self._norm):
            raise NonFiniteGradients  # before the update; with ZeRO, DeepSpeed skips the update itself


EPSILON = 1e-6
"""Added to the norm, as in `torch.nn.utils.clip_grad_norm_`."""


Held = tuple[torch.nn.Parameter, torch.Tensor]
"""A parameter and its gradient."""


def clip_gradients(parameters: Iterable[torch.nn.Parameter], mesh: Mesh, max_norm: float) -> float:
    """Scale gradients down to `max_norm`; return the norm before clipping."""
    held = [(p, p.grad) for p in parameters if p.grad is not None]
    norm = gradient_norm(held, mesh)
    scale = max_norm / (norm + EPSILON)
    if scale < 1:
        torch._foreach_mul_([gradient for _, gradient in held], scale)
    return norm


def gradient_norm(held: Sequence[Held], mesh: Mesh) -> float:
    """The norm of all gradients of a replica. Collective."""
    squares = mesh.sum_over_shards(_squares(g for p, g in held if not _is_expert(p) and _counts(p, mesh)))
    if mesh.plan.ep > 1:  # the ranks of an expert group hold different experts, and there are dp / ep such groups
        experts = _squares(g for p, g in held if _is_expert(p))
        squares = squares + mesh.sum_over_tokens(experts) * mesh.plan.ep / mesh.plan.dp
    return float(squares.sqrt())


def _squares(found: Iterable[torch.Tensor]) -> torch.Tensor:
    gradients = list(found)
    if not gradients:
        return torch.zeros((), device=device())
    return torch.stack(torch._foreach_norm(gradients)).square().sum()


def _is_expert(parameter: torch.nn.Parameter) -> bool:
    """Whether DeepSpeed reduces this gradient only over ranks with the same experts."""
    return not getattr(parameter, "allreduce", True)


def _counts(parameter: torch.nn.Parameter, mesh: Mesh) -> bool:
    """Count shards on every rank, full parameters on tensor rank 0, copies on another stage not at all."""
    if getattr(parameter, "ds_pipe_replicated", False):
        return False
    return layout_of(parameter) is not None or mesh.tensor == 0


class NoiseMeter:
    """Sums, on the device, the squared norm of every gradient that reaches a parameter."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter], mesh: Mesh) -> None:
        self._mesh = mesh
        self._squares = torch.zeros((), dtype=torch.float32, device=device())
        for parameter in parameters:
            if parameter.requires_grad:
                parameter.register_hook(self._see)  # type: ignore[no-untyped-call]

    def _see(self, gradient: torch.Tensor) -> None:
        self._squares += torch.linalg.vector_norm(gradient, dtype=torch.float32).square()

    def take(self, accumulated: int) -> float:
        """Mean squared norm of a micro-batch's gradient in the last step, over all ranks. Collective.

        `accumulated`: micro-batches per rank, by which each gradient has been divided.
        """
        total = self._mesh.sum_over_tokens(self._squares.clone())
        self._squares.zero_()
        return float(total) * accumulated / self._mesh.token_ranks
