"""Bytes while a run starts, against numbers worked by hand; tests/runtime/test_start.py measures them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.helpers.planning import GIB, LLAMA_2_7B, LLAMA_3_8B, cluster, job
from toolkit.cost.memory import memory
from toolkit.planner.search import decide
from toolkit.plans.plan import Plan, Refusal

PSI = LLAMA_2_7B.params
LAYER = max(LLAMA_2_7B.layer_params)
CONTEXT_SHARE = 0.25
"""Context and fragmentation come on top of the tensors."""
ZERO = Plan(strategy="zero", dp=8, zero_group=8, zero_stage=2, micro_batch=1, grad_accum=8)


@pytest.mark.parametrize(
    ("stage", "accumulated", "bytes_each"),
    [
        (1, 1, 2 + 2),  # all weights, and their copy in one buffer
        (1, 8, 2 + 4 / 8 + 4),  # weights, masters, fp32 sums
        (2, 8, 2 + 2),
        (3, 8, (2 + 4 + 4) / 8),  # shards, masters, a gradient buffer
        (0, 8, 2 + 16),  # DeepSpeed takes a step with zero gradients
    ],
)
def test_the_device_holds_what_deepspeed_makes(stage: int, accumulated: int, bytes_each: float) -> None:
    plan = replace(ZERO, zero_stage=stage, zero_group=8 if stage else 1, grad_accum=accumulated)
    expected = bytes_each * PSI + (2 * 2 * 2e8 if stage == 3 else 0)  # two reduction buckets
    found = memory(plan, job())
    assert expected <= found.start <= (1 + CONTEXT_SHARE) * expected + 2 * GIB


def test_a_bf16_pipeline_without_zero_starts_with_masters_of_its_share() -> None:
    """DeepSpeed shards them over replicas all the same. The first stage has half of the layers, and the table."""
    plan = Plan(strategy="pipeline", pp=2, dp=4, micro_batch=1, grad_accum=8)
    stage = LLAMA_2_7B.layers // 2 * LAYER + LLAMA_2_7B.vocab * LLAMA_2_7B.hidden
    expected = (2 + 4 / 4 + 2) * stage  # weights, masters, sums in bf16
    assert expected <= memory(plan, job()).start <= (1 + CONTEXT_SHARE) * expected + 2 * GIB


def test_a_host_holds_one_layer_in_fp32_per_rank() -> None:
    assert memory(ZERO, job()).host_start == pytest.approx(8 * 4 * LAYER)


def test_zero_3_puts_its_shards_in_a_row_on_the_host() -> None:
    plan = replace(ZERO, zero_stage=3)
    assert memory(plan, job()).host_start == pytest.approx(8 * max(4 * LAYER, 2 * PSI / 8))


def test_a_plan_that_runs_but_can_not_start_is_refused_with_the_reason() -> None:
    """ZeRO 2 over many devices runs in little more than the weights, and starts in twice as much."""
    machines = cluster(nodes=32)
    plan = Plan(strategy="zero", dp=256, zero_group=256, zero_stage=2, recompute="full")
    work = job(LLAMA_3_8B, machines, global_batch=256, seq_len=512)
    used = memory(plan, work)
    assert used.start > used.total
    between = (used.start + used.total) // 2
    small = replace(machines, device=replace(machines.device, memory_bytes=int(between / 0.95)))
    decision = decide(replace(work, cluster=small), [plan, Refusal("other", "no")])
    assert decision.chosen is None
    reason = next(one.reason for one in decision.refused if one.strategy == "zero")
    assert "while it starts" in reason
    assert "ZeRO 3 would fit" in reason


def test_a_host_without_room_for_the_start_is_refused_with_the_reason() -> None:
    machines = cluster(host_gib=5)
    decision = decide(job(machines=machines), [ZERO, Refusal("other", "no")])
    reason = next(one.reason for one in decision.refused if one.strategy == "zero")
    assert "of host memory while it starts" in reason
