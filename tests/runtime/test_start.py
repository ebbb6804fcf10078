"""A start from each rank's own share gives the losses of a start from the full model, bit for bit."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.start import own_start
from tests.helpers.parallel import ADAM, ONE, assert_same, model, run, train_as_rank
from tests.helpers.planning import cluster, job
from toolkit.cost.memory import memory
from toolkit.models.spec import read_model_config
from toolkit.plans.plan import Plan
from toolkit.recipe.model_section import Lora, Model
from toolkit.recipe.sections import Train
from toolkit.run_dir.trajectory import Trajectory
from toolkit.runtime import build_engine
from toolkit.runtime.models import build
from toolkit.runtime.models.first_weights import HostWeights
from toolkit.runtime.supervision.warm_pool import Failure, call_on_ranks, first_failure

pytestmark = pytest.mark.slow  # dozens of engines; quick tests of each strategy are in test_training.py

ZERO = Plan(strategy="zero", dp=2, micro_batch=2, zero_group=2, precision="bf16")
PLANS = {
    "zero 1": replace(ZERO, zero_stage=1),
    "zero 1, accumulating": replace(ZERO, zero_stage=1, micro_batch=1, grad_accum=2),
    "zero 2": replace(ZERO, zero_stage=2),
    "zero 3": replace(ZERO, zero_stage=3),
    "tensor": Plan(strategy="tensor_parallel", tp=2, zero_stage=1, micro_batch=4, precision="bf16"),
    "pipeline": Plan(
        strategy="pipeline",
        pp=2,
        zero_stage=1,
        micro_batch=2,
        grad_accum=2,
        pipeline_bounds=(0, 2, 4),
        precision="bf16",
    ),
}


def from_full_model(section: Model, plan: Plan, train: Train, data: str) -> Trajectory:
    """As one rank: every rank builds the complete model in fp32 first."""
    build_engine.can_start_in_place = lambda section: False
    build_engine.open_skeleton = lambda section, seed: (
        build.emptied(build.hollow_model(section, seed)),
        HostWeights(build.build_model(section, seed)),
    )
    build_engine.fill = lambda model, weights, named, place: build.fill(model, weights, named)
    return train_as_rank(section, plan, train, data)


@pytest.fixture(scope="module", params=["llama", "mixtral"])
def section(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    path = tmp_path_factory.mktemp(request.param)
    tiny = model(request.param, tie_word_embeddings=request.param == "llama")
    build.build_model(tiny, 1).to(torch.bfloat16).save_pretrained(path)
    return Model(path=str(path), init="pretrained", precision="bf16")


def both(section: Model, plan: Plan) -> tuple[Trajectory, Trajectory]:
    before = call_on_ranks(from_full_model, section, plan, ADAM, "padded", nproc=plan.devices)
    assert first_failure(before) is None, first_failure(before)
    return run(section, plan, ADAM, "padded"), before[0]


@pytest.mark.parametrize("name", PLANS)
def test_losses_are_those_of_the_full_model(section: Model, name: str) -> None:
    own, before = both(section, PLANS[name])
    assert own == before


@pytest.mark.parametrize("name", ["zero 2", "zero 3", "pipeline"])
def test_adapters_too(section: Model, name: str) -> None:
    """peft 0.21 refuses dropout before adapters of fused experts."""
    dropout = 0.0 if "mixtral" in str(section.path) else 0.1
    own, before = both(replace(section, lora=Lora(rank=4, dropout=dropout)), PLANS[name])
    assert own == before


def test_hpz_keeps_its_second_shards() -> None:
    """Its second shards hold other elements than the first ones: DeepSpeed cuts both out of one full parameter."""
    plan = replace(ZERO, dp=4, micro_batch=1, zero_stage=3, zero_variant="hpz", zero_group=2, precision="fp32")
    section = model("llama", hidden_size=64)
    assert_same(run(section, ONE), run(section, plan))


def own_file(root: str, plan: Plan) -> None:
    section = Model(path=f"{root}/{os.environ['RANK']}", init="pretrained", precision="bf16")
    train_as_rank(section, plan, ADAM, "full")


@pytest.mark.parametrize("name", ["zero 1", "tensor"])
def test_a_rank_with_another_file_is_named(name: str, tmp_path: Path) -> None:
    for rank in (0, 1):
        tiny = build.build_model(model("llama"), 0)
        with torch.no_grad():
            tiny.model.norm.weight[-1] += rank
        tiny.to(torch.bfloat16).save_pretrained(tmp_path / str(rank))
    results = call_on_ranks(own_file, str(tmp_path), PLANS[name], nproc=2)
    reasons = [result.reason for result in results if isinstance(result, Failure)]
    assert any("rank 1 starts with other weights than rank 0 in 1 parameters, first model.norm" in r for r in reasons)


WIDE = {
    "model_type": "llama", "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "vocab_size": 32000,
    "num_attention_heads": 8, "num_key_value_heads": 8, "tie_word_embeddings": False,
}  # fmt: skip
NOISE_BYTES = 48 * 2**20
"""What libraries take on first use, whatever the size of the model."""


@pytest.mark.parametrize("name", ["zero 1", "zero 3", "tensor"])
def test_the_predicted_start_is_the_measured_one(name: str, tmp_path: Path) -> None:
    section = Model(config=WIDE, init="scratch", precision="bf16")
    build.build_in_place(section, 0, torch.bfloat16, "cpu").save_pretrained(tmp_path)
    machines = cluster(per_node=2)
    machines = replace(machines, device=replace(machines.device, backend="cpu"))
    spec = read_model_config(WIDE)
    plan = PLANS[name]
    predicted = memory(plan, job(spec, machines, global_batch=plan.global_batch, seq_len=16)).start
    results = call_on_ranks(own_start, str(tmp_path), plan, spec.params, False, nproc=2)
    assert first_failure(results) is None, first_failure(results)
    measured = max(result.start_bytes for result in results)
    assert 0.7 * predicted <= measured <= 1.15 * predicted + NOISE_BYTES, (predicted, measured)
