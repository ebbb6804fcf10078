"""What tests of model parallelism share: a few steps of a tiny model as one rank, on padded and packed batches too."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from toolkit.plans.deepspeed_config import deepspeed_config
from toolkit.plans.plan import Plan
from toolkit.recipe.model_section import Model
from toolkit.recipe.schedules import make_schedule
from toolkit.recipe.sections import Train
from toolkit.run_dir.trajectory import Trajectory, largest_difference
from toolkit.runtime.build_engine import EngineSpec, build_engine
from toolkit.runtime.distributed.process_group import current_world
from toolkit.runtime.engine.protocol import Engine
from toolkit.runtime.models.micro_batch import IGNORE, MicroBatch
from toolkit.runtime.proofs.coverage import tiny_model
from toolkit.runtime.supervision.warm_pool import call_on_ranks, first_failure

STEPS, SEQUENCES, TOKENS, WORDS = 4, 4, 16, 120
ADAM = Train(global_batch=SEQUENCES, steps=STEPS, lr=1e-3, schedule="constant", warmup=0.0)
SGD = replace(ADAM, optimizer="sgd", lr=0.5, grad_clip=0.05)
"""Hides nothing: a wrong norm or a wrong scale moves the next loss."""
ONE = Plan(strategy="data_parallel", micro_batch=SEQUENCES, precision="fp32")


def model(kind: str, **config: Any) -> Model:
    """A tiny model of a type, with some keys changed."""
    tiny = tiny_model(kind, dropout=config.pop("dropout", 0.0))
    assert tiny.config is not None
    return replace(tiny, config={**tiny.config, **config})


def batch(step: int, data: str) -> MicroBatch:
    """A global batch: `full`, `padded` on the right, `padded left`, `packed` with positions that start anew, or `pairs`
    of padded sources and targets."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(3, WORDS, (SEQUENCES, TOKENS + 1), generator=generator)
    inputs, labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    if data == "padded":
        lengths = torch.tensor([TOKENS, 5, 11, 3])
        mask = (torch.arange(TOKENS) < lengths[:, None]).long()
        return MicroBatch(inputs * mask, labels.masked_fill(mask == 0, IGNORE), mask)
    if data == "pairs":
        mask = (torch.arange(TOKENS) < torch.tensor([TOKENS, 5, 11, 3])[:, None]).long()
        counted = torch.arange(TOKENS) < torch.tensor([9, TOKENS, 4, 7])[:, None]
        seen = labels.roll(1, dims=1)
        return MicroBatch(inputs * mask, labels.masked_fill(~counted, IGNORE), mask, decoder_input_ids=seen)
    if data == "padded left":
        begins = torch.tensor([0, 5, 11, 3])
        mask = (torch.arange(TOKENS) >= begins[:, None]).long()
        return MicroBatch(inputs * mask, labels.masked_fill(mask == 0, IGNORE), mask)
    if data == "packed":
        positions = torch.cat([torch.arange(6), torch.arange(TOKENS - 6)]).expand(SEQUENCES, TOKENS).contiguous()
        return MicroBatch(inputs, labels.masked_fill(positions == 5, IGNORE), None, positions)
    return MicroBatch(inputs, labels)


def micro_batches(whole: MicroBatch, plan: Plan, replica: int) -> Iterator[MicroBatch]:
    """A replica's micro-batches of a global batch."""
    for number in range(plan.grad_accum):
        start = (replica * plan.grad_accum + number) * plan.micro_batch
        rows = slice(start, start + plan.micro_batch)
        parts = {key: value[rows] for key, value in vars(whole).items() if value is not None}
        yield MicroBatch(**parts)


def engine_of(section: Model, plan: Plan, train: Train) -> Engine:
    """The engine of this rank."""
    spec = EngineSpec(
        model=section,
        train=train,
        plan=plan,
        deepspeed=deepspeed_config(plan, train, params=10**6, backend="cpu"),
        schedule=make_schedule(train, STEPS),
    )
    return build_engine(spec, current_world())


def train_as_rank(section: Model, plan: Plan, train: Train, data: str) -> Trajectory:
    """What each rank runs."""
    engine = engine_of(section, plan, train)
    results = [engine.step(list(micro_batches(batch(s, data), plan, engine.replica))) for s in range(STEPS)]
    return Trajectory(tuple(float(r.loss) for r in results), tuple(r.grad_norm for r in results))


def run(section: Model, plan: Plan, train: Train = ADAM, data: str = "full") -> Trajectory:
    """A plan on real processes; every rank tells the same. What one process computes, tests of a session share."""
    if plan != ONE:
        return _run(section, plan, train, data)
    question = repr((section, train, data))  # configs are dicts, which have no hash
    if question not in _ALONE:
        _ALONE[question] = _run(section, ONE, train, data)
    return _ALONE[question]


_ALONE: dict[str, Trajectory] = {}


def _run(section: Model, plan: Plan, train: Train, data: str) -> Trajectory:
    results = call_on_ranks(train_as_rank, section, plan, train, data, nproc=plan.devices)
    failure = first_failure(results)
    assert failure is None, f"{failure.reason}\n{failure.details}"
    for result in results[1:]:
        assert largest_difference(results[0].loss, result.loss) < 1e-6
    return results[0]  # type: ignore[no-any-return]


def assert_same(expected: Trajectory, found: Trajectory, loss: float = 1e-5, norm: float = 1e-4) -> None:
    """One process's losses and gradient norms."""
    assert largest_difference(expected.loss, found.loss) <= loss, (expected.loss, found.loss)
    assert largest_difference(expected.grad_norm, found.grad_norm) <= norm, (expected.grad_norm, found.grad_norm)
