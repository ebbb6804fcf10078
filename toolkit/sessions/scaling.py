"""Scaling curves: the best plan of each strategy by number of devices, and where more devices stop paying off."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import strategies as registry
from toolkit.clusters.reader import MOST_DEVICES
from toolkit.errors import BadInput
from toolkit.planner.search import Decision, Option, decide
from toolkit.plans.plan import Job, Plan, Refusal
from toolkit.run_dir.layout import RunDir

DAY_SECONDS = 86400.0
DIMINISHING = 0.5
"""More devices do not pay off if throughput grows by less than this fraction of their growth."""
TRAFFIC = ("tp_comm", "sp_comm", "pp_bubble", "pp_comm", "dp_comm")
"""Parts of a step in which a device waits for others."""

MOST_SIZES = 64
"""Numbers of devices on one curve."""

Propose = Callable[[Job], Iterable[Plan | Refusal]]


@dataclass(frozen=True)
class Point:
    """The best plan of one strategy for one number of devices."""

    devices: int
    global_batch: int
    option: Option | None
    reason: str = ""
    """Why there is no plan."""

    @property
    def tokens_per_second(self) -> float:
        """Predicted throughput; 0 if no plan fits."""
        return self.option.estimate.tokens_per_second if self.option else 0.0

    @property
    def exposed(self) -> float:
        """Fraction of the step spent waiting for other devices."""
        if self.option is None:
            return 0.0
        time = self.option.estimate.time
        return sum(float(getattr(time, name)) for name in TRAFFIC) / time.total


def parse_devices(text: str) -> list[int]:
    """Parse `8..16384` (doubling) or `8,24,64`."""
    try:
        if ".." in text:
            low, high = (int(part) for part in text.split("..", 1))
            sizes = [low * 2**power for power in range(64) if low * 2**power <= high]
            sizes += [high] if high > MOST_DEVICES else []
        else:
            sizes = [int(part) for part in text.split(",")]
    except ValueError:
        raise BadInput("--devices", f"{text!r} given; use 8..16384 or 8,16,64") from None
    if not sizes or min(sizes) < 1:
        raise BadInput(
            "--devices", f"{text!r} given; at least one number of devices is required, and each must be at least 1"
        )
    if max(sizes) > MOST_DEVICES or len(sizes) > MOST_SIZES:
        what = f"{text[:40]!r} given; at most {MOST_SIZES} numbers of at most {MOST_DEVICES:,} devices are allowed"
        raise BadInput("--devices", what)
    return sorted(set(sizes))


def with_devices(job: Job, devices: int, *, weak: bool) -> Job:
    """Return the job on that many devices. Weak scaling keeps sequences per device, strong scaling the global batch."""
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
    """Return the best plan of one strategy for each number of devices."""
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
    return "the strategy proposes no plan" if decision.chosen is None else "does not fit"


def efficiencies(points: Sequence[Point]) -> list[float]:
    """Return tokens per second per device, relative to the best of all sizes.

    The smallest size is no measure: its plan may offload or recompute for lack of memory, and larger ones would seem
    to be more than perfect.
    """
    base = max((p.tokens_per_second / p.devices for p in points if p.option), default=0.0)
    return [p.tokens_per_second / p.devices / base if base else 0.0 for p in points]


def diminishing(points: Sequence[Point]) -> int | None:
    """Return the number of devices beyond which more bring less than half of what they cost; None if all pay off."""
    able = [p for p in points if p.option]
    for before, after in itertools.pairwise(able):
        gain = after.tokens_per_second / before.tokens_per_second - 1
        if gain < DIMINISHING * (after.devices / before.devices - 1):
            return before.devices
    return None


def proposers(name: str) -> dict[str, Propose]:
    """Return strategy → what proposes its plans, for one strategy or for `auto`, which means all."""
    names = list(registry.registry()) if name == "auto" else [name]
    return {name: functools.partial(registry.propose, name=name) for name in names}


def measured_critical_batch(run_dir: Path) -> int:
    """Return the critical batch size in sequences that a run measured: its gradient noise scale."""
    try:
        found = json.loads(RunDir(run_dir).summary.read_text(encoding="utf-8"))["noise_scale_sequences"]
        return max(1, round(float(found)))
    except (OSError, ValueError, KeyError, TypeError):
        what = f"{run_dir} has no measured noise scale in summary.json; train with metrics.noise_scale=true first"
        raise BadInput("--noise-from", what) from None


def scaling(
    job: Job, sizes: Sequence[int], strategies: Mapping[str, Propose], *, weak: bool = True, tokens: float = 0.0,
    critical_batch: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Return what `toolkit scale --json` prints."""
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
