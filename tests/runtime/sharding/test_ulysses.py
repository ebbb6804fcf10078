"""Shared sequences on real processes, against one process."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.helpers.parallel import ADAM, ONE, SGD, assert_same, model, run, train_as_rank
from toolkit.plans.plan import Plan
from toolkit.runtime.supervision.warm_pool import call_on_ranks, first_failure

TWO = Plan(strategy="sequence_parallel", sp=2, micro_batch=4, precision="fp32")


@pytest.mark.parametrize("stage", [0, 3])
def test_with_zero_under_sgd_with_a_tight_clip(stage: int) -> None:
    section = model("llama")
    assert_same(run(section, ONE, SGD), run(section, replace(TWO, zero_stage=stage, zero_group=1 + (stage > 0)), SGD))


@pytest.mark.parametrize("data", ["padded", "packed"])
def test_masks_and_documents_reach_over_ranks(data: str) -> None:
    section = model("llama")
    assert_same(run(section, ONE, data=data), run(section, TWO, data=data))


def test_replicas_of_four_ranks_a_sequence_with_a_window() -> None:
    section = model("mistral", sliding_window=5)
    plan = replace(TWO, sp=2, dp=2, micro_batch=1, grad_accum=2, zero_stage=1, zero_group=2)
    assert_same(run(section, ONE), run(section, plan))


def test_attention_of_its_own_is_refused() -> None:
    failure = first_failure(call_on_ranks(train_as_rank, model("mpt"), TWO, ADAM, "full", nproc=2))
    assert failure is not None
    assert failure.refused
    assert "registry of attention functions" in failure.reason
