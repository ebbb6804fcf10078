"""Sequence parallel: the tokens of a sequence are split over devices (Ulysses, ring attention, or both)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from strategies.base import Proposal, Space, plans
from strategies.legal import ring_sizes, sequence_sizes
from toolkit.plans.plan import Job, Refusal


@dataclass(frozen=True)
class SequenceParallel:
    """Sequence shards, with ZeRO over replicas and sequence shards together."""

    name: str = "sequence_parallel"
    summary: str = (
        "the tokens of each sequence are split over devices; attention exchanges tokens for heads (sp), passes keys "
        "and values round a ring (cp), or both"
    )
    axes: tuple[str, ...] = ("dp", "sp", "cp", "zero_stage", "zero_group", "micro_batch", "grad_accum", "recompute")
    needs: str = "attention heads that sp divides; sequence length that sp, or 2·cp·sp with a ring, divides"
    refuses: str = "sizes that do not divide heads or sequence length; a ring for attention with windows"

    def propose(self, job: Job) -> Iterator[Proposal]:
        """Every legal `sp` and `cp` with every ZeRO stage."""
        alone = [1] if job.fixed.get("sp", 1) == 1 else []
        for sp in [*alone, *sequence_sizes(self.name, job)]:
            if isinstance(sp, Refusal):
                yield sp
                continue
            without_ring = [1] if sp > 1 and job.fixed.get("cp", 1) == 1 else []
            for cp in [*without_ring, *ring_sizes(self.name, job, sp)]:
                if isinstance(cp, Refusal):
                    yield cp
                    continue
                yield from plans(self.name, job, Space(sp=(sp,), cp=(cp,), zero_stage=(0, 1, 2, 3)))

    def variants(self, devices: int) -> dict[str, dict[str, Any]]:
        """Two ranks per sequence with every ZeRO stage; a ring of two, and one of two groups of two."""
        if devices % 2:
            return {}
        found = {f"sequence-2+zero-{stage}": {"sp": 2, "cp": 1, "zero_stage": stage} for stage in range(4)}
        found["ring-2+zero-1"] = {"sp": 1, "cp": 2, "zero_stage": 1}
        return found if devices % 4 else {**found, "ring-2x2+zero-2": {"sp": 2, "cp": 2, "zero_stage": 2}}
