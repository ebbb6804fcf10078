"""Local SGD: islands train independently and exchange weights every `local_steps` steps, for slow links."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from strategies.base import Proposal, Space, divisors, plans
from toolkit.plans.exchange import FIRST_STEPS
from toolkit.plans.plan import Job, Refusal

LOCAL_STEPS = 50
"""Default steps between two exchanges: in the middle of the range of the DiLoCo paper."""
DIFFERS = (
    "local_sgd does not give the result of synchronous training: islands drift apart between exchanges; "
    "ask for it with strategy.name=local_sgd"
)


@dataclass(frozen=True)
class LocalSgd:
    """Islands of data parallel or ZeRO 1 to 3, which average their weights or apply an outer optimizer."""

    name: str = "local_sgd"
    summary: str = "islands train independently and exchange weights every local_steps steps: for slow links"
    axes: tuple[str, ...] = (
        "islands",
        "local_steps",
        "dp",
        "zero_stage",
        "zero_group",
        "micro_batch",
        "grad_accum",
        "recompute",
    )
    needs: str = "at least two islands; a result that differs from synchronous training"
    refuses: str = "islands that do not divide the devices; being chosen by `auto`, because its result differs"

    def propose(self, job: Job) -> Iterator[Proposal]:
        """One island per site, or as many as the recipe fixes."""
        devices = job.cluster.devices
        islands = job.fixed.get("islands", job.cluster.sites if job.cluster.sites > 1 else 2)
        if islands < 2 or devices % islands:
            legal = ", ".join(str(d) for d in divisors(devices) if d > 1) or "none, with one device"
            yield Refusal(self.name, f"{devices} devices can't be split into {islands} islands; possible: {legal}")
            return
        first = FIRST_STEPS if job.workload.exchange.local_steps is None else LOCAL_STEPS
        steps = job.fixed.get("local_steps", first)
        space = Space(zero_stage=(0, 1, 2, 3), islands=(islands,), local_steps=(steps,))
        yield from plans(self.name, job, space)

    def variants(self, devices: int) -> dict[str, dict[str, Any]]:
        """No variants: the result differs from one process by design."""
        return {}
