"""Batches that grow: sizes and positions by hand, and what is refused."""

from __future__ import annotations

import pytest

from benchmarks.harness.tiny_llama import TINY_LLAMA
from toolkit.errors import BadInput
from toolkit.recipe.batch_sections import BatchRamp
from toolkit.recipe.file import make_recipe
from toolkit.recipe.schedules import Batches, make_schedule
from toolkit.recipe.sections import Recipe, Train
from toolkit.sessions.resolve import resolve

GROWING = Batches(16, BatchRamp(start=4, stage_steps=3))


def recipe(*overrides: str) -> Recipe:
    base = {"model": {"config": TINY_LLAMA, "precision": "fp32"}, "data": {"seq_len": 32}}
    return make_recipe(base, ["train.steps=9", "train.global_batch=16", *overrides])


def test_the_batch_doubles_until_it_is_full() -> None:
    assert [GROWING.size(step) for step in range(10)] == [4, 4, 4, 8, 8, 8, 16, 16, 16, 16]
    assert [GROWING.before(step) for step in range(10)] == [0, 4, 8, 12, 20, 28, 36, 52, 68, 84]


def test_steps_for_an_epoch_are_enough_and_not_more() -> None:
    for batches in (GROWING, Batches(16)):
        for samples in range(1, 200):
            steps = batches.steps_for(samples)
            assert batches.before(steps - 1) < samples <= batches.before(steps)


@pytest.mark.parametrize(("scaling", "power"), [("none", 0), ("linear", 1), ("sqrt", 0.5)])
def test_the_learning_rate_follows_if_it_is_scaled(scaling: str, power: float) -> None:
    train = Train(
        steps=9, global_batch=16, lr_scaling=scaling, base_batch=4,  # type: ignore[arg-type]
        batch_ramp=BatchRamp(start=4, stage_steps=3), schedule="constant", warmup=0.0,
    )  # fmt: skip
    factors = [make_schedule(train, 9).factor(step) for step in (0, 3, 6)]
    assert factors == pytest.approx([0.25**power, 0.5**power, 1.0])


@pytest.mark.parametrize("start", [3, 16, 32, 6])
def test_a_start_that_does_not_double_to_the_batch_is_refused(start: int) -> None:
    with pytest.raises(BadInput, match=r"train\.batch_ramp\.start: .* use 8 or 4 or 2 or 1"):
        recipe(f"train.batch_ramp={{start: {start}, stage_steps: 2}}")


def test_plans_that_cannot_start_small_are_refused() -> None:
    found = resolve(recipe("train.batch_ramp={start: 4, stage_steps: 2}"), 2).decision
    assert all(4 % (option.plan.micro_batch * option.plan.dp) == 0 for option in found.ranked)
    reasons = " ".join(refusal.reason for refusal in found.refused)
    assert "must be a multiple of micro_batch" in reasons
    offloaded = resolve(recipe("train.batch_ramp={start: 4, stage_steps: 2}", "strategy={name: zero, offload: cpu}"), 2)
    assert offloaded.decision.chosen is None
    assert any("offload fixes at the start" in refusal.reason for refusal in offloaded.decision.refused)
