"""Tensor parallel: the matrices of every layer spread over devices, with ZeRO over the replicas."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from strategies.base import Proposal, Space, divisors, plans
from toolkit.plan import Job, Refusal


@dataclass(frozen=True)
class TensorParallel:
    """Shards by transformers' plan or by analysis of the modules, under DeepSpeed's engine."""

    name: str = "tensor_parallel"
    summary: str = "the matrices of every layer are spread over devices that work on the same tokens"
    axes: tuple[str, ...] = ("tp", "dp", "zero_stage", "micro_batch", "grad_accum", "recompute")
    needs: str = "attention heads that divide, and fast links: activations are summed twice a layer"
    refuses: str = "sizes that do not divide the attention heads, or that reach over a node's border"

    def propose(self, job: Job) -> Iterator[Proposal]:
        """Every size inside a node that divides the heads, with ZeRO 0 to 3."""
        for tp in tensor_sizes(job):
            reason = tensor_fault(job, tp)
            if reason:
                yield Refusal(self.name, reason)
            else:
                yield from plans(self.name, job, Space(tp=(tp,), zero_stage=(0, 1, 2, 3)))

    def variants(self, devices: int) -> dict[str, dict[str, Any]]:
        """Two ranks under every ZeRO stage; four under the first."""
        pairs = {f"tensor-2+zero-{stage}": {"tp": 2, "zero_stage": stage} for stage in range(4)}
        fours = {"tensor-4+zero-0": {"tp": 4, "zero_stage": 0}} if devices % 4 == 0 else {}
        return pairs | fours if devices % 2 == 0 else {}


def tensor_sizes(job: Job) -> list[int]:
    """Numbers of tensor ranks to look at: all, or the one that the recipe fixes."""
    if "tp" in job.fixed:
        return [int(job.fixed["tp"])]
    return [size for size in divisors(job.cluster.devices) if 1 < size <= job.cluster.devices_per_node] or [2]


def tensor_fault(job: Job, tp: int) -> str | None:
    """Why a model can't be spread over `tp` ranks; None if it can."""
    heads = job.model.heads
    if heads % tp:
        sizes = ", ".join(str(size) for size in divisors(heads))
        return f"strategy.tp: {tp} does not divide the {heads} attention heads; use one of {sizes}"
    if tp > job.cluster.devices_per_node:
        return (
            f"{tp} tensor ranks reach over nodes of {job.cluster.devices_per_node}; "
            "every layer would wait for the network twice"
        )
    return None
