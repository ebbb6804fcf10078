"""A Ray cluster as hosts: connect or start, reserve devices by a placement group, start an agent on each node."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from toolkit.clusters.cluster import Cluster
from toolkit.clusters.ray_nodes import RayNode, describe, needed, resource_of, shortage
from toolkit.errors import BadInput
from toolkit.launching.hostfile import Host
from toolkit.runtime.hosts.agent import AGENT, ROOT
from toolkit.runtime.hosts.agent_link import HostLink
from toolkit.runtime.hosts.fleet import Fleet
from toolkit.units import MIB

CONNECT_SECONDS = 30.0
"""Time to connect to a cluster. Ray (2.40 and later) would try for minutes."""
PLACE_SECONDS = 60.0
"""Time for devices to become free."""
ACTOR_SECONDS = 60.0
"""Time for Ray to start a process on a node."""
STORE_BYTES = 80 * MIB
"""Object store of a cluster that we start; only short lines go through it."""
QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}


def connect(address: str) -> None:
    """Connect to the cluster at `address`; `BadInput` if it does not answer. A second call has no effect."""
    if ray.is_initialized():
        return
    _knock(address)
    failures: list[Exception] = []

    def join() -> None:
        try:
            ray.init(address=address, **QUIET)
        except Exception as error:
            failures.append(error)

    joining = threading.Thread(target=join, daemon=True)  # `ray.init` can't be interrupted, but it can be abandoned
    joining.start()
    joining.join(CONNECT_SECONDS)
    if joining.is_alive():
        raise _unreachable(
            address, f"the address is not a Ray cluster, or did not answer within {CONNECT_SECONDS:.0f} s"
        )
    if failures:
        raise _unreachable(address, str(failures[0]).strip().splitlines()[0])


def start(resource: str, devices: int) -> None:
    """Start a cluster on this host with this many devices; it ends with this process."""
    if not ray.is_initialized():
        gpus = devices if resource == "GPU" else 0
        count = {"num_cpus": max(1, 0 if gpus else devices), "num_gpus": gpus}
        ray.init(address="local", include_dashboard=False, object_store_memory=STORE_BYTES, **count, **QUIET)


def nodes() -> list[RayNode]:
    """The live nodes of the cluster."""
    found = [(node["NodeManagerAddress"], node["Resources"]) for node in ray.nodes() if node["Alive"]]
    return [
        RayNode(
            name=address,
            cpus=int(resources.get("CPU", 0)),
            gpus=int(resources.get("GPU", 0)),
            kind=next((key.partition(":")[2] for key in resources if key.startswith("accelerator_type:")), ""),
        )
        for address, resources in sorted(found, key=lambda one: one[0])
    ]


@contextmanager
def ray_fleet(cluster: Cluster, address: str) -> Iterator[Fleet]:
    """A fleet with an agent on each node of the plan. Leaving the context releases all resources.

    One bundle per node, on different nodes (STRICT_SPREAD), with all devices of the node that the plan uses: plans are
    made for equal nodes, and ranks of one node must see each other's devices.
    """
    resource, count, each = resource_of(cluster.device.backend), cluster.nodes, cluster.devices_per_node
    if address:
        connect(address)
    else:
        start(resource, each)
    try:
        lacking = shortage(nodes(), resource, count, each)
        if lacking:
            raise BadInput("--launcher", f"{lacking}; start more nodes, or use fewer processes")
        group = _reserve(resource, count, each)
        try:
            with Fleet(_links(group, resource, count, each), "--launcher") as fleet:
                yield fleet
        finally:
            remove_placement_group(group)
    finally:
        ray.shutdown()


def _reserve(resource: str, count: int, each: int) -> PlacementGroup:
    group = placement_group([{resource: each}] * count, strategy="STRICT_SPREAD")
    if not group.wait(timeout_seconds=PLACE_SECONDS):
        remove_placement_group(group)
        free = int(ray.available_resources().get(resource, 0))
        what = f"{needed(resource, count, each)} needed; {describe(nodes(), resource)}, of which {free} are free"
        raise BadInput("--launcher", f"{what} after {PLACE_SECONDS:.0f} s; wait for other jobs, or use fewer processes")
    return group


def _links(group: PlacementGroup, resource: str, count: int, each: int) -> list[HostLink]:
    channels = [RayChannel(group, index, resource, each) for index in range(count)]
    try:
        addresses = [channel.address(ACTOR_SECONDS) for channel in channels]
    except RayError as error:
        raise BadInput("--launcher", f"Ray can't start a process on its nodes: {reason(error)}") from None
    slots = tuple(range(each))
    return [
        HostLink(Host(name=address, slots=slots), channel, address=address)
        for address, channel in zip(addresses, channels, strict=True)
    ]


def _knock(address: str) -> None:
    """Check that something listens at the address: Ray would try for minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        if address == "auto":
            return
        raise BadInput("RAY_ADDRESS", f"{address!r} given; HOST:PORT or `auto` (the cluster of this host) is required")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
    except (OSError, OverflowError) as error:
        raise _unreachable(address, str(error)) from None


def _unreachable(address: str, why: str) -> BadInput:
    what = f"no Ray cluster at {address!r}: {why}; start one (`ray start --head`), or leave it unset"
    return BadInput("RAY_ADDRESS", f"{what} to start one on this host")


ANSWER_SECONDS = 10.0
"""Time for the actor to write a line."""
CALLS = 8
"""Methods of the actor that run concurrently: two readers, writers, the wait for its end."""


class RayChannel:
    """One actor with all devices of its node's bundle: Ray makes them visible to it, and so to the workers."""

    def __init__(self, group: PlacementGroup, index: int, resource: str, devices: int) -> None:
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
        place = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=index)
        options: dict[str, Any] = {"num_cpus": 0, "num_gpus": 0, _OPTIONS[resource]: devices}
        actor: Any = ray.remote(AgentProcess)
        self._actor = actor.options(max_concurrency=CALLS, scheduling_strategy=place, **options).remote(ROOT, AGENT)
        self._end = "its agent has ended"

    def address(self, seconds: float) -> str:
        """Address at which other nodes reach this one; `RayError` if its actor does not start."""
        return str(ray.get(self._actor.address.remote(), timeout=seconds))

    def write(self, line: str) -> None:
        """Write to the agent. The environment travels this way too, so it appears in no log, file or command line."""
        try:
            ray.get(self._actor.write.remote(line), timeout=ANSWER_SECONDS)
        except RayError as error:
            raise OSError(reason(error)) from None

    def output(self) -> Iterator[str]:
        """Lines of the agent's standard output."""
        return self._lines("stdout")

    def complaints(self) -> Iterator[str]:
        """Lines that the agent and the workers write to standard error."""
        return self._lines("stderr")

    def hang_up(self) -> None:
        """Close the agent's standard input."""
        with contextlib.suppress(RayError):
            ray.get(self._actor.hang_up.remote(), timeout=ANSWER_SECONDS)

    def leave(self, seconds: float) -> None:
        """Wait for the agent to end, then end its actor."""
        with contextlib.suppress(RayError):
            ray.get(self._actor.wait.remote(), timeout=seconds)
        ray.kill(self._actor)

    def end(self) -> str:
        """Why the channel is closed."""
        return self._end

    def _lines(self, stream: str) -> Iterator[str]:
        try:
            while line := ray.get(self._actor.read.remote(stream)):
                yield line
        except RayError as error:
            self._end = reason(error)


_OPTIONS = {"CPU": "num_cpus", "GPU": "num_gpus"}


def reason(error: BaseException) -> str:
    """The informative sentence of a Ray error; Ray puts identifiers before it and guesses after it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    sentences = [line for line in lines if line.startswith("The actor")] or lines or [type(error).__name__]
    return sentences[-1].partition(". ")[0].rstrip(".")


class AgentProcess:
    """Actor with one node's agent as a child process; its methods are called from several threads."""

    def __init__(self, root: str, words: Sequence[str]) -> None:
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            ["env", f"PYTHONPATH={root}", sys.executable, *words],  # noqa: S607
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )

    def address(self) -> str:
        """Address at which other nodes reach this one."""
        import ray

        return str(ray.util.get_node_ip_address())

    def write(self, line: str) -> None:
        """Write to the agent's standard input."""
        assert self._process.stdin is not None
        with self._lock:
            self._process.stdin.write(line)
            self._process.stdin.flush()

    def read(self, stream: str) -> str:
        """The next line of `stdout` or `stderr`; empty at the end."""
        return str(getattr(self._process, stream).readline())

    def hang_up(self) -> None:
        """Close the agent's standard input; it then ends."""
        assert self._process.stdin is not None
        with self._lock:
            self._process.stdin.close()

    def wait(self) -> int:
        """Wait until the agent has ended; return its exit code."""
        return self._process.wait()
