"""Local SGD: islands train by themselves and exchange weights every so many steps, for links that are slow."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from strategies.base import Proposal, Space, divisors, plans
from toolkit.plans.plan import Job, Refusal

LOCAL_STEPS = 50
"""Steps between two exchanges where the recipe says nothing: as in the DiLoCo paper's middle range."""
DIFFERS = (
    "local_sgd does not give the result of synchronous training: islands drift apart between exchanges; "
    "ask for it with strategy.name=local_sgd"
)


@dataclass(frozen=True)
class LocalSgd:
    """Islands of data parallel or ZeRO 1 to 3; between them weights are averaged, or moved by an outer optimizer."""

    name: str = "local_sgd"
    summary: str = "islands train by themselves and exchange weights every local_steps steps: for slow links"
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
    refuses: str = "islands that do not divide the devices; being chosen by itself, since its result differs"

    def propose(self, job: Job) -> Iterator[Proposal]:
        """One island a site, or as many as the recipe says."""
        devices = job.cluster.devices
        islands = job.fixed.get("islands", job.cluster.sites if job.cluster.sites > 1 else 2)
        if islands < 2 or devices % islands:
            legal = ", ".join(str(d) for d in divisors(devices) if d > 1) or "none: one device makes no island"
            yield Refusal(self.name, f"{islands} islands can't be made of {devices} devices; possible: {legal}")
            return
        steps = job.fixed.get("local_steps", LOCAL_STEPS)
        space = Space(zero_stage=(0, 1, 2, 3), islands=(islands,), local_steps=(steps,))
        yield from plans(self.name, job, space)

    def variants(self, devices: int) -> dict[str, dict[str, Any]]:
        """None: it differs from one process by design."""
        return {}
