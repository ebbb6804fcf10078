"""Hybrid: tensor and sequence parallel inside a stage, a pipeline of stages, data parallel over replicas."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from strategies.base import Proposal, Space, plans
from strategies.legal import offloads, pipeline_sizes, ring_sizes, schedules, sequence_sizes, tensor_sizes, token_shares
from toolkit.plans.pipeline_orders import pipeline_zero_stages
from toolkit.plans.plan import Job, Refusal

WIDEST = 64
"""Largest `tp·sp·cp`: beyond it, communication outweighs what each device computes."""


@dataclass(frozen=True)
class Hybrid:
    """Every product of at least two model-parallel axes, with the ZeRO stages that it allows."""

    name: str = "hybrid"
    summary: str = "tensor and sequence parallel inside a stage, a pipeline of stages, data parallel over replicas"
    axes: tuple[str, ...] = (
        "dp", "tp", "pp", "sp", "cp", "zero_stage", "zero_group", "offload", "micro_batch", "grad_accum", "recompute",
        "pipeline_bounds", "schedule", "chunks", "sequence_sharded",
    )  # fmt: skip
    needs: str = "what its axes need, and tp·pp·sp·cp devices per replica"
    refuses: str = "ZeRO 2 and 3 in a pipeline; sizes that the model does not allow"

    def propose(self, job: Job) -> Iterator[Proposal]:
        """Products of legal sizes; each illegal size is refused once."""
        found = [list(sizes(self.name, job)) for sizes in (tensor_sizes, pipeline_sizes, sequence_sizes)]
        yield from (size for sizes in found for size in sizes if isinstance(size, Refusal))
        tensor, stages, tokens = ([1, *(size for size in sizes if isinstance(size, int))] for sizes in found)
        for tp, pp, sp in itertools.product(tensor, stages, tokens):
            if pp > 1 and sp > 1 and not _shares_sequences(job):
                continue
            with_rings = _shares_sequences(job) if pp > 1 else tp > 1
            for cp in [1, *ring_sizes(self.name, job, sp)] if with_rings else [1]:
                if isinstance(cp, Refusal):
                    yield cp
                elif _is_hybrid(job, tp, pp, sp * cp):
                    yield from self._plans(job, tp, pp, sp, cp)

    def _plans(self, job: Job, tp: int, pp: int, sp: int, cp: int) -> Iterator[Proposal]:
        shares = token_shares(self.name, job, tp, sp * cp)
        if isinstance(shares, Refusal):
            yield shares
            return
        sizes: dict[str, Any] = {"tp": (tp,), "pp": (pp,), "sp": (sp,), "cp": (cp,), "offload": offloads(job)}
        for order in schedules(job, pp, tp):
            space = Space(zero_stage=_stages(job, pp), sequence_sharded=shares, **sizes, **order)
            yield from plans(self.name, job, space)

    def variants(self, devices: int) -> dict[str, dict[str, Any]]:
        """tp 2 × pp 2 with ZeRO 0 and 1 in both orders, and tp 2 × cp 2; the remaining devices are replicas."""
        if devices % 4:
            return {}
        sizes = {"tp": 2, "pp": 2, "grad_accum": 2}
        orders: dict[str, dict[str, Any]] = {
            "hybrid-2x2": {"schedule": "1f1b"},
            "hybrid-2x2-interleaved": {"schedule": "interleaved", "chunks": 2},
        }
        ring = {"tp": 2, "pp": 1, "sp": 1, "cp": 2, "zero_stage": 1}
        stages = {"tp": 1, "pp": 2, "grad_accum": 2, "zero_stage": 1}
        found = {
            f"{name}+zero-{z}": {**sizes, **order, "zero_stage": z} for name, order in orders.items() for z in (0, 1)
        } | {
            "hybrid-tensor-2-ring-2": ring,
            "hybrid-pipeline-2-sequence-2": {**stages, "schedule": "1f1b", "sp": 2, "cp": 1},
            "hybrid-pipeline-2-ring-2": {**stages, "schedule": "interleaved", "chunks": 2, "sp": 1, "cp": 2},
        }
        return found if devices % 8 else {**found, "hybrid-2x2-ring-2": {**sizes, "schedule": "1f1b", "cp": 2}}


def _shares_sequences(job: Job) -> bool:
    """Whether stages of a pipeline are tried with sequence and ring ranks: only if the recipe asks for such ranks.

    Tensor ranks hold the activations of a stage with less traffic, and all products of axes take seconds to plan.
    """
    return any(job.fixed.get(axis, 1) > 1 for axis in ("sp", "cp"))


def _is_hybrid(job: Job, tp: int, pp: int, parts: int) -> bool:
    """Whether at least two axes are used, and the devices can be arranged so. `parts`: ranks that share tokens."""
    several = (tp > 1) + (pp > 1) + (parts > 1) > 1
    return several and tp * parts <= WIDEST and job.cluster.devices % (tp * pp * parts) == 0


def _stages(job: Job, pp: int) -> tuple[int, ...]:
    """ZeRO stages to try: in a pipeline those that it supports, unless the recipe fixes one."""
    return pipeline_zero_stages(job.workload.precision) if pp > 1 and "zero_stage" not in job.fixed else (0, 1, 2, 3)
