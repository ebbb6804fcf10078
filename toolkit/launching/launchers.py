"""Commands that start worker processes, by launcher: argv lists and environment variables, never a shell string."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

from toolkit.launching.environment import RENDEZVOUS, START_DIRECTORY, free_port
from toolkit.launching.hostfile import Host
from toolkit.launching.private_network import private_network

LAUNCHERS = ("local", "deepspeed", "accelerate", "torchrun", "ray")
WORKER = "toolkit.worker"
PYTHON = (sys.executable, "-P", "-m")
"""Start of every Python process of ours. Without -P, `-m` puts the current directory first on the path: a file there
that is named like a library, such as datasets.py, would be imported instead of the library."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """A process to start."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables added to the environment."""
    rank: int | None = None
    """The rank if the process is a worker; None if it is a launcher."""
    one_host: bool = False
    """Whether all ranks of the job are on the host that starts this: they then meet through a private file."""
    imports_cwd: bool = False
    """Whether the launcher lets its workers import from its current directory: it is then started in an empty one."""
    cwd: str | None = None
    """Directory to start in; None: that of this process."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """One host of a run."""

    processes: int
    """Workers on this host, the same number as on every other."""
    port: int
    """Rendezvous port on the first host."""
    address: str = "127.0.0.1"
    """Rendezvous address: the first host."""
    index: int = 0
    count: int = 1

    @property
    def world(self) -> int:
        """World size: workers on all hosts."""
        return self.processes * self.count


def commands(launcher: str, run_dir: Path, nproc: int, backend: str, node: Node | None = None) -> list[Command]:
    """Return what to start on one host: every worker (`local`), or one launcher that starts them."""
    here, node = node is None, node or Node(processes=nproc, port=free_port())
    env = _common_env(backend)
    run_dir = run_dir.absolute()  # a launcher may be started in another directory
    worker = ("--run-dir", str(run_dir))
    if launcher == "local":
        return [replace(command, one_host=here) for command in _local(worker, node, env)]
    argv = {"deepspeed": _deepspeed, "torchrun": _torchrun, "accelerate": _accelerate}[launcher](run_dir, node)
    if launcher in ("torchrun", "accelerate") and node.count == 1:
        env |= _closed_agent(node)
    # accelerate (1.15.0) adds its current directory to PYTHONPATH of the workers. This can go when a worker under
    # `accelerate launch` no longer has it in sys.path.
    adds = launcher == "accelerate"
    return [Command(argv=(*PYTHON, *argv, "--module", WORKER, *worker), env=env, one_host=here, imports_cwd=adds)]


def _deepspeed(run_dir: Path, node: Node) -> tuple[str, ...]:
    return (
        "deepspeed.launcher.runner",
        *("--num_gpus", str(node.processes)),
        *("--master_port", str(node.port)),
        "--no_local_rank",
    )


def deepspeed_fleet(run_dir: Path, hosts: Sequence[Host], node: Node, backend: str) -> Command:
    """Return the command for DeepSpeed's own launcher over several hosts with pdsh.

    Settings are passed in a file (DS_ENV_FILE) that contains no secrets: DeepSpeed (0.19.8) copies it to command lines.
    """
    argv = (
        *("deepspeed.launcher.runner", "--hostfile", str(run_dir / "hostfile")),
        *("--include", "@".join(f"{host.name}:{','.join(map(str, host.slots))}" for host in hosts)),
        *("--master_addr", node.address, "--master_port", str(node.port)),
        *("--launcher", "pdsh", "--force_multi", "--no_local_rank"),
        *("--module", WORKER, "--run-dir", str(run_dir)),
    )
    env = {**_common_env(backend), "DS_ENV_FILE": str(run_dir / "deepspeed_env")}
    return Command(argv=(*PYTHON, *argv), env=env)


def _torchrun(run_dir: Path, node: Node) -> tuple[str, ...]:
    rendezvous: tuple[str, ...] = ("--rdzv-backend", "c10d", "--rdzv-conf", "store_type=file", "--rdzv-id", "run")
    if node.count > 1:
        rendezvous = ("--nnodes", str(node.count), "--node-rank", str(node.index))
        rendezvous += ("--master-addr", node.address, "--master-port", str(node.port))
    return ("torch.distributed.run", *rendezvous, "--nproc-per-node", str(node.processes))


def _closed_agent(node: Node) -> dict[str, str]:
    """Variables that keep torchrun's agent, which accelerate uses too, from listening on the network.

    torch's agent (2.13) listens on every address of the host, with and without --standalone, and with the backend c10d
    it unpickles what arrives. With `store_type=file` it uses a temporary file that only this user can read instead;
    with these, rank 0 serves the workers' store, at this address only. Can go when `ss -ltn` shows no `*:PORT` of
    `torchrun --standalone`.
    """
    return {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "PET_LOCAL_ADDR": node.address}


def _accelerate(run_dir: Path, node: Node) -> tuple[str, ...]:
    rendezvous: tuple[str, ...] = ("--rdzv_backend", "c10d", "--rdzv_conf", "store_type=file")
    if node.count > 1:
        rendezvous = ("--main_process_ip", node.address, "--machine_rank", str(node.index))
    options = ("--config_file", str(run_dir / "accelerate.yaml"), "--main_process_port", str(node.port))
    return ("accelerate.commands.launch", *options, *rendezvous)


def accelerate_config(deepspeed_json: Path, nproc: int, backend: str, nodes: int = 1) -> dict[str, object]:
    """Return the `accelerate launch` config that starts the same workers."""
    deepspeed: dict[str, object] = {"deepspeed_config_file": str(deepspeed_json), "zero3_init_flag": False}
    if nodes > 1:  # accelerate (1.15) would start the other nodes with pdsh; here it is started on each
        deepspeed["deepspeed_multinode_launcher"] = "standard"
    return {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": deepspeed,
        "machine_rank": 0,
        "num_machines": nodes,
        "num_processes": nproc,
        "use_cpu": backend == "cpu",
    }


def _local(worker: tuple[str, ...], node: Node, env: Mapping[str, str]) -> list[Command]:
    shared = {
        **env,
        "WORLD_SIZE": str(node.world),
        "LOCAL_WORLD_SIZE": str(node.processes),
        "MASTER_ADDR": node.address,
        "MASTER_PORT": str(node.port),
    }
    first = node.index * node.processes
    return [
        Command(
            argv=(*PYTHON, WORKER, *worker),
            env={**shared, "RANK": str(first + local), "LOCAL_RANK": str(local)},
            rank=first + local,
        )
        for local in range(node.processes)
    ]


@contextmanager
def private_directory(commands: Sequence[Command]) -> Iterator[list[Command]]:
    """The commands with a new directory that only this user can enter: ranks of one host meet through a file in it.

    Every start of a job needs a file of its own: the keys of an earlier one would be taken for those of its peers.
    """
    with private_meeting(one_host=any(command.one_host for command in commands)) as (private, variables):
        yield [_in_private(command, private, variables) for command in commands]


@contextmanager
def private_meeting(*, one_host: bool = True) -> Iterator[tuple[Path, dict[str, str]]]:
    """A directory that only this user can enter, and variables with which ranks of one host meet and talk."""
    network: AbstractContextManager[dict[str, str]] = nullcontext({})
    if one_host:
        network = private_network({**os.environ, **import_path()})
    with tempfile.TemporaryDirectory(prefix="toolkit-", ignore_cleanup_errors=True) as private, network as variables:
        yield Path(private), {RENDEZVOUS: str(Path(private) / "store"), **variables}


def _in_private(command: Command, private: Path, variables: Mapping[str, str]) -> Command:
    env = dict(command.env)
    if command.one_host:
        env |= variables
    if not command.imports_cwd:
        return replace(command, env=env)
    empty = private / "empty"
    empty.mkdir(exist_ok=True)
    return replace(command, env={**env, START_DIRECTORY: str(Path.cwd())}, cwd=str(empty))


def import_path() -> dict[str, str]:
    """Variables with which a Python process finds this toolkit and what PYTHONPATH names, and nothing that happens to
    lie in the current directory. They reach the processes that a launcher starts, too.
    """
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    package_root = str(Path(__file__).resolve().parents[2])
    return {"PYTHONPATH": os.pathsep.join([package_root, *filter(None, given)]), "PYTHONSAFEPATH": "1"}


def _common_env(backend: str) -> dict[str, str]:
    env = {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false", **import_path()}
    if backend == "cpu":
        env["DS_ACCELERATOR"] = "cpu"  # otherwise DeepSpeed picks an accelerator if the host has one
    return env
