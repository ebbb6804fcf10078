"""Coverage: which model types train exactly under which strategy. Tiny models on real engines, against one process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from toolkit.plans.deepspeed_config import deepspeed_config
from toolkit.plans.plan import Plan
from toolkit.plans.split_verdicts import Axes
from toolkit.recipe.model_section import Model
from toolkit.recipe.schedules import make_schedule
from toolkit.recipe.sections import Train
from toolkit.run_dir.trajectory import TINY_LOSS_TOLERANCE, TINY_NORM_TOLERANCE, Trajectory, largest_difference
from toolkit.runtime.build_engine import EngineSpec, build_engine
from toolkit.runtime.distributed.process_group import current_world
from toolkit.runtime.engine.replica import ReplicaEngine
from toolkit.runtime.models.build import skeleton
from toolkit.runtime.models.micro_batch import MicroBatch
from toolkit.runtime.models.tiny_models import VOCABULARY, tiny_of_type
from toolkit.runtime.proofs.split_proof import prove
from toolkit.runtime.supervision.warm_pool import Failure, call_on_ranks, first_failure
from toolkit.verdicts import Verdict

STEPS, SEQUENCES, TOKENS = 5, 4, 16
NOISE_FACTOR = 10.0
"""A difference up to this factor times the effect of a one-bit nudge in one process counts as rounding."""
LARGEST = 20_000_000
"""Above this number of parameters a config has not become tiny."""
TIMEOUT_SECONDS = 240.0

REFERENCE = Plan(strategy="data_parallel", micro_batch=SEQUENCES, precision="fp32")
CASES: dict[str, Plan] = {
    "zero-3": Plan(strategy="zero", dp=2, zero_stage=3, zero_group=2, micro_batch=2, precision="fp32"),
    "tensor_parallel": Plan(strategy="tensor_parallel", tp=2, micro_batch=4, precision="fp32"),
    "sequence_sharded": Plan(strategy="tensor_parallel", tp=2, micro_batch=4, precision="fp32", sequence_sharded=True),
    "pipeline": Plan(strategy="pipeline", pp=2, micro_batch=2, grad_accum=2, precision="fp32"),
    "ring": Plan(strategy="sequence_parallel", cp=2, zero_stage=1, micro_batch=4, precision="fp32"),
    "interleaved": Plan(
        strategy="pipeline", pp=2, schedule="interleaved", chunks=2, micro_batch=1, grad_accum=4, precision="fp32"
    ),
    "hybrid": Plan(strategy="hybrid", pp=2, tp=2, dp=2, zero_stage=1, zero_group=2, grad_accum=2, precision="fp32"),
}
"""Two ranks each, and 2 × 2 × 2 for the hybrid."""
_EXPERTS = Plan(strategy="expert_parallel", dp=2, ep=2, zero_stage=1, zero_group=2, micro_batch=2, precision="fp32")
EXPERT_CASES: dict[str, Plan] = {
    "experts-2": _EXPERTS,
    "experts-2+zero-3": replace(_EXPERTS, zero_stage=3),
    "experts-4": replace(_EXPERTS, dp=4, ep=4, zero_group=4, micro_batch=1),
    "experts-2x-tensor-2": replace(_EXPERTS, tp=2),
    "experts-2x-pipeline-2": replace(_EXPERTS, pp=2, micro_batch=1, grad_accum=2),
}
"""Of mixtures of experts, in addition."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """Result of one type under one strategy."""

    status: str
    """`ok`, `refused` or `mismatch`; `untrainable` if one process can't train it."""
    reason: str = ""
    loss_difference: float | None = None
    norm_difference: float | None = None


def causal_types() -> list[str]:
    """Every causal-LM type of the installed transformers."""
    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def cover(model_type: str, cases: Mapping[str, Plan] = CASES, train: Train | None = None) -> dict[str, Result]:
    """Results of a type under every case."""
    settings = train or Train(global_batch=SEQUENCES, steps=STEPS, lr=1e-3, schedule="constant", warmup=0.0)
    first = call_on_ranks(_examine, model_type, dict(cases), settings, nproc=1, timeout_seconds=TIMEOUT_SECONDS)[0]
    if isinstance(first, Failure):
        return {name: Result(status="untrainable", reason=first.reason) for name in cases}
    return {name: _case(model_type, plan, settings, first) for name, plan in cases.items()}


@dataclass(frozen=True)
class Findings:
    """Findings about a type in one process."""

    expected: Trajectory
    verdicts: dict[Axes, Verdict]


def _case(model_type: str, plan: Plan, train: Train, findings: Findings) -> Result:
    verdict = findings.verdicts.get(Axes.of(plan), Verdict(True))
    if not verdict.ok:
        return Result(status="refused", reason=verdict.reason)
    results = call_on_ranks(run_case, model_type, plan, train, nproc=plan.devices, timeout_seconds=TIMEOUT_SECONDS)
    failure = first_failure(results)
    if failure is not None:
        return Result(status="refused" if failure.refused else "mismatch", reason=failure.reason)
    return _judged(model_type, train, findings.expected, results[0])


def _judged(model_type: str, train: Train, expected: Trajectory, found: Trajectory) -> Result:
    loss = largest_difference(expected.loss, found.loss)
    norm = largest_difference(expected.grad_norm, found.grad_norm)
    measured = Result(status="ok", loss_difference=loss, norm_difference=norm)
    if loss <= TINY_LOSS_TOLERANCE and norm <= TINY_NORM_TOLERANCE:
        return measured
    nudged = call_on_ranks(_run_nudged, model_type, train, nproc=1, timeout_seconds=TIMEOUT_SECONDS)[0]
    assert isinstance(nudged, Trajectory), nudged
    loss_noise = largest_difference(expected.loss, nudged.loss)
    norm_noise = largest_difference(expected.grad_norm, nudged.grad_norm)
    loss_limit = max(TINY_LOSS_TOLERANCE, NOISE_FACTOR * loss_noise)
    norm_limit = max(TINY_NORM_TOLERANCE, NOISE_FACTOR * norm_noise)
    if loss <= loss_limit and norm <= norm_limit:
        noise = (
            f"a nudge of one bit moves one process's loss by {loss_noise:.0e} and its gradient norm by {norm_noise:.0e}"
        )
        return replace(measured, reason=f"within rounding: {noise}")
    return replace(measured, status="mismatch", reason=f"loss off by {loss:.1e}, gradient norm by {norm:.1e}")


def _examine(model_type: str, cases: Mapping[str, Plan], train: Train) -> Findings:
    """In one process: the expected trajectory, and the proof's verdict on every split."""
    section = tiny_model(model_type)
    size = sum(parameter.numel() for parameter in skeleton(section).parameters())
    if size > LARGEST:
        raise ValueError(f"the tiny config has {size:,} parameters")
    expected = run_case(model_type, REFERENCE, train)
    splits = {Axes.of(plan) for plan in cases.values() if Axes.of(plan).split}
    return Findings(expected, {axes: prove(section, axes) for axes in splits})


def _run_nudged(model_type: str, train: Train) -> Trajectory:
    return run_case(model_type, REFERENCE, train, nudged=True)


def tiny_model(model_type: str, dropout: float = 0.0) -> Model:
    """A recipe's model section for a tiny model of a type."""
    return Model(config=tiny_of_type(model_type, dropout=dropout), init="scratch", precision="fp32")


def run_case(model_type: str, plan: Plan, train: Train, *, nudged: bool = False) -> Trajectory:
    """Train a tiny model under a plan for a few steps, as one rank."""
    return run_plan(tiny_model(model_type), plan, train, nudged=nudged)


def run_plan(section: Model, plan: Plan, train: Train, *, nudged: bool = False) -> Trajectory:
    """Train a model on random tokens for a few steps, as one rank."""
    site = EngineSpec(
        model=section,
        train=train,
        plan=plan,
        deepspeed=deepspeed_config(plan, train, params=LARGEST, backend="cpu"),
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
    train = Train(global_batch=SEQUENCES, steps=STEPS, lr=1e-3, schedule="constant", warmup=0.0)
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
