"""The four ways to recompute: bytes as rehearsed, seconds in order, all of them proposed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from strategies import STRATEGIES
from tests.helpers.planning import GIB, LLAMA_3_8B, cluster, job
from toolkit.cost.communication import traffic_bytes
from toolkit.cost.execution import of_plan
from toolkit.cost.memory import memory
from toolkit.cost.timing import hardware_flops, step_time
from toolkit.plans.job import make_job
from toolkit.plans.plan import Job, Plan
from toolkit.recipe.axes import RECOMPUTES
from toolkit.recipe.file import load_recipe
from toolkit.resources import RECIPES

H100 = cluster("H100-SXM5-80GB")
REHEARSED = [(2, "selective", 43.34), (3, "selective", 33.03), (3, "offload", 21.29)]
"""ZeRO stage, recompute, GiB of live tensors on one of 8 devices: Llama 8B in bf16, 4,096 tokens, 4 micro-batches."""


def plan(stage: int, recompute: str, grad_accum: int = 4) -> Plan:
    return Plan(strategy="zero", dp=8, zero_group=8, zero_stage=stage, grad_accum=grad_accum, recompute=recompute)


@pytest.mark.parametrize(("stage", "recompute", "gib"), REHEARSED)
def test_bytes_are_those_of_rehearsed_ranks(stage: int, recompute: str, gib: float) -> None:
    found = memory(plan(stage, recompute), job(LLAMA_3_8B, H100, global_batch=32, seq_len=4096))
    assert (found.total - found.overhead) / GIB == pytest.approx(gib, rel=0.05)


def test_more_recompute_takes_less_memory_and_more_time() -> None:
    work = job(LLAMA_3_8B, H100, global_batch=32, seq_len=4096)
    used = [memory(plan(2, mode), work) for mode in RECOMPUTES]
    assert [one.activations for one in used] == sorted((one.activations for one in used), reverse=True)
    times = [step_time(plan(2, mode), work).total for mode in RECOMPUTES]
    assert times == sorted(times)
    assert times[1] < 1.15 * times[0]  # element-wise operators only
    assert hardware_flops(plan(2, "selective"), work) == hardware_flops(plan(2, "none"), work)


def test_inputs_on_the_host_are_counted_there() -> None:
    """32 layers × 4,096 tokens × 4,096 × 2 bytes × 8 devices, and a tenth for pinned buffers."""
    work = job(LLAMA_3_8B, H100, global_batch=32, seq_len=4096)
    assert memory(plan(2, "offload"), work).host == pytest.approx(1.1 * 8 * GIB)
    assert memory(plan(2, "full"), work).host == 0


def test_a_slow_link_to_the_host_shows_in_the_time() -> None:
    work = job(LLAMA_3_8B, H100, global_batch=32, seq_len=4096)
    slow = replace(H100, device=replace(H100.device, host_bytes_per_second=1e9))
    late = job(LLAMA_3_8B, slow, global_batch=32, seq_len=4096)
    assert step_time(plan(2, "offload"), work).recompute == pytest.approx(step_time(plan(2, "full"), work).recompute)
    assert step_time(plan(2, "offload"), late).recompute > 2 * step_time(plan(2, "full"), late).recompute


@pytest.mark.parametrize("name", ["data_parallel", "zero", "tensor_parallel", "pipeline", "sequence_parallel"])
def test_strategies_propose_all_four(name: str) -> None:
    found = STRATEGIES[name].propose(job(LLAMA_3_8B, H100))
    assert {one.recompute for one in found if isinstance(one, Plan)} == set(RECOMPUTES)


EXPERTS = Plan(
    strategy="expert_parallel", dp=32, zero_group=32, ep=8, zero_stage=1, micro_batch=2, grad_accum=16,
    recompute="selective",
)  # fmt: skip


def mixture() -> Job:
    """Qwen3 30B on 32 H100, 4,096 tokens per row."""
    return make_job(load_recipe(RECIPES / "pretrain_qwen3-30b-a3b_expert_parallel.yaml"))


@pytest.mark.parametrize(
    ("plan", "gib"),
    [(EXPERTS, 60.33), (replace(EXPERTS, ep=4, zero_stage=2, micro_batch=4, grad_accum=8), 73.11)],
    ids=["peak in the head", "peak in a recomputed layer"],
)
def test_selective_layers_of_a_mixture_take_what_was_rehearsed(plan: Plan, gib: float) -> None:
    """Without the outputs of experts, which would be 12 GiB of the first."""
    found = memory(plan, mixture())
    assert (found.total - found.overhead) / GIB == pytest.approx(gib, rel=0.02)


def test_selective_layers_of_a_mixture_exchange_in_three_passes() -> None:
    assert traffic_bytes(of_plan(EXPERTS, mixture()))["ep"] == pytest.approx(1_236_951_367_680, rel=1e-4)


def test_the_last_product_of_experts_is_repeated_unless_it_is_kept() -> None:
    work = mixture()
    sharded = replace(EXPERTS, zero_stage=3)
    assert hardware_flops(EXPERTS, work) > hardware_flops(replace(EXPERTS, recompute="none"), work)
    assert hardware_flops(sharded, work) == hardware_flops(replace(sharded, recompute="none"), work)
