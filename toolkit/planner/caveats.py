"""What a person should know of a chosen plan: where its result differs, and what a large batch asks for."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.launching.launchers import nccl_settings
from toolkit.plans.deepspeed_config import scaled_lr
from toolkit.plans.plan import Plan
from toolkit.recipe.sections import Train

WARMUP = 5 / 90
"""Share of a run that a scaled learning rate is warmed up over: 5 of 90 epochs (Goyal et al. 2017)."""


def notes(plan: Plan, train: Train) -> list[str]:
    """One sentence each; a plan that is exact and ordinary has none."""
    return [*_batch(train), *_wire(plan, train)]


def _batch(train: Train) -> Iterator[str]:
    if train.base_batch is None:
        return
    times = train.global_batch / train.base_batch
    yield (
        f"the batch is {times:g} times base_batch: the peak learning rate is {scaled_lr(train):g} ({train.lr_scaling} "
        f"scaling of {train.lr:g})"
    )
    if times <= 1:
        return
    steps = f" ({-(-train.steps // 18)} steps)" if train.steps else ""
    if train.steps is not None and train.warmup >= 1:
        enough = train.warmup >= WARMUP * train.steps
    else:
        enough = train.warmup >= WARMUP
    if not enough:
        yield (
            f"a learning rate scaled {times:g}-fold at once may diverge: warm up over {WARMUP:.1%} of the run or more, "
            f"train.warmup={WARMUP:.3f}{steps}; {train.warmup:g} is given"
        )
    if times > 8 and train.optimizer in ("adamw", "sgd") and train.lr_scaling == "linear":
        softer = "lr_scaling sqrt suits adamw better than linear, or use lamb" if train.optimizer == "adamw" else ""
        yield f"beyond 8 times the batch linear scaling is known to break down{'; ' + softer if softer else ''}"


def _wire(plan: Plan, train: Train) -> Iterator[str]:
    sent = train.reduce.dtype
    if sent is not None and sent != plan.precision and sent != "fp32" and plan.devices > 1:
        yield f"gradients are reduced in {sent}, not {plan.precision}: losses differ from one process by rounding"
    for name, value in nccl_settings(train.reduce.algorithm, {}).items():
        yield f"every worker sets {name}={value}"
    if train.optimizer == "onebit_adam":
        yield (
            f"onebit_adam compresses after {train.freeze_steps} steps: the result is near that of Adam, not the same; "
            "the times shown are those after these steps"
        )
    if plan.zero_quantized != "none":
        yield f"ZeRO++ quantises {plan.zero_quantized} on the wire: the result is near one process's, not the same"
