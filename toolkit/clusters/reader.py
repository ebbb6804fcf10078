"""Read the cluster of a recipe: `auto` (this machine), a name in configs/clusters, a path, or a mapping."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from toolkit.clusters.cluster import Cluster
from toolkit.clusters.devices import DEVICES, LIST_PRICES, TPU, Device, find_device, nearest_names
from toolkit.errors import BadInput, Problem
from toolkit.recipe.schema import build
from toolkit.recipe.sections import ClusterSection
from toolkit.recipe.yaml_file import read_yaml
from toolkit.resources import CONFIGS
from toolkit.units import GB, GBIT, GIB, TERA


def read_cluster(given: str | ClusterSection, nproc: int | None = None) -> Cluster:
    """The cluster of a recipe; with `nproc`, only that many of its devices."""
    if isinstance(given, ClusterSection):
        cluster = from_section(given, name="cluster")
    elif given == "auto":
        return probe(nproc)
    else:
        cluster = from_file(_find(given))
    return cluster if nproc is None else _limited(cluster, nproc)


def named_section(name: str) -> ClusterSection:
    """The section of a cluster that a name in configs/clusters or a path refers to."""
    return section_of(_find(name))


def from_file(path: Path) -> Cluster:
    """The cluster of a cluster file."""
    return from_section(section_of(path), name=path.stem, source=str(path))


def section_of(path: Path) -> ClusterSection:
    """The section in a cluster file; raises `BadInput` that lists every problem."""
    problems: list[Problem] = []
    section = build(ClusterSection, read_yaml(path), "", problems)
    if problems:
        raise BadInput(str(path), problems)
    return section


def from_section(section: ClusterSection, name: str, source: str = "cluster") -> Cluster:
    """The cluster of a recipe section; figures that are not given come from the device kind."""
    problems = [*_size_problems(section), *_site_problems(section)]
    if problems:
        raise BadInput(source, problems)
    assert isinstance(section.sites, int)
    device = _measured(
        section, cpu_device(section.devices_per_node) if section.device == "cpu" else _device(section.device)
    )
    intra = section.intra_gb_per_second * GB if section.intra_gb_per_second else device.link_bytes_per_second
    host_bytes = section.host_memory_gib * GIB if section.host_memory_gib else _usual_host_bytes(device, section)
    return Cluster(
        name=name,
        device=device,
        nodes=section.nodes,
        devices_per_node=section.devices_per_node,
        intra_bytes_per_second=intra,
        inter_bytes_per_second=(section.inter_gbps_per_device or device.inter_gbps) * GBIT,
        host_memory_bytes=int(host_bytes),
        nvme_bytes=int(section.nvme_gib * GIB),
        latency_seconds=_latency(section, device),
        inter_latency_seconds=section.inter_latency_us * 1e-6
        if section.inter_latency_us
        else Cluster.inter_latency_seconds,
        sites=section.sites,
        memory_margin=section.memory_margin,
        price_per_device_hour=_price(section, device),
        site_bytes_per_second=(section.site_gbps or 0.0) * GBIT,
        site_latency_seconds=section.site_latency_ms * 1e-3,
        sharers=max(1.0, section.devices_per_node / _cores()) if device.backend == "cpu" else 1.0,
    )


def _measured(section: ClusterSection, device: Device) -> Device:
    """The device kind, with the figures that the section overrides."""
    changes: dict[str, Any] = {}
    if section.memory_gib:
        changes["memory_bytes"] = int(section.memory_gib * GIB)
    if section.matmul_tflops:
        changes["matmul_flops"] = section.matmul_tflops * TERA
        changes["peak_flops"] = max(device.peak_flops, section.matmul_tflops * TERA)
    if section.memory_gb_per_second:
        changes["memory_bytes_per_second"] = section.memory_gb_per_second * GB
    return replace(device, **changes)


def _price(section: ClusterSection, device: Device) -> float:
    """Price of a device and hour: as given, from the table of list prices, or 0 (unknown)."""
    if section.price_per_device_hour != "list":
        return section.price_per_device_hour or 0.0
    if device.name not in LIST_PRICES:
        what = f"list given; no list price is known for {device.name}; give a number"
        raise BadInput("cluster", [Problem("price_per_device_hour", what)])
    return LIST_PRICES[device.name][0]


def _latency(section: ClusterSection, device: Device) -> float:
    if section.latency_us:
        return section.latency_us * 1e-6
    return CPU_LATENCY_SECONDS if device.backend == "cpu" else Cluster.latency_seconds


MOST_DEVICES = 2**20
"""Devices that are planned for; the largest clusters have about a tenth of it."""


def _size_problems(section: ClusterSection) -> list[Problem]:
    devices = section.nodes * section.devices_per_node
    if devices <= MOST_DEVICES:
        return []
    what = f"{section.nodes:,} × {section.devices_per_node} = {devices:,} devices given; at most {MOST_DEVICES:,}"
    return [Problem("nodes", what)]


def _site_problems(section: ClusterSection) -> list[Problem]:
    if section.sites == 1:
        return []
    if not isinstance(section.sites, int):
        what = (
            "a list of unequal sites given; they are planned by `toolkit plan` and started by `toolkit train --island`"
        )
        return [Problem("sites", what)]
    problems = []
    if section.nodes % section.sites:
        problems.append(Problem("sites", f"{section.sites} sites given; must divide the {section.nodes} nodes"))
    if section.site_gbps is None:
        problems.append(Problem("site_gbps", "required with sites: bandwidth of the link between them, Gbit/s"))
    return problems


def of_nodes(given: str | ClusterSection, nodes: int, per_node: int) -> ClusterSection:
    """The cluster section for the hosts of a job: hosts like this one for `auto`, otherwise the recipe's cluster."""
    if given == "auto":
        section = ClusterSection(device=probe(per_node).device.name)
    elif isinstance(given, str):
        section = section_of(_find(given))
    else:
        section = given
        if (section.nodes, section.devices_per_node) != (nodes, per_node):
            planned = f"{section.nodes} × {section.devices_per_node} devices in the recipe"
            what = f"{planned}, {nodes} × {per_node} in the hostfile; make them equal, or use cluster: auto"
            raise BadInput("cluster", what)
    return replace(section, nodes=nodes, devices_per_node=per_node)


def num_accelerators() -> int:
    """Number of accelerators on this host."""
    return len(_nvidia_names())


def check_here(cluster: Cluster) -> None:
    """Raise `BadInput` if this host is not the planned cluster: workers would find other devices."""
    if cluster.nodes > 1:
        what = f"{cluster.nodes} nodes; workers are started on this host only; name the others with --hostfile"
        raise BadInput("cluster", f"{what}, or use your own launcher: toolkit emit")
    if cluster.device.backend == "cpu":
        return
    there = _nvidia_names()
    if len(there) < cluster.devices:
        found = len(there) or "none"
        what = f"{cluster.devices} × {cluster.device.name}; this host has {found}; try it here: cluster=auto"
        raise BadInput("cluster", what)


def probe(nproc: int | None) -> Cluster:
    """The cluster of this machine: its NVIDIA devices if there are any, otherwise processes on the CPU."""
    names = _nvidia_names()
    if not names:
        count = nproc or os.cpu_count() or 1
        return from_section(ClusterSection(device="cpu", devices_per_node=count), name="this machine (CPU)")
    cluster = from_section(
        ClusterSection(
            device=_nearest_kind(names[0]), devices_per_node=len(names), host_memory_gib=_host_bytes() / GIB
        ),
        name="this machine",
    )
    return cluster if nproc is None else _limited(cluster, nproc)


def _limited(cluster: Cluster, nproc: int) -> Cluster:
    if nproc > cluster.devices:
        raise BadInput(
            "--nproc", f"{nproc} processes given; {cluster.name} has {cluster.devices} devices; use at most that many"
        )
    nodes = max(1, nproc // cluster.devices_per_node)
    per_node = nproc // nodes
    if nodes * per_node != nproc:
        raise BadInput("--nproc", f"{nproc} processes can't be spread evenly over nodes of {cluster.devices_per_node}")
    return Cluster(**{**vars(cluster), "nodes": nodes, "devices_per_node": per_node})


def _find(name: str) -> Path:
    if Path(name).suffix in (".yaml", ".yml") or os.sep in name:
        return Path(name)
    path = CONFIGS / "clusters" / f"{name}.yaml"
    if not path.exists():
        known = sorted(p.stem for p in path.parent.glob("*.yaml"))
        raise BadInput("cluster", f"{name!r} given; auto, a path, a mapping, or one of: {', '.join(known)}")
    return path


def _device(name: str) -> Device:
    """The device kind of exactly that name; raises `BadInput` with similar names otherwise, rather than guess."""
    if name in DEVICES:
        return DEVICES[name]
    if name.upper().startswith("TPU"):
        raise BadInput("cluster.device", f"{name!r} given; {TPU}; the known kinds: toolkit strategies --devices")
    meant = find_device(name)
    close = list(dict.fromkeys([*([meant.name] if meant else []), *nearest_names(name)]))
    raise BadInput("cluster.device", f"{name!r} is not a known kind; nearest: {', '.join(close[:3])}; or cpu")


def _usual_host_bytes(device: Device, section: ClusterSection) -> float:
    """Host memory where none is given: this host's for a CPU, otherwise twice the device memory of a node."""
    return _host_bytes() if device.backend == "cpu" else 2.0 * device.memory_bytes * section.devices_per_node


def _host_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


CPU_LATENCY_SECONDS = 300e-6
"""Start-up time of a gloo collective between processes of one host (measured on 2 cores)."""


def cpu_device(processes: int) -> Device:
    """One process's share of this host: rates from clock and vector width; `toolkit probe` measures real ones."""
    share = _cores() / processes
    flops = _cpu_flops() * share
    return Device(
        name="cpu",
        backend="cpu",
        memory_bytes=_host_bytes() // processes,
        peak_flops=flops,
        matmul_flops=flops,
        memory_bytes_per_second=14e9 * share,
        link_bytes_per_second=1.5e9,
        host_bytes_per_second=5e9,
        inter_gbps=10.0,
    )


def _cores() -> int:
    return os.cpu_count() or 1


def _cpu_flops() -> float:
    """Peak fp32 FLOPs per second of one core: two vector fused multiply-adds per cycle."""
    try:
        info = Path("/proc/cpuinfo").read_text()
    except OSError:
        return 60e9
    clock = re.search(r"cpu MHz\s*:\s*([\d.]+)", info)
    hertz = float(clock[1]) * 1e6 if clock else 2.5e9
    width = 16 if "avx512f" in info else 8 if "avx2" in info else 4
    return hertz * width * 4


def _nvidia_names() -> list[str]:
    """Names of the NVIDIA devices that this process may use."""
    names = []
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        match = re.search(r"Model:\s*(.+)", path.read_text())
        names.append(match[1].strip() if match else "unknown")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not names:
        return names
    count = len([part for part in visible.split(",") if part.strip() not in ("", "-1")])
    return names[:count]


def _nearest_kind(name: str) -> str:
    words = set(re.split(r"[\s-]+", name.upper()))
    best = max(DEVICES, key=lambda kind: len(words & set(kind.upper().split("-"))))
    if not words & set(best.upper().split("-")):
        raise BadInput(
            "cluster",
            f"device {name!r} is not a known kind; give cluster as a mapping with the nearest of: {', '.join(DEVICES)}",
        )
    return best
