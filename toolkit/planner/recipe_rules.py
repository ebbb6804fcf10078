"""Rules that refuse plans which cannot train, record or save what a recipe asks for, as data with the reason in words.

Like `RULES` in plans/deepspeed_rules.py, but these depend on the recipe, not on the DeepSpeed version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from toolkit.plans.noise_scale import tells_noise
from toolkit.plans.plan import UNKEEPABLE, Plan, Refusal, unkeepable
from toolkit.recipe.model_section import ONE_RESULT
from toolkit.recipe.sections import Recipe


@dataclass(frozen=True, kw_only=True)
class RecipeRule:
    """A plan that does not do what the recipe asks for."""

    asks: Callable[[Recipe], bool] = lambda recipe: True
    """Whether the recipe asks for what the rule is about; asked once per search, the other thousands of times."""
    forbids: Callable[[Recipe, Plan], bool]
    """Whether the rule refuses this plan."""
    reason: str
    """Why, and what to do instead; `{recipe...}` and `{plan...}` are filled in."""
    limits: str = ""
    """What of model parallelism it limits: its row in the table of limits in docs/model_parallelism.md."""


RULES: tuple[RecipeRule, ...] = (
    RecipeRule(
        asks=lambda recipe: recipe.model.task in ONE_RESULT,
        forbids=lambda recipe, plan: plan.cp > 1 or (plan.sp > 1 and plan.pp > 1),
        reason="classes, scores and embeddings are one result of a complete text, which is gathered over sp ranks of a "
        "whole model, not over a ring or in a stage; use sp without cp and pp",
        limits="classes, scores and embeddings of texts with `cp`, or with `sp` and `pp`",
    ),
    RecipeRule(
        asks=lambda recipe: recipe.model.task in ONE_RESULT,
        forbids=lambda recipe, plan: recipe.data.seq_len % plan.sp > 0,
        reason="sp {plan.sp} does not divide texts of {recipe.data.seq_len} tokens (data.seq_len)",
    ),
    RecipeRule(
        asks=lambda recipe: recipe.train.objective is not None,
        forbids=lambda recipe, plan: plan.islands > 1,
        reason="train.objective {recipe.train.objective} averages over the samples of the global batch, and islands "
        "weigh their losses by tokens; use another strategy than local_sgd",
    ),
    RecipeRule(
        asks=lambda recipe: recipe.train.reference == "live",
        forbids=lambda recipe, plan: plan.offload.endswith("_params"),
        reason="train.reference live computes with a copy of the first weights on the device, and {plan.offload} keeps "
        "weights elsewhere; use train.reference=cached, or another offload",
    ),
    RecipeRule(
        asks=lambda recipe: recipe.train.has_live_teacher,
        forbids=lambda recipe, plan: plan.pp > 1,
        reason="a live teacher would need pipeline stages of its own; use train.distill.predictions=cached, or "
        "data_parallel, zero or tensor_parallel",
        limits="live teacher with a pipeline",
    ),
    RecipeRule(
        asks=lambda recipe: recipe.train.neftune_alpha is not None,
        forbids=lambda recipe, plan: plan.token_parts > 1 or plan.sequence_sharded,
        reason="train.neftune_alpha is noise by sample and place, and ranks that share the tokens of a sample do not "
        "know the place; use strategy.sequence_sharded=false, or another strategy than sequence_parallel",
        limits="NEFTune with shares of tokens or sequence parallel",
    ),
    RecipeRule(
        asks=lambda recipe: bool(recipe.train.sample_prompts),
        forbids=lambda recipe, plan: plan.pp > 1 or plan.token_parts > 1 or plan.islands > 1 or plan.sequence_sharded,
        reason="train.sample_prompts needs a forward pass of any length in one call, which pipelines, shares of tokens "
        "and islands do not have; use data_parallel, zero or tensor_parallel with sequence_sharded=false, or "
        "`toolkit sample` on a checkpoint",
        limits="sample prompts with a pipeline, shares of tokens, sequence parallel or islands",
    ),
    RecipeRule(
        asks=lambda recipe: recipe.model.task in ("seq2seq", "image-classification"),
        forbids=lambda recipe, plan: plan.token_parts > 1,
        reason="sequence parallel splits the tokens of one sequence; data.format needs {recipe.model.task}",
    ),
    RecipeRule(
        asks=lambda recipe: _has_other_task(recipe),
        forbids=lambda recipe, plan: plan.tensor_by == "autotp" and plan.tp > 1,
        reason="AutoTP is tried on causal language models only, and data.format needs {recipe.model.task}; "
        "leave tensor_by out",
    ),
    RecipeRule(
        asks=lambda recipe: recipe.model.task == "embedding",
        forbids=lambda recipe, plan: plan.sequence_sharded,
        reason="embeddings are made of the hidden states of all tokens, which shares of tokens cut; "
        "use strategy.sequence_sharded=false",
        limits="shares of tokens of an embedding model",
    ),
    RecipeRule(
        asks=lambda recipe: recipe.model.task == "seq2seq",
        forbids=lambda recipe, plan: plan.sequence_sharded,
        reason="decoder layers read the encoder's complete output, which shares of tokens cut; "
        "use strategy.sequence_sharded=false",
        limits="shares of tokens of an encoder-decoder",
    ),
    RecipeRule(
        asks=lambda recipe: recipe.checkpoint.every > 0,
        forbids=lambda recipe, plan: not _auto_steps(recipe) and recipe.checkpoint.every % plan.local_steps > 0,
        reason="checkpoint.every ({recipe.checkpoint.every}) must be a multiple of local_steps ({plan.local_steps}): "
        "islands have equal weights only after an exchange",
    ),
    RecipeRule(
        asks=lambda recipe: recipe.metrics.noise_scale,
        forbids=lambda recipe, plan: not tells_noise(plan),
        reason="metrics.noise_scale compares gradients of micro-batches with that of the global batch: it needs "
        "data_parallel, zero or tensor_parallel, and at least two micro-batches per step over all devices",
        limits="noise scale with pipeline, sequence or expert axes, AutoTP, or islands",
    ),
    RecipeRule(
        asks=lambda recipe: recipe.train.outer is not None,
        forbids=lambda recipe, plan: plan.islands == 1,
        reason="train.outer is for the islands of local_sgd; leave it out, or set strategy.name=local_sgd",
    ),
    RecipeRule(
        asks=lambda recipe: _auto_steps(recipe),
        forbids=lambda recipe, plan: plan.islands == 1,
        reason="strategy.local_steps is for the islands of local_sgd; leave it out, or set strategy.name=local_sgd",
    ),
    RecipeRule(
        asks=lambda recipe: recipe.train.outer is not None and not _auto_steps(recipe),
        forbids=lambda recipe, plan: plan.local_steps % _fragments(recipe) > 0,
        reason="train.outer.fragments ({recipe.train.outer.fragments}) must divide local_steps ({plan.local_steps}): "
        "one part is exchanged every local_steps / fragments steps",
    ),
    RecipeRule(
        asks=lambda recipe: _delay_steps(recipe) > 0,
        forbids=lambda recipe, plan: _delay_steps(recipe) > plan.local_steps,
        reason="train.outer.delay_steps ({recipe.train.outer.delay_steps}) must be at most local_steps "
        "({plan.local_steps}), the length of a round",
    ),
    RecipeRule(
        asks=lambda recipe: _is_async(recipe) and _has_outer_momentum(recipe),
        forbids=lambda recipe, plan: True,
        reason="train.outer.optimizer nesterov would add momentum to stale updates; use average with mode async",
    ),
    RecipeRule(
        asks=lambda recipe: _is_async(recipe) and recipe.train.on_spike != "ignore",
        forbids=lambda recipe, plan: True,
        reason="train.on_spike rewind needs islands that are at the same step; use ignore with mode async",
    ),
    RecipeRule(
        asks=lambda recipe: recipe.checkpoint.every > 0,
        forbids=lambda recipe, plan: bool(unkeepable(plan)),
        reason=f"{UNKEEPABLE}; use checkpoint.every 0",
    ),
    RecipeRule(
        asks=lambda recipe: _is_quantized(recipe),
        forbids=lambda recipe, plan: plan.zero_stage == 3,
        reason="4-bit weights (model.lora.quantize) can't be sharded by ZeRO 3; use zero_stage 0, 1 or 2",
    ),
    RecipeRule(
        asks=lambda recipe: recipe.model.lora is not None and recipe.model.lora.dora,
        forbids=lambda recipe, plan: plan.tp > 1 or plan.zero_stage == 3,
        reason="DoRA (model.lora.dora) takes the length of complete weight rows in every layer; use zero_stage 0, 1 or "
        "2 without a tensor axis, or leave dora out",
        limits="DoRA with tensor shards",
    ),
)


def limits() -> list[tuple[str, str]]:
    """Combinations of model parallelism that are refused, with the reason: the table in the docs."""
    return [(rule.limits, rule.reason) for rule in RULES if rule.limits]


def keepable(recipe: Recipe, proposals: Iterable[Plan | Refusal]) -> Iterator[Plan | Refusal]:
    """The proposals; plans that a rule forbids become refusals with the reason of the first such rule."""
    rules = [rule for rule in RULES if rule.asks(recipe)]
    for proposal in proposals:
        if isinstance(proposal, Plan) and (reason := _reason(rules, recipe, proposal)):
            yield Refusal(proposal.strategy, reason, proposal)
        else:
            yield proposal


def _reason(rules: Sequence[RecipeRule], recipe: Recipe, plan: Plan) -> str:
    """Why the recipe can't use the plan; empty if it can."""
    for rule in rules:
        if rule.forbids(recipe, plan):
            return rule.reason.format(recipe=recipe, plan=plan)
    return ""


def _has_other_task(recipe: Recipe) -> bool:
    return recipe.model.task not in (None, "causal-lm")


def _delay_steps(recipe: Recipe) -> int:
    """Steps after which a round's mean is applied; 0 where the recipe does not set it."""
    return (recipe.train.outer.delay_steps or 0) if recipe.train.outer else 0


def _auto_steps(recipe: Recipe) -> bool:
    return recipe.strategy.local_steps == "auto"


def _fragments(recipe: Recipe) -> int:
    """Parts of the weights that are exchanged in turn; 1 where the run chooses them."""
    given = recipe.train.outer.fragments if recipe.train.outer else 1
    return 1 if given == "auto" else given


def _is_async(recipe: Recipe) -> bool:
    return recipe.train.outer is not None and recipe.train.outer.mode == "async"


def _has_outer_momentum(recipe: Recipe) -> bool:
    return recipe.train.outer is not None and recipe.train.outer.optimizer != "average"


def _is_quantized(recipe: Recipe) -> bool:
    return recipe.model.lora is not None and recipe.model.lora.quantize != "none"
