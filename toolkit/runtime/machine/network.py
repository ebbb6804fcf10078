"""The network interface towards other hosts, and a description of the devices.

gloo (torch 2.13) binds to the address of the host's own name, which is often loopback: ranks of other hosts then can't
connect. So workers set GLOO_SOCKET_IFNAME to the interface found here.
"""

from __future__ import annotations

import ipaddress
import socket

import psutil
import torch

from toolkit.units import GIB


def interface_towards(address: str) -> str | None:
    """The interface that this host uses to reach an address; None if it is loopback or unknown."""
    try:
        family, kind, _, _, there = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(there)  # connecting a datagram socket sends nothing, it only selects a route
            own = probe.getsockname()[0]
    except OSError:
        return None
    if ipaddress.ip_address(own.partition("%")[0]).is_loopback:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if own in {entry.address for entry in addresses}:
            return str(name)
    return None


def device_count() -> int:
    """Number of accelerators that torch can use here."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def describe() -> list[str]:
    """Lines that describe the devices of this machine."""
    if not device_count():
        return ["no accelerator: processes on the CPU are measured"]
    try:
        import pynvml
    except ImportError:
        return ["nvidia-ml-py is not installed, so links and topology are unknown: pip install 'zero-toolkit[gpu]'"]
    try:
        pynvml.nvmlInit()
        return [_line(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError as error:
        return [f"the NVIDIA driver does not answer ({error}); links and topology are unknown"]


def _line(nvml: object, index: int) -> str:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)  # type: ignore[attr-defined]
    memory = nvml.nvmlDeviceGetMemoryInfo(handle).total  # type: ignore[attr-defined]
    links = sum(_active(nvml, handle, link) for link in range(18))
    name = nvml.nvmlDeviceGetName(handle)  # type: ignore[attr-defined]
    return f"device {index}: {name}, {memory / GIB:.1f} GiB, {links} NVLinks up"


def _active(nvml: object, handle: object, link: int) -> bool:
    try:
        return bool(nvml.nvmlDeviceGetNvLinkState(handle, link))  # type: ignore[attr-defined]
    except nvml.NVMLError:  # type: ignore[attr-defined]
        return False
