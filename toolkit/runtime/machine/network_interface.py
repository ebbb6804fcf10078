"""Which network interface leads to the other hosts: gloo takes the one of the host's name, often loopback."""

from __future__ import annotations

import ipaddress
import socket

import psutil


def interface_towards(address: str) -> str | None:
    """The interface whose address this host uses to reach another; None for this host's loopback, or if unknown."""
    try:
        family, kind, _, _, there = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(there)  # a datagram socket sends nothing; it only chooses a route
            own = probe.getsockname()[0]
    except OSError:
        return None
    if ipaddress.ip_address(own.partition("%")[0]).is_loopback:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if own in {entry.address for entry in addresses}:
            return str(name)
    return None
