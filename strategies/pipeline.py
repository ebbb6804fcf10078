"""Pipeline: consecutive layers on consecutive stages; micro-batches pass through them in turn."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from strategies.base import Proposal, Space, plans
from strategies.legal import offloads, pipeline_sizes, schedules
from toolkit.plans.pipeline_orders import pipeline_zero_stages
from toolkit.plans.plan import Job, Refusal


@dataclass(frozen=True)
class Pipeline:
    """1F1B, interleaved or zero-bubble schedule over stages, with ZeRO 0 or 1 over the replicas."""

    name: str = "pipeline"
    summary: str = "consecutive layers on consecutive devices; micro-batches pass through them in turn"
    axes: tuple[str, ...] = (
        "dp",
        "pp",
        "zero_stage",
        "zero_group",
        "offload",
        "micro_batch",
        "grad_accum",
        "recompute",
        "pipeline_bounds",
        "schedule",
        "chunks",
    )
    needs: str = "at least as many layers as stages, and several micro-batches per step"
    refuses: str = "ZeRO 2 and 3; more stages than layers"

    def propose(self, job: Job) -> Iterator[Proposal]:
        """Every number of pipeline stages with every ZeRO stage that a pipeline supports."""
        for pp in pipeline_sizes(self.name, job):
            if isinstance(pp, Refusal):
                yield pp
                continue
            stages = pipeline_zero_stages(job.workload.precision) if "zero_stage" not in job.fixed else (0, 1, 2, 3)
            for order in schedules(job, pp):
                yield from plans(self.name, job, Space(pp=(pp,), zero_stage=stages, offload=offloads(job), **order))

    def variants(self, devices: int) -> dict[str, dict[str, Any]]:
        """Two stages and, if the devices allow, four, with ZeRO 0 and 1; and the other schedules on two ranks."""
        sizes = [size for size in (2, 4) if devices % size == 0]
        cases = [(pp, stage) for pp in sizes for stage in (0, 1)]
        found: dict[str, dict[str, Any]] = {
            f"pipeline-{pp}+zero-{z}": {"pp": pp, "zero_stage": z, "grad_accum": 2, "schedule": "1f1b"}
            for pp, z in cases
        }
        for schedule, z in itertools.product(("interleaved", "zero_bubble") if sizes else (), (0, 1)):
            fixed = {"pp": 2, "chunks": 2, "schedule": schedule, "zero_stage": z, "grad_accum": 4}
            found[f"{schedule}-2x2+zero-{z}"] = fixed
        return found
