"""Hybrid: pipeline stages of tensor shards, and replicas of the whole."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from strategies.base import Proposal, Space, divisors
from strategies.pipeline import staged
from strategies.tensor_parallel import tensor_fault, tensor_sizes
from toolkit import compat
from toolkit.plan import Job, Refusal


@dataclass(frozen=True)
class Hybrid:
    """Pipeline × tensor × data, with ZeRO 0 or 1."""

    name: str = "hybrid"
    summary: str = "pipeline stages across nodes, tensor shards inside them, replicas of the whole"
    axes: tuple[str, ...] = ("pp", "tp", "dp", "zero_stage", "micro_batch", "grad_accum", "recompute", "pipeline_bounds")  # fmt: skip
    needs: str = "at least four devices, a layer a stage, heads that divide"
    refuses: str = "what pipeline and tensor_parallel refuse"

    def propose(self, job: Job) -> Iterator[Proposal]:
        """Every pair of sizes whose product divides the devices."""
        for tp in tensor_sizes(job):
            reason = tensor_fault(job, tp)
            if reason or tp < 2:
                yield Refusal(self.name, reason or "one tensor rank is no hybrid: that is `pipeline`")
                continue
            for pp in self._stages(job, tp):
                yield from staged(self.name, job, Space(pp=(pp,), tp=(tp,), zero_stage=compat.pipeline_zero_stages()))

    def variants(self, devices: int) -> dict[str, dict[str, Any]]:
        """2 × 2 × the rest, with ZeRO 0 and 1."""
        if devices % 4:
            return {}
        return {f"hybrid-2x2+zero-{z}": {"pp": 2, "tp": 2, "zero_stage": z, "grad_accum": 2} for z in (0, 1)}

    def _stages(self, job: Job, tp: int) -> list[int]:
        if "pp" in job.fixed:
            return [int(job.fixed["pp"])]
        rest = job.cluster.devices // tp if job.cluster.devices % tp == 0 else 1
        return [size for size in divisors(rest) if size > 1] or [2]
