"""Preference tuning: one process's losses under every layout, and a reference that is computed once."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest

from tests.helpers.pairs import pair_rows
from tests.helpers.parallel import ADAM, ONE, STEPS, assert_same, engine_of, model
from toolkit.plans.plan import Plan
from toolkit.recipe.model_section import Lora, Model
from toolkit.recipe.sections import Train
from toolkit.run_dir.trajectory import Trajectory, largest_difference
from toolkit.runtime.models.micro_batch import MicroBatch
from toolkit.runtime.supervision.warm_pool import call_on_ranks, first_failure

pytestmark = pytest.mark.slow

LENGTHS = [(4, 5, 3), (2, 1, 6), (3, 4, 4), (1, 7, 2)]
ROWS = len(LENGTHS)


def micro_batch(step: int, rows: slice) -> MicroBatch:
    """Some rows of a step's global batch, with a made-up reference; both answers of a pair continue one prompt."""
    samples = pair_rows(LENGTHS, 16, share=True, seed=step)
    assert len(samples) == ROWS, "a pair per row"
    reference = -np.arange(1.0, 2 * ROWS + 1, dtype=np.float32) * 4 - step
    return replace(samples, reference=reference).batch(np.arange(ROWS)[rows])


def train_as_rank(section: Model, plan: Plan, train: Train) -> tuple[Trajectory, dict[str, float] | None]:
    engine = engine_of(section, plan, train)
    results = []
    for step in range(STEPS):
        first = engine.replica * plan.grad_accum * plan.micro_batch
        starts = [first + number * plan.micro_batch for number in range(plan.grad_accum)]
        results.append(engine.step([micro_batch(step, slice(at, at + plan.micro_batch)) for at in starts]))
    found = Trajectory(tuple(float(r.loss) for r in results), tuple(r.grad_norm for r in results))
    return found, results[-1].figures


def run(section: Model, plan: Plan, train: Train) -> tuple[Trajectory, dict[str, float]]:
    results = call_on_ranks(train_as_rank, section, plan, train, nproc=plan.devices)
    failure = first_failure(results)
    assert failure is None, f"{failure.reason}\n{failure.details}"
    for trajectory, _ in results[1:]:
        assert largest_difference(results[0][0].loss, trajectory.loss) < 1e-6
    return results[0]  # type: ignore[no-any-return]


def plan(**axes: object) -> Plan:
    return replace(ONE, **{"strategy": "hybrid", "micro_batch": 1, **axes})  # type: ignore[arg-type]


LAYOUTS = {
    "accumulation": plan(strategy="data_parallel", grad_accum=4),
    "data": plan(strategy="data_parallel", dp=2, micro_batch=2),
    "zero-2": plan(strategy="zero", dp=2, grad_accum=2, zero_stage=2),
    "zero-3": plan(strategy="zero", dp=2, micro_batch=2, zero_stage=3),
    "tensor": plan(strategy="tensor_parallel", tp=2, grad_accum=4),
    "pipeline": plan(strategy="pipeline", pp=2, grad_accum=4),
    "hybrid": plan(tp=2, pp=2, micro_batch=2, grad_accum=2),
    "sequence": plan(strategy="sequence_parallel", sp=2, micro_batch=2, grad_accum=2),
    "ring": plan(strategy="sequence_parallel", cp=2, dp=2, micro_batch=1, grad_accum=2, zero_stage=1),
    "sequences in stages": plan(pp=2, sp=2, micro_batch=2, grad_accum=2, zero_stage=1),
}
CASES = [
    *(("dpo", layout) for layout in LAYOUTS),
    *((objective, "hybrid") for objective in ("ipo", "orpo", "simpo", "cpo")),
]


@functools.cache
def one_process(objective: str) -> tuple[Trajectory, dict[str, float]]:
    return run(model("llama"), ONE, replace(ADAM, objective=objective))


@pytest.mark.parametrize(("objective", "layout"), CASES)
def test_every_layout_has_the_losses_of_one_process(objective: str, layout: str) -> None:
    alone, figures = one_process(objective)
    found, others = run(model("llama"), LAYOUTS[layout], replace(ADAM, objective=objective))
    assert_same(alone, found, loss=2e-5)
    assert others == {name: pytest.approx(value, rel=1e-4, abs=1e-5) for name, value in figures.items()}
    assert figures["margin"] == pytest.approx(figures["chosen_reward"] - figures["rejected_reward"], abs=1e-5)


def test_adapters_in_tensor_shards_have_the_losses_of_one_process() -> None:
    train, adapted = replace(ADAM, objective="dpo"), replace(model("llama"), lora=Lora(rank=4))
    assert_same(run(adapted, ONE, train)[0], run(adapted, LAYOUTS["tensor"], train)[0], loss=2e-5)
