"""Starting a planned run on this host, and starting it again after a failure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from toolkit.checkpoints import store
from toolkit.clusters.reader import of_nodes
from toolkit.errors import BadInput, HostLost, NoPlanFits, OutOfMemory, RankFailed
from toolkit.launching import environment
from toolkit.launching.hostfile import Host, even_slots
from toolkit.launching.machine_checks import QUICK, CheckContext, examine
from toolkit.planner.search import Option
from toolkit.reports.findings import show as show_findings
from toolkit.run_dir.async_islands import goes_async
from toolkit.run_dir.layout import RunDir
from toolkit.sessions import async_islands, ray
from toolkit.sessions.async_islands import IslandArguments
from toolkit.sessions.hosts import launch_run
from toolkit.sessions.resolve import Resolved, resolve
from toolkit.units import GIB


def start(
    resolved: Resolved,
    path: Path,
    launcher: str,
    console: Console,
    *,
    max_restarts: int = 0,
    resuming: bool = False,
    hosts: Sequence[Host] = (),
    part: IslandArguments | None = None,
) -> int:
    """Write the run directory, launch, watch; the exit code of the contract. Without hosts: on this one."""
    _examine(path, console)
    if goes_async(resolved.recipe, resolved.chosen.plan):
        return async_islands.start(
            resolved,
            path,
            launcher,
            hosts,
            console,
            part or IslandArguments(),
            max_restarts=max_restarts,
            resuming=resuming,
        )
    if part is not None and part.mailbox is not None:
        raise BadInput("--mailbox", "is for strategy local_sgd with train.outer.mode async; leave it out")
    left, failed, seen = max_restarts, False, newest(path)
    while True:
        nproc = resolved.chosen.plan.devices
        try:
            return launch_run(resolved, path, launcher, hosts, console, resuming=resuming)
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
        resuming = True
        console.print(
            f"starting again from {'the beginning' if newest(path) is None else f'step {newest(path)}'} with "
            f"{resolved.chosen.plan.devices} processes; restarts left: {left}",
            highlight=False,
            soft_wrap=True,
        )


def _leaner_or_stop(resolved: Resolved, run: RunDir, error: OutOfMemory, console: Console) -> Resolved:
    """The next plan if the recipe says so; else the error, with what was predicted and what to try."""
    option = leaner(resolved)
    text = f"{error}\n{explain_out_of_memory(resolved, option, run)}"
    if option is None or resolved.recipe.train.on_oom != "replan":
        raise OutOfMemory(text) from None
    console.print(text, highlight=False, markup=False, soft_wrap=True)
    return under(resolved, option)


def _examine(path: Path, console: Console) -> None:
    """The quick checks of `toolkit doctor`; what is fine is not mentioned."""
    findings = examine(CheckContext(path, environment.environment()), QUICK)
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


LESS = 0.9
"""A plan is leaner if it needs at most this part of the memory: predictions are no finer."""


def leaner(resolved: Resolved) -> Option | None:
    """The fastest plan for the same devices that needs clearly less memory."""
    chosen = resolved.chosen
    limit = LESS * chosen.estimate.memory.total
    same_devices = (o for o in resolved.decision.ranked if o.plan.devices == chosen.plan.devices)
    return next((option for option in same_devices if option.estimate.memory.total <= limit), None)


def under(resolved: Resolved, option: Option) -> Resolved:
    """The same job under another plan; the recipe names it, so that resuming later finds it again."""
    plan = option.plan
    axes: dict[str, Any] = {"zero_stage": plan.zero_stage, "offload": plan.offload, "recompute": plan.recompute}
    strategy = replace(
        resolved.recipe.strategy, name=plan.strategy, micro_batch=plan.micro_batch, grad_accum=None, **axes
    )
    recipe = replace(resolved.recipe, strategy=strategy)
    return replace(resolved, recipe=recipe, decision=replace(resolved.decision, chosen=option))


def explain_out_of_memory(resolved: Resolved, option: Option | None, run: RunDir) -> str:
    """Predicted parts beside the measured peak, and what to try."""
    memory = resolved.chosen.estimate.memory
    parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in asdict(memory).items() if size and name != "host")
    lines = [
        f"out of memory under {resolved.chosen.plan.describe()}",
        f"predicted: {memory.total / GIB:.2f} GiB of {resolved.chosen.estimate.memory_limit_bytes / GIB:.2f} ({parts})",
        f"measured peak so far: {_measured(run)}",
    ]
    if option is None:
        lines.append("no plan for these devices needs less; use more devices, a shorter data.seq_len, or offload")
    else:
        lines.append(
            f"the next plan needs {option.estimate.memory.total / GIB:.2f} GiB: {option.plan.describe()}; "
            "train.on_oom=replan goes on under it"
        )
    return "\n".join(lines)


def _measured(run: RunDir) -> str:
    try:
        last = json.loads(run.metrics.read_text(encoding="utf-8").splitlines()[-1])
        return f"{last['memory_bytes'] / GIB:.2f} GiB at step {last['step']}"
    except (OSError, ValueError, KeyError, IndexError):
        return "no step was finished"
