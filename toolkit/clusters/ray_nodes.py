"""Turn the nodes of a Ray cluster into a cluster section: equal nodes with equally many devices, or an error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from toolkit.clusters.devices import find_device
from toolkit.errors import BadInput
from toolkit.recipe.sections import ClusterSection


@dataclass(frozen=True, kw_only=True)
class RayNode:
    """A live node of a Ray cluster."""

    name: str
    """Address of the node."""
    cpus: int
    gpus: int = 0
    kind: str = ""
    """Accelerator type as Ray reports it, e.g. `H100`."""

    def devices(self, resource: str) -> int:
        """How many workers fit on the node."""
        return self.gpus if resource == "GPU" else self.cpus


def resource_of(backend: str) -> str:
    """Ray's resource name for a device of this backend."""
    return "CPU" if backend == "cpu" else "GPU"


def section_of(nodes: Sequence[RayNode], nproc: int | None) -> ClusterSection:
    """The cluster to plan for: GPUs if there are any, otherwise CPUs; `nproc` devices use as few nodes as possible."""
    resource = "GPU" if any(node.gpus for node in nodes) else "CPU"
    used = [node for node in nodes if node.devices(resource)]
    count, each = _all(used, resource) if nproc is None else _fewest(used, resource, nproc)
    device = "cpu" if resource == "CPU" else _kind(used, count, each)
    return ClusterSection(device=device, nodes=count, devices_per_node=each)


def shortage(nodes: Sequence[RayNode], resource: str, count: int, each: int) -> str:
    """Why the cluster has no `count` nodes with `each` devices, even if all were free; empty if it has them."""
    if sum(node.devices(resource) >= each for node in nodes) >= count:
        return ""
    return f"{needed(resource, count, each)} needed; the Ray cluster has {describe(nodes, resource)}"


def needed(resource: str, count: int, each: int) -> str:
    """The request in words, for messages."""
    return f"{each} {resource} on {'one node' if count == 1 else f'each of {count} nodes'} are"


def describe(nodes: Sequence[RayNode], resource: str) -> str:
    """Devices by node, in words."""
    return ", ".join(f"{node.devices(resource)} {resource} on {node.name}" for node in nodes) or "no node"


def _all(nodes: Sequence[RayNode], resource: str) -> tuple[int, int]:
    counts = {node.devices(resource) for node in nodes}
    if len(counts) != 1:
        what = f"the Ray cluster has {describe(nodes, resource)}; equal nodes are required; choose with --nproc"
        raise BadInput("--launcher", what)
    return len(nodes), counts.pop()


def _fewest(nodes: Sequence[RayNode], resource: str, nproc: int) -> tuple[int, int]:
    for count in range(1, len(nodes) + 1):
        if nproc % count == 0 and not shortage(nodes, resource, count, nproc // count):
            return count, nproc // count
    has = f"the Ray cluster has {describe(nodes, resource)}"
    what = f"{nproc} processes given; {has}; the same number per node is required"
    raise BadInput("--nproc", what)


def _kind(nodes: Sequence[RayNode], count: int, each: int) -> str:
    names = sorted({node.kind for node in nodes})
    device = find_device(names[0]) if len(names) == 1 else None
    if device is None:
        reported = " and ".join(name or "unknown" for name in names)
        what = (
            f"Ray reports the device type {reported}, which is not a known kind; set it in the recipe: "
            f"cluster: {{device: KIND, nodes: {count}, devices_per_node: {each}}}"
        )
        raise BadInput("cluster", what)
    return device.name
