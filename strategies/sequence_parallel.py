"""Sequence parallel (Ulysses): the tokens of a sequence are split over devices; attention exchanges them for heads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from strategies.base import Proposal, Space, plans
from strategies.legal import sequence_sizes
from toolkit.plans.plan import Job, Refusal


@dataclass(frozen=True)
class SequenceParallel:
    """Sequence shards, with ZeRO over replicas and sequence shards together."""

    name: str = "sequence_parallel"
    summary: str = "the tokens of each sequence are split over devices; attention exchanges tokens for heads"
    axes: tuple[str, ...] = ("dp", "sp", "zero_stage", "zero_group", "micro_batch", "grad_accum", "recompute")
    needs: str = "attention heads and sequence length that sp divides"
    refuses: str = "sizes that do not divide heads or sequence length"

    def propose(self, job: Job) -> Iterator[Proposal]:
        """Every legal `sp` with every ZeRO stage."""
        for sp in sequence_sizes(self.name, job):
            if isinstance(sp, Refusal):
                yield sp
                continue
            yield from plans(self.name, job, Space(sp=(sp,), zero_stage=(0, 1, 2, 3)))

    def variants(self, devices: int) -> dict[str, dict[str, Any]]:
        """Two ranks per sequence, with every ZeRO stage."""
        return {} if devices % 2 else {f"sequence-2+zero-{stage}": {"sp": 2, "zero_stage": stage} for stage in range(4)}
