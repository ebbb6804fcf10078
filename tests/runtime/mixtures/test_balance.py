"""Balanced routers on real processes: the same under every split, as transformers defines it, and seen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.conftest import Trainer
from tests.helpers.parallel import ONE, SGD, assert_same, batch, engine_of, micro_batches, model, run
from toolkit.checkpoints import store
from toolkit.errors import BadInput
from toolkit.plans.plan import Plan
from toolkit.recipe.objective_sections import Router
from toolkit.run_dir import router_load
from toolkit.runtime.mixtures.balance_loss import capacity, within_capacity
from toolkit.runtime.models.build import build_model
from toolkit.runtime.models.tiny_models import tiny_of_type
from toolkit.runtime.supervision.warm_pool import call_on_ranks, first_failure

pytestmark = pytest.mark.slow

BALANCED = replace(SGD, router=Router(loss="sequence", weight=1.0, z_loss=0.1))
BIASED = replace(SGD, router=Router(loss="sequence", weight=0.5, bias_update=0.002))
LAYOUTS = {
    "micro-batches": Plan(strategy="data_parallel", dp=2, micro_batch=1, grad_accum=2, precision="fp32"),
    "zero-3": Plan(strategy="zero", dp=2, zero_stage=3, zero_group=2, micro_batch=2, precision="fp32"),
    "tensor": Plan(strategy="tensor_parallel", tp=2, micro_batch=4, precision="fp32"),
    "pipeline": Plan(strategy="pipeline", pp=2, micro_batch=1, grad_accum=4, precision="fp32", recompute="full"),
    "sequence": Plan(strategy="sequence_parallel", sp=2, micro_batch=2, grad_accum=2, precision="fp32"),
    "selective": Plan(
        strategy="zero", dp=2, zero_stage=2, zero_group=2, micro_batch=2, precision="fp32", recompute="selective"
    ),
}


@pytest.fixture(scope="module")
def expected() -> Any:
    section = model("mixtral")
    return {data: run(section, ONE, BALANCED, data) for data in ("full", "padded", "packed")}


@pytest.mark.parametrize(
    ("layout", "data"),
    [
        ("micro-batches", "padded"),
        ("zero-3", "full"),
        ("tensor", "padded"),
        ("pipeline", "packed"),
        ("sequence", "packed"),
        ("selective", "padded"),
    ],
)
def test_the_sequence_loss_does_not_depend_on_the_split(expected: Any, layout: str, data: str) -> None:
    assert_same(expected[data], run(model("mixtral"), LAYOUTS[layout], BALANCED, data))


def test_the_sequence_loss_changes_training(expected: Any) -> None:
    plain = run(model("mixtral"), ONE, SGD, "full")
    assert abs(plain.grad_norm[0] / expected["full"].grad_norm[0] - 1) > 0.1


def test_the_sequence_loss_in_a_hybrid(expected: Any) -> None:
    plan = Plan(
        strategy="hybrid", pp=2, tp=2, dp=2, zero_stage=1, zero_group=2, micro_batch=1, grad_accum=2, precision="fp32"
    )
    assert_same(expected["full"], run(model("mixtral"), plan, BALANCED, "full"))


def biases(section: Any, plan: Plan, train: Any) -> tuple[list[float], dict[str, list[float]]]:
    """Losses and this rank's expert biases after some steps."""
    engine = engine_of(section, plan, train)
    losses = []
    for step in range(5):
        losses.append(engine.step(list(micro_batches(batch(step, "padded"), plan, engine.replica))).loss)
    module: torch.nn.Module = engine.module  # type: ignore[attr-defined]
    held = {name: buffer for name, buffer in module.named_buffers() if name.endswith("e_score_correction_bias")}
    return losses, {name: buffer.tolist() for name, buffer in held.items() if bool(buffer.any())}


def moved(plan: Plan) -> tuple[list[float], dict[str, list[float]]]:
    found = call_on_ranks(biases, model("deepseek_v3"), plan, BIASED, nproc=plan.devices)
    failure = first_failure(found)
    assert failure is None, f"{failure.reason}\n{failure.details}"
    return found[0][0], {name: values for _, held in found for name, values in held.items()}


def test_biases_follow_the_load_of_the_global_batch() -> None:
    losses, expected = moved(ONE)
    assert len(expected) == 3, "each mixture layer has moved its bias"
    for layout in ("micro-batches", "pipeline"):
        other, found = moved(LAYOUTS[layout])
        assert found == expected, layout
        assert other == pytest.approx(losses, rel=1e-5), layout


def test_capacity_by_hand() -> None:
    experts = torch.tensor([[0, 1], [0, 2], [0, 1], [1, 2]])
    counts = torch.tensor([1.0, 1.0, 1.0, 0.0])  # the last token is padding
    assert capacity(tokens=3, visits=2, num_experts=3, factor=1.0) == 2
    kept = within_capacity(experts, counts, 3, 2)
    assert kept.tolist() == [[True, True], [True, True], [False, True], [False, False]]


def gradients_with_transformers_loss(weight: float) -> dict[str, torch.Tensor]:
    section = replace(model("mixtral"), attention="eager")
    whole = build_model(section, 0).train()
    micro = batch(0, "padded")
    output = whole(
        input_ids=micro.input_ids, attention_mask=micro.attention_mask, use_cache=False, output_router_logits=True
    )
    loss = torch.nn.functional.cross_entropy(output.logits.flatten(0, 1), micro.labels.flatten(), ignore_index=-100)
    (loss + weight * output.aux_loss).backward()
    return {"aux": output.aux_loss.detach(), **{n: p.grad for n, p in whole.named_parameters() if p.grad is not None}}


def norm_and_loss(section: Any, train: Any) -> tuple[float, float]:
    engine = engine_of(section, ONE, train)
    result = engine.step([batch(0, "padded")])
    return result.grad_norm, router_load.summarise(result.numbers.routers)["balance"]  # type: ignore[index]


def test_micro_batch_is_the_loss_of_transformers() -> None:
    theirs = gradients_with_transformers_loss(1.0)
    aux = float(theirs.pop("aux"))
    norm = float(torch.stack([gradient.norm() for gradient in theirs.values()]).norm())
    train = replace(SGD, router=Router(loss="micro_batch", weight=1.0))
    ((found, balance),) = call_on_ranks(norm_and_loss, model("mixtral"), train, nproc=1)
    assert balance == pytest.approx(aux, rel=1e-6)
    assert found == pytest.approx(norm, rel=1e-5)


def test_a_router_without_a_bias_is_refused() -> None:
    train = replace(SGD, router=Router(bias_update=0.1))
    (found,) = call_on_ranks(norm_and_loss, model("mixtral"), train, nproc=1)
    assert BadInput.__name__ in found.reason + found.details
    assert "no bias that chooses experts" in found.reason + found.details


DEEPSEEK = {**tiny_of_type("deepseek_v3"), "vocab_size": 264}


def test_load_and_loss_are_recorded_and_resume_is_exact(train: Trainer, tmp_path: Any) -> None:
    base = (
        "train.steps=4", "checkpoint.every=2", "checkpoint.keep=9", f"model.config={DEEPSEEK}",
        "metrics.detail_every=1", "train.router={loss: sequence, weight: 0.1, bias_update: 0.01}",
    )  # fmt: skip
    first = train(*base, "strategy.name=zero", "strategy.zero_stage=1", into=tmp_path / "first")
    last = first.records[-1]
    assert 0 < last["router"]["entropy"] <= 1
    assert last["router"]["max_over_mean"] >= 1
    assert last["router"]["experts"] == 12
    assert len(last["router_load"]) == 3
    assert last["router"]["loss"] == pytest.approx(0.1 * last["router"]["balance"])
    resume = store.path_of(first.run.checkpoints, 2)
    again = train(*base, "strategy.name=pipeline", "strategy.pp=2", f"checkpoint.resume={resume}")
    assert again.losses == pytest.approx(first.losses[2:], rel=1e-5)
    assert again.records[-1]["router_load"] == last["router_load"], "biases came with the checkpoint"
