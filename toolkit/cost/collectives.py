"""Seconds of a collective by size, placement of its group, and links."""

from __future__ import annotations

import math
from dataclasses import dataclass

from toolkit.clusters.cluster import Cluster
from toolkit.cost.calibration import Calibration

IN_SWITCH_GAIN = 1.3
"""All-reduce with reduction in the switch over without: 480 / 366 GB/s on H100, 473 / 366 on H200 (ml-engineering)."""
BUCKET_BYTES = 500e6
"""Large transfers go in buckets of about this size; each pays the start-up again (DeepSpeed's default)."""


@dataclass(frozen=True)
class Group:
    """Where the ranks of one collective sit."""

    ranks: int
    per_node: int
    """Ranks of the group on one node."""
    sites: int = 1
    """Sites that the group spans."""

    @property
    def nodes(self) -> int:
        """Nodes that the group spans."""
        return max(1, math.ceil(self.ranks / self.per_node))


def group(cluster: Cluster, ranks: int, stride: int) -> Group:
    """Ranks that lie `stride` devices apart."""
    per_node = cluster.devices_per_node // max(1, stride)
    sites = math.ceil(ranks * stride / cluster.devices_per_site) if cluster.sites > 1 else 1
    return Group(ranks, max(1, min(ranks, per_node)), min(ranks, sites))


def all_reduce(size: float, where: Group, cluster: Cluster, cal: Calibration) -> float:
    """Every rank ends with the sum of `size` bytes."""
    if where.ranks <= 1 or size <= 0:
        return 0.0
    switch = cluster.device.in_switch_reduction and where.nodes == 1 and where.ranks >= 8
    rate = bandwidth(where, cluster, cal) * (IN_SWITCH_GAIN if switch else 1.0)
    return _startup(where, cluster, cal) + _transfer(2.0 * (where.ranks - 1) / where.ranks, size, rate, cal)


def hierarchical(size: float, where: Group, cluster: Cluster, cal: Calibration) -> float:
    """All-reduce in three parts: scattered inside every node, shards between nodes, gathered inside."""
    inside = Group(where.per_node, where.per_node)
    between = Group(where.nodes, 1, where.sites)
    shards = all_reduce(size / where.per_node, between, cluster, cal)
    return 2 * gather(size, inside, cluster, cal) + shards


def gather(size: float, where: Group, cluster: Cluster, cal: Calibration, messages: int = 1) -> float:
    """All-gather or reduce-scatter of `size` bytes in full: a ring, each message of which passes every rank in turn."""
    if where.ranks <= 1 or size <= 0:
        return 0.0
    hops = messages * (where.ranks - 1) * cal.ring_hop * cluster.inter_latency_seconds if where.nodes > 1 else 0.0
    wire = (where.ranks - 1) / where.ranks
    startup = messages * _startup(where, cluster, cal)
    return startup + hops + _transfer(wire, size, bandwidth(where, cluster, cal), cal)


def buckets(size: float) -> int:
    """Messages that a large transfer is cut into."""
    return max(1, round(size / BUCKET_BYTES))


def all_to_all(size: float, where: Group, cluster: Cluster, cal: Calibration) -> float:
    """Every rank sends an equal part of its `size` bytes to every other rank."""
    if where.ranks <= 1 or size <= 0:
        return 0.0
    inside = (where.per_node - 1) / where.ranks * size / (cluster.intra_bytes_per_second * cal.intra)
    outside = (where.ranks - where.per_node) / where.ranks * size / (cluster.inter_bytes_per_second * cal.inter)
    return _startup(where, cluster, cal) + inside + outside


def send(size: float, *, between_nodes: bool, cluster: Cluster, cal: Calibration) -> float:
    """One rank to another."""
    if between_nodes:
        return cluster.inter_latency_seconds / 2 + size / (cluster.inter_bytes_per_second * cal.inter)
    return cluster.latency_seconds / 2 + size / (cluster.intra_bytes_per_second * cal.intra)


def bandwidth(where: Group, cluster: Cluster, cal: Calibration) -> float:
    """Bytes a second through the slowest cut of the ring: the links inside a node, or the group's share of its NICs."""
    inside = cluster.intra_bytes_per_second * cal.intra
    if where.nodes == 1:
        return inside
    between = min(inside, where.per_node * cluster.inter_bytes_per_second * cal.inter)
    if where.sites == 1:
        return between
    return min(between, where.ranks / where.sites * cluster.site_bytes_per_second / cluster.devices_per_site)


def _startup(where: Group, cluster: Cluster, cal: Calibration) -> float:
    if where.nodes == 1:
        return cal.rank_latency * where.ranks * cluster.latency_seconds
    between = cluster.inter_latency_seconds * (1.0 + cal.node_latency * math.log2(where.nodes / 2))
    return between + (cluster.site_latency_seconds if where.sites > 1 else 0.0)


def _transfer(wire: float, size: float, rate: float, cal: Calibration) -> float:
    """Time on the wire; messages that are short for the rate don't reach it."""
    if rate <= 0:
        return math.inf
    half = cal.ramp_seconds * rate
    return wire * (size + half * (1.0 - math.exp(-size / half))) / rate
