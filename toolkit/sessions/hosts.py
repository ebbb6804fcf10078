"""Where a run goes to: this host, those of `--hostfile`, or a Ray cluster's nodes."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from toolkit import secrets
from toolkit.clusters.cluster import Cluster
from toolkit.clusters.reader import check_here, of_nodes
from toolkit.errors import BadInput
from toolkit.launching import environment, launchers
from toolkit.launching.hostfile import Host, even_slots
from toolkit.plans.plan import Plan
from toolkit.recipe.sections import Recipe
from toolkit.run_dir.layout import RunDir
from toolkit.sessions import ray
from toolkit.sessions.resolve import Resolved

if TYPE_CHECKING:
    from toolkit.runtime.hosts.fleet import Fleet

_PLAIN = re.compile(r"[A-Za-z0-9_./+=:@%-]+")
"""What pdsh may hand to the shells of other hosts as it is."""


def on_hosts(recipe: Recipe, hosts: Sequence[Host]) -> Recipe:
    """The recipe with the hosts as its cluster."""
    if not hosts:
        return recipe
    return replace(recipe, cluster=of_nodes(recipe.cluster, len(hosts), even_slots(hosts)))


def planned_commands(
    launcher: str, path: Path, cluster: Cluster, hosts: Sequence[Host]
) -> dict[str, list[launchers.Command]]:
    """What would be started, by host; on many hosts the first one chooses the port when it comes to it."""
    backend, each = cluster.device.backend, cluster.devices_per_node
    if launcher == ray.LAUNCHER:
        names = [f"node-{number}" for number in range(1, cluster.nodes + 1)]
    elif not hosts:
        return {"this host": launchers.commands(launcher, path, cluster.devices, backend)}
    else:
        names = [host.name for host in hosts]
    port = environment.free_port()
    nodes = [
        launchers.Node(processes=each, port=port, address=names[0], index=index, count=len(names))
        for index in range(len(names))
    ]
    if launcher == "deepspeed":
        return {"this host": [launchers.deepspeed_fleet(path.resolve(), hosts, nodes[0], backend)]}
    return {
        name: launchers.commands(_starter(launcher), path.resolve(), each, backend, node)
        for name, node in zip(names, nodes, strict=True)
    }


def check_launcher(launcher: str, plan: Plan) -> None:
    """`BadInput` if the launcher can't start such a plan."""
    if launcher == "accelerate" and plan.pp > 1:
        what = "accelerate has no pipeline; use another --launcher, or fix strategy.pp=1"
        raise BadInput("--launcher", what)


def launch_run(
    resolved: Resolved, path: Path, launcher: str, hosts: Sequence[Host], console: Console, *, resuming: bool
) -> int:
    """Check where the run goes to, write its directory, start the workers, watch them."""
    cluster, timeout = resolved.job.cluster, resolved.recipe.train.hang_timeout_seconds
    backend = cluster.device.backend
    check_launcher(launcher, resolved.chosen.plan)
    if hosts and launcher == "deepspeed":
        _check_pdsh(path)
    with _fleet(launcher, cluster, hosts) as fleet:
        if fleet is None:
            check_here(cluster)
        else:
            fleet.check(backend)
        run = resolved.write(path, resuming=resuming)
        resolved.write_accelerate(run)
        console.print(f"run directory: {path}", highlight=False, soft_wrap=True)
        if fleet is not None and launcher != "deepspeed":
            return fleet.run(_starter(launcher), run, backend, timeout)
        node = fleet.node(0) if fleet else None
    if node is None:
        commands = launchers.commands(launcher, run.path, resolved.chosen.plan.devices, backend)
    else:
        commands = [launchers.deepspeed_fleet(run.path.resolve(), hosts, node, backend)]
        _write_deepspeed_files(run, hosts, commands[0], console)
    from toolkit.runtime.supervision.supervise import run_all

    return run_all(commands, run, timeout)


def _fleet(launcher: str, cluster: Cluster, hosts: Sequence[Host]) -> AbstractContextManager[Fleet | None]:
    """Agents on the hosts of the run; None: this host needs none."""
    if launcher == ray.LAUNCHER:
        return ray.fleet(cluster)
    if not hosts:
        return nullcontext()
    from toolkit.runtime.hosts.fleet import Fleet
    from toolkit.runtime.hosts.ssh_channel import ssh_links

    return Fleet(ssh_links(hosts, cluster.device.backend), "--hostfile")


def _starter(launcher: str) -> str:
    """Who starts the workers of one host: Ray finds the host, the agent there starts them."""
    return "local" if launcher == ray.LAUNCHER else launcher


def _check_pdsh(path: Path) -> None:
    if shutil.which("pdsh") is None:
        what = "deepspeed needs pdsh for many hosts; install it (apt-get install pdsh), or leave --launcher out"
        raise BadInput("--launcher", what)
    for place in (path.resolve(), Path.cwd()):
        if not _PLAIN.fullmatch(str(place)):
            what = f"deepspeed hands {str(place)!r} to shells as it is; use a plain path, or leave --launcher out"
            raise BadInput("--launcher", what)


def _write_deepspeed_files(run: RunDir, hosts: Sequence[Host], command: launchers.Command, console: Console) -> None:
    """Hosts and settings for DeepSpeed's launcher, which writes settings into command lines: so no secret is passed."""
    exports = environment.exported(environment.environment(command.env))
    secret = [name for name in exports if secrets.is_secret(name)]
    odd = [name for name, value in exports.items() if name not in secret and not _PLAIN.fullmatch(value)]
    lines = [f"{name}={value}\n" for name, value in exports.items() if name not in (*secret, *odd)]
    run.path.joinpath("hostfile").write_text(
        "".join(f"{host.name} slots={max(host.slots) + 1}\n" for host in hosts), encoding="utf-8"
    )
    with open(run.path / "deepspeed_env", "w", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.writelines(lines)
    if secret or odd:
        console.print(
            f"not passed on to other hosts, because deepspeed puts settings on command lines: "
            f"{', '.join([*secret, *odd])}; log in there (`hf auth login`, `wandb login`), or leave --launcher out",
            highlight=False,
        )
