"""The fitted constants of the cost model, and cluster files from measurements.

`benchmarks/fit_cost_model.py` fits the constants marked "step" to the `calib` rows of `benchmarks/data/published.csv`
(log step time, equal weight per source) and those marked "NCCL" to `benchmarks/data/nccl_allreduce.csv`. It prints the
errors, also with one source left out. Constants that are measured elsewhere or counted are defined where they are used.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Protocol

from toolkit.clusters.devices import find_device
from toolkit.units import GB, GIB, KIB, MIB, TERA


@dataclass(frozen=True)
class Calibration:
    """How far real training falls short of the best rates of the hardware."""

    matmul: float = 0.942
    """Step. Share of a device's best measured matmul rate that a layer's large matmuls reach in training."""
    attention: float = 0.821
    """Step. Share of the published attention-kernel rates that is reached in training."""
    attention_tokens: float = 1330.0
    """Step. Length of a sequence at which causal attention reaches half of its rate on long ones."""
    stream: float = 0.616
    """Step. Share of the memory bandwidth that element-wise operators reach."""
    launch_seconds: float = 3.31e-05
    """Step. Host time per operator (Python, autograd and launch); it matters where operators are small."""
    kernel_seconds: float = 1.47e-06
    """Step. Time that the device needs to start a kernel, even if the host is ahead."""
    tp_exposed: float = 0.717
    """Step. Share of tensor-parallel traffic that stays exposed when it is sliced and overlapped with its matmul,
    besides the first slice (1 / tp)."""
    interference: float = 0.935
    """Step. Share of overlapped traffic that slows compute down: both use memory and multiprocessors."""
    network_interference: float = 0.384
    """Step. The same for traffic between nodes, which moves at a fraction of the memory bandwidth."""
    pipeline_waits: float = 1.7
    """Step. Times that a stage waits for a transfer that does not overlap: sending, and in part receiving."""
    zero_host_seconds: float = 0.000208
    """Step. Host time of DeepSpeed's ZeRO 3 per tensor that is gathered or reduced (hooks, coalescing, release)."""
    fixed_seconds: float = 0.00522
    """Step. Data loading, logging and synchronisation per step."""
    power: float = 0.326
    """Step. Exponent by which the sustained rate falls with watts per FLOP below an H100 (700 W, 989 TFLOP/s)."""
    misaligned: float = 0.603
    """Step. Relative rate of a matmul with a side that is not a multiple of 64 (BigScience: 14400 and 14336)."""
    intra: float = 0.76
    """NCCL. Share of the link bandwidth inside a node that a large collective reaches."""
    inter: float = 0.70
    """NCCL and step. Share of the network bandwidth between nodes that a large collective reaches."""
    rank_latency: float = 0.2
    """NCCL. Start-up time per rank of a collective inside a node, in units of `Cluster.latency_seconds`."""
    node_latency: float = 0.9
    """NCCL. Growth of the start-up time per doubling of nodes, in units of `Cluster.inter_latency_seconds`."""
    ring_hop: float = 0.0949
    """Dev rows. Time per hop of a ring that leaves the node, in units of `Cluster.inter_latency_seconds` (4 µs): from
    ZeRO 3 on 512 and 1,024 devices (DeepSpeed on Azure)."""
    ramp_seconds: float = 45e-6
    """NCCL. Time constant with which a collective reaches full bandwidth as messages grow."""
    fragmentation: float = 0.02
    """Memory. What the allocator needs beyond live tensors, relative to them, when the device is almost full: it then
    returns cached blocks before it fails."""
    reserved: float = 0.14
    """Memory. What the allocator reserves beyond live tensors while there is room."""
    context_bytes: float = 1.2 * GIB
    """Memory. Device context, libraries and workspaces of one process."""
    collective_bytes: float = 0.9 * GIB
    """Memory. Buffers of the collectives library, if there is more than one device."""


CALIBRATION = Calibration()
CONSTANTS = tuple(f.name for f in fields(Calibration))
"""Names of all fitted constants; a test limits them to 25."""


@dataclass(frozen=True, kw_only=True)
class Links:
    """Bandwidth and latency of collectives, as the cost model defines them."""

    gb_per_second: float
    latency_us: float


def fit_links(all_reduce: Mapping[int, float], ranks: int) -> Links:
    """Bandwidth and latency inside a node with which the cost model reproduces the measured times."""
    smallest, largest = min(all_reduce), max(all_reduce)
    latency = all_reduce[smallest] / (CALIBRATION.rank_latency * ranks)
    moving = max(all_reduce[largest] - all_reduce[smallest], 1e-9)
    wire = 2.0 * (ranks - 1) / ranks
    ramp = CALIBRATION.ramp_seconds * wire
    rate = wire * largest / max(moving - ramp, 0.1 * moving)
    return Links(gb_per_second=rate / CALIBRATION.intra / GB, latency_us=latency * 1e6)


def fit_network(all_reduce: Mapping[int, float], nodes: int) -> Links:
    """Bandwidth per device and latency between nodes with which the cost model reproduces the measured times."""
    smallest, largest = min(all_reduce), max(all_reduce)
    latency = all_reduce[smallest] / (1.0 + CALIBRATION.node_latency * math.log2(nodes / 2))
    moving = max(all_reduce[largest] - all_reduce[smallest], 1e-9)
    wire = 2.0 * (nodes - 1) / nodes
    rate = wire * largest / max(moving - CALIBRATION.ramp_seconds * wire, 0.1 * moving)
    return Links(gb_per_second=rate / CALIBRATION.inter / GB, latency_us=latency * 1e6)


class Measurements(Protocol):
    """What `toolkit probe` measured on one machine, or on all nodes of a job."""

    @property
    def device(self) -> str:
        """Name of the device as the driver reports it."""

    @property
    def backend(self) -> str:
        """`cuda`, `rocm` or `cpu`."""

    @property
    def nodes(self) -> int:
        """Number of nodes."""

    @property
    def processes(self) -> int:
        """Processes on each node, one per device."""

    @property
    def memory_bytes(self) -> int:
        """Memory of one device; 0 on a CPU, where processes share the host's memory."""

    @property
    def matmul_flops(self) -> float:
        """Sustained matmul FLOPs per second of one device."""

    @property
    def memory_bytes_per_second(self) -> float:
        """Bandwidth of one device's memory."""

    @property
    def collectives(self) -> Mapping[str, Mapping[int, float]]:
        """Seconds of each collective inside a node, by message size in bytes."""

    @property
    def between(self) -> Mapping[int, float]:
        """Seconds of an all-reduce across nodes, by message size in bytes; empty on one node."""


def cluster_yaml(found: Measurements, *, host_bytes: int) -> str:
    """A cluster file with the measured rates; comments list the timings by message size."""
    lines = [*_timing_comments(found), *_device_lines(found, host_bytes)]
    if "all_reduce" in found.collectives and found.processes > 1:
        links = fit_links(found.collectives["all_reduce"], found.processes)
        lines.append(f"intra_gb_per_second: {links.gb_per_second:.4g}")
        lines.append(f"latency_us: {links.latency_us:.4g}")
    if found.between:
        links = fit_network(found.between, found.nodes)
        lines.append(f"inter_gbps_per_device: {8 * links.gb_per_second:.4g}")
        lines.append(f"inter_latency_us: {links.latency_us:.4g}")
    return "\n".join(lines) + "\n"


def _timing_comments(found: Measurements) -> Iterator[str]:
    plural = "es" if found.processes > 1 else ""
    yield f"# Measured by `toolkit probe` on {found.processes} process{plural}: {found.device}."
    named = {**found.collectives, **({"all_reduce between nodes": found.between} if found.between else {})}
    for name, times in named.items():
        shown = ", ".join(f"{_size(size)} {seconds * 1e6:,.0f} µs" for size, seconds in sorted(times.items()))
        yield f"# {name}: {shown}"


def _device_lines(found: Measurements, host_bytes: int) -> Iterator[str]:
    yield f"device: {'cpu' if found.backend == 'cpu' else _kind(found.device)}"
    yield f"nodes: {found.nodes}"
    yield f"devices_per_node: {found.processes}"
    yield f"matmul_tflops: {found.matmul_flops / TERA:.4g}"
    yield f"memory_gb_per_second: {found.memory_bytes_per_second / GB:.4g}"
    yield f"memory_gib: {(found.memory_bytes or host_bytes / found.processes) / GIB:.4g}"
    yield f"host_memory_gib: {host_bytes / GIB:.4g}"


def _kind(name: str) -> str:
    found = find_device(name)
    return found.name if found else name


def _size(count: int) -> str:
    return f"{count // MIB} MiB" if count >= MIB else f"{count // KIB} KiB"
