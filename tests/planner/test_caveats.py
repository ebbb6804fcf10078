"""What is said of a plan: warm-up for a scaled learning rate, and what is not exact."""

from __future__ import annotations

import pytest

from toolkit.planner.explain import caveats
from toolkit.plans.plan import Plan
from toolkit.recipe.batch_sections import Reduce
from toolkit.recipe.sections import Train

PLAN = Plan(strategy="data_parallel", dp=2, precision="fp32")


def test_an_ordinary_plan_needs_no_words() -> None:
    assert caveats(PLAN, Train(steps=100)) == []


def test_a_scaled_rate_is_told_and_warmed_up() -> None:
    scaled = {"steps": 100, "global_batch": 64, "base_batch": 16, "lr": 1e-3, "lr_scaling": "linear"}
    short, long = (" ".join(caveats(PLAN, Train(**scaled, warmup=warmup))) for warmup in (0.01, 0.1))
    assert "4 times base_batch: the peak learning rate is 0.004" in short
    assert "train.warmup=0.056 (6 steps); 0.01 is given" in short
    assert "warm up" not in long
    assert "warm up" in " ".join(caveats(PLAN, Train(**scaled, warmup=3)))
    assert "warm up" not in " ".join(caveats(PLAN, Train(**scaled, warmup=6)))


@pytest.mark.parametrize(
    ("plan", "section", "words"),
    [
        (PLAN, {"dtype": "bf16"}, "reduced in bf16, not fp32"),
        (PLAN, {"algorithm": "tree"}, "NCCL_ALGO=Tree"),
        (Plan(strategy="zero", zero_stage=3, zero_quantized="gradients"), {}, "not the same"),
    ],
)
def test_what_is_not_exact_or_set_is_said(plan: Plan, section: dict[str, str], words: str) -> None:
    assert words in " ".join(caveats(plan, Train(steps=1, reduce=Reduce(**section))))  # type: ignore[arg-type]
