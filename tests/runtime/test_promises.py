"""What every strategy promises: the same run twice, near the same in bf16, and left padding as one process has it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from tests.helpers.parallel import ONE, assert_same, model, run
from toolkit.plans.plan import Plan
from toolkit.run_dir.trajectory import Trajectory, largest_difference

pytestmark = pytest.mark.slow  # dozens of engines; quick tests of each strategy are in test_training.py

PLANS = {
    "data_parallel": Plan(strategy="data_parallel", dp=2, micro_batch=2),
    "zero-2": Plan(strategy="zero", dp=2, zero_stage=2, zero_group=2, micro_batch=2),
    "zero-3": Plan(strategy="zero", dp=2, zero_stage=3, zero_group=2, micro_batch=2),
    "tensor_parallel": Plan(strategy="tensor_parallel", tp=2, zero_stage=1, micro_batch=4),
    "pipeline": Plan(strategy="pipeline", pp=2, zero_stage=1, micro_batch=2, grad_accum=2),
    "hybrid": Plan(strategy="hybrid", pp=2, tp=2, zero_stage=1, micro_batch=2, grad_accum=2),
    "sequence_parallel": Plan(strategy="sequence_parallel", sp=2, zero_stage=1, zero_group=2, micro_batch=4),
}
SPLITS = ("tensor_parallel", "pipeline", "hybrid", "sequence_parallel")


@cache
def one_process(kind: str, data: str = "full") -> Trajectory:
    return run(model(kind), ONE, data=data)


@pytest.mark.parametrize("name", PLANS)
def test_dropout_is_reproducible_bit_by_bit(name: str) -> None:
    section = model("llama" if name == "sequence_parallel" else "gpt2", dropout=0.2)
    plan = replace(PLANS[name], precision="fp32")
    first = run(section, plan)
    assert first == run(section, plan)
    if name != "sequence_parallel":
        assert largest_difference(one_process("gpt2").loss, first.loss) > 1e-3, "dropout was off"


@pytest.mark.parametrize("name", PLANS)
def test_bf16_stays_near_fp32(name: str) -> None:
    found = run(replace(model("llama"), precision="bf16"), replace(PLANS[name], precision="bf16"))
    assert 0 < largest_difference(one_process("llama").loss, found.loss) <= 2e-2


@pytest.mark.parametrize("name", SPLITS)
def test_left_padding_is_that_of_one_process(name: str) -> None:
    plan = replace(PLANS[name], precision="fp32")
    assert_same(one_process("llama", "padded left"), run(model("llama"), plan, data="padded left"))
