"""Device kinds by the names that people write: `A100`, `NVIDIA H100 80GB HBM3`, `h200`."""

from __future__ import annotations

import difflib
import re

from toolkit.clusters.devices import DEVICES, GIB, Device


def find_device(name: str, *, memory_gb: float | None = None, hint: str = "") -> Device | None:
    """The kind that a name means, of several the one with the nearest memory; None if no kind is near."""
    if name in DEVICES:
        return DEVICES[name]
    kinds = [device for device in DEVICES.values() if _stem(device.name) in _words(name)]
    if not kinds:
        return None
    pcie = "PCIE" in f"{name} {hint}".upper() and "NVLINK" not in hint.upper()
    fitting = [device for device in kinds if ("PCIe" in device.name) == pcie] or kinds
    stated = memory_gb or _memory_in(name)
    return min(fitting, key=lambda device: abs(device.memory_bytes / GIB - (stated or 1e9)))


def nearest_names(name: str, count: int = 3) -> list[str]:
    """Kinds whose names look like the given one."""
    lowered = {kind.lower(): kind for kind in DEVICES}
    close = difflib.get_close_matches(name.lower(), lowered, n=count, cutoff=0.3)
    return [lowered[kind] for kind in close] or list(DEVICES)


def _stem(kind: str) -> str:
    """`A100-SXM4-80GB` → `A100`; `RTX-4090` → `4090`."""
    parts = kind.upper().split("-")
    return parts[1] if parts[0] == "RTX" else parts[0]


def _words(name: str) -> set[str]:
    return set(re.split(r"[^A-Z0-9]+", name.upper()))


def _memory_in(name: str) -> float | None:
    match = re.search(r"(\d+) ?GB", name.upper())
    return float(match[1]) if match else None
