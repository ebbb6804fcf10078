"""Starting a planned run on this host, and starting it again after a failure."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from toolkit.checkpoints import store
from toolkit.clusters.reader import of_nodes
from toolkit.commands.doctor import show as show_findings
from toolkit.errors import BadInput, HostLost, NoPlanFits, OutOfMemory, RankFailed
from toolkit.launching import launchers
from toolkit.launching.hostfile import Host, even_slots
from toolkit.launching.machine_checks import QUICK, Site, examine
from toolkit.run_dir.async_islands import goes_async
from toolkit.run_dir.layout import RunDir
from toolkit.sessions import async_islands, out_of_memory, ray
from toolkit.sessions.async_islands import Part
from toolkit.sessions.hosts import launch_run
from toolkit.sessions.resolve import Resolved, resolve


def add_restart_argument(parser: argparse.ArgumentParser) -> None:
    """--max-restarts."""
    parser.add_argument(
        "--max-restarts",
        type=int,
        default=0,
        metavar="N",
        help="when a rank fails, go on from the last checkpoint, at most N times; a second failure without progress "
        "takes fewer processes (default 0)",
    )


def start(
    resolved: Resolved,
    path: Path,
    launcher: str,
    console: Console,
    *,
    max_restarts: int = 0,
    go_on: bool = False,
    hosts: Sequence[Host] = (),
    part: Part | None = None,
) -> int:
    """Write the run directory, launch, watch; the exit code of the contract. Without hosts: on this one."""
    _examine(path, console)
    if goes_async(resolved.recipe, resolved.chosen.plan):
        return async_islands.start(
            resolved, path, launcher, hosts, console, part or Part(), max_restarts=max_restarts, go_on=go_on
        )
    if part is not None and part.mailbox is not None:
        raise BadInput("--mailbox", "is for strategy local_sgd with train.outer.mode async; leave it out")
    left, failed, seen = max_restarts, False, newest(path)
    while True:
        nproc = resolved.chosen.plan.devices
        try:
            return launch_run(resolved, path, launcher, hosts, console, go_on=go_on)
        except OutOfMemory as error:
            resolved = _leaner_or_stop(resolved, RunDir(path), error, console)
        except RankFailed as error:
            if not left:
                raise
            left -= 1
            console.print(str(error), highlight=False, markup=False, soft_wrap=True)
            if isinstance(error, HostLost) and launcher == ray.LAUNCHER:
                resolved = _fewer_nodes(resolved, error)
            elif isinstance(error, HostLost):
                resolved, hosts = _without(resolved, hosts, error)
            elif failed and newest(path) == seen and not hosts:
                resolved = _smaller(resolved, nproc)
            failed, seen = True, newest(path)
        go_on = True
        console.print(
            f"starting again from {'the beginning' if newest(path) is None else f'step {newest(path)}'} with "
            f"{resolved.chosen.plan.devices} processes; restarts left: {left}",
            highlight=False,
            soft_wrap=True,
        )


def _leaner_or_stop(resolved: Resolved, run: RunDir, error: OutOfMemory, console: Console) -> Resolved:
    """The next plan if the recipe says so; else the error, with what was predicted and what to try."""
    option = out_of_memory.leaner(resolved)
    text = f"{error}\n{out_of_memory.explain(resolved, option, run)}"
    if option is None or resolved.recipe.train.on_oom != "replan":
        raise OutOfMemory(text) from None
    console.print(text, highlight=False, markup=False, soft_wrap=True)
    return out_of_memory.under(resolved, option)


def _examine(path: Path, console: Console) -> None:
    """The quick checks of `toolkit doctor`; what is fine is not mentioned."""
    findings = examine(Site(path, launchers.environment()), QUICK)
    show_findings([finding for finding in findings if finding.level != "ok"], console)


def newest(path: Path) -> int | None:
    """Step of the newest checkpoint of a run."""
    return next(iter(store.steps(RunDir(path).checkpoints)), None)


def _smaller(resolved: Resolved, nproc: int) -> Resolved:
    """The largest world below `nproc` that the recipe has a plan for; the same if there is none."""
    for fewer in range(nproc - 1, 0, -1):
        try:
            candidate = resolve(resolved.recipe, fewer)
            _ = candidate.chosen
        except (BadInput, NoPlanFits):
            continue
        return candidate
    return resolved


def _without(resolved: Resolved, hosts: Sequence[Host], error: HostLost) -> tuple[Resolved, tuple[Host, ...]]:
    """A plan for the hosts that are left; the error if there is none."""
    left = tuple(host for host in hosts if host.name not in error.hosts)
    try:
        recipe = replace(resolved.recipe, cluster=of_nodes("auto", len(left), even_slots(left)))
        candidate = resolve(recipe)
        _ = candidate.chosen
    except (BadInput, NoPlanFits):
        raise error from None
    return candidate, left


def _fewer_nodes(resolved: Resolved, error: HostLost) -> Resolved:
    """A plan for as many nodes as Ray has left, at most those that the run had; the error if there is none."""
    cluster, given = resolved.job.cluster, resolved.recipe.cluster
    left = min(cluster.nodes, ray.num_nodes(cluster, error.hosts))
    if left == cluster.nodes:
        return resolved
    if not left:
        raise error
    try:
        section = (
            of_nodes(given, left, cluster.devices_per_node) if isinstance(given, str) else replace(given, nodes=left)
        )
        candidate = resolve(replace(resolved.recipe, cluster=section))
        _ = candidate.chosen
    except (BadInput, NoPlanFits):
        raise error from None
    return candidate
