"""The machines of a job: how many devices, and how fast they talk."""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.hardware import Device


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

    @property
    def devices(self) -> int:
        """All devices of the job."""
        return self.nodes * self.devices_per_node
