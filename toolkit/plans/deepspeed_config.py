"""The DeepSpeed config of a plan: one pure function. No value is "auto"; defaults that changed are written out."""

from __future__ import annotations

import math
from typing import Any

from toolkit.plans.plan import Plan
from toolkit.recipe.batch_sections import Reduce
from toolkit.recipe.schedules import scaled_lr
from toolkit.recipe.sections import Train

NEVER = 2**31 - 1
"""Steps between DeepSpeed's own progress lines: never, because the toolkit prints its own."""
BUCKET_ELEMENTS = 200_000_000
"""Largest reduction bucket, in elements: enough for full bandwidth; DeepSpeed allocates all of it, 400 MB in bf16."""
UPDATE_ELEMENTS = 100_000_000
"""Elements of a rank's shard that ZeRO 3 updates at a time: it copies their fp32 gradients first, 400 MB. DeepSpeed's
default of a billion takes 4 GB beside the gradients themselves, in an update that moves as many bytes either way."""
OFFLOADED_UPDATE_ELEMENTS = 1_000_000_000
"""Elements per update under offload: the host updates in place, and disks are read in pieces of this size."""
MAX_LIVE_ELEMENTS = 10**9
"""Gathered parameters that ZeRO 3 does not release: beyond them nothing is gathered ahead."""
PERSISTENT_ELEMENTS = 100_000
"""ZeRO 3 keeps parameters below this size on every rank: gathering them costs more than storing them."""

OWN = {
    "lamb": "Lamb",
    "lion": "Lion",
    "lars": "Lars",
    "muon": "Muon",
    "adopt": "Adopt",
    "schedule_free": "ScheduleFree",
    "adafactor": "Adafactor",
}
"""Optimizers that the toolkit implements; the names are DeepSpeed's, which has CUDA kernels for two of them."""
_ONE_BIT = {"onebit_adam": "OneBitAdam", "onebit_lamb": "OneBitLamb", "zero_one_adam": "ZeroOneAdam"}


def deepspeed_config(
    plan: Plan, train: Train, *, params: int, backend: str, nvme_path: str | None = None
) -> dict[str, Any]:
    """The config for `deepspeed.initialize`.

    `train_batch_size` is left out: with `autotp_size`, DeepSpeed 0.19.8 checks it against the world size including
    tensor-parallel ranks and refuses the true global batch.
    """
    return {
        "train_micro_batch_size_per_gpu": plan.micro_batch,
        "gradient_accumulation_steps": plan.grad_accum,
        # DeepSpeed's default is 0 up to 0.19.2 and 1.0 since 0.19.3; left out, clipping depends on the version.
        "gradient_clipping": float(train.grad_clip),
        **_reduction(train.reduce),
        "steps_per_print": NEVER,
        "wall_clock_breakdown": False,
        # DeepSpeed 0.19.8 measures samples per second by default: from the third step on it waits for the device before
        # and after every micro-batch, though it never prints the result here.
        "timers": {"throughput": {"enabled": False}},
        "optimizer": _optimizer(plan, train),
        "zero_optimization": _zero(plan, train.reduce, params, backend, nvme_path),
        # Under offload, torch's fused AdamW updates the states on the host, vectorised and without a compiler.
        # DeepSpeed 0.19.8 refuses any optimizer but its own CPU Adam, which it compiles on first use, unless this is
        # false. The line can go when offload starts with a client optimizer by default.
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        **_pipeline(plan),
        **({"tensor_parallel": {"autotp_size": plan.tp}} if plan.tensor_by == "autotp" else {}),
        **_precision(plan),
    }


def bucket_elements(params: float, parts: int, asked: int | None = None) -> int:
    """Elements of a reduction bucket: at most one rank's share of the parameters, as DeepSpeed allocates it in full.

    Rounded up to an even number: DeepSpeed 0.19.8 asserts in stage_1_and_2.py that `allgather_bucket_size` is a
    multiple of `nccl_start_alignment_factor`, which is 2, and ZeRO 1 or 2 of a model with an odd share fails to start.
    The rounding can go when that assertion has gone.
    """
    elements = min(asked or BUCKET_ELEMENTS, math.ceil(params / parts))
    return elements + elements % 2


def accumulates_apart(plan: Plan) -> bool:
    """Whether DeepSpeed keeps fp32 gradients of all parameters on every rank (its `BF16_Optimizer`).

    It does under ZeRO 1 in bf16 with several micro-batches, where sums must not round. With one micro-batch there is
    nothing to sum: gradients stay in bf16, and ZeRO 1 runs DeepSpeed's ZeRO optimizer, as ZeRO 2 does.
    """
    return plan.zero_stage == 1 and plan.precision == "bf16" and plan.grad_accum > 1 and plan.offload == "none"


def _reduction(section: Reduce) -> dict[str, Any]:
    """Reduction settings of the recipe; DeepSpeed's default reduces in the precision of the model."""
    config: dict[str, Any] = {"prescale_gradients": section.scaling == "pre"}
    if section.predivide is not None:
        config["gradient_predivide_factor"] = section.predivide
    if section.dtype is not None:
        config["communication_data_type"] = section.dtype
    return config


def _optimizer(plan: Plan, train: Train) -> dict[str, Any]:
    lr = scaled_lr(train)
    if train.optimizer == "sgd":
        return {"type": "SGD", "params": {"lr": lr, "weight_decay": train.weight_decay}}
    params: dict[str, Any] = {"lr": lr, "betas": list(train.betas), "weight_decay": train.weight_decay}
    if train.optimizer == "lion":
        return {"type": "Lion", "params": params}
    params["eps"] = train.eps
    if train.optimizer == "adamw":
        # torch's fused AdamW needs no compiler on any device. DeepSpeed 0.19.8 uses its FusedAdam without `torch_adam`,
        # which compiles CUDA code on first use and fails where there is no compiler.
        return {"type": "AdamW", "params": {**params, "torch_adam": True, "fused": True}}
    return {"type": {**OWN, **_ONE_BIT}[train.optimizer], "params": params}


def _zero(plan: Plan, reduce: Reduce, params: int, backend: str, nvme_path: str | None) -> dict[str, Any]:
    config: dict[str, Any] = {"stage": plan.zero_stage}
    bucket = bucket_elements(params, plan.tp * plan.pp, reduce.bucket_elements)
    if plan.zero_stage == 0:
        return config
    config |= {
        "contiguous_gradients": True,
        "reduce_scatter": True,
        # Written out because DeepSpeed's default depends on the stage and the version. A CPU has no streams to overlap.
        "overlap_comm": backend != "cpu" if reduce.overlap is None else reduce.overlap,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
        "round_robin_gradients": False,
    }
    if plan.zero_stage == 3:
        config |= {
            "stage3_prefetch_bucket_size": max(1, bucket // 4),
            "stage3_param_persistence_threshold": PERSISTENT_ELEMENTS,
            "stage3_max_live_parameters": MAX_LIVE_ELEMENTS,
            "stage3_max_reuse_distance": MAX_LIVE_ELEMENTS,
            "stage3_gather_16bit_weights_on_model_save": False,
            "sub_group_size": UPDATE_ELEMENTS if plan.offload == "none" else OFFLOADED_UPDATE_ELEMENTS,
        }
    return config | _offload(plan, backend, nvme_path) | _variants(plan)


def _offload(plan: Plan, backend: str, nvme_path: str | None) -> dict[str, Any]:
    if plan.offload == "none":
        return {}
    device, _, params_too = plan.offload.partition("_")
    target: dict[str, Any] = {"device": device, "pin_memory": backend != "cpu"}
    if device == "nvme":
        target["nvme_path"] = nvme_path
    return {"offload_optimizer": target} | ({"offload_param": dict(target)} if params_too else {})


def _variants(plan: Plan) -> dict[str, Any]:
    config: dict[str, Any] = {}
    if plan.zero_variant == "hpz":
        config["zero_hpz_partition_size"] = plan.zero_group
    if plan.zero_variant == "mics":
        config["mics_shard_size"] = plan.zero_group
    if plan.zero_quantized in ("weights", "both"):
        config["zero_quantized_weights"] = True
    if plan.zero_quantized in ("gradients", "both"):
        config["zero_quantized_gradients"] = True
    return config


def _pipeline(plan: Plan) -> dict[str, Any]:
    """`pipeline/transfers.py` sends the shares of tensor ranks: DeepSpeed 0.19.8 partitions a single tensor only."""
    return {"pipeline": {"pipe_partitioned": False, "grad_partitioned": False}} if plan.pp > 1 else {}


def _precision(plan: Plan) -> dict[str, Any]:
    fp16: dict[str, Any] = {"enabled": plan.precision == "fp16"}
    if plan.precision == "fp16":
        fp16 |= {
            "loss_scale": 0,
            "initial_scale_power": 16,
            "loss_scale_window": 1000,
            "hysteresis": 2,
            "consecutive_hysteresis": False,
            "min_loss_scale": 1,
        }
    bf16: dict[str, Any] = {"enabled": plan.precision == "bf16"}
    if accumulates_apart(plan):
        # Each gradient is added to its fp32 sum as soon as it exists, and freed. DeepSpeed 0.19.8 keeps all of them
        # until the update by default, 2 more bytes per parameter. This can go when its default is true.
        bf16["immediate_grad_update"] = True
    return {"bf16": bf16, "fp16": fp16, "data_types": {"grad_accum_dtype": _accumulation_type(plan)}}


def _accumulation_type(plan: Plan) -> str:
    """The type in which micro-batches are summed: fp32, so that sums do not round.

    Without ZeRO, DeepSpeed 0.19.8 only accepts the precision of the model and raises otherwise. Under ZeRO 1 in bf16,
    fp32 selects `BF16_Optimizer`, which holds 4 more bytes per parameter and reduces after the backward pass; with one
    micro-batch nothing is summed, so it is avoided there.
    """
    if plan.zero_stage == 0:
        return plan.precision
    summed = plan.grad_accum > 1 or plan.zero_stage > 1 or plan.offload != "none"
    return "bf16" if plan.precision == "bf16" and not summed else "fp32"
