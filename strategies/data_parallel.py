"""Pure data parallel: every device holds the full model; gradients are averaged once per step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from strategies.base import Proposal, Space, plans
from toolkit.plans.plan import Job


@dataclass(frozen=True)
class DataParallel:
    """DeepSpeed engine with ZeRO 0."""

    name: str = "data_parallel"
    summary: str = "every device holds the full model; gradients are averaged once per step"
    axes: tuple[str, ...] = ("dp", "micro_batch", "grad_accum", "recompute")
    needs: str = "a model whose states (16 bytes per parameter in bf16 with Adam) fit on one device"
    refuses: str = "offload and sharding: that is `zero`"

    def propose(self, job: Job) -> Iterator[Proposal]:
        """One plan for each micro-batch, with and without recompute."""
        yield from plans(self.name, job, Space())

    def variants(self, devices: int) -> dict[str, dict[str, Any]]:
        """The strategy has a single variant."""
        return {self.name: {}}
