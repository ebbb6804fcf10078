"""What `toolkit probe` measured, as a cluster file that the planner reads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from toolkit.clusters.device_names import find_device
from toolkit.cost.calibration import CALIBRATION

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Links:
    """Bandwidth and start-up of collectives inside a node, in the cost model's terms."""

    gb_per_second: float
    latency_us: float


def fit_links(all_reduce: Mapping[int, float], ranks: int) -> Links:
    """The link rate and latency with which the cost model gives the largest and the smallest measured time back."""
    smallest, largest = min(all_reduce), max(all_reduce)
    latency = all_reduce[smallest] / (CALIBRATION.rank_latency * ranks)
    moving = max(all_reduce[largest] - all_reduce[smallest], 1e-9)
    wire = 2.0 * (ranks - 1) / ranks
    ramp = CALIBRATION.ramp_seconds * wire
    rate = wire * largest / max(moving - ramp, 0.1 * moving)
    return Links(gb_per_second=rate / CALIBRATION.intra / 1e9, latency_us=latency * 1e6)


def fit_network(all_reduce: Mapping[int, float], nodes: int) -> Links:
    """The same between nodes: each device's share of the network."""
    smallest, largest = min(all_reduce), max(all_reduce)
    latency = all_reduce[smallest] / (1.0 + CALIBRATION.node_latency * math.log2(nodes / 2))
    moving = max(all_reduce[largest] - all_reduce[smallest], 1e-9)
    wire = 2.0 * (nodes - 1) / nodes
    rate = wire * largest / max(moving - CALIBRATION.ramp_seconds * wire, 0.1 * moving)
    return Links(gb_per_second=rate / CALIBRATION.inter / 1e9, latency_us=latency * 1e6)


def cluster_yaml(
    *, device: str, backend: str, processes: int, memory_bytes: int, host_bytes: int, matmul_flops: float,
    memory_bytes_per_second: float, collectives: Mapping[str, Mapping[int, float]], nodes: int = 1,
    between: Mapping[int, float] | None = None,
) -> str:  # fmt: skip
    """A cluster file; timings by size stand in comments."""
    kind = "cpu" if backend == "cpu" else _kind(device)
    lines = [f"# Measured by `toolkit probe` on {processes} process{'es' if processes > 1 else ''}: {device}."]
    named = {**collectives, **({"all_reduce between nodes": between} if between else {})}
    for name, times in named.items():
        shown = ", ".join(f"{_size(size)} {seconds * 1e6:,.0f} µs" for size, seconds in sorted(times.items()))
        lines.append(f"# {name}: {shown}")
    lines += [f"device: {kind}", f"nodes: {nodes}", f"devices_per_node: {processes}"]
    lines.append(f"matmul_tflops: {matmul_flops / 1e12:.4g}")
    lines.append(f"memory_gb_per_second: {memory_bytes_per_second / 1e9:.4g}")
    lines.append(f"memory_gib: {(memory_bytes or host_bytes / processes) / GIB:.4g}")
    lines.append(f"host_memory_gib: {host_bytes / GIB:.4g}")
    if "all_reduce" in collectives and processes > 1:
        links = fit_links(collectives["all_reduce"], processes)
        lines.append(f"intra_gb_per_second: {links.gb_per_second:.4g}")
        lines.append(f"latency_us: {links.latency_us:.4g}")
    if between:
        links = fit_network(between, nodes)
        lines.append(f"inter_gbps_per_device: {8 * links.gb_per_second:.4g}")
        lines.append(f"inter_latency_us: {links.latency_us:.4g}")
    return "\n".join(lines) + "\n"


def _kind(name: str) -> str:
    found = find_device(name)
    return found.name if found else name


def _size(count: int) -> str:
    return f"{count // 2**20} MiB" if count >= 2**20 else f"{count // 2**10} KiB"
