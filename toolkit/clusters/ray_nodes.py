"""What the nodes of a Ray cluster are to a plan: equal nodes with equally many devices, or a reason why not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from toolkit.clusters.devices import find_device
from toolkit.errors import BadInput
from toolkit.recipe.sections import ClusterSection


@dataclass(frozen=True, kw_only=True)
class RayNode:
    """A living node of a Ray cluster."""

    name: str
    """Its address."""
    cpus: int
    gpus: int = 0
    kind: str = ""
    """What Ray calls its accelerators, e.g. `H100`."""

    def devices(self, resource: str) -> int:
        """How many workers it can hold."""
        return self.gpus if resource == "GPU" else self.cpus


def resource_of(backend: str) -> str:
    """What Ray calls a device of the plan."""
    return "CPU" if backend == "cpu" else "GPU"


def section_of(nodes: Sequence[RayNode], nproc: int | None) -> ClusterSection:
    """The cluster to plan for: GPUs if there are any, else CPUs; with `nproc`, so many on as few nodes as possible."""
    resource = "GPU" if any(node.gpus for node in nodes) else "CPU"
    used = [node for node in nodes if node.devices(resource)]
    count, each = _all(used, resource) if nproc is None else _fewest(used, resource, nproc)
    device = "cpu" if resource == "CPU" else _kind(used, count, each)
    return ClusterSection(device=device, nodes=count, devices_per_node=each)


def shortage(nodes: Sequence[RayNode], resource: str, count: int, each: int) -> str:
    """Why so many devices on each of so many nodes are not there, even if all were free; empty: they are."""
    if sum(node.devices(resource) >= each for node in nodes) >= count:
        return ""
    return f"{needed(resource, count, each)} needed; the Ray cluster has {describe(nodes, resource)}"


def needed(resource: str, count: int, each: int) -> str:
    """In words."""
    return f"{each} {resource} on {'one node' if count == 1 else f'each of {count} nodes'} are"


def describe(nodes: Sequence[RayNode], resource: str) -> str:
    """What there is, by node."""
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
    what = f"{nproc} processes given; the Ray cluster has {describe(nodes, resource)}; equally many a node are required"
    raise BadInput("--nproc", what)


def _kind(nodes: Sequence[RayNode], count: int, each: int) -> str:
    names = sorted({node.kind for node in nodes})
    device = find_device(names[0]) if len(names) == 1 else None
    if device is None:
        what = (
            f"Ray calls the devices {' and '.join(name or 'nothing' for name in names)}, an unknown kind; say it "
            f"in the recipe: cluster: {{device: KIND, nodes: {count}, devices_per_node: {each}}}"
        )
        raise BadInput("cluster", what)
    return device.name
