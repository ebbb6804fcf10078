"""Rules that refuse plans which cannot train or save what a recipe asks for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from toolkit.plans.deepspeed_rules import unkeepable
from toolkit.plans.noise_scale import tells_noise
from toolkit.plans.plan import Plan, Refusal
from toolkit.recipe.sections import Recipe


def _keepable(recipe: Recipe, proposals: Iterable[Plan | Refusal]) -> Iterator[Plan | Refusal]:
    """Proposals, without those that can't train the recipe's task, or save what it asks to save."""
    for proposal in proposals:
        if isinstance(proposal, Plan) and (reason := _task_fault(recipe.model.task, proposal)):
            yield Refusal(proposal.strategy, reason, proposal)
        elif isinstance(proposal, Plan) and recipe.checkpoint.every % proposal.local_steps:
            reason = (
                f"checkpoints are made where islands agree: checkpoint.every {recipe.checkpoint.every} is no multiple "
                f"of local_steps {proposal.local_steps}"
            )
            yield Refusal(proposal.strategy, reason, proposal)
        elif isinstance(proposal, Plan) and recipe.metrics.noise_scale and not tells_noise(proposal):
            reason = (
                "metrics.noise_scale compares micro-batches with the whole batch: it needs data_parallel or zero, and "
                "at least two micro-batches a step over all devices"
            )
            yield Refusal(proposal.strategy, reason, proposal)
        elif isinstance(proposal, Plan) and recipe.train.outer is not None and proposal.islands == 1:
            reason = "train.outer is for the islands of local_sgd; leave it out, or set strategy.name=local_sgd"
            yield Refusal(proposal.strategy, reason, proposal)
        elif isinstance(proposal, Plan) and (reason := _delay_fault(recipe, proposal) or _async_fault(recipe)):
            yield Refusal(proposal.strategy, reason, proposal)
        elif isinstance(proposal, Plan) and recipe.checkpoint.every > 0 and unkeepable(proposal):
            yield Refusal(proposal.strategy, f"{unkeepable(proposal)}; use checkpoint.every 0", proposal)
        elif isinstance(proposal, Plan) and _is_quantized(recipe) and proposal.zero_stage == 3:
            yield Refusal(proposal.strategy, "4bit weights of model.lora.quantize can't be sharded by ZeRO 3", proposal)
        else:
            yield proposal


def _task_fault(task: str | None, plan: Plan) -> str:
    """Why a plan can't split the model of a task; empty if it can."""
    if task in (None, "causal-lm"):
        return ""
    if plan.sp > 1:
        return f"sequence shards are for losses of single tokens of a causal language model; data.format needs {task}"
    if plan.tensor_by == "autotp" and plan.tp > 1:
        return f"AutoTP is tried on causal language models only, and data.format needs {task}; leave tensor_by out"
    if plan.pp > 1 and task == "seq2seq":
        return "every decoder layer reads the encoder's output: each stage would compute the whole encoder"
    return ""


def _delay_fault(recipe: Recipe, plan: Plan) -> str:
    """Why a round's mean can't count when the recipe says; empty if it can."""
    delay = recipe.train.outer.delay_steps if recipe.train.outer else None
    if delay is None or delay <= plan.local_steps:
        return ""
    return f"train.outer.delay_steps {delay} is more than a round of local_steps {plan.local_steps}"


def _async_fault(recipe: Recipe) -> str:
    """Why islands can't go their own ways with a recipe; empty if they can."""
    outer = recipe.train.outer
    if outer is None or outer.mode != "async":
        return ""
    if outer.optimizer != "average":
        return "train.outer.optimizer nesterov would add momentum to stale changes; use average with mode async"
    if recipe.train.on_spike != "ignore":
        return "train.on_spike rewind needs islands that stand at the same step; use ignore with mode async"
    return ""


def _is_quantized(recipe: Recipe) -> bool:
    return recipe.model.lora is not None and recipe.model.lora.quantize != "none"
