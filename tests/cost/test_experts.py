"""What mixtures of experts take, by plan: exchanges between nodes, gathers of large experts, stages of dense layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from toolkit.cost import communication, timing
from toolkit.cost.memory import memory
from toolkit.cost.timing import step_time
from toolkit.plans.job import make_job
from toolkit.plans.plan import Job, Plan
from toolkit.recipe.file import load_recipe
from toolkit.resources import find_recipe
from toolkit.sessions.resolve import resolve
from toolkit.units import GIB

DEEPSEEK = load_recipe(find_recipe("pretrain_deepseek-v3_expert_parallel"))
PLAN = Plan(
    strategy="expert_parallel", dp=128, pp=16, ep=8, zero_stage=1, zero_group=128, micro_batch=1, grad_accum=120
)


@pytest.fixture(scope="module")
def job() -> Job:
    return make_job(DEEPSEEK)


def test_deepseek_v3_on_2048_h800() -> None:
    chosen = resolve(DEEPSEEK).chosen
    assert chosen.plan.ep > 1
    assert chosen.plan.pp > 1
    assert chosen.estimate.fits
    assert chosen.estimate.tokens_per_second >= 1.4e6


def test_exchanges_between_nodes_overlap_with_the_experts_of_another_part(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside, between = PLAN, replace(PLAN, ep=16)
    in_turns = step_time(between, job).sp_comm
    whole = step_time(inside, job).sp_comm
    monkeypatch.setattr(timing, "exchange_parts", lambda own: 1)
    assert step_time(inside, job).sp_comm == whole, "inside a node there is one part"
    assert in_turns < 0.9 * step_time(between, job).sp_comm


def test_experts_beyond_the_limit_of_zero_3_are_not_gathered_ahead(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = replace(
        PLAN, strategy="zero", dp=1024, tp=2, pp=1, ep=1, zero_stage=3, zero_group=1024, micro_batch=15, grad_accum=1
    )
    late = step_time(plan, job).dp_comm
    monkeypatch.setattr(communication, "MAX_LIVE_ELEMENTS", 10**12)
    assert late > 1.1 * step_time(plan, job).dp_comm


def test_a_newer_attention_kernel_is_faster(job: Job) -> None:
    older = replace(job, workload=replace(job.workload, flash_generation=2))
    assert job.workload.flash_generation == 3
    assert step_time(PLAN, job).compute < 0.9 * step_time(PLAN, older).compute


def test_the_stage_after_the_dense_layers_is_the_fullest(job: Job) -> None:
    """Stages of four layers; the first three layers are dense."""
    bounds = (*range(0, 61, 4), 61)
    found = memory(replace(PLAN, pipeline_bounds=bounds), job)
    routed = 4 * 256 * 3 * 7168 * 2048
    dense = sum(job.model.layer_params[4:8]) - routed
    assert found.params == pytest.approx(2 * (dense + routed / 8), rel=0.001)


def test_adapters_of_attention_leave_experts_alone() -> None:
    recipe = find_recipe("lora_gpt-oss-120b_expert_parallel")

    def peak(*overrides: str) -> float:
        work: Any = make_job(load_recipe(recipe, overrides))
        plan = Plan(strategy="expert_parallel", dp=8, ep=8, zero_stage=1, zero_group=8, grad_accum=8)
        return memory(plan, work).activations / GIB

    assert peak() < 0.7 * peak("model.lora={rank: 16}")
