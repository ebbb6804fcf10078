"""`toolkit probe`: measure this machine and write a cluster file."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from toolkit.clusters.devices import find_device, nearest_names
from toolkit.cost.calibration import cluster_yaml
from toolkit.errors import BadInput
from toolkit.launching import environment


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "--nproc", type=int, metavar="N", help="number of processes (default: every device, or 2 on a CPU)"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=0.3,
        metavar="S",
        help="seconds for each of about 30 measurements (default 0.3)",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="cluster file to write (default: print it)")


def run(args: argparse.Namespace) -> int:
    """Measure, then write or print the cluster file."""
    from toolkit.runtime.machine.network import describe, device_count
    from toolkit.runtime.machine.probe import Measured, measure, measure_job

    if args.nproc is not None and args.nproc < 1:
        raise BadInput("--nproc", f"{args.nproc} given; at least 1 is required")
    if not args.seconds > 0:
        raise BadInput("--seconds", f"{args.seconds:g} given; more than 0 is required")
    job = environment.job_place()
    console = Console(stderr=True, quiet=job is not None and job.rank > 0)
    if job is not None and args.nproc is not None:
        raise BadInput("--nproc", "the launcher has already started the processes of this job; remove it")
    for line in describe():
        console.print(line, highlight=False)
    if job is None:
        environment.use_loopback()
    with Progress(TextColumn("{task.description}"), BarColumn(), console=console) as bar:
        task = bar.add_task("starting", total=None)

        def show(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        found: Measured = (
            measure(args.nproc or device_count() or 2, show, args.seconds)
            if job is None
            else measure_job(job.rank, job.world, job.per_node, environment.environment(), show, args.seconds)
        )
    if job is not None and job.rank > 0:
        return 0
    if found.backend != "cpu" and find_device(found.device) is None:
        near = ", ".join(nearest_names(found.device))
        console.print(
            f"{found.device!r} is not a known device: set `device` in the file to the closest one: {near}", markup=False
        )
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    _deliver(cluster_yaml(found, host_bytes=host), args.out, console)
    return 0


def _deliver(text: str, out: Path | None, console: Console) -> None:
    if out is None:
        print(text, end="")
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text, encoding="utf-8")
    console.print(f"written to {out}; use it with cluster={out}", highlight=False, markup=False, soft_wrap=True)
