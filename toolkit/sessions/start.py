"""Start a planned run and restart it after a failure, if needed on fewer hosts, with fewer processes or less memory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from toolkit.checkpoints import store
from toolkit.clusters.reader import of_nodes
from toolkit.cost.estimate import APART
from toolkit.errors import BadInput, HostLost, NoPlanFits, OutOfMemory, RankFailed
from toolkit.launching import environment
from toolkit.launching.hostfile import Host, even_slots
from toolkit.launching.machine_checks import QUICK, CheckContext, examine
from toolkit.planner.search import Option
from toolkit.reports.tables import show_findings
from toolkit.run_dir import lock
from toolkit.run_dir.async_islands import goes_async
from toolkit.run_dir.layout import LOCK, RunDir
from toolkit.sessions import ray
from toolkit.sessions.hosts import LaunchOptions, launch_run
from toolkit.sessions.islands import start_islands
from toolkit.sessions.resolve import Resolved, resolve
from toolkit.units import GIB

LEANER = 0.9
"""A plan counts as leaner if it needs at most this fraction of the memory: predictions are no more precise."""


def start(resolved: Resolved, path: Path, options: LaunchOptions, console: Console) -> int:
    """Write the run directory, launch the workers and supervise them; restart as the options allow.

    Returns the exit code of the command line.
    """
    _examine(path, console)
    say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    island = options.islands.island
    with lock.hold(path, say, LOCK if island is None else f"{LOCK}.island-{island}"):
        return _start(resolved, path, options, console)


def _start(resolved: Resolved, path: Path, options: LaunchOptions, console: Console) -> int:
    if goes_async(resolved.recipe, resolved.chosen.plan):
        return start_islands(resolved, path, options, console)
    if options.islands.rendezvous is not None:
        what = "is used by strategy local_sgd with train.outer.mode async only; remove it"
        raise BadInput("--rendezvous", what)
    left, failed_before, last_seen = options.max_restarts, False, newest(path)
    while True:
        nproc = resolved.chosen.plan.devices
        try:
            return launch_run(resolved, path, options, console)
        except OutOfMemory as error:
            if error.stopped:
                raise
            resolved = _leaner_or_stop(resolved, RunDir(path), error, console)
        except RankFailed as error:
            if not left or error.stopped:
                raise
            left -= 1
            console.print(str(error), highlight=False, markup=False, soft_wrap=True)
            if isinstance(error, HostLost) and options.launcher == ray.LAUNCHER:
                resolved = _on_fewer_nodes(resolved, error)
            elif isinstance(error, HostLost):
                resolved, hosts = _without_lost(resolved, options.hosts, error)
                options = replace(options, hosts=hosts)
            elif failed_before and newest(path) == last_seen and not options.hosts:
                resolved = _with_fewer_processes(resolved, nproc)
            failed_before, last_seen = True, newest(path)
        options = replace(options, resuming=True)
        console.print(
            f"restarting from {'the beginning' if newest(path) is None else f'step {newest(path)}'} with "
            f"{resolved.chosen.plan.devices} processes; restarts left: {left}",
            highlight=False,
            soft_wrap=True,
        )


def _leaner_or_stop(resolved: Resolved, run: RunDir, error: OutOfMemory, console: Console) -> Resolved:
    """Return the job under a leaner plan if `train.on_oom` is `replan`; else raise, and say what to try."""
    option = leaner(resolved)
    text = f"{error}\n{explain_out_of_memory(resolved, option, run)}"
    if option is None or resolved.recipe.train.on_oom != "replan":
        raise OutOfMemory(text) from None
    console.print(text, highlight=False, markup=False, soft_wrap=True)
    return under(resolved, option)


def _examine(path: Path, console: Console) -> None:
    """Run the quick checks of `toolkit doctor` and print what is not ok."""
    findings = examine(CheckContext(path, environment.environment()), QUICK)
    show_findings([finding for finding in findings if finding.level != "ok"], console)


def newest(path: Path) -> int | None:
    """Return the step of the newest checkpoint of a run; None if it has none."""
    return next(iter(store.steps(RunDir(path).checkpoints)), None)


def _with_fewer_processes(resolved: Resolved, nproc: int) -> Resolved:
    """Plan for the largest world size below `nproc` that has a plan; unchanged if there is none."""
    for fewer in range(nproc - 1, 0, -1):
        try:
            candidate = resolve(resolved.recipe, fewer)
            _ = candidate.chosen
        except (BadInput, NoPlanFits):
            continue
        return candidate
    return resolved


def _without_lost(resolved: Resolved, hosts: Sequence[Host], error: HostLost) -> tuple[Resolved, tuple[Host, ...]]:
    """Plan for the remaining hosts; raise the error if no plan fits them."""
    left = tuple(host for host in hosts if host.name not in error.hosts)
    try:
        recipe = replace(resolved.recipe, cluster=of_nodes("auto", len(left), even_slots(left)))
        candidate = resolve(recipe)
        _ = candidate.chosen
    except (BadInput, NoPlanFits):
        raise error from None
    return candidate, left


def _on_fewer_nodes(resolved: Resolved, error: HostLost) -> Resolved:
    """Plan for the nodes that Ray has left, at most as many as before; raise the error if no plan fits them."""
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


def leaner(resolved: Resolved) -> Option | None:
    """Return the fastest plan for the same devices that needs clearly less memory."""
    chosen = resolved.chosen
    limit = LEANER * chosen.estimate.memory.total
    same_devices = (o for o in resolved.decision.ranked if o.plan.devices == chosen.plan.devices)
    return next((option for option in same_devices if option.estimate.memory.total <= limit), None)


def under(resolved: Resolved, option: Option) -> Resolved:
    """Return the job under another plan, with the plan's axes fixed in the recipe so that a later resume keeps them."""
    plan = option.plan
    axes: dict[str, Any] = {"zero_stage": plan.zero_stage, "offload": plan.offload, "recompute": plan.recompute}
    strategy = replace(
        resolved.recipe.strategy, name=plan.strategy, micro_batch=plan.micro_batch, grad_accum=None, **axes
    )
    recipe = replace(resolved.recipe, strategy=strategy)
    return replace(resolved, recipe=recipe, decision=replace(resolved.decision, chosen=option))


def explain_out_of_memory(resolved: Resolved, option: Option | None, run: RunDir) -> str:
    """Say what was predicted, by part, what was measured, and what to try."""
    memory = resolved.chosen.estimate.memory
    parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in asdict(memory).items() if size and name not in APART)
    lines = [
        f"out of memory under {resolved.chosen.plan.describe()}",
        f"predicted: {memory.total / GIB:.2f} GiB of {resolved.chosen.estimate.memory_limit_bytes / GIB:.2f} ({parts})",
        f"measured peak so far: {_measured(run)}",
    ]
    if option is None:
        lines.append(
            "no plan for these devices needs less memory; use more devices, a shorter data.seq_len, or offload"
        )
    else:
        lines.append(
            f"the next plan needs {option.estimate.memory.total / GIB:.2f} GiB: {option.plan.describe()}; "
            "train.on_oom=replan switches to it and resumes"
        )
    return "\n".join(lines)


def _measured(run: RunDir) -> str:
    try:
        last = json.loads(run.metrics.read_text(encoding="utf-8").splitlines()[-1])
        return f"{last['memory_bytes'] / GIB:.2f} GiB at step {last['step']}"
    except (OSError, ValueError, KeyError, IndexError, TypeError, RecursionError):
        return "none, no step was completed"
