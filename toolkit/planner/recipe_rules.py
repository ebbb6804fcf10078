"""Rules that refuse plans which cannot train, record or save what a recipe asks for, as data with the reason in words.

Like `RULES` in plans/deepspeed_rules.py, but these depend on the recipe, not on the DeepSpeed version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from toolkit.plans.deepspeed_rules import UNKEEPABLE, unkeepable
from toolkit.plans.noise_scale import tells_noise
from toolkit.plans.plan import Plan, Refusal
from toolkit.recipe.sections import Recipe


@dataclass(frozen=True, kw_only=True)
class RecipeRule:
    """A plan that does not do what the recipe asks for."""

    forbids: Callable[[Recipe, Plan], bool]
    """Whether the rule refuses this plan."""
    reason: str
    """Why, and what to do instead; `{recipe...}` and `{plan...}` are filled in."""
    limits: str = ""
    """What of model parallelism it limits: its row in the table of limits in docs/model_parallelism.md."""


RULES: tuple[RecipeRule, ...] = (
    RecipeRule(
        forbids=lambda recipe, plan: recipe.train.objective is not None and plan.sp > 1,
        reason="train.objective {recipe.train.objective} sums over complete answers, and sequence parallel cuts them; "
        "use data_parallel, zero, tensor_parallel, pipeline or hybrid",
    ),
    RecipeRule(
        forbids=lambda recipe, plan: recipe.train.objective is not None and plan.islands > 1,
        reason="train.objective {recipe.train.objective} averages over the pairs of the global batch, and islands "
        "weigh their losses by tokens; use another strategy than local_sgd",
    ),
    RecipeRule(
        forbids=lambda recipe, plan: _has_other_task(recipe) and plan.sp > 1,
        reason="sequence parallel needs the per-token loss of a causal language model; data.format needs "
        "{recipe.model.task}",
    ),
    RecipeRule(
        forbids=lambda recipe, plan: _has_other_task(recipe) and plan.tensor_by == "autotp" and plan.tp > 1,
        reason="AutoTP is tried on causal language models only, and data.format needs {recipe.model.task}; "
        "leave tensor_by out",
    ),
    RecipeRule(
        forbids=lambda recipe, plan: recipe.model.task == "seq2seq" and plan.pp > 1,
        reason="every decoder layer reads the encoder's output: each stage would compute the whole encoder",
        limits="pipeline of an encoder-decoder",
    ),
    RecipeRule(
        forbids=lambda recipe, plan: recipe.checkpoint.every % plan.local_steps > 0,
        reason="checkpoint.every ({recipe.checkpoint.every}) must be a multiple of local_steps ({plan.local_steps}): "
        "islands have equal weights only after an exchange",
    ),
    RecipeRule(
        forbids=lambda recipe, plan: recipe.metrics.noise_scale and not tells_noise(plan),
        reason="metrics.noise_scale compares gradients of micro-batches with that of the global batch: it needs "
        "data_parallel, zero or tensor_parallel, and at least two micro-batches per step over all devices",
        limits="noise scale with pipeline, sequence or expert axes, AutoTP, or islands",
    ),
    RecipeRule(
        forbids=lambda recipe, plan: recipe.train.outer is not None and plan.islands == 1,
        reason="train.outer is for the islands of local_sgd; leave it out, or set strategy.name=local_sgd",
    ),
    RecipeRule(
        forbids=lambda recipe, plan: _delay_steps(recipe) > plan.local_steps,
        reason="train.outer.delay_steps ({recipe.train.outer.delay_steps}) must be at most local_steps "
        "({plan.local_steps}), the length of a round",
    ),
    RecipeRule(
        forbids=lambda recipe, plan: _is_async(recipe) and _has_outer_momentum(recipe),
        reason="train.outer.optimizer nesterov would add momentum to stale updates; use average with mode async",
    ),
    RecipeRule(
        forbids=lambda recipe, plan: _is_async(recipe) and recipe.train.on_spike != "ignore",
        reason="train.on_spike rewind needs islands that are at the same step; use ignore with mode async",
    ),
    RecipeRule(
        forbids=lambda recipe, plan: recipe.checkpoint.every > 0 and bool(unkeepable(plan)),
        reason=f"{UNKEEPABLE}; use checkpoint.every 0",
    ),
    RecipeRule(
        forbids=lambda recipe, plan: _is_quantized(recipe) and plan.zero_stage == 3,
        reason="4-bit weights (model.lora.quantize) can't be sharded by ZeRO 3; use zero_stage 0, 1 or 2",
    ),
)


def limits() -> list[tuple[str, str]]:
    """Combinations of model parallelism that are refused, with the reason: the table in the docs."""
    return [(rule.limits, rule.reason) for rule in RULES if rule.limits]


def keepable(recipe: Recipe, proposals: Iterable[Plan | Refusal]) -> Iterator[Plan | Refusal]:
    """The proposals; plans that a rule forbids become refusals with the reason of the first such rule."""
    for proposal in proposals:
        if isinstance(proposal, Plan) and (reason := _reason(recipe, proposal)):
            yield Refusal(proposal.strategy, reason, proposal)
        else:
            yield proposal


def _reason(recipe: Recipe, plan: Plan) -> str:
    """Why the recipe can't use the plan; empty if it can."""
    found = next((rule for rule in RULES if rule.forbids(recipe, plan)), None)
    return found.reason.format(recipe=recipe, plan=plan) if found else ""


def _has_other_task(recipe: Recipe) -> bool:
    return recipe.model.task not in (None, "causal-lm")


def _delay_steps(recipe: Recipe) -> int:
    """Steps after which a round's mean is applied; 0 where the recipe does not set it."""
    return (recipe.train.outer.delay_steps or 0) if recipe.train.outer else 0


def _is_async(recipe: Recipe) -> bool:
    return recipe.train.outer is not None and recipe.train.outer.mode == "async"


def _has_outer_momentum(recipe: Recipe) -> bool:
    return recipe.train.outer is not None and recipe.train.outer.optimizer != "average"


def _is_quantized(recipe: Recipe) -> bool:
    return recipe.model.lora is not None and recipe.model.lora.quantize != "none"
