"""Tensor parallel: the matrices of every layer are split over the devices of a replica."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from strategies.base import Proposal, Space, plans
from strategies.legal import offloads, tensor_sizes, token_shares
from toolkit.plans.plan import Job, Refusal


@dataclass(frozen=True)
class TensorParallel:
    """Sharded linear layers, with ZeRO 0 to 3 over the replicas."""

    name: str = "tensor_parallel"
    summary: str = "the matrices of every layer are split over the devices of a replica, with ZeRO over the replicas"
    axes: tuple[str, ...] = (
        "dp",
        "tp",
        "zero_stage",
        "zero_group",
        "offload",
        "micro_batch",
        "grad_accum",
        "recompute",
        "tensor_by",
        "sequence_sharded",
    )
    needs: str = "heads and MLP width that tp divides; fast links between the devices of a replica"
    refuses: str = "sizes that do not divide heads or MLP width"

    def propose(self, job: Job) -> Iterator[Proposal]:
        """Every legal `tp` with every ZeRO stage."""
        for tp in tensor_sizes(self.name, job):
            if isinstance(tp, Refusal):
                yield tp
                continue
            shares = token_shares(self.name, job, tp)
            if isinstance(shares, Refusal):
                yield shares
                continue
            ways: dict[str, Any] = {"tensor_by": _ways(job), "offload": offloads(job), "sequence_sharded": shares}
            space = Space(tp=(tp,), zero_stage=(0, 1, 2, 3), **ways)
            yield from plans(self.name, job, space)

    def variants(self, devices: int) -> dict[str, dict[str, Any]]:
        """Two ranks per replica with every ZeRO stage; four with ZeRO 0; two with complete residuals."""
        sizes = [size for size in (2, 4) if devices % size == 0]
        cases = [(tp, stage) for tp in sizes for stage in (range(4) if tp == 2 else (0,))]
        shared = {f"tensor-{tp}+zero-{stage}": {"tp": tp, "zero_stage": stage} for tp, stage in cases}
        whole = {"tp": 2, "zero_stage": 1, "sequence_sharded": False}
        return {**shared, "tensor-2+whole-residuals": whole} if sizes else {}


def _ways(job: Job) -> tuple[str, ...]:
    """How to shard: AutoTP only if the recipe fixes it, because the toolkit's own slices support more models."""
    return ("autotp",) if job.fixed.get("tensor_by") == "autotp" else ("slices",)
