"""Scaling curves: the best plan of each strategy on more and more devices, and where more stop paying."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from toolkit.errors import BadInput
from toolkit.planner.search import Decision, Option, decide
from toolkit.plans.plan import Job, Plan, Refusal

DAY_SECONDS = 86400.0
DIMINISHING = 0.5
"""A doubling of devices that brings less than this share of a doubling in tokens a second does not pay."""
TRAFFIC = ("tp_comm", "sp_comm", "pp_bubble", "pp_comm", "dp_comm")
"""Parts of a step that a device spends waiting for others."""

Propose = Callable[[Job], Iterable[Plan | Refusal]]


@dataclass(frozen=True)
class Point:
    """The best plan of one strategy on one number of devices."""

    devices: int
    global_batch: int
    option: Option | None
    reason: str = ""
    """Why there is no plan."""

    @property
    def tokens_per_second(self) -> float:
        """0 where nothing fits."""
        return self.option.estimate.tokens_per_second if self.option else 0.0

    @property
    def exposed(self) -> float:
        """Share of the step spent waiting for other devices."""
        if self.option is None:
            return 0.0
        time = self.option.estimate.time
        return sum(float(getattr(time, name)) for name in TRAFFIC) / time.total


def parse_devices(text: str) -> list[int]:
    """`8..16384` (doubling) or `8,24,64`."""
    try:
        if ".." in text:
            low, high = (int(part) for part in text.split("..", 1))
            sizes = [low * 2**power for power in range(64) if low * 2**power <= high]
        else:
            sizes = [int(part) for part in text.split(",")]
    except ValueError:
        raise BadInput("--devices", f"{text!r} given; use 8..16384 or 8,16,64") from None
    if not sizes or min(sizes) < 1:
        raise BadInput("--devices", f"{text!r} given; at least one number of devices from 1 is required")
    return sorted(set(sizes))


def with_devices(job: Job, devices: int, *, weak: bool) -> Job:
    """The job on that many devices; weak scaling keeps the sequences of a device, strong the batch of a step."""
    cluster = job.cluster
    per_node = min(devices, cluster.devices_per_node)
    if devices % per_node:
        raise BadInput("--devices", f"{devices} devices can't be spread over nodes of {per_node}")
    machines = replace(cluster, nodes=devices // per_node, devices_per_node=per_node, sites=1)
    batch = job.workload.global_batch
    if weak:
        batch = max(1, batch * devices // cluster.devices)
    return replace(job, cluster=machines, workload=replace(job.workload, global_batch=batch, ramp_start=0))


def curve(job: Job, sizes: Sequence[int], propose: Propose, *, weak: bool = True) -> list[Point]:
    """One strategy's points."""
    points = []
    for devices in sizes:
        grown = with_devices(job, devices, weak=weak)
        decision = decide(grown, propose(grown))
        fitting = decision.chosen if decision.chosen and decision.chosen.estimate.fits else None
        reason = "" if fitting else _reason(decision)
        points.append(Point(devices, grown.workload.global_batch, fitting, reason))
    return points


def _reason(decision: Decision) -> str:
    if decision.refused:
        return decision.refused[-1].reason
    return "no plan is proposed" if decision.chosen is None else "does not fit"


def efficiencies(points: Sequence[Point]) -> list[float]:
    """Tokens a second and device, relative to the smallest number of devices that has a plan."""
    base = next((p.tokens_per_second / p.devices for p in points if p.option), 0.0)
    return [p.tokens_per_second / p.devices / base if base else 0.0 for p in points]


def diminishing(points: Sequence[Point]) -> int | None:
    """The number of devices after which more bring less than half of what they cost; None: they pay to the end."""
    able = [p for p in points if p.option]
    for before, after in itertools.pairwise(able):
        gain = after.tokens_per_second / before.tokens_per_second - 1
        if gain < DIMINISHING * (after.devices / before.devices - 1):
            return before.devices
    return None


def scaling(
    job: Job, sizes: Sequence[int], strategies: Mapping[str, Propose], *, weak: bool = True, tokens: float = 0.0,
    critical_batch: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The JSON of `toolkit scale`."""
    curves = {name: curve(job, sizes, propose, weak=weak) for name, propose in strategies.items()}
    batches = {point.devices: point.global_batch for points in curves.values() for point in points}
    passed = [devices for devices, batch in sorted(batches.items()) if critical_batch and batch > critical_batch]
    return {
        "devices": list(sizes),
        "scaling": "weak" if weak else "strong",
        "tokens": tokens or None,
        "strategies": {name: _points(points, tokens) for name, points in curves.items()},
        "diminishing": {name: diminishing(points) for name, points in curves.items()},
        "critical_batch": {"sequences": critical_batch, "passed_at_devices": passed[0] if passed else None},
    }


def _points(points: Sequence[Point], tokens: float) -> list[dict[str, Any]]:
    return [_point(p, efficiency, tokens) for p, efficiency in zip(points, efficiencies(points), strict=True)]


def _point(point: Point, efficiency: float, tokens: float) -> dict[str, Any]:
    shared = {"devices": point.devices, "global_batch": point.global_batch}
    if point.option is None:
        return {**shared, "plan": None, "reason": point.reason}
    seconds = tokens / point.tokens_per_second
    return {
        **shared,
        "plan": point.option.plan.describe(),
        "tokens_per_second": point.tokens_per_second,
        "efficiency": efficiency,
        "exposed": point.exposed,
        "mfu": point.option.estimate.mfu,
        "step_seconds": point.option.estimate.time.total,
        "days": seconds / DAY_SECONDS if tokens else None,
        "device_hours": seconds * point.devices / 3600 if tokens else None,
    }
