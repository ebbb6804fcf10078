"""Experts on several ranks, on real processes, against one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.harness.checkpoint_layouts import assert_equal, resume_and_copy
from tests.conftest import Finished, Trainer
from tests.helpers.parallel import ADAM, ONE, SGD, assert_same, engine_of, model, run, train_as_rank
from toolkit.checkpoints import store
from toolkit.plans.plan import Plan
from toolkit.plans.split_verdicts import Axes
from toolkit.recipe.file import make_recipe
from toolkit.recipe.model_section import Lora, Model
from toolkit.recipe.objective_sections import Router
from toolkit.recipe.sections import Train
from toolkit.run_dir.trajectory import Trajectory
from toolkit.runtime import build_engine
from toolkit.runtime.mixtures import expert_dispatch, expert_shards
from toolkit.runtime.mixtures.expert_exchange import slots_of
from toolkit.runtime.models.parameter_shards import Layout
from toolkit.runtime.models.tiny_models import tiny_of_type
from toolkit.runtime.proofs.split_proof import prove
from toolkit.runtime.supervision.warm_pool import call_on_ranks, first_failure
from toolkit.sessions.parity import largest_difference
from toolkit.sessions.rehearse import rehearse
from toolkit.sessions.resolve import resolve

pytestmark = pytest.mark.slow

EP = Plan(strategy="expert_parallel", dp=2, ep=2, micro_batch=2, precision="fp32")
BALANCED = replace(SGD, router=Router(loss="sequence", weight=1.0))
"""Under SGD with a tight clip a wrong norm, scale or router loss moves the next loss."""
LARGE = {
    "dp 4, ZeRO 2": replace(EP, dp=4, zero_stage=2, zero_group=4, micro_batch=1),
    "dp 4, ZeRO 3": replace(EP, dp=4, zero_stage=3, zero_group=4, micro_batch=1),
    "ep 4": replace(EP, dp=4, ep=4, zero_stage=1, zero_group=4, micro_batch=1),
    "tensor": replace(EP, tp=2, zero_stage=1, zero_group=2),
    "tensor, ZeRO 3": replace(EP, tp=2, zero_stage=3, zero_group=2),
    "pipeline": replace(EP, pp=2, zero_stage=1, zero_group=2, micro_batch=1, grad_accum=2, recompute="full"),
    "interleaved": replace(
        EP,
        pp=2,
        zero_stage=1,
        zero_group=2,
        micro_batch=1,
        grad_accum=2,
        schedule="interleaved",
        chunks=2,
        recompute="full",
    ),
    "pipeline, ZeRO 0": replace(EP, pp=2, micro_batch=1, grad_accum=2),
    "sequence": replace(EP, sp=2, zero_stage=1, zero_group=2, micro_batch=1, grad_accum=2),
    "ring": replace(EP, cp=2, zero_stage=1, zero_group=2, micro_batch=1, grad_accum=2),
}


@pytest.fixture(scope="module")
def expected() -> Trajectory:
    return run(model("mixtral"), ONE, BALANCED)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_experts_on_two_ranks_are_those_of_one_process(expected: Trajectory, stage: int) -> None:
    plan = replace(EP, zero_stage=stage, zero_group=1 + (stage > 0), recompute="full" if stage == 2 else "none")
    assert_same(expected, run(model("mixtral"), plan, BALANCED))


@pytest.mark.parametrize("layout", LARGE)
def test_experts_beside_other_axes(expected: Trajectory, layout: str) -> None:
    assert_same(expected, run(model("mixtral"), LARGE[layout], BALANCED))


@pytest.mark.parametrize("kind", ["gpt_oss", "deepseek_v3", "granitemoeshared", "nemotron_h"])
def test_other_mixtures(kind: str) -> None:
    section = model(kind)
    assert_same(run(section, ONE, ADAM), run(section, replace(EP, zero_stage=1, zero_group=2), ADAM))


def train_in_parts(section: Model, plan: Plan, train: Train) -> Trajectory:
    """As between nodes: parts of a rank's experts exchange and compute in turns."""
    build_engine.distribute = in_parts  # type: ignore[attr-defined]
    return train_as_rank(section, plan, train, "full")


def in_parts(experts: Any, group: Any, overlaps: bool, limit: Any) -> None:
    assert not overlaps, "one node"
    expert_dispatch.distribute(experts, group, overlaps=True, limit=limit)


@pytest.mark.parametrize(("kind", "experts", "layout"), [("mixtral", 8, {}), ("gpt_oss", 12, {"recompute": "full"})])
def test_experts_in_parts(kind: str, experts: int, layout: dict[str, Any]) -> None:
    """Four parts of one expert on each rank, and three of two."""
    section = model(kind, num_local_experts=experts)
    found = call_on_ranks(train_in_parts, section, replace(EP, **layout), BALANCED, nproc=2)
    assert first_failure(found) is None, first_failure(found)
    assert_same(run(section, ONE, BALANCED), found[0])


LIMITED = replace(SGD, router=Router(loss="none", capacity_factor=1.0))


def test_limited_experts_drop_the_same_visits_wherever_they_are() -> None:
    """Capacity is counted per micro-batch, so the same micro-batches give the same result with and without ep."""
    section = model("mixtral")
    whole = replace(EP, strategy="data_parallel", ep=1)
    for data in ("full", "padded"):
        expected = run(section, whole, LIMITED, data)
        assert_same(expected, run(section, replace(EP, zero_stage=1, zero_group=2), LIMITED, data))
    free = run(section, whole, SGD, "padded")
    assert abs(expected.loss[-1] / free.loss[-1] - 1) > 1e-4, "something was dropped"


def test_limited_experts_in_a_pipeline_recompute_what_they_have_dropped() -> None:
    """While a layer is recomputed, the routers have seen another micro-batch, with other padding."""
    section = model("mixtral")
    whole = replace(EP, strategy="data_parallel", ep=1, micro_batch=1, grad_accum=2)
    assert_same(run(section, whole, LIMITED, "padded"), run(section, LARGE["pipeline"], LIMITED, "padded"))


def test_experts_with_room_for_every_token_drop_nothing() -> None:
    """Fixed sizes of all exchanges, and the result of one process."""
    section = model("mixtral")
    roomy = replace(BALANCED, router=replace(BALANCED.router, capacity_factor=section.config["num_local_experts"] / 2))
    plan = replace(EP, zero_stage=1, zero_group=2)
    assert_same(run(section, ONE, BALANCED, "padded"), run(section, plan, roomy, "padded"))


def test_slots_by_hand() -> None:
    places = torch.tensor([1, 0, 1, 2, 1, 0])  # of two experts; the fourth visit is to none
    source, slots = slots_of(places, experts=2, most=2)
    assert source.tolist() == [1, 5, 0, 2]
    assert slots.tolist() == [2, 0, 3, 4, 4, 1], "the third visit to the second expert has no slot"
    source, slots = slots_of(places, experts=2, most=3)
    assert source.tolist() == [1, 5, 6, 0, 2, 4], "an empty slot"


ADAPTED = replace(SGD, grad_clip=0.5)
EXPERT_TENSORS = ("q_proj", "gate_up_proj", "down_proj")


@pytest.mark.parametrize(
    ("kind", "targets", "layout"),
    [
        ("mixtral", "auto", "dp 4, ZeRO 3"),
        ("mixtral", "auto", "tensor"),
        ("mixtral", "auto", "interleaved"),
        ("gpt_oss", EXPERT_TENSORS, "ep 4"),  # one transposed expert per rank
        ("deepseek_v3", "auto", "sequence"),
    ],
)
def test_adapters_on_experts(kind: str, targets: Any, layout: str) -> None:
    section = replace(model(kind), lora=Lora(rank=3, alpha=6.0, targets=targets))
    expected = run(section, ONE, ADAPTED)
    assert expected.loss[-1] != pytest.approx(expected.loss[0], rel=1e-4), "the adapters learn"
    assert_same(expected, run(section, LARGE[layout], ADAPTED))


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_the_proof_covers_adapters_on_experts(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    section = replace(model(kind), lora=Lora(rank=3, targets=EXPERT_TENSORS))
    assert prove(section, Axes(1, 1, 1, ep=2)).ok
    monkeypatch.setattr(expert_shards, "Layout", lambda packs, **how: Layout(**how))
    assert not prove(section, Axes(1, 1, 1, ep=2)).ok, "the second factor, cut as if experts were its slowest index"


def counts_of_rank(section: Model, plan: Plan) -> dict[str, tuple[int, ...]]:
    engine = engine_of(section, plan, ADAM)
    module: torch.nn.Module = engine.module  # type: ignore[attr-defined]
    return {name: tuple(p.shape) for name, p in module.named_parameters() if ".experts." in name}


def test_a_rank_holds_only_its_experts() -> None:
    first, second = call_on_ranks(counts_of_rank, model("mixtral"), EP, nproc=2)
    assert first == second
    assert {shape[0] for shape in first.values()} == {2}, "of four experts"


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_the_proof_accepts_distributed_experts(kind: str) -> None:
    assert prove(model(kind), Axes(1, 1, 1, ep=2)).ok


def test_the_proof_finds_rows_that_come_back_to_the_wrong_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    right = expert_dispatch._experts_of
    monkeypatch.setattr(expert_dispatch, "_experts_of", lambda arriving, rows: right(arriving, rows).roll(1, 0))
    verdict = prove(model("mixtral"), Axes(1, 1, 1, ep=2))
    assert not verdict.ok
    assert "experts" in verdict.reason


@pytest.mark.parametrize(("kind", "what"), [("llama", "no experts of llama"), ("jetmoe", "no experts of jetmoe")])
def test_other_forms_are_refused_with_the_reason(kind: str, what: str) -> None:
    verdict = prove(model(kind), Axes(1, 1, 1, ep=2))
    assert not verdict.ok
    assert what in verdict.reason


MIXTRAL = {**tiny_of_type("mixtral"), "vocab_size": 264}
BASE = ("train.steps=8", "checkpoint.every=4", "checkpoint.keep=9")
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "experts": (4, ("strategy.name=expert_parallel", "strategy.ep=2", "strategy.zero_stage=0", "strategy.pp=1")),
    "experts+zero-2": (2, ("strategy.name=expert_parallel", "strategy.ep=2", "strategy.zero_stage=2")),
    "experts+zero-3": (4, ("strategy.name=expert_parallel", "strategy.ep=2", "strategy.zero_stage=3")),
    "experts-4": (4, ("strategy.name=expert_parallel", "strategy.ep=4", "strategy.zero_stage=1", "strategy.pp=1")),
    "experts x pipeline": (
        4,
        ("strategy.name=expert_parallel", "strategy.ep=2", "strategy.pp=2", "strategy.zero_stage=1"),
    ),
    "data_parallel": (1, ("strategy.name=data_parallel",)),
    "tensor_parallel": (2, ("strategy.name=tensor_parallel", "strategy.tp=2")),
}


@pytest.fixture(scope="module")
def origins() -> dict[str, Finished]:
    """Uninterrupted runs by layout, made when first asked for."""
    return {}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("experts", "experts"),
        ("experts+zero-2", "experts+zero-2"),
        ("experts", "data_parallel"),
        ("data_parallel", "experts+zero-2"),
        ("experts+zero-2", "tensor_parallel"),
        ("experts-4", "experts+zero-3"),
        ("experts+zero-3", "experts x pipeline"),
        ("experts x pipeline", "data_parallel"),
    ],
)
def test_checkpoints_hold_whole_experts(train: Trainer, origins: dict[str, Finished], first: str, second: str) -> None:
    config = f"model.config={MIXTRAL}"
    (nproc, axes), (other_nproc, other_axes) = LAYOUTS[first], LAYOUTS[second]
    if first not in origins:
        origins[first] = train(*BASE, config, *axes, nproc=nproc)
    origin = origins[first]
    saved = store.path_of(origin.run.checkpoints, 4)
    resume = (f"checkpoint.resume={saved}",)
    done = train(*BASE, config, *other_axes, *resume, nproc=other_nproc, enter=resume_and_copy)
    assert_equal(saved, store.path_of(done.run.path / "reloaded", 4))
    assert largest_difference(origin.losses[4:], done.losses) <= (0 if first == second else 1e-5)


def test_a_rehearsal_counts_the_exchange_of_the_formula() -> None:
    """4 · top_k · tokens · width · bytes of every layer, of which (ep − 1) / ep leave the rank; sizes come on top."""
    config = {**MIXTRAL, "num_hidden_layers": 3, "hidden_size": 64}
    given = {
        "name": "tiny",
        "model": {"config": config, "precision": "bf16"},
        "data": {"path": "synthetic", "seq_len": 64},
        "train": {"global_batch": 8, "steps": 2},
        "strategy": {
            "name": "expert_parallel",
            "ep": 4,
            "pp": 1,
            "zero_stage": 1,
            "micro_batch": 2,
            "recompute": "none",
        },
        "cluster": {"device": "A100-SXM4-80GB", "nodes": 1, "devices_per_node": 4},
    }
    found = rehearse(resolve(make_recipe(given)), ranks="0")
    predicted, counted = found.traffic(found.roles[0])["ep"]
    rows = 2 * 2 * 64
    assert predicted == 3 * 4 * rows * 64 * 2
    assert counted == pytest.approx(predicted, rel=0.02)
