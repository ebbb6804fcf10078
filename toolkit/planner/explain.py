"""Estimates in words: the bottleneck of a plan, why it does not fit, which change would, and caveats."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

from toolkit.cost.estimate import APART, Memory, Time
from toolkit.cost.start import start_reason
from toolkit.launching.environment import nccl_settings
from toolkit.plans.plan import Plan
from toolkit.plans.router_balance import Balance, balance_lines
from toolkit.recipe.schedules import scaled_lr
from toolkit.recipe.sections import Train
from toolkit.units import GIB

NOTABLE = 0.12
"""A part below this share of the step is not mentioned."""
WAITS = {
    "recompute": "recomputing activations",
    "tp_comm": "tensor-parallel collectives",
    "sp_comm": "sequence-, ring- or expert-parallel exchanges",
    "pp_bubble": "pipeline stages waiting",
    "pp_comm": "activations between stages",
    "dp_comm": "gradient and ZeRO traffic",
    "optimizer": "summing gradients and updating weights",
    "fixed": "work between steps",
}
"""Parts of a step other than useful compute → description."""
REMEDIES = {
    "recompute": "more memory would avoid it",
    "tp_comm": "a smaller tp inside one node would help",
    "sp_comm": "a smaller sp, cp or ep would help",
    "pp_bubble": "more micro-batches or fewer stages would help",
    "pp_comm": "a faster network or fewer stages would help",
    "dp_comm": "a larger batch per device or a faster network would help",
    "optimizer": "fewer micro-batches, or states sharded and on the device, would help",
    "fixed": "a larger batch per step would help",
}
NAMES = {
    "params": "parameters", "grads": "gradients", "optimizer": "optimizer states", "activations": "activations",
    "logits": "logits", "gathered": "gathered parameters", "buffers": "buckets", "overhead": "overhead",
}  # fmt: skip


def bottleneck(plan: Plan, time: Time) -> str:
    """The part of the step that costs most time besides useful compute, and what would help."""
    total = time.total
    shares = {name: getattr(time, name) / total for name in WAITS}
    worst = max(shares, key=lambda name: shares[name])
    useful = time.compute / total
    if shares[worst] < NOTABLE:
        return f"compute ({useful:.0%} of the step)"
    return f"{WAITS[worst]} ({shares[worst]:.0%} of the step): {REMEDIES[worst]}"


def misfit_reason(used: Memory, limit_bytes: int, host_limit_bytes: int, margin_bytes: int = 0) -> str:
    """Why a plan does not fit, with the largest parts of its memory."""
    usable = limit_bytes - margin_bytes
    if used.total > usable:
        margin = f" ({_gib(limit_bytes)} less a margin of {margin_bytes / limit_bytes:.0%})" if margin_bytes else ""
        return f"needs {_gib(used.total)} of {_gib(usable)} GiB{margin}: {_parts(used)}"
    if used.host > host_limit_bytes:
        return f"needs {_gib(used.host)} GiB of host memory; {_gib(host_limit_bytes)} may be used"
    return start_reason(used, usable, host_limit_bytes)


def would_fit(plan: Plan, test: Callable[[Plan], bool]) -> str:
    """`; ZeRO 2 would fit`: the cheapest single change that makes the plan fit; empty if none does."""
    for words, change in _changes(plan):
        if test(replace(plan, **change)):
            return f"; {words} would fit"
    return ""


def _changes(plan: Plan) -> list[tuple[str, dict[str, Any]]]:
    """Changes to try, from the cheapest to the most expensive in time."""
    changes: list[tuple[str, dict[str, Any]]] = []
    full = {"recompute": "full"} if plan.recompute in ("none", "selective") else {}
    if plan.recompute == "none":
        changes.append(("recompute selective", {"recompute": "selective"}))
    if full:
        changes.append(("recompute full", dict(full)))
    deepest = 1 if plan.pp > 1 else 3
    for stage in range(plan.zero_stage + 1, deepest + 1):
        changes.append((f"ZeRO {stage}", {"zero_stage": stage, "zero_group": plan.dp}))
    for stage in range(plan.zero_stage + 1, deepest + 1):
        if full:
            changes.append((f"ZeRO {stage} with recompute full", {"zero_stage": stage, "zero_group": plan.dp, **full}))
    if plan.micro_batch > 1:
        smaller = {"micro_batch": 1, "grad_accum": plan.micro_batch * plan.grad_accum}
        changes.append(("micro_batch 1", smaller))
    if plan.offload == "none" and plan.zero_stage:
        changes.append(("offload to the host", {"offload": "cpu", **full}))
    return changes


def _parts(used: Memory) -> str:
    sizes = {f.name: getattr(used, f.name) for f in fields(used) if f.name not in APART}
    largest = sorted(sizes.items(), key=lambda item: -item[1])[:3]
    return ", ".join(f"{NAMES[name]} {_gib(size)}" for name, size in largest)


def _gib(size: float) -> str:
    return f"{size / GIB:.1f}"


WARMUP = 5 / 90
"""Fraction of a run to warm up a scaled learning rate: 5 of 90 epochs (Goyal et al. 2017)."""


def caveats(plan: Plan, train: Train, balance: Balance | None = None, experts_per_visit: float = math.inf) -> list[str]:
    """What users should know about a plan, one sentence each; none for a plan that is exact and ordinary."""
    routers = balance_lines(balance, experts_per_visit) if balance else ()
    return [*_batch(train), *_decay(train), *routers, *_wire(plan, train)]


def _decay(train: Train) -> Iterator[str]:
    if train.weight_decay and train.decay == "matrices":
        yield "weight decay leaves out norms and biases; train.decay=all includes them"


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
        yield f"beyond 8 times base_batch, linear scaling is known to break down{'; ' + softer if softer else ''}"


def _wire(plan: Plan, train: Train) -> Iterator[str]:
    sent = train.reduce.dtype
    if sent is not None and sent != plan.precision and sent != "fp32" and plan.devices > 1:
        yield f"gradients are reduced in {sent}, not {plan.precision}: losses differ by rounding"
    for name, value in nccl_settings(train.reduce.algorithm, {}).items():
        yield f"every worker sets {name}={value}"
    if train.optimizer == "onebit_adam":
        yield (
            f"onebit_adam compresses after {train.freeze_steps} steps: the result is near that of Adam, not the same; "
            "predicted times are for the steps after that"
        )
    if plan.zero_quantized != "none":
        yield f"ZeRO++ quantises {plan.zero_quantized} on the wire: the result is near one process's, not the same"
