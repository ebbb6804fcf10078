"""Scores, embeddings, unpaired answers, a teacher: one process's losses and gradient norms under every layout."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.helpers.pairs import pairs
from tests.helpers.parallel import ADAM, ONE, STEPS, assert_same, engine_of, model
from toolkit.plans.plan import Plan
from toolkit.recipe.model_section import Lora, Model
from toolkit.recipe.objective_sections import Contrastive, Distill
from toolkit.recipe.sections import Train
from toolkit.run_dir.trajectory import Trajectory, largest_difference
from toolkit.runtime.engine.protocol import EvaluationSums
from toolkit.runtime.models.micro_batch import IGNORE, MicroBatch
from toolkit.runtime.objectives.distill_loss import outcomes
from toolkit.runtime.supervision.warm_pool import call_on_ranks, first_failure

pytestmark = pytest.mark.slow

SAMPLES, TOKENS, WORDS, TEXTS = 8, 12, 120, 3


def grouped(step: int, samples: slice, texts: int) -> MicroBatch:
    """Samples of a few padded texts each. The last one is padding; two queries look for the same text."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(3, WORDS, (SAMPLES, texts, TOKENS), generator=generator)
    lengths = torch.randint(2, TOKENS + 1, (SAMPLES, texts), generator=generator)
    mask = (torch.arange(TOKENS) < lengths[..., None]).long()
    labels = torch.zeros(SAMPLES, dtype=torch.long)
    labels[-1] = IGNORE
    keys = torch.arange(SAMPLES * texts).view(SAMPLES, texts)
    keys[5, 1] = keys[2, 1]
    scores = torch.rand(SAMPLES, texts, generator=generator)
    return MicroBatch(
        (ids * mask)[samples].flatten(0, 1), labels[samples], mask[samples].flatten(0, 1), scores=scores[samples],
        keys=keys[samples],
    )  # fmt: skip


def unpaired(step: int, samples: slice) -> MicroBatch:
    """Answers with a label, each with a mismatched one, and a made-up reference."""
    lengths = [(2 + n % 3, 3 + n % 4, 1 + n % 5) for n in range(SAMPLES)]
    whole = pairs(lengths, seed=step)
    assert whole.input_ids is not None
    assert whole.position_ids is not None
    reference = -torch.arange(1.0, 2 * SAMPLES + 1) - step
    return MicroBatch(
        whole.input_ids[samples], whole.labels[samples], position_ids=whole.position_ids[samples],
        pairs=torch.ones(SAMPLES, dtype=torch.long)[samples], reference=reference.view(-1, 2)[samples].flatten(),
        scores=(torch.arange(SAMPLES) % 3 > 0).double()[samples],
    )  # fmt: skip


def taught(step: int, samples: slice) -> MicroBatch:
    """Plain rows with what a made-up teacher has kept."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(3, WORDS, (SAMPLES, TOKENS + 1), generator=generator)
    logits = 2 * torch.randn(SAMPLES, TOKENS, WORDS, generator=generator)
    top = logits.topk(5, -1).indices
    labels = ids[:, 1:].clone()
    labels[0, :5] = IGNORE
    return MicroBatch(
        ids[samples, :-1], labels[samples], teacher_ids=top.int()[samples], teacher_logps=outcomes(logits, top)[samples]
    )


def train_as_rank(
    section: Model, plan: Plan, train: Train, make: Callable[[int, slice], MicroBatch]
) -> tuple[Trajectory, EvaluationSums, dict[str, float] | None]:
    engine = engine_of(section, plan, train)
    results = []

    def batch(step: int) -> list[MicroBatch]:
        first = engine.replica * plan.grad_accum * plan.micro_batch
        starts = [first + number * plan.micro_batch for number in range(plan.grad_accum)]
        return [make(step, slice(at, at + plan.micro_batch)) for at in starts]

    for step in range(STEPS):
        results.append(engine.step(batch(step)))
    found = Trajectory(tuple(float(r.loss) for r in results), tuple(r.grad_norm for r in results))
    return found, engine.evaluate(batch(STEPS)), results[-1].figures


def run(section: Model, plan: Plan, train: Train, make: Any) -> tuple[Trajectory, EvaluationSums, dict[str, float]]:
    results = call_on_ranks(train_as_rank, section, plan, train, make, nproc=plan.devices)
    failure = first_failure(results)
    assert failure is None, f"{failure.reason}\n{failure.details}"
    for trajectory, evaluated, _ in results[1:]:
        assert largest_difference(results[0][0].loss, trajectory.loss) < 1e-6
        assert evaluated.loss == pytest.approx(results[0][1].loss, rel=1e-6)
    return results[0]  # type: ignore[no-any-return]


ALONE = replace(ONE, micro_batch=SAMPLES)


def plan(**axes: object) -> Plan:
    return replace(ALONE, **{"strategy": "hybrid", **axes})  # type: ignore[arg-type]


LAYOUTS = {
    "accumulation": plan(strategy="data_parallel", micro_batch=2, grad_accum=4),
    "data": plan(strategy="data_parallel", dp=2, micro_batch=4),
    "zero-2": plan(strategy="zero", dp=2, micro_batch=2, grad_accum=2, zero_stage=2),
    "zero-3": plan(strategy="zero", dp=2, micro_batch=2, grad_accum=2, zero_stage=3),
    "tensor": plan(strategy="tensor_parallel", tp=2, micro_batch=4, grad_accum=2),
    "pipeline": plan(strategy="pipeline", pp=2, micro_batch=2, grad_accum=4),
    "hybrid": plan(tp=2, pp=2, micro_batch=2, grad_accum=4),
    "sequence": plan(strategy="sequence_parallel", sp=2, micro_batch=4, grad_accum=2),
    "sequences in stages": plan(pp=2, sp=2, micro_batch=2, grad_accum=4, zero_stage=1),
}
HEAD: dict[str, Any] = {"task": "classification", "num_labels": 1}
OBJECTIVES: dict[str, tuple[dict[str, Any], Train, Any]] = {
    "reward": (HEAD, replace(ADAM, objective="reward"), functools.partial(grouped, texts=2)),
    "rank": (HEAD, replace(ADAM, objective="rank"), functools.partial(grouped, texts=TEXTS)),
    "contrastive": (
        {"task": "embedding"},
        replace(ADAM, objective="contrastive", contrastive=Contrastive(temperature=0.2)),
        functools.partial(grouped, texts=TEXTS),
    ),
    "kto": ({}, replace(ADAM, objective="kto"), unpaired),
    "distill": ({}, replace(ADAM, objective="distill", distill=Distill(teacher="x", ce_weight=0.25)), taught),
}
"""Name → (changes to the model section, training section, makes micro-batches)."""
CASES = [
    *(("reward", "llama", layout) for layout in ("zero-3", "hybrid")),
    *(("rank", "bert", layout) for layout in ("zero-2", "tensor")),
    *(("contrastive", "bert", layout) for layout in ("zero-2", "hybrid")),
    *(("contrastive", "llama", layout) for layout in ("accumulation", "zero-3", "pipeline")),
    *(("kto", "llama", layout) for layout in ("data", "zero-3", "hybrid", "sequences in stages")),
    *(("distill", "llama", layout) for layout in ("zero-3", "hybrid", "sequence")),
]


def section_of(objective: str, kind: str) -> Model:
    return replace(model(kind), **OBJECTIVES[objective][0])


@functools.cache
def one_process(objective: str, kind: str) -> tuple[Trajectory, EvaluationSums, dict[str, float]]:
    return run(section_of(objective, kind), ALONE, *OBJECTIVES[objective][1:])


@pytest.mark.parametrize(("objective", "kind", "layout"), CASES)
def test_every_layout_has_the_losses_of_one_process(objective: str, kind: str, layout: str) -> None:
    alone, evaluated, figures = one_process(objective, kind)
    found, others, values = run(section_of(objective, kind), LAYOUTS[layout], *OBJECTIVES[objective][1:])
    assert_same(alone, found, loss=2e-5)
    assert others.loss == pytest.approx(evaluated.loss, rel=2e-5)
    assert (others.counted, others.correct) == (evaluated.counted, evaluated.correct)
    assert values == {name: pytest.approx(value, rel=1e-3, abs=1e-5) for name, value in figures.items()}
    assert len(set(alone.loss)) == STEPS, "the model learns"


@pytest.mark.parametrize("objective", ["reward", "contrastive", "kto"])
def test_adapters_in_tensor_shards_have_the_losses_of_one_process(objective: str) -> None:
    section = replace(section_of(objective, "llama"), lora=Lora(rank=4))
    _, *rest = OBJECTIVES[objective]
    assert_same(run(section, ALONE, *rest)[0], run(section, LAYOUTS["tensor"], *rest)[0], loss=2e-5)


@pytest.mark.parametrize("ranks", [4, 8])
def test_negatives_are_those_of_the_global_batch_whatever_the_number_of_ranks(ranks: int) -> None:
    alone, evaluated, _ = one_process("contrastive", "bert")
    layout = plan(strategy="zero", dp=ranks, micro_batch=1, grad_accum=SAMPLES // ranks, zero_stage=1)
    found, others, _ = run(section_of("contrastive", "bert"), layout, *OBJECTIVES["contrastive"][1:])
    assert_same(alone, found, loss=2e-5)
    assert others.loss == pytest.approx(evaluated.loss, rel=2e-5)
