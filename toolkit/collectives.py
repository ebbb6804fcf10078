"""Seconds of a collective by size, placement of its group, and links."""

from __future__ import annotations

import math
from dataclasses import dataclass

from toolkit.calibration import Calibration
from toolkit.cluster import Cluster


@dataclass(frozen=True)
class Group:
    """Where the ranks of one collective sit."""

    ranks: int
    per_node: int
    """Ranks of the group on one node."""

    @property
    def nodes(self) -> int:
        return max(1, math.ceil(self.ranks / self.per_node))


def group(cluster: Cluster, ranks: int, stride: int) -> Group:
    """Ranks that lie `stride` devices apart; neighbours come first."""
    per_node = max(1, min(ranks, cluster.devices_per_node // max(1, stride)))
    return Group(ranks, per_node)


def _bandwidth(g: Group, cluster: Cluster, cal: Calibration, *, reduce_in_switch: bool = False) -> float:
    intra = cluster.intra_bytes_per_second * cal.intra
    if reduce_in_switch and g.ranks >= 8 and g.nodes == 1:
        intra *= 1.33
    if g.nodes == 1:
        return intra
    return min(intra, g.per_node * cluster.inter_bytes_per_second * cal.inter)


def _latency(g: Group) -> float:
    intra = 7e-6 + 3.5e-6 * (g.per_node if g.nodes == 1 else 0)
    return intra if g.nodes == 1 else 30e-6 + 17e-6 * math.log2(g.nodes)


def _padded(size: float, half: float) -> float:
    return size + half * (1.0 - math.exp(-size / half))


def all_reduce(size: float, g: Group, cluster: Cluster, cal: Calibration) -> float:
    if g.ranks <= 1 or size <= 0:
        return 0.0
    nvls = cluster.device.in_switch_reduction
    b = _bandwidth(g, cluster, cal, reduce_in_switch=nvls)
    return _latency(g) + 2.0 * (g.ranks - 1) / g.ranks * _padded(size, HALF) / b


def gather(size: float, g: Group, cluster: Cluster, cal: Calibration) -> float:
    """All-gather or reduce-scatter of `size` bytes in full."""
    if g.ranks <= 1 or size <= 0:
        return 0.0
    buckets = max(1.0, size / 500e6)
    hops = buckets * (g.nodes - 1) * cal.ring_hop_seconds
    return _latency(g) + hops + (g.ranks - 1) / g.ranks * _padded(size, HALF) / _bandwidth(g, cluster, cal)


HALF = 6e6
