"""A plan inside other people's trainers: arguments for transformers and TRL, a plugin for accelerate loops."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from toolkit.errors import BadInput
from toolkit.plans.plan import Plan
from toolkit.recipe.schedules import make_schedule
from toolkit.recipe.sections import Train


def check_expressible(plan: Plan, train: Train) -> None:
    """`BadInput` for what those trainers can't do: their loss would differ from the plan's, or nothing would run."""
    axes = {"pp": plan.pp, "tp": plan.tp, "sp": plan.sp, "ep": plan.ep, "islands": plan.islands}
    split = [f"{axis} {size}" for axis, size in axes.items() if size > 1]
    if split:
        what = f"{', '.join(split)} is for our own trainer only; use toolkit.train, or fix strategy.name=zero"
        raise BadInput("plan", what)
    if train.grad_reduce != "mean":
        raise BadInput("train.grad_reduce", f"{train.grad_reduce!r} given; other trainers take the mean; use mean")
    if train.reduce.algorithm != "auto" or (train.reduce.bucket_elements and plan.zero_stage == 0):
        what = "algorithm, and bucket_elements of ZeRO 0, are our own trainer's; leave them out for other trainers"
        raise BadInput("train.reduce", what)
    if train.batch_ramp is not None:
        raise BadInput("train.batch_ramp", "our own trainer's; other trainers have one batch size: leave it out")
    if train.optimizer in ("lars", "onebit_adam"):
        what = f"{train.optimizer!r} is our own trainer's; other trainers get DeepSpeed's: use lamb or adamw"
        raise BadInput("train.optimizer", what)


def arguments(plan: Plan, train: Train, deepspeed: Mapping[str, Any], *, on_cpu: bool) -> dict[str, Any]:
    """Keywords of `TrainingArguments` that make the same updates."""
    check_expressible(plan, train)
    optimizer = deepspeed["optimizer"]["params"]
    given: dict[str, Any] = {
        "deepspeed": dict(deepspeed),
        "per_device_train_batch_size": plan.micro_batch,
        "gradient_accumulation_steps": plan.grad_accum,
        "learning_rate": optimizer["lr"],
        "max_grad_norm": train.grad_clip,
        "bf16": plan.precision == "bf16",
        "fp16": plan.precision == "fp16",
        "gradient_checkpointing": plan.recompute == "full",
        "max_steps": train.steps or -1,
        "seed": train.seed,
        "use_cpu": on_cpu,
        "report_to": [],
        "weight_decay": train.weight_decay,
        **_schedule(train, optimizer["lr"]),
    }
    if train.epochs is not None:
        given["num_train_epochs"] = train.epochs
    if "betas" in optimizer:
        given |= {"adam_beta1": train.betas[0], "adam_beta2": train.betas[1]}
    if "eps" in optimizer:
        given["adam_epsilon"] = train.eps
    return given


def _schedule(train: Train, lr: float) -> dict[str, Any]:
    """Our schedule by the names of transformers: exact but for the warm-up, which starts at 0 there."""
    warmup: float = train.warmup
    if train.steps is not None:
        warmup = make_schedule(train, train.steps).warmup_steps
    if warmup:
        text = "transformers warms the learning rate up from 0, one step behind toolkit.train; train.warmup=0 is exact"
        warnings.warn(text, stacklevel=4)
    kinds: dict[str, tuple[str, dict[str, float]]] = {
        "constant": ("constant_with_warmup", {}),
        "cosine": ("cosine_with_min_lr", {"min_lr_rate": train.min_lr_ratio}),
        "linear": ("polynomial", {"lr_end": train.min_lr_ratio * lr, "power": 1.0}),
    }
    name, options = kinds[train.schedule]
    return {"lr_scheduler_type": name, "lr_scheduler_kwargs": options, "warmup_steps": warmup}
