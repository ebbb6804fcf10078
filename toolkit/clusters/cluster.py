"""The machines of a job: how many devices, and how fast the links between them are."""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.clusters.devices import Device


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A set of equal nodes, each with equal devices."""

    name: str
    """Name for messages; nothing depends on it."""
    device: Device
    """The device kind, the same for all devices."""
    nodes: int
    """Number of nodes."""
    devices_per_node: int
    """Devices (worker processes) per node."""
    intra_bytes_per_second: float
    """Bandwidth between two devices of a node, in one direction."""
    inter_bytes_per_second: float
    """Bandwidth between nodes per device, in one direction."""
    host_memory_bytes: int
    """Host memory per node."""
    nvme_bytes: int = 0
    """Local NVMe disk space per node; 0: none, so nothing can be offloaded to it."""
    latency_seconds: float = 20e-6
    """Start-up time of one collective inside a node."""
    inter_latency_seconds: float = 40e-6
    """Start-up time of one collective across nodes."""
    sites: int = 1
    """Sites (data centres, providers) with equally many nodes each and a slow link between them."""
    site_bytes_per_second: float = 0.0
    """Bandwidth between two sites in one direction, shared by all devices of a site."""
    site_latency_seconds: float = 0.03
    """Start-up time of one collective across sites."""
    memory_margin: float = 0.04
    """Share of a device's memory that plans leave free."""
    price_per_device_hour: float = 0.0
    """US dollars per device and hour; 0: unknown."""
    sharers: float = 1.0
    """Processes per core, where the device is a CPU: while one waits, the others use its core."""

    @property
    def devices(self) -> int:
        """All devices of the job."""
        return self.nodes * self.devices_per_node

    @property
    def devices_per_site(self) -> int:
        """Devices per site."""
        return self.devices // self.sites
