"""Rank the proposals of the strategies: every plan gets an estimate or a refusal, unless it can't win.

Four prunings are safe. Memory grows with the micro-batch, so no larger micro-batch fits than one that does not, except
without accumulation, where gradients take less memory. Recomputing more only adds time, so it is not tried where the
same plan fits with less. A plan whose weights, states and activations alone take more than the closest misfit of its
strategy neither fits nor is closer. A plan many times slower than one that fits is not looked at, if its strategy has
another. `tests/planner/test_search.py` compares all four with brute force.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from toolkit.cost.estimate import COVERAGE, DEVICE_SHARE, Estimate, Memory, Money, Time, memory_interval, step_interval
from toolkit.cost.execution import Execution, of_plan
from toolkit.cost.memory import device_bytes, least_bytes, memory
from toolkit.cost.timing import model_flops, seconds
from toolkit.errors import BadInput
from toolkit.planner.explain import bottleneck, misfit_reason, would_fit
from toolkit.plans.plan import Job, Plan, Refusal
from toolkit.recipe.axes import RECOMPUTES

HOST_SHARE = 0.9
"""Fraction of host memory that a plan may use."""
SLOW = 8.0
"""A plan that takes this many times as long as the fastest one so far is left out."""
TIE = 0.02
"""Plans of one job within this relative difference are equal, and the simpler one comes first. Their errors are alike,
so two plans can be told apart although their intervals overlap: of published pairs of plans whose predictions differ by
more, nine in ten are in the right order."""


@dataclass(frozen=True)
class Option:
    """A plan with its estimate."""

    plan: Plan
    estimate: Estimate

    def to_json(self) -> dict[str, Any]:
        """The plan with its estimate, as in plan.json and `toolkit plan --json`."""
        estimate = self.estimate
        return {
            **asdict(self.plan),
            "fits": estimate.fits,
            "memory": {**asdict(estimate.memory), "total": estimate.memory.total},
            "time": {**asdict(estimate.time), "total": estimate.time.total},
            "tokens_per_second": estimate.tokens_per_second,
            "mfu": estimate.mfu,
            "memory_limit_bytes": estimate.memory_limit_bytes,
            "memory_margin_bytes": estimate.memory_margin_bytes,
            "interval": {
                "coverage": COVERAGE,
                "step_seconds": list(estimate.step_seconds),
                "memory_bytes": [int(bound) for bound in estimate.memory_bytes],
            },
            "cost": asdict(estimate.money) if estimate.money else None,
            "bottleneck": bottleneck(self.plan, estimate.time),
        }


@dataclass(frozen=True)
class Decision:
    """The best plan, all plans in order, and the refusals."""

    chosen: Option | None
    ranked: tuple[Option, ...]
    refused: tuple[Refusal, ...]
    considered: int

    def overlaps_best(self, option: Option) -> bool:
        """Whether the interval of a plan's step time overlaps that of the chosen plan: neither may be called faster."""
        if self.chosen is None:
            return False
        low, high = self.chosen.estimate.step_seconds
        return option.estimate.step_seconds[0] <= high and option.estimate.step_seconds[1] >= low

    def _shown(self, option: Option) -> dict[str, Any]:
        return {**option.to_json(), "overlaps_best": self.overlaps_best(option)}

    def to_json(self, top: int | None = None) -> dict[str, Any]:
        """The output of `toolkit plan --json`."""
        return {
            "chosen": self._shown(self.chosen) if self.chosen else None,
            "ranked": [self._shown(option) for option in self.ranked[:top]],
            "refused": [
                {"strategy": r.strategy, "plan": asdict(r.plan) if r.plan else None, "reason": r.reason}
                for r in self.refused
            ],
            "considered": self.considered,
        }


OBJECTIVES: dict[str, Callable[[Option], float]] = {
    "throughput": lambda option: -option.estimate.tokens_per_second,
    "time": lambda option: option.estimate.time.total,
    "cost": lambda option: option.plan.devices / option.estimate.tokens_per_second * _price(option),
    "memory": lambda option: float(option.estimate.memory.total),
}
"""What to minimise: negative tokens per second, seconds per step, device-seconds per token, bytes per device."""


def _price(option: Option) -> float:
    """Price of a device for a second, up to a constant; 1 where none is given."""
    found = option.estimate.money
    if found is None or found.per_billion_tokens is None:
        return 1.0
    return found.per_billion_tokens * option.estimate.tokens_per_second / option.plan.devices


def estimate(plan: Plan, job: Job) -> Estimate:
    """Memory and time of one plan."""
    run = of_plan(plan, job)
    return _estimate(plan, job, run, device_bytes(run), seconds(run))


def _estimate(plan: Plan, job: Job, run: Execution, used: Memory, time: Time) -> Estimate:
    limit, host_limit = limits(job)
    return Estimate(
        memory=used,
        time=time,
        memory_limit_bytes=limit,
        host_limit_bytes=host_limit,
        memory_margin_bytes=margin_bytes(job),
        step_seconds=step_interval(run).of(time.total),
        memory_bytes=memory_interval(run).of(used.total),
        money=money(plan, job, time.total),
        tokens_per_second=job.workload.tokens / time.total,
        mfu=model_flops(job) / time.total / (job.cluster.device.peak_flops * plan.devices),
    )


def money(plan: Plan, job: Job, step_seconds: float) -> Money:
    """Cost and energy of a plan at the cluster's price and the device's power."""
    hours = plan.devices * step_seconds / 3600
    price, watts = job.cluster.price_per_device_hour, job.cluster.device.board_watts
    billions = job.workload.tokens / 1e9
    steps = job.workload.steps
    return Money(
        per_billion_tokens=price * hours / billions if price else None,
        run=price * hours * steps if price and steps else None,
        kwh_per_billion_tokens=watts / 1000 * hours / billions if watts else None,
        run_kwh=watts / 1000 * hours * steps if watts and steps else None,
    )


def fits(used: Memory, job: Job) -> bool:
    """Whether the plan fits on device and host."""
    limit, host_limit = limits(job)
    return used.peak <= limit - margin_bytes(job) and used.host_peak <= host_limit


def margin_bytes(job: Job) -> int:
    """Bytes of a device that plans leave free."""
    return int(limits(job)[0] * job.cluster.memory_margin)


def limits(job: Job) -> tuple[int, int]:
    """Bytes that the job has on a device, margin included, and on the host of a node."""
    device = job.cluster.device
    share = 1.0 if device.backend == "cpu" else DEVICE_SHARE
    return int(device.memory_bytes * share), int(job.cluster.host_memory_bytes * HOST_SHARE)


def decide(job: Job, proposals: Iterable[Plan | Refusal], objective: str = "throughput") -> Decision:
    """Rank the plans that fit; on a tie the simpler plan comes first."""
    if objective not in OBJECTIVES:
        raise BadInput("--objective", f"{objective!r} given; one of: {', '.join(OBJECTIVES)}")
    search = Search(job, prune_slower=objective != "memory")
    for proposal in proposals:
        search.add(proposal)
    return search.decision(OBJECTIVES[objective])


class Search:
    """Collects proposals: options that fit, the closest misfit of each strategy, and refusals."""

    def __init__(self, job: Job, *, prune: bool = True, prune_slower: bool = True) -> None:
        self._job = job
        self._prune = prune
        self._prune_slower = prune and prune_slower
        self._too_large: dict[tuple[Any, ...], int] = {}
        self._without_recompute: set[tuple[Any, ...]] = set()  # plans that more recompute would only make slower
        self._usable_bytes = limits(job)[0] - margin_bytes(job)
        self._options: list[Option] = []
        self._able: set[str] = set()
        self._least_seconds = math.inf
        self._nearest: dict[str, tuple[tuple[float, float], Plan, Memory]] = {}
        self._refused: dict[tuple[str, str], Refusal] = {}
        self._considered = 0

    def add(self, proposal: Plan | Refusal) -> None:
        """Estimate a plan unless it can't win; keep one refusal per strategy and reason."""
        self._considered += 1
        if isinstance(proposal, Refusal):
            self._refused.setdefault((proposal.strategy, proposal.reason), proposal)
        elif not (self._prune and self._cannot_win(proposal)):
            self._estimate(proposal)

    def decision(self, objective: Callable[[Option], float]) -> Decision:
        """The decision over all proposals so far."""
        if not self._options and len(self._nearest) == 1 and self._considered == 1:
            near = next(iter(self._nearest.values()))  # every axis is fixed: show that plan, and why it does not fit
            option = Option(near[1], estimate(near[1], self._job))
            return Decision(option, (option,), (self._misfit(*near),), 1)
        ranked = _ranked(self._options, objective)
        refused = [*self._refused.values(), *(self._misfit(*near) for near in self._nearest.values())]
        return Decision(ranked[0] if ranked else None, tuple(ranked), tuple(refused), self._considered)

    def _estimate(self, plan: Plan) -> None:
        run = of_plan(plan, self._job)
        near = self._nearest.get(plan.strategy)
        if self._prune and near is not None and self._least_need(run) > near[0][0]:
            self._note_too_large(plan)
            return
        time = seconds(run)
        if self._prune_slower and plan.strategy in self._able and time.total > SLOW * self._least_seconds:
            self._without_recompute.add(_batch_key(plan))
            return
        used = device_bytes(run)
        if fits(used, self._job):
            self._options.append(Option(plan, _estimate(plan, self._job, run, used, time)))
            self._able.add(plan.strategy)
            self._least_seconds = min(self._least_seconds, time.total)
            self._without_recompute.add(_batch_key(plan))
            return
        self._note_too_large(plan)
        device = used.peak / self._usable_bytes
        host = used.host_peak / max(1, limits(self._job)[1])
        need = max(device, host), device  # where the host decides, the device does next
        if plan.strategy not in self._nearest or need < self._nearest[plan.strategy][0]:
            self._nearest[plan.strategy] = need, plan, used

    def _note_too_large(self, plan: Plan) -> None:
        key = _memory_key(plan)
        self._too_large[key] = min(plan.micro_batch, self._too_large.get(key, plan.micro_batch))

    def _cannot_win(self, plan: Plan) -> bool:
        too_large = self._too_large.get(_memory_key(plan))
        if too_large is not None and plan.micro_batch >= too_large:
            return True
        return self._prune_slower and plan.recompute != "none" and _batch_key(plan) in self._without_recompute

    def _least_need(self, run: Execution) -> float:
        """What a plan needs of a device at least, relative to what it has."""
        return least_bytes(run) / self._usable_bytes

    def _misfit(self, _need: tuple[float, float], plan: Plan, used: Memory) -> Refusal:
        reason = misfit_reason(used, *limits(self._job), margin_bytes(self._job))
        advice = would_fit(plan, lambda other: fits(memory(other, self._job), self._job))
        return Refusal(plan.strategy, f"{reason}{advice}", plan)


def _memory_key(plan: Plan) -> tuple[Any, ...]:
    """Everything that memory depends on except the micro-batch."""
    return (
        plan.strategy, plan.dp, plan.tp, plan.pp, plan.sp, plan.cp, plan.ep, plan.zero_stage, plan.zero_group,
        plan.zero_variant, plan.zero_quantized, plan.offload, plan.islands, plan.local_steps, plan.grad_accum > 1,
        plan.sequence_sharded, plan.schedule, plan.chunks, plan.recompute,
    )  # fmt: skip


def _batch_key(plan: Plan) -> tuple[Any, ...]:
    """Everything that memory depends on except recompute."""
    return (*_memory_key(plan)[:-1], plan.micro_batch)


def _ranked(options: list[Option], objective: Callable[[Option], float]) -> list[Option]:
    """Best first; plans that tie with the best of their group are sorted by simplicity."""
    ordered = sorted(options, key=lambda option: (objective(option), complexity(option.plan)))
    ranked: list[Option] = []
    start = 0
    while start < len(ordered):
        best = objective(ordered[start])
        end = start
        while end < len(ordered) and objective(ordered[end]) <= best + TIE * abs(best):
            end += 1
        ranked += sorted(ordered[start:end], key=lambda option: complexity(option.plan))
        start = end
    return ranked


def complexity(plan: Plan) -> tuple[int, ...]:
    """Sort key: simpler plans have smaller ones."""
    axes = sum(axis > 1 for axis in (plan.tp, plan.pp, plan.sp, plan.cp, plan.ep, plan.islands))
    extras = (plan.offload != "none") + (plan.zero_variant != "plain") + (plan.zero_quantized != "none")
    extras += plan.schedule != "1f1b"
    return (axes, extras, RECOMPUTES.index(plan.recompute), plan.zero_stage, plan.grad_accum)


def smaller_clusters(job: Job) -> list[Job]:
    """The job on the full cluster and on halves of it, for the objective `cost`: fewer devices may cost less."""
    jobs = [job]
    while job.cluster.nodes % 2 == 0:
        job = replace(job, cluster=replace(job.cluster, nodes=job.cluster.nodes // 2))
        jobs.append(job)
    return jobs


def best_of(decisions: Sequence[Decision], objective: str) -> int:
    """Index of the decision with the best plan; 0 if none has a plan."""
    worth = OBJECTIVES[objective]
    able = [index for index, decision in enumerate(decisions) if decision.chosen is not None]
    return min(able, key=lambda index: worth(_chosen(decisions[index])), default=0)


def _chosen(decision: Decision) -> Option:
    assert decision.chosen is not None
    return decision.chosen
