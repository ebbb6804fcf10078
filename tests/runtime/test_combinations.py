"""Shards and stages with 16 bits, offloaded states, layer-wise optimizers, growing batches and the noise scale."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.conftest import Trainer
from tests.helpers.parallel import ADAM, ONE, SGD, assert_same, model, run
from toolkit.plans.plan import Plan
from toolkit.sessions.parity import largest_difference

pytestmark = pytest.mark.slow

TENSOR = Plan(strategy="tensor_parallel", tp=2, micro_batch=2, grad_accum=2, precision="fp32")
STAGES = Plan(strategy="pipeline", pp=2, micro_batch=1, grad_accum=4, precision="fp32")
PLANS = {"tensor": TENSOR, "pipeline": STAGES}


@pytest.mark.parametrize("name", PLANS)
def test_16_bits_without_zero_clip_by_the_norm_of_all_parts(name: str) -> None:
    section = model("gpt2")
    expected = run(section, replace(ONE, precision="bf16"), SGD)
    assert_same(expected, run(section, replace(PLANS[name], precision="bf16"), SGD), loss=1e-3, norm=5e-3)


@pytest.mark.parametrize(("name", "stage"), [("tensor", 2), ("tensor", 3), ("pipeline", 1)])
def test_states_on_the_host(name: str, stage: int) -> None:
    section = model("gpt2")
    assert_same(run(section, ONE), run(section, replace(PLANS[name], zero_stage=stage, offload="cpu")), loss=1e-6)


@pytest.mark.parametrize("name", PLANS)
def test_states_on_the_host_in_16_bits(name: str) -> None:
    section = model("gpt2")
    plan = replace(PLANS[name], zero_stage=1, offload="cpu", precision="bf16")
    assert_same(run(section, ONE), run(section, plan), loss=2e-2, norm=1e-1)


@pytest.mark.parametrize("optimizer", ["lamb", "lars"])
@pytest.mark.parametrize(("name", "stage"), [("tensor", 0), ("tensor", 1), ("pipeline", 1)])
def test_norms_of_layers_whose_parts_are_on_several_ranks(name: str, stage: int, optimizer: str) -> None:
    section, train = model("gpt2"), replace(ADAM, optimizer=optimizer, lr=1e-2)  # type: ignore[arg-type]
    assert_same(run(section, ONE, train), run(section, replace(PLANS[name], zero_stage=stage), train), loss=1e-6)


@pytest.mark.parametrize("axes", ["name: pipeline, pp: 2", "name: tensor_parallel, tp: 2"])
def test_a_batch_that_grows(train: Trainer, axes: str) -> None:
    ramp = ("train.steps=5", "train.batch_ramp={start: 2, stage_steps: 2}", "strategy.micro_batch=1")
    alone = train(*ramp, "strategy.name=data_parallel", nproc=1)
    found = train(f"strategy={{{axes}}}", *ramp, nproc=2)
    assert largest_difference(alone.losses, found.losses) < 1e-5
    assert largest_difference(alone.norms, found.norms) < 1e-4
    assert [record["tokens"] for record in found.records] == [record["tokens"] for record in alone.records]


def test_the_noise_scale_of_tensor_shards_is_that_of_one_process(train: Trainer) -> None:
    base = ("train.steps=4", "strategy.micro_batch=2", "metrics.noise_scale=true")
    alone = train(*base, "strategy.name=data_parallel", nproc=1)
    found = train("strategy={name: tensor_parallel, tp: 2}", *base, nproc=2)
    expected = [record["noise_scale_sequences"] for record in alone.records]
    assert any(value is not None for value in expected)
    for value, other in zip(expected, [record["noise_scale_sequences"] for record in found.records], strict=True):
        assert value == (other if value is None else pytest.approx(other, rel=1e-3))
