"""Pipeline × tensor × data on eight real processes, against one."""

from __future__ import annotations

from typing import Any

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


@pytest.mark.slow
@pytest.mark.parametrize(
    "axes",
    [{"sp": 2}, {"cp": 2, "schedule": "interleaved", "chunks": 2}, {"cp": 2, "tp": 2, "sequence_sharded": True}],
    ids=["sequence", "ring of chunks", "ring of tensor shards"],
)
def test_stages_whose_ranks_share_sequences(axes: dict[str, Any]) -> None:
    """Packed documents of other lengths in every row; ZeRO 1 over the ranks that share sequences."""
    plan = Plan(
        strategy="hybrid", pp=2, zero_stage=1, zero_group=1, micro_batch=1, grad_accum=4, precision="fp32", **axes
    )
    section = model("llama")
    assert_same(run(section, ONE, SGD, "packed"), run(section, plan, SGD, "packed"))
