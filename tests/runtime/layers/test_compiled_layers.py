"""Compiled layers: same results, one set of graphs for all documents, refusals with reasons."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.helpers import planning
from tests.helpers.parallel import ADAM, ONE, STEPS, assert_same, batch, micro_batches, model, run
from toolkit.errors import BadInput
from toolkit.plans.deepspeed_config import deepspeed_config
from toolkit.plans.deepspeed_rules import refusal
from toolkit.plans.plan import Plan
from toolkit.recipe.model_section import Lora, Model
from toolkit.recipe.schedules import make_schedule
from toolkit.run_dir.trajectory import Trajectory
from toolkit.runtime.build_engine import EngineSpec, build_engine
from toolkit.runtime.distributed.process_group import current_world
from toolkit.runtime.layers import compiled_layers
from toolkit.runtime.proofs.coverage import tiny_model
from toolkit.runtime.supervision.warm_pool import call_on_ranks, first_failure

pytestmark = pytest.mark.slow


def compiled_on_rank(section: Model, plan: Plan, data: str) -> tuple[Trajectory, list[int | None]]:
    """A few steps, and the graphs compiled after each. Without code generation, which takes minutes on busy cores."""
    compiled_layers.BACKEND = "aot_eager"
    site = EngineSpec(
        model=replace(section, compile="layers"),
        train=ADAM,
        plan=plan,
        deepspeed=deepspeed_config(plan, ADAM, params=10**6, backend="cpu"),
        schedule=make_schedule(ADAM, STEPS),
    )
    engine = build_engine(site, current_world())
    results, graphs = [], []
    for step in range(STEPS):
        results.append(engine.step(list(micro_batches(batch(step, data), plan, engine.replica))))
        graphs.append(compiled_layers.compiled_graphs())
    return Trajectory(tuple(float(r.loss) for r in results), tuple(r.grad_norm for r in results)), graphs


PIPELINE = Plan(strategy="pipeline", pp=2, micro_batch=1, grad_accum=4, precision="fp32", pipeline_bounds=(0, 2, 4))
PLANS: dict[str, tuple[Plan, dict[str, Any]]] = {
    "zero 2": (Plan(strategy="zero", dp=2, zero_group=2, zero_stage=2, micro_batch=2, precision="fp32"), {}),
    "pipeline": (PIPELINE, {}),
    "tensor": (Plan(strategy="tensor_parallel", tp=2, micro_batch=4, precision="fp32"), {}),
    "adapters, recomputed": (replace(ONE, recompute="full"), {"lora": Lora(rank=4)}),
}


@pytest.mark.parametrize("name", PLANS)
def test_compiled_engines_train_as_one_eager_process(name: str) -> None:
    """Documents differ in every step; nothing is compiled after the first one."""
    plan, extras = PLANS[name]
    section = replace(model("llama"), **extras)
    results = call_on_ranks(compiled_on_rank, section, plan, "packed", nproc=plan.devices)
    failure = first_failure(results)
    assert failure is None, f"{failure.reason}\n{failure.details}"
    found, graphs = results[-1]
    assert_same(run(section, ONE, data="packed"), found)
    assert graphs[0]
    assert set(graphs) == {graphs[0]}


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (Plan(strategy="zero", zero_stage=3, dp=2, zero_group=2), "ZeRO 3 gathers"),
        (Plan(strategy="sequence_parallel", sp=2, zero_stage=1), "sequence and expert parallel"),
        (replace(ONE, recompute="selective"), "selective recompute"),
    ],
)
def test_plans_that_break_compiled_layers_are_refused(plan: Plan, words: str) -> None:
    assert words in (refusal(plan, planning.job(compiled=True)) or "")


def test_a_type_that_breaks_is_refused_with_the_reason() -> None:
    section = replace(model("llama"), compile="layers", attention="eager")
    with pytest.raises(BadInput, match="masks of its own"):
        compiled_layers.install(None, section)


@pytest.mark.parametrize("kind", ["gptj", "gpt_neo", "falcon"])
def test_types_that_look_up_their_attention_by_name_can_be_tried(kind: str) -> None:
    assert compiled_layers.why_not(tiny_model(kind), "aot_eager") == ""
