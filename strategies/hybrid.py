"""Hybrid: tensor and sequence parallel inside a stage, a pipeline of stages, data parallel over replicas."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from strategies.base import Proposal, Space, plans
from strategies.legal import offloads, pipeline_sizes, schedules, sequence_sizes, tensor_sizes
from toolkit.plans import deepspeed_rules
from toolkit.plans.plan import Job, Refusal

WIDEST = 64
"""Largest `tp·sp`: beyond it, communication outweighs what each device computes."""


@dataclass(frozen=True)
class Hybrid:
    """Every product of at least two model-parallel axes, with the ZeRO stages that it allows."""

    name: str = "hybrid"
    summary: str = "tensor and sequence parallel inside a stage, a pipeline of stages, data parallel over replicas"
    axes: tuple[str, ...] = (
        "dp", "tp", "pp", "sp", "zero_stage", "zero_group", "offload", "micro_batch", "grad_accum", "recompute",
        "pipeline_bounds", "schedule", "chunks",
    )  # fmt: skip
    needs: str = "what its axes need, and tp·pp·sp devices per replica"
    refuses: str = "ZeRO 2 and 3 in a pipeline; sizes that the model does not allow"

    def propose(self, job: Job) -> Iterator[Proposal]:
        """Products of legal sizes; each illegal size is refused once."""
        found = [list(sizes(self.name, job)) for sizes in (tensor_sizes, pipeline_sizes, sequence_sizes)]
        yield from (size for sizes in found for size in sizes if isinstance(size, Refusal))
        tensor, stages, tokens = ([1, *(size for size in sizes if isinstance(size, int))] for sizes in found)
        for tp, pp, sp in itertools.product(tensor, stages, tokens):
            axes = (tp > 1) + (pp > 1) + (sp > 1)
            if axes > 1 and tp * sp <= WIDEST and job.cluster.devices % (tp * pp * sp) == 0:
                for order in schedules(job, pp, tp):
                    sizes: dict[str, Any] = {"tp": (tp,), "pp": (pp,), "sp": (sp,), "offload": offloads(job)}
                    space = Space(zero_stage=_stages(job, pp), **sizes, **order)
                    yield from plans(self.name, job, space)

    def variants(self, devices: int) -> dict[str, dict[str, Any]]:
        """tp 2 × pp 2, the remaining devices as replicas, with ZeRO 0 and 1, in both orders that it offers."""
        if devices % 4:
            return {}
        sizes = {"tp": 2, "pp": 2, "grad_accum": 2}
        orders: dict[str, dict[str, Any]] = {
            "hybrid-2x2": {"schedule": "1f1b"},
            "hybrid-2x2-interleaved": {"schedule": "interleaved", "chunks": 2},
        }
        return {
            f"{name}+zero-{z}": {**sizes, **order, "zero_stage": z} for name, order in orders.items() for z in (0, 1)
        }


def _stages(job: Job, pp: int) -> tuple[int, ...]:
    """ZeRO stages to try: in a pipeline those that it supports, unless the recipe fixes one."""
    return deepspeed_rules.pipeline_zero_stages() if pp > 1 and "zero_stage" not in job.fixed else (0, 1, 2, 3)
