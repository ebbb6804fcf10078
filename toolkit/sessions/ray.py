"""`--launcher ray`: find the nodes of a Ray cluster and place agents on them."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING

from toolkit.clusters.cluster import Cluster
from toolkit.clusters.ray_nodes import resource_of, section_of
from toolkit.clusters.reader import check_here
from toolkit.errors import BadInput
from toolkit.launching import environment
from toolkit.launching.hostfile import Host
from toolkit.recipe.sections import Recipe

if TYPE_CHECKING:
    from toolkit.runtime.hosts.fleet import Fleet

ADDRESS = "RAY_ADDRESS"
LAUNCHER = "ray"


def on_ray(recipe: Recipe, nproc: int | None, hosts: Sequence[Host]) -> Recipe:
    """Return the recipe with the Ray cluster as its cluster if that is `auto`; raise `BadInput` if Ray is unusable."""
    if importlib.util.find_spec("ray") is None:
        raise BadInput("--launcher", "ray is not installed here; pip install 'zero-toolkit[ray]'")
    if hosts:
        raise BadInput(
            "--launcher", "ray excludes --hostfile: the Ray cluster determines the hosts; remove one of the two"
        )
    address = _address(environment.environment())
    if not address or recipe.cluster != "auto":
        return recipe
    from toolkit.runtime.hosts import ray_cluster

    ray_cluster.connect(address)
    return replace(recipe, cluster=section_of(ray_cluster.nodes(), nproc))


def fleet(cluster: Cluster) -> AbstractContextManager[Fleet]:
    """Place agents on the nodes of the cluster at RAY_ADDRESS; if unset, on a temporary Ray cluster of this host."""
    address = _address(environment.environment())
    if not address:
        _check_alone(cluster)
        environment.set_own_ray()
    from toolkit.runtime.hosts.ray_cluster import ray_fleet

    return ray_fleet(cluster, address)


def num_nodes(cluster: Cluster, lost: Sequence[str]) -> int:
    """Count the nodes with enough devices for one node of the plan; `lost` ones may still be listed by Ray."""
    address = _address(environment.environment())
    if not address:
        return 1
    from toolkit.runtime.hosts import ray_cluster

    ray_cluster.connect(address)
    resource = resource_of(cluster.device.backend)
    there = [node for node in ray_cluster.nodes() if node.name not in lost]
    return sum(node.devices(resource) >= cluster.devices_per_node for node in there)


def _check_alone(cluster: Cluster) -> None:
    if cluster.nodes > 1:
        what = f"is not set, so Ray would run on this host alone; the plan has {cluster.nodes} nodes; set it"
        raise BadInput(ADDRESS, f"{what} to HOST:PORT of the cluster's head, or to auto on a node of the cluster")
    check_here(cluster)


def _address(env: Mapping[str, str]) -> str:
    """Return the address of the cluster to join; empty: start one on this host."""
    address = env.get(ADDRESS, "")
    if address.startswith("ray://"):
        what = f"{address!r} given, a Ray Client address; run this command on a node of the cluster, or with"
        raise BadInput(ADDRESS, f"{what} `ray job submit`, and set HOST:PORT of the head, or auto")
    return "" if address == "local" else address
