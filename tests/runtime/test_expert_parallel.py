"""Experts spread by AutoEP on real processes, against one process."""

from __future__ import annotations

import pytest

from tests.runtime.parallel import ONE, SGD, assert_same, model, run
from toolkit.plan import Plan


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_experts_of_mixtral_under_sgd_with_a_tight_clip(stage: int) -> None:
    plan = Plan(
        strategy="expert_parallel",
        dp=2,
        ep=2,
        zero_stage=stage,
        zero_group=1 + (stage > 0),
        micro_batch=2,
        precision="fp32",
    )
    section = model("mixtral")
    assert_same(run(section, ONE, SGD), run(section, plan, SGD))
