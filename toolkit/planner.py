"""Choosing: every proposal is estimated, refused or ranked."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any

from toolkit.estimate import Estimate, Memory
from toolkit.memory import memory
from toolkit.plan import Job, Plan, Refusal
from toolkit.timing import model_flops, step_time

GIB = 2**30
HOST_SHARE = 0.9
"""Part of the host's memory that a plan may use."""


@dataclass(frozen=True)
class Option:
    """A plan with its estimate."""

    plan: Plan
    estimate: Estimate

    def to_json(self) -> dict[str, Any]:
        """PLAN of the JSON contract."""
        estimate = self.estimate
        return {
            **asdict(self.plan),
            "fits": estimate.fits,
            "memory": {**asdict(estimate.memory), "total": estimate.memory.total},
            "time": {**asdict(estimate.time), "total": estimate.time.total},
            "tokens_per_second": estimate.tokens_per_second,
            "mfu": estimate.mfu,
        }


@dataclass(frozen=True)
class Decision:
    """The best plan, the others in order, and what was refused."""

    chosen: Option | None
    ranked: tuple[Option, ...]
    refused: tuple[Refusal, ...]
    considered: int

    def to_json(self, top: int | None = None) -> dict[str, Any]:
        """The JSON contract of `toolkit plan`."""
        return {
            "chosen": self.chosen.to_json() if self.chosen else None,
            "ranked": [option.to_json() for option in self.ranked[:top]],
            "refused": [
                {"strategy": r.strategy, "plan": asdict(r.plan) if r.plan else None, "reason": r.reason}
                for r in self.refused
            ],
            "considered": self.considered,
        }


def estimate(plan: Plan, job: Job) -> Estimate:
    """Memory and time of one plan."""
    time = step_time(plan, job)
    return Estimate(
        memory=memory(plan, job),
        time=time,
        memory_limit_bytes=job.cluster.device.memory_bytes,
        host_limit_bytes=int(job.cluster.host_memory_bytes * HOST_SHARE),
        tokens_per_second=job.workload.tokens / time.total,
        mfu=model_flops(job) / time.total / (job.cluster.device.peak_flops * plan.devices),
    )


def decide(job: Job, proposals: Iterable[Plan | Refusal]) -> Decision:
    """Rank what fits by tokens a second; ties go to the simpler plan."""
    options: list[Option] = []
    misfits: list[Option] = []
    refused: list[Refusal] = []
    considered = 0
    for proposal in proposals:
        considered += 1
        if isinstance(proposal, Refusal):
            refused.append(proposal)
            continue
        option = Option(proposal, estimate(proposal, job))
        (options if option.estimate.fits else misfits).append(option)
    if not options and len(misfits) == 1:  # every axis is fixed: show that plan's estimate
        return Decision(misfits[0], tuple(misfits), tuple(refused), considered)
    refused += [Refusal(o.plan.strategy, misfit_reason(o.estimate), o.plan) for o in misfits]
    options.sort(key=lambda option: (-round(option.estimate.tokens_per_second, 3), _complexity(option.plan)))
    return Decision(options[0] if options else None, tuple(options), tuple(refused), considered)


def misfit_reason(estimate: Estimate) -> str:
    """Why a plan does not fit, with its largest parts."""
    if estimate.memory.total > estimate.memory_limit_bytes:
        return (
            f"needs {_gib(estimate.memory.total)} of {_gib(estimate.memory_limit_bytes)} GiB: {_parts(estimate.memory)}"
        )
    return f"needs {_gib(estimate.memory.host)} GiB of host memory; {_gib(estimate.host_limit_bytes)} may be used"


def _parts(memory: Memory) -> str:
    sizes = {f.name: getattr(memory, f.name) for f in fields(memory) if f.name != "host"}
    largest = sorted(sizes.items(), key=lambda item: -item[1])[:3]
    return ", ".join(f"{name} {_gib(size)}" for name, size in largest)


def _complexity(plan: Plan) -> tuple[int, ...]:
    """Smaller is simpler."""
    axes = sum(axis > 1 for axis in (plan.tp, plan.pp, plan.sp, plan.ep, plan.islands))
    extras = (plan.offload != "none") + (plan.zero_variant != "plain") + (plan.zero_quantized != "none")
    return (axes, extras, plan.recompute != "none", plan.zero_stage, plan.grad_accum)


def _gib(size: float) -> str:
    return f"{size / GIB:.1f}"
