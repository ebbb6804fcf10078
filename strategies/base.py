"""What a strategy is: it proposes plans, or says why not. It never touches a tensor."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from toolkit import compat
from toolkit.plan import Job, Plan, Refusal

Proposal = Plan | Refusal


class Strategy(Protocol):
    """One file a strategy; the registry is the table in `strategies/__init__.py`."""

    @property
    def name(self) -> str:
        """Name in recipes."""

    @property
    def summary(self) -> str:
        """What it does, in a line."""

    @property
    def axes(self) -> tuple[str, ...]:
        """Plan fields that it varies."""

    @property
    def needs(self) -> str:
        """What it needs to run."""

    @property
    def refuses(self) -> str:
        """What it refuses."""

    def propose(self, job: Job) -> Iterator[Proposal]:
        """Every plan for the job, and refusals with their reasons."""


@dataclass(frozen=True, kw_only=True)
class Space:
    """The values that a strategy tries for each axis; everything else stays at the plan's default."""

    tp: Sequence[int] = (1,)
    pp: Sequence[int] = (1,)
    sp: Sequence[int] = (1,)
    ep: Sequence[int] = (1,)
    zero_stage: Sequence[int] = (0,)
    zero_variant: Sequence[str] = ("plain",)
    zero_quantized: Sequence[str] = ("none",)
    offload: Sequence[str] = ("none",)
    recompute: Sequence[str] = ("none", "full")


def plans(strategy: str, job: Job, space: Space) -> Iterator[Proposal]:
    """All plans of a space that the job, the fixed axes and DeepSpeed allow; refusals for the rest."""
    choices = _restricted(strategy, job, space)
    if isinstance(choices, Refusal):
        yield choices
        return
    for values in itertools.product(*choices.values()):
        yield from _with_batches(strategy, job, dict(zip(choices, values, strict=True)))


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


def _restricted(strategy: str, job: Job, space: Space) -> dict[str, Sequence[Any]] | Refusal:
    """The space with fixed axes put in; a refusal where a fixed value is not the strategy's to choose."""
    choices: dict[str, Sequence[Any]] = dict(vars(space))
    for axis, value in job.fixed.items():
        if axis in choices and value not in choices[axis]:
            offered = ", ".join(str(choice) for choice in choices[axis])
            return Refusal(strategy, f"strategy.{axis} is fixed at {value}; {strategy} offers {offered}")
        if axis in choices:
            choices[axis] = (value,)
        elif axis in ("islands", "local_steps") and value != 1:
            return Refusal(strategy, f"strategy.{axis} is fixed at {value}; {strategy} synchronises every step")
    return choices


def _with_batches(strategy: str, job: Job, axes: Mapping[str, Any]) -> Iterator[Proposal]:
    """Plans for one choice of axes: every group size and micro-batch that is possible."""
    replica = axes["tp"] * axes["pp"] * axes["sp"]
    if job.cluster.devices % replica:
        return
    dp = job.cluster.devices // replica
    batch = job.workload.global_batch
    if job.fixed.get("dp", dp) != dp:
        yield Refusal(strategy, f"strategy.dp is fixed at {job.fixed['dp']}; {job.cluster.devices} devices / {replica} make {dp}")  # fmt: skip
        return
    if batch % dp:
        low, high = batch // dp * dp, (batch // dp + 1) * dp
        advice = f"{low} or {high}" if low else f"{high}"
        yield Refusal(strategy, f"global batch {batch} can't be split over {dp} data-parallel replicas; use {advice}")
        return
    for micro_batch in divisors(batch // dp):
        grad_accum = batch // dp // micro_batch
        if job.fixed.get("micro_batch", micro_batch) != micro_batch or job.fixed.get("grad_accum", grad_accum) != grad_accum:  # fmt: skip
            continue
        for group in _groups(job, dp, axes):
            plan = Plan(
                strategy=strategy, dp=dp, zero_group=group, micro_batch=micro_batch, grad_accum=grad_accum,
                precision=job.workload.precision, **axes,
            )  # fmt: skip
            reason = compat.refusal(plan, job)
            yield Refusal(strategy, reason, plan) if reason else plan


def _groups(job: Job, dp: int, axes: Mapping[str, Any]) -> Sequence[int]:
    """Sizes of the group that holds one full set of sharded states."""
    if axes["zero_stage"] == 0:
        whole = 1
    else:
        whole = dp
    if axes["zero_variant"] == "plain":
        return (job.fixed.get("zero_group", whole),)
    sizes = [size for size in divisors(min(dp, job.cluster.devices_per_node)) if 1 < size < dp and dp % size == 0]
    return [size for size in sizes if job.fixed.get("zero_group", size) == size]
