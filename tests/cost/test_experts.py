"""What mixtures of experts take, by plan: exchanges between nodes, gathers of large experts, stages of dense layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from toolkit.cost import communication, timing
from toolkit.cost.calibration import CALIBRATION
from toolkit.cost.execution import layer_shape, of_plan
from toolkit.cost.memory import memory
from toolkit.cost.operators import ROUTED, Slice, layer_cost
from toolkit.cost.timing import step_time
from toolkit.plans.job import make_job
from toolkit.plans.plan import Job, Plan
from toolkit.plans.router_balance import balance_of
from toolkit.recipe.file import load_recipe, make_recipe
from toolkit.recipe.objective_sections import Router
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


@pytest.mark.parametrize("strategy", ["expert_parallel", "auto"])
def test_deepseek_v3_on_2048_h800(strategy: str) -> None:
    chosen = resolve(replace(DEEPSEEK, strategy=replace(DEEPSEEK.strategy, name=strategy))).chosen
    assert chosen.plan.ep > 1
    assert chosen.plan.pp > 1
    assert chosen.estimate.fits
    assert chosen.estimate.tokens_per_second >= 1.4e6


DBRX = {
    "model_type": "dbrx", "d_model": 6144, "n_heads": 48, "n_layers": 40, "max_seq_len": 32768, "vocab_size": 100352,
    "tie_word_embeddings": False, "attn_config": {"kv_n_heads": 8, "clip_qkv": 8, "rope_theta": 500000},
    "ffn_config": {
        "hidden_size": 6144, "ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4, "moe_loss_weight": 0.05,
    },
}  # fmt: skip
"""databricks/dbrx-base."""


def test_dbrx_on_3072_h100() -> None:
    """Its card: 132B parameters, 36B of them active, 12T tokens on 3,072 H100. A rate was not published."""
    mapping: dict[str, Any] = {
        "name": "dbrx",
        "model": {"config": DBRX, "init": "scratch", "precision": "bf16"},
        "data": {"path": "synthetic", "seq_len": 4096},
        "train": {"global_batch": 3072, "steps": 1},
        "cluster": {
            "device": "H100-SXM5-80GB", "nodes": 384, "devices_per_node": 8, "inter_gbps_per_device": 400,
        },
    }  # fmt: skip
    found = resolve(make_recipe(mapping))
    assert found.job.model.params == pytest.approx(132e9, rel=0.005)
    assert found.job.model.active_params == pytest.approx(36e9, rel=0.02)
    assert found.chosen.plan.ep > 1
    assert found.chosen.estimate.fits
    assert 20 < 12e12 / found.chosen.estimate.tokens_per_second / 86400 < 90, "days"


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


def test_every_tensor_rank_permutes_all_visits_of_cut_experts(job: Job) -> None:
    """Rows of experts have the full width, whichever slice of the experts a rank holds."""
    device, software = job.cluster.device, of_plan(PLAN, job).software
    shape = layer_shape(job.model, experts=True)
    whole = Slice(micro_batch=1, seq_len=4096)
    cut, megatron = replace(whole, tp=2, residual_parts=2), replace(whole, tp=2, residual_parts=2, expert_tp=1)
    one, two, shared = (
        layer_cost(shape, part, device, software, CALIBRATION).forward for part in (whole, cut, megatron)
    )
    rows = ROUTED[0] * shape.experts_per_token * shape.hidden * 4096
    rate = device.memory_bytes_per_second * CALIBRATION.stream
    assert two.stream == pytest.approx(one.stream / 2 + rows / 2 / rate, rel=0.01)
    assert shared.stream == pytest.approx(one.stream / 2, rel=0.01), "ranks that share tokens divide their visits"


def test_the_busiest_rank_decides(job: Job) -> None:
    def seconds(**router: Any) -> float:
        balance = balance_of(Router(**router), {})
        return step_time(PLAN, replace(job, workload=replace(job.workload, balance=balance))).total

    even, uneven = seconds(max_over_mean=1.0), seconds(max_over_mean=2.0)
    assert 1.05 * even < uneven < 1.25 * even, "32 experts per rank: an excess of 1 / √32 = 18% of experts and exchange"
    assert seconds(max_over_mean=2.0, capacity_factor=1.0) == even, "what is dropped takes no time"
    assert seconds(max_over_mean=1.0, capacity_factor=1.5) > 1.1 * even, "empty slots do"
    assert seconds(bias_update=0.001) < seconds(loss="sequence"), "by default as measured"
    fewer = replace(PLAN, ep=64)
    loads = [of_plan(plan, job).expert_load - 1 for plan in (PLAN, fewer, replace(PLAN, ep=1))]
    assert loads[1] == pytest.approx(loads[0] * 8**0.5)
    assert loads[2] == 0


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
