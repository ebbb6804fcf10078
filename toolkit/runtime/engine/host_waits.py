"""Keeps the host from waiting for the device in DeepSpeed's optimizers: what it would read stays on the device.

DeepSpeed 0.19.8 reads the gradient norm and an overflow flag before every update, to skip updates with NaN or infinite
gradients, and waits for the device after every backward pass under ZeRO. Here such updates are skipped on the device,
and streams wait for each other. The replaced lines are named below; docs/metrics.md lists what still waits. All of this
can go when `toolkit rehearse` counts at most one wait per step without it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.utils import get_global_norm_of_tensors
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from toolkit.plans.plan import Plan

STAND_IN = 1.0
"""Norm that DeepSpeed sees on the host: valid, and used for nothing."""
EPSILON = 1e-6
"""Added to the norm before clipping, as in `torch.nn.utils.clip_grad_norm_`."""


def decides_on_device(plan: Plan) -> bool:
    """Whether updates are skipped on the device.

    Not in fp16, where a skipped step changes the loss scale, a number of the host; not if the optimizer runs on the
    host.
    """
    return plan.precision != "fp16" and plan.offload == "none"


class UpdateGuard:
    """Lets an update with NaN or infinite gradients have no effect, without asking the device first.

    torch's fused AdamW takes a flag for that (`found_inf`) and leaves weights and moments as they are. For other
    optimizers the gradients become zeros, so that weights and moments stay finite; the run ends after such a step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer: Any = optimizer
        self._bad: torch.Tensor | None = None
        self._has_flag = isinstance(optimizer, torch.optim.Adam) and bool(optimizer.defaults.get("fused"))
        if not self._has_flag:
            optimizer.register_step_pre_hook(self._drop)

    def see(self, norm: torch.Tensor) -> torch.Tensor:
        """Take the norm of the gradients of the next update, and return it."""
        self._bad = ~torch.isfinite(norm)
        if self._has_flag:
            self._optimizer.found_inf = self._bad.float().reshape(())
        return norm

    def _drop(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for weight in group["params"]:
                if weight.grad is not None and self._bad is not None:
                    weight.grad.masked_fill_(self._bad, 0.0)


See = Callable[[torch.Tensor], torch.Tensor]
"""Takes the norm of the gradients before each update, and returns it."""


def keep_norm(engine: Any, plan: Plan, see: See, own: Callable[[], torch.Tensor] | None = None) -> None:
    """Let the norm of DeepSpeed's optimizer stay on the device; `see` gets it before every update.

    `own`: computes the norm under ZeRO 1 and 2, if DeepSpeed's is wrong.
    """
    optimizer = engine.optimizer
    if isinstance(optimizer, BF16_Optimizer):
        optimizer.step = functools.partial(
            _step_in_bf16, optimizer, see, own or functools.partial(_bf16_norm, optimizer)
        )
    elif isinstance(optimizer, DeepSpeedZeroOptimizer):
        _keep_zero_1_and_2(optimizer, see, own or optimizer.scaled_global_norm)
    elif plan.zero_stage == 3:
        _keep_zero_3(optimizer, see)


def _keep_zero_1_and_2(optimizer: Any, see: See, compute: Callable[[], torch.Tensor]) -> None:
    """`stage_1_and_2.py`: `check_overflow`, `is_invalid_grad_norm` in `step` and in `unscale_and_clip_grads`."""
    held: list[torch.Tensor] = []

    def scaled_global_norm(norm_type: int = 2) -> float:
        held[:] = [see(compute())]
        return STAND_IN

    def unscale_and_clip_grads(gradients: list[Any], total_norm: float) -> None:
        scale, limit = optimizer.loss_scale, optimizer.clip_grad
        if limit > 0:
            factor = 1.0 / (torch.clamp((held[0] / scale + EPSILON) / limit, min=1.0) * scale)
        elif scale != 1.0:
            factor = 1.0 / scale
        else:
            return
        for gradient in gradients:
            for part in gradient if isinstance(gradient, list) else [gradient]:
                part.data.mul_(factor)

    optimizer.check_grad_overflow = False
    optimizer.scaled_global_norm = scaled_global_norm
    optimizer.unscale_and_clip_grads = unscale_and_clip_grads


def _keep_zero_3(optimizer: Any, see: See) -> None:
    """`stage3.py`: `is_invalid_grad_norm` in `step`."""
    from deepspeed.runtime.utils import combine_grad_norm_groups

    groups, clip = optimizer._get_norm_groups, optimizer.unscale_and_clip_grads
    held: list[torch.Tensor] = []

    def norm_groups() -> list[float]:
        held[:] = [see(combine_grad_norm_groups(groups()))]
        return [STAND_IN]

    optimizer._get_norm_groups = norm_groups
    optimizer.unscale_and_clip_grads = lambda sub_group, total_norm: clip(sub_group, held[0])


def _bf16_norm(optimizer: Any) -> torch.Tensor:
    gradients, _ = optimizer.get_grads_for_norm()
    norm: torch.Tensor = get_global_norm_of_tensors(
        input_tensors=gradients, mpu=optimizer.mpu, norm_type=optimizer.norm_type
    )
    return norm


@torch.no_grad()
def _step_in_bf16(optimizer: Any, see: See, compute: Callable[[], torch.Tensor], closure: None = None) -> None:
    """`BF16_Optimizer.step` without its two reads, `is_invalid_grad_norm` and `clip_coef < 1`."""
    assert closure is None
    optimizer.overflow = False
    norm = compute()
    norm = see(torch.where(norm < 0, torch.full_like(norm, float("inf")), norm))  # -1 stands for NaN and infinity
    if optimizer.clip_grad > 0:
        factor = torch.clamp(optimizer.clip_grad / (norm + EPSILON), max=1.0)
        for gradient in optimizer.get_grads_for_norm(for_clipping=True):
            gradient.detach().mul_(factor)
    for master, gradient in zip(
        optimizer.fp32_groups_flat_partition, optimizer.fp32_groups_gradient_flat_partition, strict=True
    ):
        master.grad = gradient.to(master.dtype)
    optimizer.optimizer.step()
    if optimizer.grad_acc_dtype is not torch.float32:
        for master in optimizer.fp32_groups_flat_partition:
            master.grad = None
    optimizer._lazy_init_hp_params_optimizer_state()
    optimizer.update_lp_params()
    optimizer.clear_hp_grads()


def let_streams_wait(engine: Any, plan: Plan) -> None:
    """Order streams on the device where DeepSpeed lets the host wait after every backward pass.

    Its reductions run on a stream of their own; what follows on the main stream must come after them. With states on
    the host nothing is changed: copies to the host have waits of their own.
    """
    if plan.offload != "none" or get_accelerator().resolves_data_dependency():
        return
    optimizer = engine.optimizer
    if isinstance(optimizer, DeepSpeedZeroOptimizer) and optimizer.overlap_comm:
        _order_zero_1_and_2(optimizer)
    elif plan.zero_stage == 3 and engine.zero_overlap_comm():
        stream = optimizer.reduce_and_partition_stream
        # `stage3.py`, `independent_gradient_partition_epilogue`.
        stream.synchronize = lambda: get_accelerator().current_stream().wait_stream(stream)
        if plan.zero_variant == "plain" and plan.zero_quantized == "none":
            gather_persistent(optimizer)


def gather_persistent(optimizer: Any) -> None:
    """Gather ZeRO 3's persistent parameters after an update as others are fetched: streams wait, the host does not.

    `partition_parameters.py`, `_allgather_params_coalesced`: it waits for the device after the collectives are done.
    """
    if not optimizer.persistent_parameters:
        return
    first = optimizer.persistent_parameters[0]
    gather = first.all_gather

    def all_gather(param_list: Any = None, async_op: bool = False, hierarchy: int = 0) -> Any:
        if async_op or param_list is None or not all(parameter.ds_persist for parameter in param_list):
            return gather(param_list, async_op=async_op, hierarchy=hierarchy)
        absent = [parameter for parameter in param_list if parameter.ds_status.name == "NOT_AVAILABLE"]
        if absent:
            first.all_gather_coalesced(absent).wait()
        return None

    first.all_gather = all_gather


def _order_zero_1_and_2(optimizer: Any) -> None:
    """`stage_1_and_2.py`: `synchronize` in `independent_gradient_partition_epilogue`."""
    finish, reduce = optimizer.independent_gradient_partition_epilogue, optimizer.reduce_ipg_grads

    def epilogue() -> None:
        reduce()
        get_accelerator().current_stream().wait_stream(optimizer.reduction_stream)
        optimizer._clear_previous_reduced_grads()
        # The rest of the method is for everything but the reduction: without overlap it does not wait.
        optimizer.overlap_comm, optimizer.reduce_ipg_grads = False, lambda comm_dtype=None: None
        try:
            finish()
        finally:
            optimizer.overlap_comm, optimizer.reduce_ipg_grads = True, reduce

    optimizer.independent_gradient_partition_epilogue = epilogue
