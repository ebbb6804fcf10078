"""Expert parallel: experts are distributed over data-parallel ranks; tokens are sent to their experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from strategies.base import Proposal, Space, plans
from strategies.legal import expert_sizes
from toolkit.plans.plan import Job, Refusal


@dataclass(frozen=True)
class ExpertParallel:
    """Experts in groups of `ep` data-parallel ranks, with ZeRO 0 to 2."""

    name: str = "expert_parallel"
    summary: str = "experts of a mixture-of-experts model distributed over devices; tokens are sent to their experts"
    axes: tuple[str, ...] = ("dp", "ep", "zero_stage", "zero_group", "micro_batch", "grad_accum", "recompute")
    needs: str = "a mixture-of-experts model whose experts ep divides"
    refuses: str = "dense models; ZeRO 3; sizes that do not divide the experts"

    def propose(self, job: Job) -> Iterator[Proposal]:
        """Every legal `ep` with ZeRO 0 to 2."""
        if not job.model.experts:
            yield Refusal(self.name, f"{job.model.model_type} has no experts to spread: it is a dense model")
            return
        for ep in expert_sizes(self.name, job):
            if isinstance(ep, Refusal):
                yield ep
                continue
            yield from plans(self.name, job, Space(ep=(ep,), zero_stage=(0, 1, 2)))

    def variants(self, devices: int) -> dict[str, dict[str, Any]]:
        """Two expert-parallel ranks with ZeRO 0 to 2."""
        return {} if devices % 2 else {f"experts-2+zero-{stage}": {"ep": 2, "zero_stage": stage} for stage in range(3)}
