"""Where and how a run is launched: on this host, on the hosts of `--hostfile`, or on the nodes of a Ray cluster."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from toolkit.clusters.cluster import Cluster
from toolkit.clusters.reader import check_here, of_nodes
from toolkit.errors import BadInput
from toolkit.launching import environment, launchers
from toolkit.launching.hostfile import Host, even_slots
from toolkit.plans.plan import Plan
from toolkit.recipe.sections import Recipe
from toolkit.run_dir.layout import RunDir
from toolkit.secrets import is_secret_variable
from toolkit.sessions import ray
from toolkit.sessions.islands import IslandOptions
from toolkit.sessions.resolve import Resolved

if TYPE_CHECKING:
    from toolkit.runtime.hosts.fleet import Fleet

_SHELL_SAFE = re.compile(r"[A-Za-z0-9_./+=:@%-]+")
"""Text that means the same to a shell, unquoted: pdsh passes arguments to the shells of other hosts as they are."""


@dataclass(frozen=True)
class LaunchOptions:
    """How a planned run is launched."""

    launcher: str = "local"
    """One of `launchers.LAUNCHERS`."""
    hosts: tuple[Host, ...] = ()
    """Hosts to train on; empty: this host, or those that Ray offers."""
    max_restarts: int = 0
    """How often a failed run is restarted from its last checkpoint."""
    resuming: bool = False
    """Whether the run directory already exists and its run continues."""
    islands: IslandOptions = field(default_factory=IslandOptions)
    """Used by asynchronous islands only."""


def on_hosts(recipe: Recipe, hosts: Sequence[Host]) -> Recipe:
    """Return the recipe with the hosts as its cluster; without hosts, unchanged."""
    if not hosts:
        return recipe
    return replace(recipe, cluster=of_nodes(recipe.cluster, len(hosts), even_slots(hosts)))


def planned_commands(
    launcher: str, path: Path, cluster: Cluster, hosts: Sequence[Host]
) -> dict[str, list[launchers.Command]]:
    """Return the commands a run would start, by host. In a real run the first host picks the rendezvous port."""
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
        name: launchers.commands(_worker_launcher(launcher), path.resolve(), each, backend, node)
        for name, node in zip(names, nodes, strict=True)
    }


def check_launcher(launcher: str, plan: Plan) -> None:
    """Raise `BadInput` if the launcher can't start such a plan."""
    if launcher == "accelerate" and plan.pp > 1:
        what = "accelerate does not support pipeline parallelism; use another --launcher, or set strategy.pp=1"
        raise BadInput("--launcher", what)


def launch_run(resolved: Resolved, path: Path, options: LaunchOptions, console: Console) -> int:
    """Check the hosts, write the run directory, start the workers and supervise them. Returns the exit code."""
    launcher, hosts = options.launcher, options.hosts
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
        run = resolved.write(path, resuming=options.resuming)
        resolved.write_accelerate(run)
        console.print(f"run directory: {path}", highlight=False, markup=False, soft_wrap=True)
        if fleet is not None and launcher != "deepspeed":
            return fleet.run(_worker_launcher(launcher), run, backend, timeout)
        node = fleet.node(0) if fleet else None
    if node is None:
        commands = launchers.commands(launcher, run.path, resolved.chosen.plan.devices, backend)
    else:
        commands = [launchers.deepspeed_fleet(run.path.resolve(), hosts, node, backend)]
        _write_deepspeed_files(run, hosts, commands[0], console)
    from toolkit.runtime.supervision.supervise import run_all

    return run_all(commands, run, timeout)


def _fleet(launcher: str, cluster: Cluster, hosts: Sequence[Host]) -> AbstractContextManager[Fleet | None]:
    """Return the agents on the hosts of the run; None if all workers run on this host."""
    if launcher == ray.LAUNCHER:
        return ray.fleet(cluster)
    if not hosts:
        return nullcontext()
    from toolkit.runtime.hosts.agent_link import ssh_links
    from toolkit.runtime.hosts.fleet import Fleet

    return Fleet(ssh_links(hosts, cluster.device.backend), "--hostfile")


def _worker_launcher(launcher: str) -> str:
    """Return the launcher an agent uses on its own host: Ray only places the agent, which starts workers itself."""
    return "local" if launcher == ray.LAUNCHER else launcher


def _check_pdsh(path: Path) -> None:
    if shutil.which("pdsh") is None:
        what = "deepspeed needs pdsh for several hosts; install it (apt-get install pdsh), or omit --launcher"
        raise BadInput("--launcher", what)
    for place in (path.resolve(), Path.cwd()):
        if not _SHELL_SAFE.fullmatch(str(place)):
            what = f"deepspeed passes {str(place)!r} to shells unquoted; use a plain path, or omit --launcher"
            raise BadInput("--launcher", what)


def _write_deepspeed_files(run: RunDir, hosts: Sequence[Host], command: launchers.Command, console: Console) -> None:
    """Write the hostfile and the settings file of DeepSpeed's launcher.

    DeepSpeed (0.19.8) copies every line of the settings file onto command lines, which any user of a host can read,
    and puts values into double quotes at most, in which shells still expand `$`. So secrets and values with special
    characters are withheld and reported. Obsolete once `PDSHRunner` in deepspeed/launcher passes settings another way.
    """
    exports = environment.exported(environment.environment(command.env))
    secret = [name for name in exports if is_secret_variable(name)]
    unsafe = [name for name, value in exports.items() if name not in secret and not _SHELL_SAFE.fullmatch(value)]
    lines = [f"{name}={value}\n" for name, value in exports.items() if name not in (*secret, *unsafe)]
    run.path.joinpath("hostfile").write_text(
        "".join(f"{host.name} slots={max(host.slots) + 1}\n" for host in hosts), encoding="utf-8"
    )
    with open(run.path / "deepspeed_env", "w", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.writelines(lines)
    if secret or unsafe:
        console.print(
            f"not passed on to other hosts, because deepspeed puts settings on command lines: "
            f"{', '.join([*secret, *unsafe])}; log in there (`hf auth login`, `wandb login`), or omit --launcher",
            highlight=False,
            markup=False,
        )
