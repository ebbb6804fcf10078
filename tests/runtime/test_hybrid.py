"""Pipeline × tensor × data on eight real processes, against one."""

from __future__ import annotations

import pytest

from tests.helpers.parallel import ONE, SGD, assert_same, model, run
from toolkit.plans.plan import Plan


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "stage", "dp"), [("gpt2", 0, 1), ("llama", 1, 2)])
def test_hybrids_under_sgd_with_a_tight_clip(kind: str, stage: int, dp: int) -> None:
    plan = Plan(
        strategy="hybrid",
        pp=2,
        tp=2,
        dp=dp,
        zero_stage=stage,
        zero_group=dp if stage else 1,
        micro_batch=1,
        grad_accum=4 // dp,
        precision="fp32",
        pipeline_bounds=(0, 2, 4),
    )
    section = model(kind)
    assert_same(run(section, ONE, SGD), run(section, plan, SGD))
