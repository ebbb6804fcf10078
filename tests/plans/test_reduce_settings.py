"""Settings of the reduction before a run: what is refused, what is written, what it costs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.harness.tiny_llama import TINY_LLAMA
from tests.helpers.planning import LLAMA_2_7B, cluster, job
from toolkit.cost import communication
from toolkit.cost.calibration import CALIBRATION
from toolkit.cost.execution import of_plan
from toolkit.cost.memory import memory
from toolkit.cost.timing import step_time
from toolkit.errors import BadInput
from toolkit.launching.environment import nccl_settings
from toolkit.plans.deepspeed_config import deepspeed_config
from toolkit.plans.deepspeed_rules import refusal
from toolkit.plans.plan import Plan
from toolkit.recipe.batch_sections import Reduce
from toolkit.recipe.file import make_recipe
from toolkit.recipe.sections import Train

ZERO_0 = Plan(strategy="data_parallel", dp=16, micro_batch=1)
ZERO_1, ZERO_2 = (replace(ZERO_0, strategy="zero", zero_stage=stage, zero_group=16) for stage in (1, 2))


def reason(plan: Plan, *, cpu: bool = False, nodes: int = 2, **section: Any) -> str | None:
    machines = cluster(nodes=nodes)
    if cpu:
        machines = replace(machines, device=replace(machines.device, backend="cpu"))
    one = job(LLAMA_2_7B, machines=machines)
    return refusal(plan, replace(one, workload=replace(one.workload, reduce=Reduce(**section))))


@pytest.mark.parametrize(
    ("plan", "where", "section", "words"),
    [
        (ZERO_2, {}, {"scaling": "post"}, "divide before the sum"),
        (ZERO_2, {}, {"predivide": 2.0}, "divide before the sum"),
        (ZERO_2, {"cpu": True}, {"overlap": True}, "device streams"),
        (ZERO_0, {}, {"overlap": True}, "after the backward pass"),
        (replace(ZERO_1, grad_accum=2), {}, {"overlap": True}, "after the backward pass"),
        (ZERO_0, {"cpu": True}, {"algorithm": "tree"}, "NCCL algorithms"),
        (ZERO_2, {}, {"algorithm": "hierarchical"}, "only ZeRO 0"),
        (replace(ZERO_0, dp=8), {"nodes": 1}, {"algorithm": "hierarchical"}, "several hosts"),
    ],
)
def test_what_a_plan_would_not_use_is_refused(plan: Plan, where: Any, section: Any, words: str) -> None:
    assert words in (reason(plan, **where, **section) or "")
    assert reason(plan, **where) is None


def test_what_a_plan_uses_is_not_refused() -> None:
    assert reason(ZERO_0, algorithm="hierarchical", scaling="pre") is None
    assert reason(ZERO_1, overlap=True) is None, "one micro-batch is not summed"
    assert reason(ZERO_2, algorithm="ring", overlap=True, dtype="fp32", bucket_elements=10**7) is None


def test_settings_reach_deepspeed() -> None:
    section = Reduce(dtype="fp32", bucket_elements=5000, scaling="pre", overlap=False)
    config = deepspeed_config(ZERO_2, Train(steps=1, reduce=section), params=10**6, backend="cuda")
    assert (config["communication_data_type"], config["prescale_gradients"]) == ("fp32", True)
    zero = config["zero_optimization"]
    assert (zero["overlap_comm"], zero["reduce_bucket_size"], zero["allgather_bucket_size"]) == (False, 5000, 5000)
    divided = deepspeed_config(ZERO_0, Train(steps=1, reduce=Reduce(predivide=4.0)), params=1, backend="cpu")
    assert divided["gradient_predivide_factor"] == 4.0


def test_pre_and_predivide_exclude_each_other() -> None:
    with pytest.raises(BadInput, match=r"train\.reduce\.predivide: unused with scaling pre"):
        make_recipe({"model": {"config": TINY_LLAMA}}, ["train.steps=1", "train.reduce={scaling: pre, predivide: 2}"])


def test_nccl_hears_the_algorithm_and_contradictions_are_refused() -> None:
    assert nccl_settings("ring", {}) == {"NCCL_ALGO": "Ring"}
    assert nccl_settings("tree", {"NCCL_ALGO": "tree"}) == {"NCCL_ALGO": "Tree"}
    assert nccl_settings("auto", {"NCCL_ALGO": "Tree"}) == {}
    with pytest.raises(BadInput, match="NCCL_ALGO=Tree"):
        nccl_settings("ring", {"NCCL_ALGO": "Tree"})


def test_the_planner_knows_what_travels() -> None:
    def seconds(plan: Plan, **section: Any) -> float:
        one = job(LLAMA_2_7B, machines=cluster(nodes=2), global_batch=16)
        return step_time(plan, replace(one, workload=replace(one.workload, reduce=Reduce(**section)))).dp_comm

    plain = seconds(ZERO_2, overlap=False)
    assert seconds(ZERO_2) < plain < seconds(ZERO_2, overlap=False, dtype="fp32")
    assert seconds(ZERO_0, overlap=False, algorithm="hierarchical") != seconds(ZERO_0, overlap=False)


@pytest.mark.parametrize(
    ("optimizer", "precision", "times"), [("onebit_adam", "fp32", 31), ("onebit_adam", "bf16", 15)]
)
def test_signs_are_a_small_part_of_gradients(optimizer: str, precision: str, times: int) -> None:
    one = job(LLAMA_2_7B, machines=cluster(nodes=2), global_batch=16)
    plan = replace(ZERO_0, precision=precision)
    whole = of_plan(plan, one)
    signs = of_plan(plan, replace(one, workload=replace(one.workload, optimizer=optimizer)))
    assert times < whole.grad_wire / signs.grad_wire < times + 1
    slow = replace(one, cluster=replace(one.cluster, inter_bytes_per_second=1e8))
    compressed = replace(slow, workload=replace(slow.workload, optimizer=optimizer))
    assert step_time(plan, slow).dp_comm > 10 * step_time(plan, compressed).dp_comm


def test_one_bit_adam_runs_on_whole_replicas_and_its_kin_are_gone() -> None:
    one = job(LLAMA_2_7B, machines=cluster(nodes=2))
    signs = replace(one, workload=replace(one.workload, optimizer="onebit_adam"))
    assert refusal(ZERO_0, signs) is None
    assert "full replicas" in (refusal(ZERO_2, signs) or "")
    half = replace(signs, workload=replace(signs.workload, precision="fp16"))
    assert "loss scale" in (refusal(replace(ZERO_0, precision="fp16"), half) or "")
    for gone in ("onebit_lamb", "zero_one_adam"):
        asked = replace(one, workload=replace(one.workload, optimizer=gone))
        assert "removed in 0.19.7" in (refusal(ZERO_0, asked, (0, 19, 8)) or "")
        assert "precision fp16" in (refusal(ZERO_0, asked, (0, 19, 6)) or "")


def test_quantised_gradients_travel_in_a_quarter() -> None:
    one = job(LLAMA_2_7B, machines=cluster(nodes=2), global_batch=16)
    plan = replace(ZERO_2, zero_stage=3, zero_quantized="gradients")
    assert of_plan(plan, one).grad_wire == 0.25
    assert step_time(plan, one).dp_comm <= step_time(replace(plan, zero_quantized="none"), one).dp_comm
    assert "CUDA kernels" in (reason(plan, cpu=True) or "")


def test_a_bucket_s_memory_is_known() -> None:
    def used(**section: Any) -> int:
        one = job(LLAMA_2_7B, machines=cluster(nodes=2), global_batch=16)
        return memory(ZERO_2, replace(one, workload=replace(one.workload, reduce=Reduce(**section)))).buffers

    assert used(bucket_elements=10**6) < used()
    assert used(overlap=False) < used()


def test_hierarchical_crosses_a_slow_network_with_shards() -> None:
    """Two hosts of 8: a ring crosses with 30 / 16 of the bytes, shards with 1 of them."""
    machines = replace(cluster(nodes=2), inter_bytes_per_second=1e6)
    where = communication.group(machines, 16, 1)
    flat = communication.all_reduce(1e9, where, machines, CALIBRATION)
    parts = communication.hierarchical(1e9, where, machines, CALIBRATION)
    assert flat / parts == pytest.approx(30 / 16, rel=0.01)
