"""The single change to a recipe or cluster that would help most: each one is planned, none is canned."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import strategies
from toolkit.planner.recipe_rules import keepable
from toolkit.planner.search import Decision, Option, decide
from toolkit.plans.plan import Job
from toolkit.recipe.sections import Recipe

WORTH_SAYING = 1.05
"""Least gain in throughput at which a change is suggested."""
MOST_PLANS = 2000
"""Plans after which no further change is tried: planning must stay instant, and about 5,000 plans take a second. Not a
time: the advice must be the same on a busy machine."""
MOST_TIMES = 64
"""Largest growth of the cluster that is tried where nothing fits."""
RANK = 16
"""Rank of the adapters that are suggested where all weights do not fit."""


@dataclass(frozen=True)
class Advice:
    """One change, and the plan that it leads to."""

    change: str
    """The change in words, with the recipe key where there is one."""
    plan: str
    tokens_per_second: float
    gain: float | None
    """Throughput relative to the chosen plan; None where no plan fits without the change."""

    def __str__(self) -> str:
        if self.gain is None:
            return f"{self.change}: {self.plan} would fit, {self.tokens_per_second:,.0f} tokens/s"
        return f"{self.change} would help most: {self.gain:.2f} times the throughput ({self.plan})"


def advise(recipe: Recipe, job: Job, decision: Decision) -> Advice | None:
    """The change that helps most; None if nothing helps, or every axis is fixed."""
    chosen = decision.chosen
    if chosen is not None and not chosen.estimate.fits:
        return None
    trials = _Trials(recipe)
    if chosen is not None and chosen.plan.offload != "none" and (more := _without_offload(trials, job, chosen)):
        return more
    found = []
    for change, other in _rescues(job) if chosen is None else _improvements(job, chosen):
        if trials.plans > MOST_PLANS:
            break
        option = trials.best(other, chosen)
        if option is None:
            continue
        rate = option.estimate.tokens_per_second
        if chosen is None:
            return Advice(change, option.plan.describe(), rate, None)
        found.append(Advice(change, option.plan.describe(), rate, rate / chosen.estimate.tokens_per_second))
    best = max(found, key=lambda advice: advice.gain or 0.0, default=None)
    return best if best is not None and (best.gain or 0.0) >= WORTH_SAYING else None


@dataclass
class _Trials:
    """Searches of changed jobs, and the plans that they proposed so far."""

    recipe: Recipe
    plans: int = 0

    def best(self, job: Job, chosen: Option | None) -> Option | None:
        """The best plan of a changed job, with the axes of the chosen plan where there is one.

        Where nothing fits, ZeRO is asked: it shards everything, and its search takes a fraction of that of hybrids.
        """
        if chosen is not None:
            axes = {axis: getattr(chosen.plan, axis) for axis in ("tp", "pp", "sp", "cp", "ep")}
            job = replace(job, fixed={**axes, **job.fixed})
        proposed = list(strategies.propose(job, chosen.plan.strategy if chosen else "zero"))
        self.plans += len(proposed)
        option = decide(job, keepable(self.recipe, proposed)).chosen
        return option if option is not None and option.estimate.fits else None


def _without_offload(trials: _Trials, job: Job, chosen: Option) -> Advice | None:
    """As many devices as hold the states in their own memory: the host and the disk are what slows the plan down."""
    fixed = {**job.fixed, "offload": "none"}
    times = 2
    while times <= MOST_TIMES and trials.plans <= MOST_PLANS:
        option = trials.best(replace(_devices(job, times), fixed=fixed), None)
        if option is not None:
            rate = option.estimate.tokens_per_second
            change = f"memory comes first: {times * job.cluster.devices} devices, without offload,"
            return Advice(change, option.plan.describe(), rate, rate / chosen.estimate.tokens_per_second)
        times *= 2
    return None


Change = tuple[str, Job]


def _rescues(job: Job) -> Iterator[Change]:
    """Changes after which something may fit, the least intrusive first."""
    work = job.workload
    if work.lora_rank and not work.quantized_base:
        yield "4-bit base weights (model.lora.quantize=4bit)", _work(job, quantized_base=True)
    yield from _divisible(job)
    if work.seq_len >= 4096:
        yield f"half the sequence (data.seq_len={work.seq_len // 2})", _work(job, seq_len=work.seq_len // 2)
    times = 2
    while times <= MOST_TIMES:
        yield f"memory is what is missing: {times * job.cluster.devices} devices of this kind", _devices(job, times)
        times *= 2
    if not work.lora_rank:
        yield f"adapters instead of all weights (model.lora.rank={RANK})", _work(job, lora_rank=RANK)
        four_bit = _work(job, lora_rank=RANK, quantized_base=True)
        yield f"adapters over 4-bit weights (model.lora.rank={RANK}, model.lora.quantize=4bit)", four_bit


def _improvements(job: Job, chosen: Option) -> Iterator[Change]:
    """Changes that may make the chosen plan faster."""
    work, cluster, spent = job.workload, job.cluster, chosen.estimate.time
    if not work.flash_attention:
        yield "attention without stored scores (model.attention=sdpa)", _work(job, flash_attention=True)
    yield from _divisible(job)
    if spent.total - spent.compute > 0.05 * spent.total:
        doubled = 2 * work.global_batch
        yield f"a batch of {doubled} sequences (train.global_batch)", _work(job, global_batch=doubled)
        more = replace(cluster.device, memory_bytes=2 * cluster.device.memory_bytes)
        yield "twice the memory per device", replace(job, cluster=replace(cluster, device=more))
    waiting = spent.dp_comm + spent.tp_comm + spent.sp_comm + spent.pp_comm
    if waiting > 0.05 * spent.total:
        faster = replace(cluster, inter_bytes_per_second=2 * cluster.inter_bytes_per_second)
        if cluster.sites > 1:
            faster = replace(faster, site_bytes_per_second=2 * cluster.site_bytes_per_second)
        if cluster.nodes > 1:
            yield "twice the network bandwidth between nodes", replace(job, cluster=faster)
        links = replace(cluster, intra_bytes_per_second=2 * cluster.intra_bytes_per_second)
        yield "twice the bandwidth between the devices of a node", replace(job, cluster=links)


def _divisible(job: Job) -> Iterable[Change]:
    """The nearest batch that all devices can share as replicas, if this one can't be."""
    devices, batch = job.cluster.devices, job.workload.global_batch
    if batch % devices == 0 or "dp" in job.fixed:
        return ()
    near = max(devices, round(batch / devices) * devices)
    return (
        (f"a batch of {near}, which {devices} devices can share (train.global_batch)", _work(job, global_batch=near)),
    )


def _work(job: Job, **changes: Any) -> Job:
    fixed = {axis: value for axis, value in job.fixed.items() if axis != "grad_accum"}
    return replace(job, workload=replace(job.workload, **changes), fixed=fixed)


def _devices(job: Job, times: int) -> Job:
    cluster = replace(job.cluster, nodes=job.cluster.nodes * times)
    batch = job.workload.global_batch
    batch = batch if batch % cluster.devices == 0 else -(-batch // cluster.devices) * cluster.devices
    return replace(_work(job, global_batch=batch), cluster=cluster)
