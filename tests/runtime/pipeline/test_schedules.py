"""Interleaved and zero-bubble pipelines of tiny models on real processes, against one process and 1F1B."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.helpers.parallel import ONE, SGD, STEPS, assert_same, batch, engine_of, micro_batches, model, run
from toolkit.plans.plan import Plan
from toolkit.plans.split_verdicts import Axes
from toolkit.recipe.model_section import Lora
from toolkit.recipe.sections import Train
from toolkit.run_dir.trajectory import Trajectory, largest_difference
from toolkit.runtime.models.micro_batch import MicroBatch
from toolkit.runtime.pipeline.weight_gradients import WeightGradients
from toolkit.runtime.proofs.coverage import tiny_model
from toolkit.runtime.proofs.split_proof import prove
from toolkit.runtime.supervision.warm_pool import call_on_ranks, first_failure

pytestmark = pytest.mark.slow

LOOPED = Plan(
    strategy="pipeline", pp=2, micro_batch=1, grad_accum=4, precision="fp32", schedule="interleaved", chunks=2
)
FOLDED = replace(LOOPED, schedule="zero_bubble")
PLAIN = replace(LOOPED, schedule="1f1b", chunks=1)
PLANS = {"interleaved": LOOPED, "zero_bubble": FOLDED}


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_tied_and_untied_models_under_sgd_with_a_tight_clip(kind: str, stage: int, name: str) -> None:
    section = model(kind)
    plan = replace(PLANS[name], zero_stage=stage, zero_group=1)
    assert_same(run(section, ONE, SGD), run(section, plan, SGD), loss=1e-6, norm=1e-6)


def test_interleaved_equals_1f1b_bit_by_bit() -> None:
    section = model("llama")
    assert run(section, LOOPED, SGD, data="packed") == run(section, PLAIN, SGD, data="packed")


@pytest.mark.parametrize("name", PLANS)
def test_replicas_in_bf16_with_tied_weights(name: str) -> None:
    plan = replace(PLANS[name], dp=1, zero_stage=1, precision="bf16")
    section = model("gpt2")
    assert_same(run(section, ONE, SGD), run(section, plan, SGD), loss=2e-2, norm=1e-1)


def test_two_replicas_of_padded_batches_with_recompute() -> None:
    section = model("llama")
    plan = replace(LOOPED, dp=2, grad_accum=2, zero_stage=1, zero_group=2, recompute="full")
    assert_same(run(section, ONE, SGD, data="padded"), run(section, plan, SGD, data="padded"), loss=1e-6, norm=1e-6)


@pytest.mark.parametrize(("kind", "shares"), [("gpt2", False), ("llama", False), ("qwen3", True)])
def test_tensor_shards_put_off_their_weights(kind: str, shares: bool) -> None:
    plan = replace(FOLDED, strategy="hybrid", tp=2, zero_stage=1, sequence_sharded=shares)
    assert_same(run(model(kind), ONE, SGD), run(model(kind), plan, SGD), loss=1e-6, norm=2e-6)


def test_tensor_shards_inside_interleaved_stages() -> None:
    section = model("qwen3")
    plan = replace(LOOPED, strategy="hybrid", tp=2, zero_stage=1)
    assert_same(run(section, ONE, SGD), run(section, plan, SGD), loss=1e-6, norm=2e-6)


def test_token_shares_inside_interleaved_stages() -> None:
    section = model("llama")
    plan = replace(LOOPED, strategy="hybrid", tp=2, zero_stage=1, sequence_sharded=True)
    assert_same(run(section, ONE, SGD), run(section, plan, SGD), loss=1e-6, norm=2e-6)


@pytest.mark.parametrize("name", PLANS)
def test_adapters(name: str) -> None:
    section = replace(model("llama"), lora=Lora(rank=4, alpha=8))
    assert_same(run(section, ONE), run(section, PLANS[name]), loss=1e-6, norm=1e-5)


def test_uneven_stages_of_experts() -> None:
    section = model("mixtral", num_hidden_layers=6)
    plan = replace(LOOPED, pipeline_bounds=(0, 1, 3, 4, 6))
    assert_same(run(section, ONE), run(section, plan), loss=1e-6, norm=1e-5)


def different_shapes(plan: Plan, train: Train) -> tuple[Trajectory, tuple[float, int, int]]:
    """Steps whose micro-batches have 16, 8, 16 and 4 tokens, an evaluation, and a further step."""
    engine = engine_of(model("gpt2"), plan, train)
    results = []
    for step in range(STEPS):
        if step == STEPS - 1:
            found = engine.evaluate(_shortened(step))
        results.append(engine.step(_shortened(step)))
    losses = Trajectory(tuple(r.loss for r in results), tuple(r.grad_norm for r in results))
    return losses, (found.loss, found.counted, found.correct)


def _shortened(step: int) -> list[MicroBatch]:
    parts = micro_batches(batch(step, "full"), replace(LOOPED, micro_batch=1), 0)
    return [
        MicroBatch(part.input_ids[:, :tokens].contiguous(), part.labels[:, :tokens].contiguous())  # type: ignore[index]
        for part, tokens in zip(parts, (16, 8, 16, 4), strict=True)
    ]


@pytest.mark.parametrize("name", PLANS)
def test_micro_batches_of_one_step_may_differ_in_shape_and_evaluation_agrees(name: str) -> None:
    one = replace(ONE, micro_batch=1, grad_accum=4)
    (expected,) = call_on_ranks(different_shapes, one, SGD, nproc=1)
    results = call_on_ranks(different_shapes, PLANS[name], SGD, nproc=2)
    failure = first_failure(results)
    assert failure is None, f"{failure.reason}\n{failure.details}"
    for found, evaluated in results:
        assert_same(expected[0], found, loss=1e-6, norm=1e-6)
        assert largest_difference([expected[1][0]], [evaluated[0]]) < 1e-6
        assert evaluated[1:] == expected[1][1:]


def test_weights_that_wait_get_the_gradients_of_one_backward_pass_and_run_their_hooks() -> None:
    torch.manual_seed(0)
    stages = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2, bias=False))
    inputs = torch.randn(4, 3, requires_grad=True)
    stages(inputs).square().sum().backward()
    expected = [parameter.grad.clone() for parameter in stages.parameters() if parameter.grad is not None]
    assert inputs.grad is not None
    onward = inputs.grad.clone()
    stages.zero_grad()
    inputs.grad = None
    later = WeightGradients(stages)
    seen: list[torch.Tensor] = []
    stages[0].weight.register_post_accumulate_grad_hook(lambda own: seen.append(own.grad))  # type: ignore[operator]
    with later.collecting((0, 0)):
        stages(inputs).square().sum().backward()
    assert torch.equal(inputs.grad, onward)
    assert stages[0].weight.grad is None
    later.compute((0, 0))
    assert seen[-1] is not None
    for parameter, gradient in zip(stages.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        ("gpt2", FOLDED),
        ("llama", FOLDED),
        ("llama", replace(FOLDED, tp=2)),
        ("gpt2", replace(FOLDED, tp=2, sequence_sharded=True)),
    ],
)
def test_the_proof_covers_weights_that_wait(kind: str, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    section = tiny_model(kind)
    verdict = prove(section, Axes.of(plan))
    assert verdict.ok, verdict.reason
    monkeypatch.setattr(WeightGradients, "compute", lambda self, place: None)
    verdict = prove(section, Axes.of(plan))
    assert not verdict.ok
    assert "gradients" in verdict.reason
