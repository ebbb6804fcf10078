"""The machines of a job: how many devices, and how fast they talk."""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.clusters.devices import Device


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A set of equal nodes, each with equal devices."""

    name: str
    """For messages only."""
    device: Device
    """The kind of every device."""
    nodes: int
    """Number of nodes."""
    devices_per_node: int
    """Devices (worker processes) on each node."""
    intra_bytes_per_second: float
    """Between two devices of one node, one direction."""
    inter_bytes_per_second: float
    """Between nodes, one direction, for each device."""
    host_memory_bytes: int
    """Memory of one node's host."""
    nvme_bytes: int = 0
    """Fast local disk of one node; 0: none, so nothing can be offloaded to it."""
    latency_seconds: float = 20e-6
    """Start-up cost of one collective inside a node."""
    inter_latency_seconds: float = 40e-6
    """Start-up cost of one collective across nodes."""
    sites: int = 1
    """Places that the nodes are split over evenly (data centres, providers), with a slow link between them."""
    site_bytes_per_second: float = 0.0
    """Between two sites, one direction, shared by all devices of a site."""
    site_latency_seconds: float = 0.03
    """Start-up cost of one collective across sites."""
    sharers: float = 1.0
    """Processes that share a core, where the device is a CPU: one that waits leaves it to the others."""

    @property
    def devices(self) -> int:
        """All devices of the job."""
        return self.nodes * self.devices_per_node

    @property
    def devices_per_site(self) -> int:
        """Devices of one site."""
        return self.devices // self.sites
