"""`toolkit strategies`: list the strategies, or the known devices."""

from __future__ import annotations

import argparse

from rich.console import Console
from rich.table import Table

import strategies
from toolkit.clusters.devices import DEVICES
from toolkit.units import GB, GIB, TERA


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("--devices", action="store_true", help="list the known devices instead")


def run(args: argparse.Namespace) -> int:
    """Print the table."""
    table = _devices() if args.devices else _strategies()
    Console().print(table)
    return 0


def _strategies() -> Table:
    table = Table("strategy", "what it does", "axes", "needs", "refuses", show_lines=True)
    for name, strategy in strategies.registry().items():
        table.add_row(name, strategy.summary, ", ".join(strategy.axes), strategy.needs, strategy.refuses)
    return table


def _devices() -> Table:
    table = Table("device", "backend", "memory GiB", "peak TFLOP/s", "TB/s", "GB/s to peers", "Gbit/s to nodes")
    for name, device in DEVICES.items():
        numbers = (
            device.memory_bytes / GIB,
            device.peak_flops / TERA,
            device.memory_bytes_per_second / TERA,
            device.link_bytes_per_second / GB,
            device.inter_gbps,
        )
        table.add_row(name, device.backend, *(f"{number:g}" for number in numbers))
    return table
