"""What `toolkit plan` says beside the numbers."""

from __future__ import annotations

import pytest

from toolkit.cost.estimate import Estimate
from toolkit.errors import BadInput
from toolkit.recipe.file import load_recipe
from toolkit.resources import RECIPES
from toolkit.sessions.resolve import plan_notes, resolve


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ("embed_bert-base_data_parallel", ["dropout is off"]),
        ("kto_qwen3-8b_zero", ["the reference, in less than", "GiB per device, computes every"]),
        ("distill_qwen3-0.6b_zero", ["the teacher, complete on each rank (15.3 GiB of weights),", "minutes"]),
    ],
)
def test_objectives_say_what_they_change(recipe: str, words: list[str]) -> None:
    notes = " ".join(plan_notes(resolve(load_recipe(RECIPES / f"{recipe}.yaml"))))
    assert all(word in notes for word in words)


ZERO_3 = ("strategy={name: zero, zero_stage: 3, zero_group: 8, micro_batch: 1, recompute: full}",)


def planned(recipe: str, *overrides: str) -> Estimate:
    return resolve(load_recipe(RECIPES / f"{recipe}.yaml", overrides)).chosen.estimate


def test_a_live_reference_is_in_the_prediction() -> None:
    """A copy of the weights in shards as they are, and a forward pass: a third of compute without recompute."""
    cached = planned("dpo_qwen3-8b_zero", *ZERO_3)
    live = planned("dpo_qwen3-8b_zero", "train.reference=live", *ZERO_3)
    assert live.memory.params == pytest.approx(2 * cached.memory.params, rel=0.01)
    assert live.time.compute - cached.time.compute == pytest.approx(cached.time.compute / 3, rel=0.1)
    adapters = ("model.lora={rank: 16, alpha: 32}", *ZERO_3)
    small = planned("dpo_qwen3-8b_zero", "train.reference=live", *adapters)
    assert small.memory.params < 1.02 * planned("dpo_qwen3-8b_zero", *adapters).memory.params, "adapters only"


def test_a_live_teacher_is_in_the_prediction() -> None:
    fixed = ("strategy={name: zero, zero_stage: 3, zero_group: 8, micro_batch: 4}",)
    cached, live = (
        planned("distill_qwen3-0.6b_zero", f"train.distill.predictions={how}", *fixed) for how in ("cached", "live")
    )
    assert live.memory.params - cached.memory.params == pytest.approx(2 * 8.19e9 / 8, rel=0.01)
    assert live.time.compute > cached.time.compute


def test_a_first_pass_of_every_step_is_in_the_prediction() -> None:
    """Against the same model on as many tokens."""
    found, plain = (planned(name, *ZERO_3).time.compute for name in ("kto_qwen3-8b_zero", "dpo_qwen3-8b_zero"))
    assert found == pytest.approx(4 / 3 * plain, rel=0.1)


def test_a_cached_teacher_that_no_device_can_hold_is_refused() -> None:
    given = "train.distill.teacher=Qwen/Qwen3-235B-A22B"
    with pytest.raises(BadInput, match=r"437.9 GiB on each rank .* a device has 80.0 GiB; use a smaller teacher"):
        planned("distill_qwen3-0.6b_zero", given)
    planned("distill_qwen3-0.6b_zero", "train.distill.teacher=Qwen/Qwen3-32B")
