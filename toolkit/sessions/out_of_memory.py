"""Out of device memory: what was predicted, what was measured, and the next plan that needs less."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

from toolkit.planner.search import Option
from toolkit.run_dir.layout import RunDir
from toolkit.sessions.resolve import Resolved

LESS = 0.9
"""A plan is leaner if it needs at most this part of the memory: predictions are no finer."""
GIB = 2**30


def leaner(resolved: Resolved) -> Option | None:
    """The fastest plan for the same devices that needs clearly less memory."""
    chosen = resolved.chosen
    limit = LESS * chosen.estimate.memory.total
    same_devices = (o for o in resolved.decision.ranked if o.plan.devices == chosen.plan.devices)
    return next((option for option in same_devices if option.estimate.memory.total <= limit), None)


def under(resolved: Resolved, option: Option) -> Resolved:
    """The same job under another plan; the recipe names it, so that resuming later finds it again."""
    plan = option.plan
    axes: dict[str, Any] = {"zero_stage": plan.zero_stage, "offload": plan.offload, "recompute": plan.recompute}
    strategy = replace(
        resolved.recipe.strategy, name=plan.strategy, micro_batch=plan.micro_batch, grad_accum=None, **axes
    )
    recipe = replace(resolved.recipe, strategy=strategy)
    return replace(resolved, recipe=recipe, decision=replace(resolved.decision, chosen=option))


def explain(resolved: Resolved, option: Option | None, run: RunDir) -> str:
    """Predicted parts beside the measured peak, and what to try."""
    memory = resolved.chosen.estimate.memory
    parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in asdict(memory).items() if size and name != "host")
    lines = [
        f"out of memory under {resolved.chosen.plan.describe()}",
        f"predicted: {memory.total / GIB:.2f} GiB of {resolved.chosen.estimate.memory_limit_bytes / GIB:.2f} ({parts})",
        f"measured peak so far: {_measured(run)}",
    ]
    if option is None:
        lines.append("no plan for these devices needs less; use more devices, a shorter data.seq_len, or offload")
    else:
        lines.append(
            f"the next plan needs {option.estimate.memory.total / GIB:.2f} GiB: {option.plan.describe()}; "
            "train.on_oom=replan goes on under it"
        )
    return "\n".join(lines)


def _measured(run: RunDir) -> str:
    try:
        last = json.loads(run.metrics.read_text(encoding="utf-8").splitlines()[-1])
        return f"{last['memory_bytes'] / GIB:.2f} GiB at step {last['step']}"
    except (OSError, ValueError, KeyError, IndexError):
        return "no step was finished"
