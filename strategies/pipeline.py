"""Pipeline: layers spread over stages; micro-batches flow through them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from strategies.base import Proposal, Space, divisors, plans
from toolkit import compat
from toolkit.plan import Job, Plan, Refusal
from toolkit.stages import bounds_fault, pipeline_bounds


@dataclass(frozen=True)
class Pipeline:
    """DeepSpeed's pipeline engine on the model's own forward."""

    name: str = "pipeline"
    summary: str = "layers are spread over stages, and micro-batches flow through them; replicas of the whole line"
    axes: tuple[str, ...] = ("pp", "dp", "zero_stage", "micro_batch", "grad_accum", "recompute", "pipeline_bounds")
    needs: str = "at least one layer a stage, and several micro-batches a step to keep stages busy"
    refuses: str = "ZeRO 2 and 3, more stages than layers, models whose layers run more than once a forward"

    def propose(self, job: Job) -> Iterator[Proposal]:
        """Every number of stages that divides the devices, with ZeRO 0 and 1."""
        for pp in [size for size in divisors(job.cluster.devices) if size > 1] or [2]:
            if job.fixed.get("pp", pp) != pp:
                continue
            space = Space(pp=(pp,), zero_stage=compat.pipeline_zero_stages())
            yield from staged(self.name, job, space)

    def variants(self, devices: int) -> dict[str, dict[str, Any]]:
        """Two stages, and as many as there are devices up to four."""
        if devices < 2 or devices % 2:
            return {}
        sizes = sorted({2, min(devices, 4)}) if devices % 4 == 0 else [2]
        cases = [(pp, stage) for pp in sizes for stage in (0, 1)]
        return {f"pipeline-{pp}+zero-{z}": {"pp": pp, "zero_stage": z, "grad_accum": 2} for pp, z in cases}


def staged(strategy: str, job: Job, space: Space) -> Iterator[Proposal]:
    """Plans of a space with one number of stages, with their bounds; a refusal where layers can't be spread so."""
    pp = space.pp[0]
    reason = _fault(job, pp)
    if reason:
        yield Refusal(strategy, reason)
        return
    bounds = tuple(job.fixed.get("pipeline_bounds") or pipeline_bounds(job.model, pp, job.workload.seq_len))
    for proposal in plans(strategy, job, space):
        yield replace(proposal, pipeline_bounds=bounds) if isinstance(proposal, Plan) else proposal


def _fault(job: Job, pp: int) -> str | None:
    layers = job.model.layers
    if pp > layers:
        return f"{pp} stages need at least {pp} layers; the model has {layers}"
    given = job.fixed.get("pipeline_bounds")
    fault = bounds_fault(given, layers, pp) if given else None
    return f"strategy.pipeline_bounds: {fault}" if fault else None
