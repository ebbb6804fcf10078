"""Global gradient norm of a step and clipping by it; updates with NaN or infinite gradients have no effect."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from toolkit.runtime.distributed.mesh import Mesh
from toolkit.runtime.distributed.process_group import device
from toolkit.runtime.engine import host_waits
from toolkit.runtime.engine.host_waits import EPSILON, See, UpdateGuard
from toolkit.runtime.models.parameter_shards import is_tensor_slice
from toolkit.runtime.optimizers.onebit_adam import OneBitAdam


class GradientNormMeter:
    """The gradient norm of the last step, under any optimizer; it stays on the device where the update allows it.

    Under ZeRO, DeepSpeed computes a correct norm. Without ZeRO, DeepSpeed 0.19.8 does not:
    - fp32: it clips without reporting a norm, in a pipeline by the first stage's norm, and counts tied weights twice.
      Losses then differ from one process. We measure and clip ourselves.
    - 16 bits: it clips by the norm of the first tensor rank's shards, without experts. We give it our norm; in bf16 we
      also make the step, because DeepSpeed's reads a number from the device for every parameter.
    Both can go when the parity tests of pipeline and tensor parallel pass with ZeRO 0 and without this class.
    """

    def __init__(self, engine: Any, mesh: Mesh) -> None:
        self._engine = engine
        self._mesh = mesh
        self._norm: torch.Tensor | None = None
        self._differs_by_rank = mesh.token_ranks > 1 and isinstance(engine.basic_optimizer, OneBitAdam)
        if mesh.plan.pp > 1 and isinstance(engine.optimizer, DeepSpeedZeroOptimizer):
            _reduce_once(engine.optimizer)
        if host_waits.decides_on_device(mesh.plan):
            self._stay_on_device(UpdateGuard(engine.basic_optimizer))
        elif isinstance(engine.optimizer, FP16_UnfusedOptimizer):
            self._correct(engine.optimizer)

    def _stay_on_device(self, guard: UpdateGuard) -> None:
        engine, plan = self._engine, self._mesh.plan

        def see(norm: torch.Tensor) -> torch.Tensor:
            self._norm = guard.see(self._over_ranks(norm))
            return norm

        if plan.zero_stage == 0 and plan.precision == "fp32":
            limit = engine.gradient_clipping() or float("inf")
            # Above 0, so that the engine calls `clip_fp32_gradients` each step.
            engine.gradient_clipping = lambda: limit
            engine.clip_fp32_gradients = lambda: clip_gradients(engine.module.parameters(), self._mesh, limit, see)
        elif isinstance(engine.optimizer, FP16_UnfusedOptimizer):
            engine.optimizer.step = functools.partial(_step_in_16_bits, engine.optimizer, self._mesh, see)
        else:
            own = functools.partial(_norm_under_zero, engine.optimizer, self._mesh) if plan.ep > 1 else None
            host_waits.keep_norm(engine, plan, see, own)
        engine.get_global_grad_norm = lambda: self._norm

    def last(self) -> torch.Tensor | float:
        """The norm before clipping."""
        if self._norm is not None:
            return self._norm
        norm = self._engine.get_global_grad_norm()
        if norm is None:
            return float("nan")
        return self._over_ranks(torch.as_tensor(norm, device=device())) if self._differs_by_rank else norm

    def _over_ranks(self, own: torch.Tensor) -> torch.Tensor:
        """With 1-bit Adam gradients differ between ranks: the root mean square of their norms, equal on all ranks."""
        if not self._differs_by_rank:
            return own
        return (self._mesh.sum_over_tokens(own.double().square()) / self._mesh.token_ranks).sqrt()

    def _correct(self, optimizer: FP16_UnfusedOptimizer) -> None:
        """Make the optimizer clip by, and report, the norm of all gradients, which are fp32 at that point."""
        clip = optimizer.unscale_and_clip_grads

        def clip_by_all(total_norm: float, apply_scale: bool = True) -> Any:
            held = [(weight, master.grad) for weight, master in _pairs(optimizer) if master.grad is not None]
            optimizer._global_grad_norm = float(gradient_norm(held, self._mesh))
            return clip(optimizer._global_grad_norm, apply_scale)

        optimizer.unscale_and_clip_grads = clip_by_all


def _pairs(optimizer: FP16_UnfusedOptimizer) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
    """Weights and their fp32 masters."""
    for weights, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
        yield from zip(weights, masters, strict=True)


@torch.no_grad()
def _step_in_16_bits(optimizer: FP16_UnfusedOptimizer, mesh: Mesh, see: See, closure: None = None) -> None:
    """`FP16_UnfusedOptimizer.step` of DeepSpeed 0.19.8 with the norm of all gradients, without reading from the device.

    It reads whether each gradient is finite, the norm of each, and the total.
    """
    assert closure is None
    optimizer.overflow = False
    held: list[Held] = []
    for weight, master in _pairs(optimizer):
        master.grad = torch.zeros_like(master) if weight.grad is None else weight.grad.to(master.dtype)
        held.append((weight, master.grad))
    norm = see(gradient_norm(held, mesh))
    optimizer._update_scale(False)
    if optimizer.clip_grad > 0:
        factor = 1.0 / ((norm.double() + EPSILON) / optimizer.clip_grad).clamp(min=1.0)
        for _, gradient in held:
            gradient.mul_(factor.to(gradient.dtype))
    optimizer.optimizer.step()
    for weight, master in _pairs(optimizer):
        master.grad = None
        weight.data.copy_(master.data)


Held = tuple[torch.nn.Parameter, torch.Tensor]
"""A parameter and its gradient."""


def clip_gradients(parameters: Iterable[torch.nn.Parameter], mesh: Mesh, max_norm: float, see: See) -> None:
    """Scale gradients down to `max_norm`; `see` gets the norm before clipping."""
    held = [(p, p.grad) for p in parameters if p.grad is not None]
    norm = see(gradient_norm(held, mesh))
    if held and math.isfinite(max_norm):
        # In float64, and then in the gradients' type: as a Python number would be.
        scale = (max_norm / (norm.double() + EPSILON)).clamp(max=1.0)
        torch._foreach_mul_([gradient for _, gradient in held], scale.to(norm.dtype))


def gradient_norm(held: Sequence[Held], mesh: Mesh) -> torch.Tensor:
    """The norm of all gradients of a replica. Collective.

    Squares are summed in float64, so that the norm does not depend on which rank holds which parameter.
    """
    squares = _squares(g for p, g in held if not _is_expert(p) and _counts(p, mesh))
    if mesh.plan.ep > 1:
        # The ranks of an expert group hold different experts. There are several such groups, and tensor ranks hold the
        # same experts.
        copies = mesh.token_ranks // mesh.plan.ep * mesh.plan.tp
        experts = _squares(g for p, g in held if _is_expert(p))
        squares = squares + mesh.sum_over_tokens(experts) / copies
    return mesh.sum_over_shards(squares).sqrt().float()


def _norm_under_zero(optimizer: Any, mesh: Mesh) -> torch.Tensor:
    """The norm of all gradients, experts included, under ZeRO 1 and 2. Collective, once.

    DeepSpeed 0.19.8 has a collective for each of its parameter groups, and experts make several: stages with different
    numbers of experts would wait for each other forever. `BF16_Optimizer` leaves out what other stages hold.
    """
    if isinstance(optimizer, BF16_Optimizer):
        held = [
            (weight, gradient)
            for weights, gradients in zip(optimizer.bf16_groups, optimizer.fp32_groups_gradients, strict=True)
            for weight, gradient in zip(weights, gradients, strict=True)
        ]
        return gradient_norm(held, mesh)
    own = [
        gradient
        for number, _ in enumerate(optimizer.bit16_groups)
        for gradient, weight in zip(
            _unpadded(optimizer.averaged_gradients[number]), optimizer.params_in_partition[number], strict=False
        )
        if _counts(weight, mesh)
    ]
    return mesh.sum_over_shards(mesh.sum_over_tokens(_squares(own).float())).sqrt()


def _reduce_once(optimizer: DeepSpeedZeroOptimizer) -> None:
    """Let the stages of a pipeline sum their norms in one collective.

    DeepSpeed 0.19.8 has one for each parameter group, and stages need not have equally many groups: matrices of muon,
    tables, or what a learning-rate multiplier names may be in some of them only. The others would wait forever, or take
    the next collective's numbers. It can go when pp 4 with ZeRO 1 passes in tests/runtime/optimizers/test_muon.py.
    """
    compute, reduce = optimizer.scaled_global_norm, optimizer._model_parallel_all_reduce

    def scaled_global_norm(norm_type: int = 2) -> torch.Tensor:
        optimizer._model_parallel_all_reduce = lambda tensor, op: None
        try:
            total: torch.Tensor = compute(norm_type).float().square()
        finally:
            optimizer._model_parallel_all_reduce = reduce
        reduce(tensor=total, op=torch.distributed.ReduceOp.SUM)
        return total.sqrt()

    optimizer.scaled_global_norm = scaled_global_norm


def _unpadded(gradients: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [gradient for gradient in gradients if not getattr(gradient, "_zero_padding", False)]


def _squares(found: Iterable[torch.Tensor]) -> torch.Tensor:
    gradients = list(found)
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device())
    return torch.stack(torch._foreach_norm(gradients)).double().square().sum()


def _is_expert(parameter: torch.nn.Parameter) -> bool:
    """Whether DeepSpeed reduces this gradient only over ranks with the same experts."""
    return not getattr(parameter, "allreduce", True)


def _counts(parameter: torch.nn.Parameter, mesh: Mesh) -> bool:
    """Count shards on every rank, full parameters on tensor rank 0, copies on another stage not at all."""
    if getattr(parameter, "ds_pipe_replicated", False):
        return False
    return is_tensor_slice(parameter) or mesh.tensor == 0


class NoiseMeter:
    """Sums, on the device, the squared norm of every gradient that reaches a parameter; of shards, each its own."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter], mesh: Mesh) -> None:
        self._mesh = mesh
        self._squares = torch.zeros((), dtype=torch.float32, device=device())
        for parameter in parameters:
            if parameter.requires_grad and _counts(parameter, mesh):
                parameter.register_hook(self._see)  # type: ignore[no-untyped-call]

    def _see(self, gradient: torch.Tensor) -> None:
        self._squares += torch.linalg.vector_norm(gradient, dtype=torch.float32).square()

    def take(self, accumulated: int) -> torch.Tensor:
        """Mean squared norm of a micro-batch's gradient in the last step, over all ranks. Collective.

        `accumulated`: micro-batches per rank, by which each gradient has been divided.
        """
        total = self._mesh.sum_over_shards(self._mesh.sum_over_tokens(self._squares.clone()))
        self._squares.zero_()
        return total.double() * accumulated / self._mesh.token_ranks
