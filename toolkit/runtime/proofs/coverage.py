"""Coverage: which model types train exactly under which strategy. Tiny models on real engines, against one process."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from toolkit.errors import first_line
from toolkit.plans.deepspeed_config import deepspeed_config
from toolkit.plans.plan import Plan
from toolkit.recipe.model_section import Lora, Model
from toolkit.recipe.schedules import make_schedule
from toolkit.recipe.sections import Train
from toolkit.run_dir.trajectory import TINY_LOSS_TOLERANCE, TINY_NORM_TOLERANCE, Trajectory, largest_difference
from toolkit.runtime.build_engine import EngineSpec, build_engine
from toolkit.runtime.distributed.process_group import current_world
from toolkit.runtime.engine.replica import ReplicaEngine
from toolkit.runtime.models.build import skeleton
from toolkit.runtime.models.micro_batch import MicroBatch
from toolkit.runtime.models.tiny_models import VOCABULARY, Sizes, drawn_sizes, tiny_of_type
from toolkit.runtime.supervision.warm_pool import call_on_ranks, first_failure
from toolkit.verdicts import Verdict

STEPS, SEQUENCES, TOKENS = 5, 4, 16
NOISE_FACTOR = 10.0
"""A difference up to this factor times the effect of a one-bit nudge in one process counts as rounding."""
LARGEST = 20_000_000
"""Above this number of parameters a config has not become tiny."""
TIMEOUT_SECONDS = 240.0
ADAPTERS = Lora(rank=3, alpha=6.0)
"""Adapters of the columns `lora-…`."""

REFERENCE = Plan(strategy="data_parallel", micro_batch=SEQUENCES, precision="fp32")


@dataclass(frozen=True)
class Case:
    """A column of the table: a recipe's strategy section, which the planner makes a plan of."""

    strategy: Mapping[str, Any]
    nproc: int = 2
    lora: bool = False
    """Whether adapters are trained instead of all weights."""


_TENSOR = {"name": "tensor_parallel", "tp": 2, "zero_stage": 0, "micro_batch": 4}
_PIPELINE = {"name": "pipeline", "pp": 2, "zero_stage": 0, "schedule": "1f1b", "micro_batch": 2}
_HYBRID = {"name": "hybrid", "tp": 2, "pp": 2, "sp": 1, "cp": 1, "schedule": "1f1b", "zero_stage": 1, "micro_batch": 1}
CASES: dict[str, Case] = {
    "zero-3": Case({"name": "zero", "zero_stage": 3, "micro_batch": 2}),
    "tensor_parallel": Case({**_TENSOR, "sequence_sharded": False}),
    "sequence_sharded": Case({**_TENSOR, "sequence_sharded": True}),
    "pipeline": Case(_PIPELINE),
    "interleaved": Case({**_PIPELINE, "schedule": "interleaved", "chunks": 2, "micro_batch": 1}),
    "ring": Case({"name": "sequence_parallel", "sp": 1, "cp": 2, "zero_stage": 1, "micro_batch": 4}),
    "hybrid": Case(_HYBRID, nproc=8),
    "lora-tensor": Case(_TENSOR, lora=True),
    "lora-pipeline": Case(_PIPELINE, lora=True),
    "lora-hybrid": Case({**_HYBRID, "micro_batch": 2}, nproc=4, lora=True),
}
"""Two ranks each; tp 2 × pp 2 × dp 2 for the hybrid, tp 2 × pp 2 for that with adapters: two micro-batches both."""
_EXPERTS = {"name": "expert_parallel", "ep": 2, "zero_stage": 1, "micro_batch": 2}
EXPERT_CASES: dict[str, Case] = {
    "experts-2": Case(_EXPERTS),
    "experts-2+zero-3": Case({**_EXPERTS, "zero_stage": 3}),
    "experts-4": Case({**_EXPERTS, "ep": 4, "micro_batch": 1}, nproc=4),
    "experts-2x-tensor-2": Case({**_EXPERTS, "tp": 2}, nproc=4),
    "experts-2x-pipeline-2": Case({**_EXPERTS, "pp": 2, "micro_batch": 1}, nproc=4),
    "lora-experts-2": Case(_EXPERTS, lora=True),
}
"""Of mixtures of experts, in addition."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """Result of one type under one strategy."""

    status: str
    """`ok`, `refused`, `mismatch`, or `timeout` without an answer in time; `untrainable` if one process can't train it,
    and `timeout` under every strategy if one process gave no answer."""
    reason: str = ""
    loss_difference: float | None = None
    norm_difference: float | None = None


def causal_types() -> list[str]:
    """Every causal-LM type of the installed transformers."""
    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def settings(*, lora: bool) -> Train:
    """Training settings of a case; adapters start at zero, so they need a higher rate to change a loss."""
    rate = 1e-2 if lora else 1e-3
    return Train(global_batch=SEQUENCES, steps=STEPS, lr=rate, schedule="constant", warmup=0.0)


@dataclass(frozen=True)
class Findings:
    """A type in one process: sizes at which it trains, and what it gives there."""

    section: Model
    sizes: str
    expected: Trajectory
    adapted: Trajectory | None
    """With adapters; None if they were not wanted, or if one process can't train them."""
    why_not_adapted: str = ""


def examine(model_type: str, seed: int, lora: bool) -> Findings:
    """In one process: the first of a few sizes at which the type trains, and its losses there.

    Sizes are drawn by seed and type. A type that accepts none of the drawn ones gets the usual sizes of tiny models.
    """
    last: Exception | None = None
    for sizes in _candidates(model_type, seed):
        try:
            section = Model(config=tiny_of_type(model_type, sizes), init="scratch", precision="fp32")
            check_size(section)
            expected = run_plan(section, REFERENCE, settings(lora=False))
            if not all(map(math.isfinite, [*expected.loss, *expected.grad_norm])):
                raise ValueError("the loss or the gradient norm is NaN or infinite")
        except Exception as error:
            last = error
            continue
        adapted, reason = _adapted(section) if lora else (None, "")
        return Findings(section, sizes.describe(), expected, adapted, reason)
    assert last is not None
    raise last


def _candidates(model_type: str, seed: int) -> Iterator[Sizes]:
    numbers = random.Random(f"{seed} {model_type}")  # noqa: S311 - sizes, not secrets
    own_head_dim = "head_dim" in tiny_of_type(model_type)
    if own_head_dim:
        yield drawn_sizes(numbers, odd_width=True)
    yield drawn_sizes(numbers, odd_width=False)
    yield Sizes()


def check_size(section: Model) -> None:
    """Raise `ValueError` if a config has not become tiny."""
    size = sum(parameter.numel() for parameter in skeleton(section).parameters())
    if size > LARGEST:
        raise ValueError(f"the tiny config has {size:,} parameters")


def _adapted(section: Model) -> tuple[Trajectory | None, str]:
    try:
        return run_plan(replace(section, lora=ADAPTERS), REFERENCE, settings(lora=True)), ""
    except Exception as error:
        return None, f"one process can't train adapters: {first_line(error)}"


def judge(section: Model, train: Train, expected: Trajectory, results: list[Any]) -> Result:
    """Compare what ranks returned with one process; where they differ, ask how far rounding alone goes."""
    failure = first_failure(results)
    if failure is not None:
        status = "timeout" if failure.late else "refused" if failure.refused else "mismatch"
        return Result(status=status, reason=failure.reason)
    found: Trajectory = results[0]
    loss = largest_difference(expected.loss, found.loss)
    norm = largest_difference(expected.grad_norm, found.grad_norm)
    measured = Result(status="ok", loss_difference=loss, norm_difference=norm)
    if loss <= TINY_LOSS_TOLERANCE and norm <= TINY_NORM_TOLERANCE:
        return measured
    nudged = call_on_ranks(_run_nudged, section, train, nproc=1, timeout_seconds=TIMEOUT_SECONDS)[0]
    off = f"loss off by {loss:.1e}, gradient norm by {norm:.1e}"
    if not isinstance(nudged, Trajectory):
        return replace(measured, status="mismatch", reason=f"{off}; how far rounding goes was not found: {nudged}")
    loss_noise = largest_difference(expected.loss, nudged.loss)
    norm_noise = largest_difference(expected.grad_norm, nudged.grad_norm)
    loss_limit = max(TINY_LOSS_TOLERANCE, NOISE_FACTOR * loss_noise)
    norm_limit = max(TINY_NORM_TOLERANCE, NOISE_FACTOR * norm_noise)
    if loss <= loss_limit and norm <= norm_limit:
        noise = (
            f"a nudge of one bit moves one process's loss by {loss_noise:.0e} and its gradient norm by {norm_noise:.0e}"
        )
        return replace(measured, reason=f"within rounding: {noise}")
    return replace(measured, status="mismatch", reason=off)


def _run_nudged(section: Model, train: Train) -> Trajectory:
    return run_plan(section, REFERENCE, train, nudged=True)


def tiny_model(model_type: str, dropout: float = 0.0) -> Model:
    """A recipe's model section for a tiny model of a type."""
    return Model(config=tiny_of_type(model_type, dropout=dropout), init="scratch", precision="fp32")


def run_plan(
    section: Model, plan: Plan, train: Train, deepspeed: dict[str, Any] | None = None, *, nudged: bool = False
) -> Trajectory:
    """Train a model on random tokens for a few steps, as one rank.

    `deepspeed`: the config that the planner wrote for the plan; default: one for a model of any tiny size.
    """
    site = EngineSpec(
        model=section,
        train=train,
        plan=plan,
        deepspeed=deepspeed or deepspeed_config(plan, train, params=LARGEST, backend="cpu"),
        schedule=make_schedule(train, STEPS),
    )
    engine = build_engine(site, current_world())
    if nudged:
        assert isinstance(engine, ReplicaEngine)
        _nudge(engine.module)
    results = [engine.step(list(share(step, plan, engine.replica))) for step in range(train.steps or STEPS)]
    return Trajectory(tuple(float(r.loss) for r in results), tuple(r.grad_norm for r in results))


def share(step: int, plan: Plan, replica: int) -> Iterator[MicroBatch]:
    """A replica's micro-batches of a step; two batches alternate."""
    generator = torch.Generator().manual_seed(step % 2)
    ids = torch.randint(3, VOCABULARY - 1, (plan.global_batch, TOKENS + 1), generator=generator)
    own = ids.chunk(plan.dp)[replica]
    for start in range(0, len(own), plan.micro_batch):
        rows = own[start : start + plan.micro_batch]
        yield MicroBatch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())


def _nudge(model: torch.nn.Module) -> None:
    """Move every weight by one bit, up or down."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            signs = torch.randint(0, 2, parameter.shape, generator=generator) * 2.0 - 1.0
            parameter.mul_(1.0 + signs * torch.finfo(torch.float32).eps)


def try_autotp(section: Model, tp: int) -> Verdict:
    """Whether a few steps under AutoTP reproduce the losses and gradient norms of one process.

    DeepSpeed 0.19.8's AutoTP is silently wrong for some types (gpt_bigcode, persimmon), so each model is tested.
    """
    train = settings(lora=False)
    plan = Plan(
        strategy="tensor_parallel",
        tp=tp,
        zero_stage=1,
        micro_batch=SEQUENCES,
        precision="fp32",
        tensor_by="autotp",
    )
    whole = call_on_ranks(run_plan, section, REFERENCE, train, nproc=1, timeout_seconds=TIMEOUT_SECONDS)
    cut = call_on_ranks(run_plan, section, plan, train, nproc=tp, timeout_seconds=TIMEOUT_SECONDS)
    for results, what in ((whole, "one process"), (cut, "AutoTP")):
        if failure := first_failure(results):
            return Verdict(False, f"a tiny model fails under {what}: {failure.reason}")
    loss = largest_difference(whole[0].loss, cut[0].loss)
    norm = largest_difference(whole[0].grad_norm, cut[0].grad_norm)
    if loss <= TINY_LOSS_TOLERANCE and norm <= TINY_NORM_TOLERANCE:
        return Verdict(True)
    return Verdict(
        False,
        f"AutoTP is not exact for this model: on a tiny model the loss is off by {loss:.1e}, "
        f"the gradient norm by {norm:.1e}; leave strategy.tensor_by out",
    )
