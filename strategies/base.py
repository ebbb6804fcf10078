"""What a strategy is: it proposes plans, or refusals with a reason. It never touches a tensor."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

from toolkit.plans import deepspeed_rules
from toolkit.plans.pipeline_bounds import pipeline_bounds
from toolkit.plans.pipeline_orders import micro_batches_problem
from toolkit.plans.plan import Job, Plan, Refusal
from toolkit.recipe.axes import RECOMPUTES

__all__ = ["Job", "Plan", "Proposal", "Refusal", "Space", "Strategy", "divisors", "plans"]

Proposal = Plan | Refusal
"""What a strategy yields: a plan, or the reason why there is none."""


class Strategy(Protocol):
    """One strategy, in a file of its own; the table in `strategies/__init__.py` lists them."""

    @property
    def name(self) -> str:
        """Name in recipes."""

    @property
    def summary(self) -> str:
        """What it does, in one line."""

    @property
    def axes(self) -> tuple[str, ...]:
        """Plan fields that it varies."""

    @property
    def needs(self) -> str:
        """What it needs to run, in words."""

    @property
    def refuses(self) -> str:
        """What it refuses, in words."""

    def propose(self, job: Job) -> Iterator[Proposal]:
        """Every plan for the job, and refusals with their reasons."""

    def variants(self, devices: int) -> dict[str, dict[str, Any]]:
        """Cases for `toolkit parity`: name → fixed axes."""


@dataclass(frozen=True, kw_only=True)
class Space:
    """The values that a strategy tries for each axis; all other plan fields keep their defaults."""

    tp: Sequence[int] = (1,)
    pp: Sequence[int] = (1,)
    sp: Sequence[int] = (1,)
    cp: Sequence[int] = (1,)
    ep: Sequence[int] = (1,)
    zero_stage: Sequence[int] = (0,)
    zero_variant: Sequence[str] = ("plain",)
    zero_quantized: Sequence[str] = ("none",)
    offload: Sequence[str] = ("none",)
    recompute: Sequence[str] = RECOMPUTES
    tensor_by: Sequence[str] = ("slices",)
    sequence_sharded: Sequence[bool] = (False,)
    islands: Sequence[int] = (1,)
    local_steps: Sequence[int] = (1,)
    schedule: Sequence[str] = ("1f1b",)
    chunks: Sequence[int] = (1,)


def plans(strategy: str, job: Job, space: Space) -> Iterator[Proposal]:
    """All plans of a space that the job, the fixed axes and DeepSpeed allow; refusals for the others."""
    choices = _restricted(strategy, job, space)
    if isinstance(choices, Refusal):
        yield choices
        return
    for values in itertools.product(*choices.values()):
        yield from _with_batches(strategy, job, dict(zip(choices, values, strict=True)))


def divisors(number: int) -> list[int]:
    """All divisors, in ascending order."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


DENSE = 8
"""Every micro-batch up to this one is tried."""
SPARSE = 1.9
"""Beyond it, a micro-batch is tried only if it is this many times the one before: they hardly differ in speed."""
MANY = 4096
"""Sequences per replica and step above which few micro-batches are tried, so that planning stays fast."""
LEAST_TOKENS = 256
"""Tokens of the smallest micro-batch that is tried for so many sequences: fewer save no memory."""
LARGEST_TOKENS = 2**18
"""Tokens of the largest micro-batch beyond `DENSE` that is tried unless the recipe fixes one: no device gets faster."""


def micro_batches(share: int, seq_len: int, fixed: Mapping[str, Any]) -> list[int]:
    """Micro-batches to try for `share` sequences per replica; few, however many divisors there are."""
    if "grad_accum" in fixed and share % fixed["grad_accum"] == 0:
        return [share // fixed["grad_accum"]]
    if "micro_batch" in fixed:
        return [fixed["micro_batch"]] if share % fixed["micro_batch"] == 0 else []
    return _usual_micro_batches(share, LEAST_TOKENS // seq_len, LARGEST_TOKENS // seq_len)


@lru_cache(maxsize=1024)
def _usual_micro_batches(share: int, least: int, largest: int) -> list[int]:
    dense, sparse, sizes = DENSE, SPARSE, divisors(share)
    if share > MANY:
        dense, sparse, sizes = 2, SPARSE**2, [size for size in sizes if size >= least]
    kept = [sizes[0]]
    for size in sizes[1:]:
        if size <= dense or largest >= size >= sparse * kept[-1]:
            kept.append(size)
    return kept


def _restricted(strategy: str, job: Job, space: Space) -> dict[str, Sequence[Any]] | Refusal:
    """The space restricted to the fixed axes; a refusal if the strategy does not offer a fixed value."""
    choices: dict[str, Sequence[Any]] = dict(vars(space))
    for axis, value in job.fixed.items():
        if axis in ("islands", "local_steps") and tuple(choices[axis]) == (1,) and value != 1:
            return Refusal(strategy, f"strategy.{axis} is fixed at {value}; {strategy} synchronises every step")
        if axis in ("schedule", "chunks") and tuple(choices["pp"]) == (1,) and value not in choices[axis]:
            return Refusal(strategy, f"strategy.{axis} is fixed at {value}; {strategy} has no pipeline to order")
        if axis in choices and value not in choices[axis]:
            offered = ", ".join(str(choice) for choice in choices[axis])
            return Refusal(strategy, f"strategy.{axis} is fixed at {value}; {strategy} offers {offered}")
        if axis in choices:
            choices[axis] = (value,)
    return choices


def _with_batches(strategy: str, job: Job, axes: Mapping[str, Any]) -> Iterator[Proposal]:
    """Plans for one choice of axes, with every possible micro-batch and group size.

    DeepSpeed's rules are asked once: except under a batch ramp, none depends on the size of the micro-batch, only on
    whether there are several.
    """
    islands = axes["islands"]
    replica = axes["tp"] * axes["pp"] * axes["sp"] * axes["cp"] * islands
    if job.cluster.devices % replica:
        return
    dp = job.cluster.devices // replica
    reason = _batch_problem(job, dp, replica, islands)
    if reason:
        yield Refusal(strategy, reason)
        return
    share = job.workload.global_batch // (dp * islands)
    bounds = _bounds(job, axes["pp"], axes["schedule"], axes["chunks"])
    order = axes["schedule"], axes["pp"]
    judged: dict[tuple[int, bool], str | None] = {}
    sizes = micro_batches(share, job.workload.seq_len, job.fixed)
    for micro_batch, group in itertools.product(sizes, _groups(job, dp, axes)):
        batches: dict[str, Any] = {"micro_batch": micro_batch, "grad_accum": share // micro_batch}
        like = group, share > micro_batch
        if judged.get(like) or any(job.fixed.get(name, value) != value for name, value in batches.items()):
            continue
        if order[0] != "1f1b" and (problem := micro_batches_problem(*order, share // micro_batch)):
            if micro_batch == 1 or job.fixed.keys() & batches.keys():
                yield Refusal(strategy, problem)
            continue
        plan = Plan(
            strategy=strategy,
            dp=dp,
            zero_group=group,
            precision=job.workload.precision,
            pipeline_bounds=bounds,
            **batches,
            **axes,
        )
        if like in judged:
            yield plan
            continue
        reason = deepspeed_rules.refusal(plan, job)
        if not job.workload.ramp_start:
            judged[like] = reason
        yield Refusal(strategy, reason, plan) if reason else plan


def _bounds(job: Job, pp: int, schedule: str, chunks: int) -> tuple[int, ...]:
    """Stage bounds: from the recipe, or balanced."""
    if pp == 1:
        return ()
    given = job.fixed.get("pipeline_bounds")
    return tuple(given or pipeline_bounds(job.model, pp, job.workload.seq_len, schedule, chunks))


def _batch_problem(job: Job, dp: int, replica: int, islands: int) -> str | None:
    """Why the global batch can't be split over the replicas as the recipe fixes it; None if it can."""
    batch, fixed = job.workload.global_batch, job.fixed
    if fixed.get("dp", dp) != dp:
        return f"strategy.dp is fixed at {fixed['dp']}; {job.cluster.devices} devices / {replica} make {dp}"
    dp *= islands
    if batch % dp:
        low, high = batch // dp * dp, (batch // dp + 1) * dp
        advice = f"{low} or {high}" if low else f"{high}"
        return f"global batch {batch} can't be split over {dp} data-parallel replicas; use {advice}"
    micro, accum = fixed.get("micro_batch", 1), fixed.get("grad_accum", 1)
    if (batch // dp) % (micro * accum) or (
        {"micro_batch", "grad_accum"} <= fixed.keys() and micro * accum * dp != batch
    ):
        given = " × ".join(f"{name} {fixed[name]}" for name in ("micro_batch", "grad_accum") if name in fixed)
        return f"{given} × dp {dp} does not make the global batch {batch}"
    return None


def _groups(job: Job, dp: int, axes: Mapping[str, Any]) -> Sequence[int]:
    """Possible sizes of the group that holds one full set of sharded states."""
    if axes["zero_variant"] == "plain":
        return (job.fixed.get("zero_group", dp if axes["zero_stage"] else 1),)
    if "zero_group" in job.fixed:
        return (job.fixed["zero_group"],)
    sizes = [size for size in divisors(min(dp, job.cluster.devices_per_node)) if 1 < size < dp and dp % size == 0]
    return sizes or ([dp] if "zero_variant" in job.fixed else [])
