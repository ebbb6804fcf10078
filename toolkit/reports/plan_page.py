"""The HTML page of `toolkit plan --html`: one self-contained file."""

from __future__ import annotations

from typing import Any

import yaml

from toolkit.planner.search import Decision, Option, limits, margin_bytes
from toolkit.plans.plan import Job, Plan
from toolkit.recipe.sections import AXES
from toolkit.reports.template import fill

SHOWN = 200
"""Largest number of plans on the page."""


def render(decision: Decision, job: Job, recipe_text: str) -> str:
    """Return the page; `recipe_text` is the planned recipe as YAML."""
    limit, host_limit = limits(job)
    recipe = yaml.safe_load(recipe_text)
    data = {
        "title": f"{recipe.get('name', 'recipe')} on {job.cluster.devices} × {job.cluster.device.name}",
        "subtitle": _subtitle(decision, job),
        "memory_limit": limit,
        "memory_margin": margin_bytes(job),
        "host_limit": host_limit,
        "ranked": [_option(option, recipe) for option in decision.ranked[:SHOWN]],
        "refused": [
            {"strategy": r.strategy, "describe": r.plan.describe() if r.plan else "", "reason": r.reason}
            for r in decision.refused
        ],
    }
    return fill("plan.html", data)


def _subtitle(decision: Decision, job: Job) -> str:
    work, cluster = job.workload, job.cluster
    return (
        f"{job.model.params / 1e9:.2f} B parameters · {cluster.nodes} nodes of {cluster.devices_per_node} · "
        f"{work.global_batch} sequences of {work.seq_len} tokens per step · {work.precision} · "
        f"{decision.considered:,} plans considered, {len(decision.ranked):,} ranked"
    )


def _option(option: Option, recipe: dict[str, Any]) -> dict[str, Any]:
    return {**option.to_json(), "describe": option.plan.describe(), "recipe": recipe_for(option.plan, recipe)}


def recipe_for(plan: Plan, recipe: dict[str, Any]) -> str:
    """Return the recipe with the plan's axes fixed; axes at their defaults are omitted."""
    usual = Plan(strategy=plan.strategy)
    always = ("dp", "micro_batch", "grad_accum", "zero_stage", "recompute")
    axes = {axis: getattr(plan, axis) for axis in AXES}
    fixed = {axis: value for axis, value in axes.items() if axis in always or value != getattr(usual, axis)}
    if plan.zero_variant == "plain":
        fixed.pop("zero_group", None)  # follows from dp
    complete = {**recipe, "strategy": {"name": plan.strategy, **fixed}}
    return yaml.safe_dump(complete, sort_keys=False, allow_unicode=True)
